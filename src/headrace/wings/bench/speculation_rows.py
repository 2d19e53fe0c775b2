"""The rows of the benchmark ``speculation``, and the models that answer them.

A row begins at a random phrase of a *book* of phrases. Every phrase has several wordings, and the wording decides on
the next phrase, so that the answers to one row begin with the same phrases, diverge at some wording, and have phrases
in common afterwards. The demonstrations, on which a small model is trained, also contain mistyped characters. A larger
model computes the same function as the small model at the cost of its size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.columns import IntColumn
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.tokens import Tokens
from headrace.learner import LearnerConfig
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.models import ModelConfig, load_model
from headrace.models.tiny import make_tiny
from headrace.wings.bench.engine import LARGE, SMALL

PROMPT, ANSWER = 8, 128
"""The number of tokens of every prompt, and of every answer."""
PHRASES, WORDINGS = 60, (0.6, 0.3, 0.1)
"""The number of phrases, and the probabilities of the wordings of each phrase."""
MISTYPED_FRAC = 0.02
"""The fraction of the characters of demonstrations that are mistyped."""
STEPS, BATCH = 300, 32
"""The number of training steps, and the number of demonstrations in each step."""
_FIRST = 3
"""The id of the first character."""


class PhraseBook:
    """A random generator of texts from a fixed set of phrases of random characters, in the vocabulary of the engine
    benchmark."""

    def __init__(self) -> None:
        """Draw the phrases, and the successor of every wording, from a fixed seed: all books are equal."""
        rng = np.random.default_rng(7)
        self._num = len(SMALL.vocab)
        """The size of the vocabulary."""
        self._wordings = [[self._characters(rng, int(rng.integers(7, 13))) for _ in WORDINGS] for _ in range(PHRASES)]
        """For each phrase its wordings, each a text of 7 to 12 random characters."""
        self._next = rng.integers(0, PHRASES, (PHRASES, len(WORDINGS)))
        """For each phrase and wording, the index of the phrase that follows."""

    def text(self, rng: np.random.Generator, num_tokens: int, *, mistyped_frac: float = 0.0) -> IntColumn:
        """Return a text of ``num_tokens`` tokens that begins at a random phrase, drawn with ``rng``. Each phrase begins
        with a character of its own; ``mistyped_frac`` is the fraction of the other characters that are mistyped."""
        phrase, ids = int(rng.integers(PHRASES)), list[int]()
        while len(ids) < num_tokens:
            wording = int(rng.choice(len(WORDINGS), p=WORDINGS))
            words = self._wordings[phrase][wording]
            mistyped = rng.random(len(words)) < mistyped_frac
            ids += [_FIRST + phrase, *np.where(mistyped, self._characters(rng, len(words)), words).tolist()]
            phrase = int(self._next[phrase, wording])
        return np.array(ids[:num_tokens], np.int32)

    def _characters(self, rng: np.random.Generator, count: int) -> IntColumn:
        """Return ``count`` random characters."""
        return _FIRST + rng.integers(self._num, size=count).astype(np.int32)


def draw_demonstrations(rng: np.random.Generator, num: int) -> list[IntColumn]:
    """Return ``num`` texts of the book by a careless writer, drawn with ``rng``, each of the length of a prompt and its
    answer."""
    book = PhraseBook()
    return [book.text(rng, PROMPT + ANSWER, mistyped_frac=MISTYPED_FRAC) for _ in range(num)]


def train_model(
    directory: Path, on_progress: Callable[[str], None], *, kind: str = SMALL.kind, steps: int = STEPS
) -> Path:
    """Train a small model of the ``kind`` on texts of the book for ``steps`` steps, write the model into ``directory``,
    and return the path of this directory. ``on_progress`` is called with lines of progress."""
    cold = make_tiny(directory.with_name(f"{directory.name}-untrained"), replace(SMALL, kind=kind, init_std=0.08))
    core = LearnerCore(
        load_model(ModelConfig(path=str(cold))),
        LearnerConfig(lr=2e-3, warmup_steps=20, betas=(0.9, 0.98), tokens_per_microbatch=8192),
        Objective.build(AlgoConfig.model_validate({"loss": "ce"})),
        LearnerContext(temperature=1.0, total_steps=steps, model_dir=cold, clock=RealClock()),
    )
    rng = np.random.default_rng(1)
    masks_T = np.arange(PROMPT + ANSWER) >= PROMPT
    for step in range(steps):
        texts = draw_demonstrations(rng, BATCH)
        samples = [
            TrainSample(key=EpisodeKey(place, 0), spans=(Tokens.observed(ids),), mask_T=masks_T, advantage=1.0)
            for place, ids in enumerate(texts)
        ]
        trained = core.train(Batch.collate(step, samples))
        if step % 100 == 99:
            on_progress(f"training step {step + 1} of {steps}: loss {trained.metrics['loss']:.2f}")
    directory.mkdir()
    core.save(directory)
    shutil.rmtree(cold)
    return directory


@torch.inference_mode()
def widen_model(small_dir: Path, directory: Path) -> Path:
    """Write a model of the size :data:`~headrace.wings.bench.engine.LARGE` into ``directory`` that computes the same
    function as the model of the size ``SMALL`` in ``small_dir``, and return its path. The larger matrices are filled up
    with zeros, and the outputs of the additional layers are zero, but all of them are computed."""
    model = load_model(ModelConfig(path=str(small_dir)))
    small = dict(model.named_parameters())
    model = load_model(ModelConfig(path=str(make_tiny(directory, replace(LARGE, kind=model.config.model_type)))))
    copy_weights(small, dict(model.named_parameters()))
    model.save_pretrained(directory)
    return directory


def copy_weights(small: Mapping[str, Tensor], large: Mapping[str, Tensor]) -> None:
    """Write the tensors ``small`` of a model of the size ``SMALL`` into ``large``, those of a model of the size
    ``LARGE``, by their names. All other numbers of ``large`` become 0."""
    normed = any(name.endswith("k_norm.weight") for name in small)
    for name, target in large.items():
        target.zero_()
        if name in small:
            _place(name, small[name], target, normed=normed)


def _place(name: str, value: Tensor, target: Tensor, *, normed: bool) -> None:
    """Write ``value``, the parameter ``name`` of the small model, into ``target``, the parameter of the large model,
    which is filled with zeros. A norm over more numbers, of which the new ones are zero, divides by a smaller root mean
    square; its weight is scaled down for this. ``normed`` says whether queries and keys have norms."""
    size, large_size = SMALL.hidden_size // SMALL.num_heads, LARGE.hidden_size // LARGE.num_heads
    spread = torch.arange(0, large_size, large_size // size)  # dimensions that rotate as fast as in the small model
    kind = name.split(".")[-2]
    # the weights of q_norm and k_norm together undo the norms over larger heads and the smaller scale of scores there
    if kind == "q_norm":
        target[spread] = value
    elif kind == "k_norm":
        target[spread] = value / (large_size / size) ** 0.5
    elif kind in ("q_proj", "k_proj", "v_proj"):
        heads, columns = target.unflatten(0, (-1, large_size)), (slice(0, width) for width in value.shape[1:])
        scale = (large_size / size) ** 0.5 if kind == "q_proj" and not normed else 1.0
        heads[: len(value) // size, spread, *columns] = value.unflatten(0, (-1, size)) * scale
    elif kind == "o_proj":
        heads = target.unflatten(1, (-1, large_size))
        heads[: len(value), : value.shape[1] // size, spread] = value.unflatten(1, (-1, size))
    elif kind == "input_proj":  # of a prediction head: a state beside an embedding
        halves = target.unflatten(1, (2, -1))
        halves[: len(value), :, : len(value)] = value.unflatten(1, (2, -1))
    elif value.dim() == 1:
        target[: len(value)] = value / (LARGE.hidden_size / SMALL.hidden_size) ** 0.5
    else:
        target[: value.shape[0], : value.shape[1]] = value
