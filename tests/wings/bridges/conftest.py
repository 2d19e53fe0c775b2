from __future__ import annotations

from pathlib import Path

import pytest

from headrace.models.tiny import TinySpec, make_tiny
from tests.wings.bridges.scripted import PRINTABLE

TEMPLATE = (
    "{%- for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that reads and writes whatever can be printed."""
    spec = TinySpec(
        vocab=PRINTABLE, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, max_positions=1024,
        init_std=0.3, chat_template=TEMPLATE,
    )  # fmt: skip
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", spec)
