"""The creation of the demo in one directory: model, tokenizer, dataset, reward function and run file. The task of the
demo is the addition of two-digit numbers by a small model.

In a short supervised phase, the library's learner trains the model to imitate the answers of a careless teacher, who
forgets most carries.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.tokens import Tokens
from headrace.learner import LearnerConfig
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.models import ModelConfig, load_model, load_tokenizer
from headrace.wings.recipes.demo.task import CHAT_TEMPLATE, VOCAB, Pair, answer, careless, prompt, row, split

if TYPE_CHECKING:
    from headrace.models.tiny import TinySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The paths of a created demo."""

    directory: Path
    """The directory with all files of the demo."""
    run_file: Path
    """The run file, which names the other files."""


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
"""Settings of a model of the same size whose first layer has linear attention."""
KINDS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "dense": ("qwen3", {}),
    "mixture": ("qwen3_moe", MIXTURE),
    "hybrid": ("qwen3_5_text", HYBRID),
}
"""The kinds of models of the demo: for each kind its ``model_type``, and its settings beside the common settings."""


def build_demo(
    directory: Path,
    *,
    seed: int,
    kind: str = "dense",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Demo:
    """Create the demo in ``directory``, with a model of a ``kind`` in :data:`KINDS`, and return the demo's paths.
    ``seed`` determines the initial weights, the split of the rows, and the demonstrations. ``progress`` is called with
    the number of finished steps and the number of all steps of the supervised phase."""
    from headrace.models.tiny import make_tiny

    run_file = lay_out(directory, seed=seed)
    cold = make_tiny(directory / "untrained", _make_tiny_spec(seed, kind=kind, hidden_size=128, num_layers=2))
    warm_start(cold, directory / "model", Demonstrations(pairs=split(seed).warm), seed=seed, progress=progress)
    shutil.rmtree(cold)
    return Demo(directory=directory, run_file=run_file)


def lay_out(directory: Path, *, seed: int) -> Path:
    """Write the dataset, the reward function and the run file of the demo into ``directory``, but no model; return the
    path of the run file. ``seed`` determines the split of the rows."""
    directory.mkdir(parents=True, exist_ok=True)
    pairs = split(seed)
    _write_rows(directory / "train.jsonl", pairs.train)
    _write_rows(directory / "held_out.jsonl", pairs.held_out)
    package = files(__package__)
    for name in ("reward.py", "demo.toml"):
        with as_file(package / name) as source:
            shutil.copyfile(source, directory / name)
    run_file = directory / "demo.toml"
    if seed:  # the last section of the file is [run], to which the line is appended
        run_file.write_text(f"{run_file.read_text(encoding='utf-8')}seed = {seed}\n", encoding="utf-8")
    return run_file


def write_untrained(directory: Path, *, seed: int) -> Path:
    """Write the demo's model with random weights, without the supervised phase, into ``directory``/model, and return
    the directory of the model. ``seed`` determines the weights. It is meant for test runs that need not learn
    anything."""
    from headrace.models.tiny import make_tiny

    return make_tiny(directory / "model", _make_tiny_spec(seed, kind="dense", hidden_size=128, num_layers=2))


def build_teacher(directory: Path, *, seed: int) -> Path:
    """Create a teacher for distillation in ``directory``, and return the directory of its model. ``seed`` determines
    its weights and the rows that it is trained on. The teacher has about three times the size of the demo's model, and
    is trained on correct answers."""
    from headrace.models.tiny import make_tiny

    cold = make_tiny(directory / "untrained", _make_tiny_spec(seed, kind="dense", hidden_size=192, num_layers=3))
    demonstrations = Demonstrations(pairs=split(seed).warm, careless_frac=0.0)
    warm_start(cold, directory / "teacher", demonstrations, seed=seed, progress=lambda done, total: None)
    shutil.rmtree(cold)
    return directory / "teacher"


def _make_tiny_spec(seed: int, *, kind: str, hidden_size: int, num_layers: int) -> TinySpec:
    """Return the specification of a small model of a ``kind`` in :data:`KINDS` with ``num_layers`` layers of width
    ``hidden_size``. ``seed`` determines its random initial weights."""
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
    """Write the dataset of ``pairs``, one row for each pair, into the JSON Lines file ``path``."""
    path.write_text("".join(json.dumps(row(pair)) + "\n" for pair in pairs), encoding="utf-8")


WARM_STEPS = 400
"""Number of steps of the supervised phase."""
WARM_BATCH = 128
"""Number of demonstrations in each step of the supervised phase."""
CARELESS_FRAC = 0.6
"""Fraction of the demonstrations in which the teacher forgets every carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The teacher's demonstrations for the supervised phase: sums of pairs, some of them wrong."""

    pairs: list[Pair]
    """The pairs of numbers to add."""
    careless_frac: float = CARELESS_FRAC
    """Fraction of the answers in which the teacher forgets every carry."""


def warm_start(
    model_dir: Path, out: Path, demonstrations: Demonstrations, *, seed: int, progress: Callable[[int, int], None]
) -> None:
    """Run the supervised phase: train the model in ``model_dir`` to imitate ``demonstrations``, and write the trained
    model into the directory ``out``. ``seed`` determines which demonstrations are drawn. ``progress`` is called after
    each step with the number of finished steps and the number of all steps."""
    torch.set_num_threads(1)  # more threads are no faster for such small matrices, and much slower on a busy machine
    tokenizer = load_tokenizer(str(model_dir))
    core = LearnerCore(
        load_model(ModelConfig(path=str(model_dir))),
        LearnerConfig(lr=2e-3, warmup_steps=20, betas=(0.9, 0.98), tokens_per_microbatch=4096),
        Objective.build(AlgoConfig.model_validate({"loss": "ce"})),
        LearnerContext(temperature=1.0, total_steps=WARM_STEPS, model_dir=model_dir, clock=RealClock()),
    )
    rng = np.random.default_rng([seed, 1])
    for step in range(WARM_STEPS):
        chosen = [demonstrations.pairs[index] for index in rng.integers(len(demonstrations.pairs), size=WARM_BATCH)]
        forgets = rng.random(WARM_BATCH) < demonstrations.careless_frac
        answers = [careless(pair) if forgot else answer(pair) for pair, forgot in zip(chosen, forgets, strict=True)]
        samples = [
            _make_demonstration(
                index, tokenizer.encode(prompt(pair)), [*tokenizer.encode(text), tokenizer.eos_token_id]
            )
            for index, (pair, text) in enumerate(zip(chosen, answers, strict=True))
        ]
        core.train(Batch.collate(step, samples))
        progress(step + 1, WARM_STEPS)
    out.mkdir(parents=True, exist_ok=True)
    core.save(out)


def _make_demonstration(index: int, prompt_ids: list[int], answer_ids: list[int]) -> TrainSample:
    """Return the train sample of one demonstration, with loss only on the tokens of the answer. ``index`` is the
    sample's index in the batch."""
    return TrainSample(
        key=EpisodeKey(index, 0),
        spans=(Tokens.observed([*prompt_ids, *answer_ids]),),
        mask_T=np.array([False] * len(prompt_ids) + [True] * len(answer_ids)),
        advantage=1.0,
    )
