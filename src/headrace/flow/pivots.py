"""Pivots: the places in failed answers from which others are sampled, and how they are chosen.

Source: Guo et al. (DEEP-GRPO), arXiv 2602.14169: dense resampling from deep, recoverable states of failed trajectories.

Shape legend: C candidates, O outcomes of earlier pivots, T tokens of the answers of one episode, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from headrace.algo.advantages.tokens import spikes
from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph

Floats = npt.NDArray[np.float64]

WINDOW = 10_000
"""Earlier pivots that say how likely success is; older ones are forgotten."""
FEWEST_OUTCOMES = 10
"""With fewer, every place is taken to be equally likely to succeed."""


class PivotConfig(Section):
    """Episodes that failed are resampled from within: at some of their tokens, several branches go on from there under
    one version of the weights, and are compared with each other."""

    threshold: float = 0.0
    """An episode that earned this or less has failed."""
    per_episode: int = Field(default=1, ge=1)
    """Pivots in each failed episode, where it is long enough."""
    branches: int = Field(default=8, ge=2)
    """Branches sampled at each pivot: a group of their own, which ``algo.advantage`` compares."""
    choose: Literal["utility", "uniform", "entropy"] = "utility"
    """``utility``: drawn in proportion to P(success | depth)·depth^γ, where P is a logistic regression over the pivots
    so far and depth is the fraction of the episode's sampled tokens before the pivot. ``uniform``: drawn. ``entropy``:
    before the tokens that were drawn from the highest entropies."""
    depth_bias: float = Field(default=0.1, ge=0)
    """γ of ``utility``: 0 prefers no depth."""
    gap: int = Field(default=16, ge=1)
    """Pivots are this many tokens apart at least, and from the beginning of a turn. ``utility`` and ``uniform`` choose
    among every ``gap``-th token."""
    weight: float = Field(default=1.0, ge=0)
    """λ: the loss is that of the episodes plus λ times that of the branches, each reduced by itself."""

    @model_validator(mode="after")
    def _depth_counts(self) -> Self:
        if self.choose != "utility" and self.depth_bias != type(self).model_fields["depth_bias"].default:
            raise ConfigError(
                f"flow.pivots.depth_bias={self.depth_bias:g} has no effect with choose={self.choose!r}",
                remedy="set flow.pivots.choose = 'utility', or leave depth_bias out",
            )
        return self


class Pivot(NamedTuple):
    """A place between two tokens."""

    answer: int
    """Which of the episode's answers."""
    at: int
    """How many of its tokens are kept; at least one is not."""
    depth: float
    """Fraction of the episode's sampled tokens that stand before it."""


class Recoverability:
    """P(success | depth): logistic regression of whether a branch succeeded on the depth of its pivot, with the slope
    drawn to 0 by ½·slope². It learns from all pivots that it is told of, the latest :data:`WINDOW`."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self._fitted: tuple[float, float] | None = None

    def learn(self, depth: float, success: bool) -> None:
        """What became of a pivot."""
        self._outcomes.append((depth, success))
        self._fitted = None

    def __call__(self, depths_C: Floats) -> Floats:
        """The probability at each depth; all the same while too little is known.

        >>> found = Recoverability()
        >>> for place in range(100):
        ...     found.learn(place / 100, place < 50)
        >>> bool(found(np.array([0.1]))[0] > 0.6 > 0.4 > found(np.array([0.9]))[0])
        True
        """
        successes = sum(success for _, success in self._outcomes)
        if len(self._outcomes) <= FEWEST_OUTCOMES or successes in (0, len(self._outcomes)):
            return np.ones(len(depths_C))
        if self._fitted is None:
            self._fitted = _fit(np.array(sorted(self._outcomes), np.float64))
        intercept, slope = self._fitted
        return 1 / (1 + np.exp(-(intercept + slope * depths_C)))


def _fit(outcomes_O2: Floats, steps: int = 30) -> tuple[float, float]:
    """Intercept and slope, by Newton's method from 0: the loss is convex, and its Hessian is never singular."""
    inputs_O2 = np.stack([np.ones(len(outcomes_O2)), outcomes_O2[:, 0]], axis=1)
    ridge = np.diag([0.0, 1.0])
    weights = np.zeros(2)
    for _ in range(steps):
        p_O = 1 / (1 + np.exp(-inputs_O2 @ weights))
        gradient = inputs_O2.T @ (p_O - outcomes_O2[:, 1]) + ridge @ weights
        hessian = (inputs_O2 * (p_O * (1 - p_O))[:, None]).T @ inputs_O2 + ridge
        change = np.linalg.solve(hessian, gradient)
        weights -= change
        if np.abs(change).max() < 1e-9:
            break
    return float(weights[0]), float(weights[1])


def outcomes_of(episode: EpisodeGraph, threshold: float) -> list[tuple[float, bool]]:
    """What became of the pivots of an episode: the depth of each, and whether a branch earned more than ``threshold``.
    Those of which no branch has a reward say nothing."""
    own = [turn.branch is None and not turn.untrained for turn in episode.turns]
    lengths = [turn.tokens.num_sampled for turn in episode.turns]
    found: dict[int, tuple[float, bool]] = {}
    for turn in episode.turns:
        branch, parent = turn.branch, turn.parent
        if branch is None or branch.reward is None or parent is None:
            continue
        if branch.pivot not in found:
            sampled = [length if counts else 0 for length, counts in zip(lengths, own, strict=True)]
            found[branch.pivot] = (sum(sampled[: parent + 1]) / sum(sampled), False)
        depth, success = found[branch.pivot]
        found[branch.pivot] = (depth, success or branch.reward > threshold)
    return [found[pivot] for pivot in sorted(found)]


class PivotChooser:
    """Chooses pivots, and learns from what became of them."""

    def __init__(self, config: PivotConfig) -> None:
        self._config = config
        self._recoverability = Recoverability()

    def learn(self, depth: float, success: bool) -> None:
        """What became of a pivot."""
        self._recoverability.learn(depth, success)

    def choose(self, entropies: Sequence[npt.NDArray[np.floating]], rng: np.random.Generator) -> list[Pivot]:
        """Pivots of an episode, in order: ``entropies`` are those of each token of each of its answers, zeros where
        they were not recorded. None where no answer is long enough."""
        lengths = [len(entropies_T) for entropies_T in entropies]
        starts = np.cumsum([0, *lengths])
        places = self._at_spikes(entropies) if self._config.choose == "entropy" else self._drawn(starts, rng)
        answers = np.searchsorted(starts, places, side="right") - 1
        return [
            Pivot(answer=answer, at=place - int(starts[answer]), depth=place / int(starts[-1]))
            for place, answer in zip(places, answers.tolist(), strict=True)
        ]

    def _at_spikes(self, entropies: Sequence[npt.NDArray[np.floating]]) -> list[int]:
        """The first tokens of an answer are no pivots: nothing would be kept, or too little."""
        known_T = np.concatenate([np.zeros(0), *entropies])
        start = 0
        for entropies_T in entropies:
            known_T[start : start + min(self._config.gap, len(entropies_T))] = -np.inf
            start += len(entropies_T)
        found = spikes(known_T, most=self._config.per_episode, gap=self._config.gap)
        return [place for place in found if np.isfinite(known_T[place])]

    def _drawn(self, starts: npt.NDArray[np.int64], rng: np.random.Generator) -> list[int]:
        gap = self._config.gap
        bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        candidates_C = np.array([place for start, end in bounds for place in range(start + gap, end, gap)], np.int64)
        if not len(candidates_C):
            return []
        weights_C = np.ones(len(candidates_C))
        if self._config.choose == "utility":
            depths_C = candidates_C / starts[-1]
            weights_C = self._recoverability(depths_C) * depths_C**self._config.depth_bias
        count = min(self._config.per_episode, len(candidates_C))
        chosen = rng.choice(candidates_C, count, replace=False, p=weights_C / weights_C.sum())
        return sorted(chosen.tolist())
