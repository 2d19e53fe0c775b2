"""Tiny models with a prediction head: untrained, whose drafts are bad, and trained, whose drafts are good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.speculation_heads import add_head, train_head
from tests.models.kinds import KINDS, VOCAB

HEADED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": KINDS["deepseek_v3"],
}
"""The settings of the kinds whose heads can be loaded."""
Headed = Callable[..., Path]


def made(directory: Path, kind: str, *, trained: bool = False) -> Path:
    """A model of that kind with a head. A trained one is of a model whose layers change little, so that it can be
    learned within seconds, and whose logits are large."""
    spec = TinySpec(
        vocab=VOCAB, kind=kind, hidden_size=32, intermediate_size=64, init_std=0.3,
        extra=HEADED[kind],
    )  # fmt: skip
    make_tiny(directory, spec)
    if not trained:
        return add_head(directory, noise=0.2)
    file = directory / "model.safetensors"
    factors = {"o_proj": 0.01, "down_proj": 0.01}
    tensors = {name: one * factors.get(name.split(".")[-2], 2.0) for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    rng = np.random.default_rng(0)
    texts = [[rng.integers(3, 39, 60).astype(np.int32) for _ in range(8)] for _ in range(120)]
    return train_head(add_head(directory), texts, lambda line: None, lr=5e-3)


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """The directory of a model of a kind with a head, made once."""
    done: dict[tuple[str, bool], Path] = {}

    def make(kind: str, *, trained: bool = False) -> Path:
        if (kind, trained) not in done:
            done[kind, trained] = made(tmp_path_factory.mktemp(kind) / "model", kind, trained=trained)
        return done[kind, trained]

    return make
