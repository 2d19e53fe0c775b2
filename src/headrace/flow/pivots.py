"""Pivots and how they are chosen. A pivot is a position in a failed answer from which branches are sampled, and a
branch is a new continuation of the answer from the pivot on. Source: Guo et al. (DEEP-GRPO), arXiv 2602.14169: dense
resampling from deep, recoverable states of failed trajectories.

The *depth* of a pivot is the fraction of the episode's sampled tokens that come before it.

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
"""Greatest number of recent pivots from which the probability of success is estimated."""
FEWEST_OUTCOMES = 10
"""With this many outcomes or fewer, every position has the same probability of success."""


class PivotConfig(Section):
    """The settings of resampling from within failed episodes (``flow.pivots``). From some positions in such an episode,
    several branches are sampled under one version of the weights and compared with each other."""

    threshold: float = 0.0
    """An episode whose reward is at most this value has failed."""
    per_episode: int = Field(default=1, ge=1)
    """Number of pivots in each failed episode, if it is long enough."""
    branches: int = Field(default=8, ge=2)
    """Number of branches at each pivot. ``algo.advantage`` treats the branches of one pivot as a group."""
    choose: Literal["utility", "uniform", "entropy"] = "utility"
    """How pivots are chosen. ``utility`` draws them in proportion to P(success | depth)·depth^γ, where P is a logistic
    regression over earlier pivots and depth is the fraction of the episode's sampled tokens before the pivot.
    ``uniform`` draws them with equal probability. ``entropy`` takes the positions before the tokens with the highest
    entropies."""
    depth_bias: float = Field(default=0.1, ge=0)
    """The exponent γ of ``utility``: larger values prefer deeper pivots, and 0 prefers no depth."""
    gap: int = Field(default=16, ge=1)
    """Least number of tokens between two pivots, and between a pivot and the beginning of its turn. ``utility`` and
    ``uniform`` choose among every ``gap``-th token."""
    weight: float = Field(default=1.0, ge=0)
    """The weight λ of the branches: the loss is the loss of the episodes plus λ times the loss of the branches, each
    reduced separately."""

    @model_validator(mode="after")
    def _refuse_depth_bias_without_effect(self) -> Self:
        """Raise :class:`ConfigError` if ``depth_bias`` is set and pivots are not chosen by utility, where it would have
        no effect."""
        if self.choose != "utility" and self.depth_bias != type(self).model_fields["depth_bias"].default:
            raise ConfigError(
                f"flow.pivots.depth_bias={self.depth_bias:g} has no effect with choose={self.choose!r}",
                remedy="set flow.pivots.choose = 'utility', or leave depth_bias out",
            )
        return self


class Pivot(NamedTuple):
    """A position between two tokens of a failed episode, from which branches are sampled."""

    answer: int
    """Index of the answer among the answers (sampled turns) of the episode."""
    num_tokens_before: int
    """Number of tokens of the answer before the pivot; at least one token follows."""
    depth: float
    """Fraction of the episode's sampled tokens that come before the pivot."""


class Recoverability:
    """An estimate of P(success | depth): a logistic regression of the success of a pivot's branches on its depth, with
    the regulariser ½·slope². It uses the last :data:`WINDOW` pivots."""

    def __init__(self) -> None:
        """Create an estimate without outcomes."""
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        """Depth and success of each recent pivot."""
        self._coefficients: tuple[float, float] | None = None
        """The intercept and the slope of the regression; ``None`` if they must be computed again."""

    def learn(self, depth: float, success: bool) -> None:
        """Add the outcome of one pivot: its depth, and whether at least one of its branches succeeded."""
        self._outcomes.append((depth, success))
        self._coefficients = None

    def __call__(self, depths_C: Floats) -> Floats:
        """Return the estimated probability of success at each of the depths ``depths_C``; 1 at every depth while there
        are too few outcomes, or while all pivots succeeded or all failed.

        >>> found = Recoverability()
        >>> for place in range(100):
        ...     found.learn(place / 100, place < 50)
        >>> bool(found(np.array([0.1]))[0] > 0.6 > 0.4 > found(np.array([0.9]))[0])
        True
        """
        successes = sum(success for _, success in self._outcomes)
        if len(self._outcomes) <= FEWEST_OUTCOMES or successes in (0, len(self._outcomes)):
            return np.ones(len(depths_C))
        if self._coefficients is None:
            self._coefficients = _fit(np.array(sorted(self._outcomes), np.float64))
        intercept, slope = self._coefficients
        return 1 / (1 + np.exp(-(intercept + slope * depths_C)))


def _fit(outcomes_O2: Floats, steps: int = 30) -> tuple[float, float]:
    """Return intercept and slope of the logistic regression on ``outcomes_O2``, whose columns are depth and success (0
    or 1), after at most ``steps`` steps of Newton's method from 0. The loss is convex."""
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


def list_outcomes(episode: EpisodeGraph, threshold: float) -> list[tuple[float, bool]]:
    """Return the outcome of each pivot of an episode, in the order of the pivots: its depth, and whether one of its
    branches earned a reward above ``threshold``. Pivots of which no branch has a reward are left out."""
    is_own = [turn.branch is None and not turn.untrained for turn in episode.turns]
    lengths = [turn.tokens.num_sampled for turn in episode.turns]
    outcomes: dict[int, tuple[float, bool]] = {}
    for turn in episode.turns:
        branch, parent = turn.branch, turn.parent
        if branch is None or branch.reward is None or parent is None:
            continue
        if branch.pivot not in outcomes:
            sampled = [length if counted else 0 for length, counted in zip(lengths, is_own, strict=True)]
            outcomes[branch.pivot] = (sum(sampled[: parent + 1]) / sum(sampled), False)
        depth, success = outcomes[branch.pivot]
        outcomes[branch.pivot] = (depth, success or branch.reward > threshold)
    return [outcomes[pivot] for pivot in sorted(outcomes)]


class PivotChooser:
    """The component of a run that chooses pivots in failed episodes. It learns from the outcomes of earlier pivots."""

    def __init__(self, config: PivotConfig) -> None:
        """Create a chooser with the settings ``config`` and without outcomes."""
        self._config = config
        self._recoverability = Recoverability()
        """The estimate of P(success | depth)."""

    def learn(self, depth: float, success: bool) -> None:
        """Add the outcome of one pivot: its depth, and whether at least one of its branches succeeded."""
        self._recoverability.learn(depth, success)

    def choose(self, entropies: Sequence[npt.NDArray[np.floating]], rng: np.random.Generator) -> list[Pivot]:
        """Return the pivots of one failed episode, in order; empty if no answer is long enough. ``entropies`` has one
        array for each answer: the entropy at each of its tokens, 0 where it was not recorded. ``rng`` draws the pivots,
        unless they are chosen by entropy."""
        lengths = [len(entropies_T) for entropies_T in entropies]
        starts = np.cumsum([0, *lengths])
        places = self._at_spikes(entropies) if self._config.choose == "entropy" else self._draw_places(starts, rng)
        answers = np.searchsorted(starts, places, side="right") - 1
        return [
            Pivot(answer=answer, num_tokens_before=place - int(starts[answer]), depth=place / int(starts[-1]))
            for place, answer in zip(places, answers.tolist(), strict=True)
        ]

    def _at_spikes(self, entropies: Sequence[npt.NDArray[np.floating]]) -> list[int]:
        """Return the positions before the tokens with the highest entropies, as indices into all tokens of the answers.
        The first ``gap`` tokens of each answer are excluded, because a branch from there would keep too little of the
        answer."""
        known_T = np.concatenate([np.zeros(0), *entropies])
        start = 0
        for entropies_T in entropies:
            known_T[start : start + min(self._config.gap, len(entropies_T))] = -np.inf
            start += len(entropies_T)
        places = spikes(known_T, max_count=self._config.per_episode, gap=self._config.gap)
        return [place for place in places if np.isfinite(known_T[place])]

    def _draw_places(self, starts: npt.NDArray[np.int64], rng: np.random.Generator) -> list[int]:
        """Draw positions with ``rng`` among every ``gap``-th token of each answer, and return them in ascending order,
        as indices into all tokens of the answers. ``starts`` contains the index at which each answer begins and, at the
        end, the total number of tokens."""
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
