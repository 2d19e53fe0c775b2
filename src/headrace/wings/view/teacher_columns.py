"""The log-probabilities that learner and teachers computed for an episode's tokens.

    a teacher with an engine           ··▶ columns of the turns, recorded before the step
    the learner, a teacher beside it   ··▶ columns recorded by the step that trained the episode

Shape legend: T tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn
from headrace.wings.view.run import OpenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherColumns:
    """The recorded values of one episode, by the index of the turn; turns without a record are left out."""

    gaps: Mapping[int, FloatColumn]
    """log π − log μ of each token that carried loss; NaN for the others."""
    teacher_scores: Mapping[int, TeacherScores]
    """The values that a teacher computed for the tokens, with an engine or beside the learner."""

    @classmethod
    def of(cls, run: OpenRun, episode: EpisodeGraph) -> TeacherColumns:
        """Read the recorded values of ``episode``."""
        learned = run.browser().learned(episode.key.group)
        served = {
            index: turn.tokens.teacher_scores
            for index, turn in enumerate(episode.turns)
            if turn.tokens.teacher_scores is not None
        }
        if learned is None:
            return cls(gaps={}, teacher_scores=served)
        return cls(gaps=learned.gaps(episode), teacher_scores={**learned.teacher_scores(episode), **served})

    def teacher_gaps(self, episode: EpisodeGraph, turn: int) -> FloatColumn | None:
        """Return log ν − log μ of each token of a turn; NaN where the teacher computed nothing; ``None`` without a
        record."""
        teacher_scores = self.teacher_scores.get(turn)
        return None if teacher_scores is None else teacher_scores.logprobs_T - episode.turns[turn].tokens.logprobs_T


def no_teacher_reason(run: OpenRun, step: int | None) -> str:
    """Return the reason why no teacher's values are recorded for an episode that ``step`` trained (``None``: no step
    did)."""
    teachers: list[dict[str, Any]] = run.setting("learner", "teachers") or []
    if not teachers:
        return "the run has no teacher"
    if any(teacher.get("engine") is not None for teacher in teachers):
        return "no teacher was asked about it"
    if step is None:
        return "no step has taken its group"
    return "not recorded: a teacher beside the learner says log ν only where algo.advantage = 'reverse_kl' asks for it"


def max_abs(gaps_T: FloatColumn | None) -> float | None:
    """Return the largest finite absolute value; ``None`` if there is none."""
    return None if gaps_T is None or not np.isfinite(gaps_T).any() else float(np.nanmax(np.abs(gaps_T)))
