"""What the learner's side says of an episode's tokens: log π, and what a teacher thinks of them.

    a teacher with an engine     ··▶ columns of the turns, before the step
    one beside the learner, log π ··▶ what the step made of its tokens

Shape legend: T tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.taught import Taught
from headrace.base.types.tokens import FloatColumn
from headrace.wings.view.run import OpenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtTokens:
    """By turn; turns of which nothing is recorded are left out."""

    gaps: Mapping[int, FloatColumn]
    """log π − log μ of the tokens that carried loss; NaN for the others."""
    taught: Mapping[int, Taught]
    """What a teacher says of the tokens, wherever it computes."""

    @classmethod
    def of(cls, run: OpenRun, episode: EpisodeGraph) -> TaughtTokens:
        """What is recorded of ``episode``."""
        learned = run.browser().learned(episode.key.group)
        served = {index: said for index, turn in enumerate(episode.turns) if (said := turn.tokens.taught) is not None}
        if learned is None:
            return cls(gaps={}, taught=served)
        return cls(gaps=learned.gaps(episode), taught={**learned.taught(episode), **served})

    def teacher_gaps(self, episode: EpisodeGraph, turn: int) -> FloatColumn | None:
        """log ν − log μ of the tokens of a turn; NaN where no teacher was asked."""
        said = self.taught.get(turn)
        return None if said is None else said.logprobs_T - episode.turns[turn].tokens.logprobs_T


def why_untaught(run: OpenRun, step: int | None) -> str:
    """Why nothing is there that a teacher said of an episode that ``step`` trained (``None``: none did), in words."""
    teachers: list[dict[str, Any]] = run.setting("learner", "teachers") or []
    if not teachers:
        return "the run has no teacher"
    if any(teacher.get("engine") is not None for teacher in teachers):
        return "no teacher was asked about it"
    if step is None:
        return "no step has taken its group"
    return "not recorded: a teacher beside the learner says log ν only where algo.advantage = 'reverse_kl' asks for it"


def greatest(gaps_T: FloatColumn | None) -> float | None:
    """The distance from 0 of the token farthest from it."""
    return None if gaps_T is None or not np.isfinite(gaps_T).any() else float(np.nanmax(np.abs(gaps_T)))
