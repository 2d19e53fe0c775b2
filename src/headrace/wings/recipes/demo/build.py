"""Creates everything the demo needs in one directory: model, tokenizer, dataset, reward function and run file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.wings.recipes.demo.task import CHAT_TEMPLATE, VOCAB, Pair, row, split

if TYPE_CHECKING:
    from headrace.models.tiny import TinySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The paths of a demo that has been created."""

    directory: Path
    run_file: Path


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "decoder_sparse_step": 1}
"""Settings of a mixture-of-experts model with about as many active parameters per token as the dense model."""

HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
"""Settings of a model of the same size whose first layer is linear attention."""
KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "dense": ("qwen3", {}),
    "mixture": ("qwen3_moe", MIXTURE),
    "hybrid": ("qwen3_5_text", HYBRID),
}
"""The kinds of models of the demo: the ``model_type`` of each, and its settings beyond the common ones."""


def build_demo(
    directory: Path,
    *,
    seed: int,
    kind: str = "dense",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Demo:
    """Create the demo in ``directory`` with a model of a kind of :data:`KINDS`. ``progress`` is called with the number
    of finished steps and of all steps of the supervised phase."""
    from headrace.models.tiny import make_tiny
    from headrace.wings.recipes.demo.warm import Demonstrations, warm_start

    run_file = lay_out(directory, seed=seed)
    cold = make_tiny(directory / "untrained", _spec(seed, kind=kind, hidden_size=128, num_layers=2))
    warm_start(cold, directory / "model", Demonstrations(pairs=split(seed).warm), seed=seed, progress=progress)
    shutil.rmtree(cold)
    return Demo(directory=directory, run_file=run_file)


def lay_out(directory: Path, *, seed: int) -> Path:
    """Write the dataset, the reward function and the run file of the demo, but no model; return the path of the run
    file."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs = split(seed)
    _write_rows(directory / "train.jsonl", pairs.train)
    _write_rows(directory / "held_out.jsonl", pairs.held_out)
    package = files(__package__)
    for name in ("reward.py", "demo.toml"):
        with as_file(package / name) as source:
            shutil.copyfile(source, directory / name)
    return directory / "demo.toml"


def build_teacher(directory: Path, *, seed: int) -> Path:
    """Create a model of about three times the demo's size, trained on correct answers, and return its directory."""
    from headrace.models.tiny import make_tiny
    from headrace.wings.recipes.demo.warm import Demonstrations, warm_start

    cold = make_tiny(directory / "untrained", _spec(seed, kind="dense", hidden_size=192, num_layers=3))
    demonstrations = Demonstrations(pairs=split(seed).warm, careless_frac=0.0)
    warm_start(cold, directory / "teacher", demonstrations, seed=seed, progress=lambda done, total: None)
    shutil.rmtree(cold)
    return directory / "teacher"


def _spec(seed: int, *, kind: str, hidden_size: int, num_layers: int) -> TinySpec:
    """Return the specification of a small model of this kind."""
    from headrace.models.tiny import TinySpec

    model_type, extra = KINDS[kind]
    return TinySpec(
        vocab=VOCAB,
        seed=seed,
        kind=model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 32,
        num_kv_heads=hidden_size // 64,
        intermediate_size=3 * hidden_size,
        max_positions=64,
        chat_template=CHAT_TEMPLATE,
        extra={"tie_word_embeddings": True, **extra},
    )


def _write_rows(path: Path, pairs: list[Pair]) -> None:
    path.write_text("".join(json.dumps(row(pair)) + "\n" for pair in pairs), encoding="utf-8")
