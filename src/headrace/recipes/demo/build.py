"""Makes everything the demo needs in one directory: model, tokenizer, rows, reward and a run file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from headrace.recipes.demo.task import CHAT_TEMPLATE, VOCAB, Pair, row, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Where the demo is."""

    directory: Path
    run_file: Path


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "decoder_sparse_step": 1}
"""Of about the same size per token as the dense model."""


def build_demo(
    directory: Path,
    *,
    seed: int,
    mixture: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Demo:
    """Make the demo in ``directory``, with a mixture of experts if asked for; ``progress`` is told steps done and in
    all of the supervised phase."""
    from headrace.models.tiny import TinySpec, make_tiny
    from headrace.recipes.demo.warm import warm_start

    directory.mkdir(parents=True, exist_ok=True)
    pairs = split(seed)
    _write_rows(directory / "train.jsonl", pairs.train)
    _write_rows(directory / "held_out.jsonl", pairs.held_out)
    package = files(__package__)
    for name in ("reward.py", "demo.toml"):
        with as_file(package / name) as source:
            shutil.copyfile(source, directory / name)
    spec = TinySpec(
        vocab=VOCAB,
        seed=seed,
        kind="qwen3_moe" if mixture else "qwen3",
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=384,
        max_positions=64,
        chat_template=CHAT_TEMPLATE,
        extra={"tie_word_embeddings": True, **(MIXTURE if mixture else {})},
    )
    cold = make_tiny(directory / "untrained", spec)
    warm_start(cold, directory / "model", pairs.warm, seed=seed, progress=progress)
    shutil.rmtree(cold)
    return Demo(directory=directory, run_file=directory / "demo.toml")


def _write_rows(path: Path, pairs: list[Pair]) -> None:
    path.write_text("".join(json.dumps(row(pair)) + "\n" for pair in pairs), encoding="utf-8")
