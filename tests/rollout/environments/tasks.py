"""Runs of a tiny model over environments."""

from __future__ import annotations

import json
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.base.types.episode import EpisodeGraph
from headrace.flow.ledger.opening import open_ledger
from tests.run.session.runs import make_run, tiny_model

TEMPLATE = (
    "{%- for m in messages %}{{ '+' if m.role == 'tool' }}{{ m.content }}"
    "{%- if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""All that a model of digits can read."""


def chat_model(directory: Path, **changes: Any) -> Path:
    """A model with random weights that speaks in messages."""
    return tiny_model(directory, chat_template=TEMPLATE, **{"max_positions": 64, **changes})


def make_env_run(directory: Path, model: Path, code: str, entry: str, **sections: Any) -> Path:
    """A run over ``entry`` of the file ``my_env.py`` with this ``code``: ``Name`` of a class, or of a function."""
    kind = "env" if entry[0].isupper() else "rollout"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "my_env.py").write_text(textwrap.dedent(code))
    env = {"kind": kind, "entry": f"my_env.py:{entry}", "reward": "", **sections.pop("env", {})}
    rows = "".join(json.dumps({"prompt": f"{a}+{a + 1}=", "number": a}) + "\n" for a in range(12))
    return make_run(directory, model, rows=sections.pop("rows", rows), env=env, **sections)


def episodes(run_dir: Path, num_groups: int) -> list[EpisodeGraph]:
    """Every episode of a run's first groups, as its ledger has them."""
    with closing(open_ledger(run_dir)) as ledger:
        return [episode for number in range(num_groups) for episode in ledger.episodes(number)]
