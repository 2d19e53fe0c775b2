"""Where the time goes, in words: who waits, how much of the time, and which setting to turn."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.types.observation import Fractions


class Bound(enum.StrEnum):
    """What holds a run up."""

    GENERATION = "generation-bound"
    """The learner waits while the engine works."""
    LEARNER = "learner-bound"
    """The engine waits while the learner works."""
    SCORING = "scoring-bound"
    """Both wait for rewards."""
    SYNC = "sync-bound"
    """Somebody waits for weights."""
    TURNS = "taking turns"
    """Engine and learner work one after the other, never together."""
    BALANCED = "balanced"
    """Nobody waits long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding and one piece of advice."""

    bound: Bound
    frac: float
    """The fraction of the time that is lost to it."""
    finding: str
    """A sentence with the numbers."""
    advice: str
    """A sentence with the names of settings; empty when balanced."""

    def __str__(self) -> str:
        return f"{self.bound}: {self.finding} {self.advice}".rstrip()


SMALL = 0.10
"""A fraction of the time below which nobody is said to wait."""

_ADVICE = {
    Bound.GENERATION: "Give the engine more: raise launch.engine_threads (and lower launch.learner_threads), or "
    "engine.max_sequences if many requests wait to join.",
    Bound.LEARNER: "Give the learner more: raise launch.learner_threads (and lower launch.engine_threads).",
    Bound.SCORING: "Let generation run ahead while rewards are computed: raise flow.max_age and flow.lead, or make the "
    "reward faster.",
    Bound.SYNC: "Let generation run ahead while weights travel: raise flow.lead (and flow.max_age, which bounds it).",
    Bound.TURNS: "Let them overlap: set flow.max_age >= 1; where it is, raise flow.max_age and flow.lead.",
    Bound.BALANCED: "",
}
_RUN_AHEAD = "The engine stands idle too: raise flow.lead (and flow.max_age, which bounds it)."


def judge(fractions: Fractions) -> Verdict:
    """The verdict on one interval.

    >>> print(judge(Fractions(engine_idle=0.02, learner_idle=0.38)).finding)
    the learner waits for episodes 38% of the time; the engine works 98%.
    """
    bound, frac = _bound(fractions)
    advice = _ADVICE[bound]
    if bound is Bound.GENERATION and fractions.engine_idle > 2 * SMALL:
        advice = _RUN_AHEAD
    return Verdict(bound=bound, frac=frac, finding=_finding(bound, fractions), advice=advice)


def _bound(f: Fractions) -> tuple[Bound, float]:
    outside = max((f.scoring, Bound.SCORING), (f.sync, Bound.SYNC), key=lambda pair: pair[0])
    if outside[0] >= SMALL and outside[0] >= 0.5 * min(f.engine_idle, f.learner_idle):
        return outside[1], outside[0]
    if min(f.engine_idle, f.learner_idle) >= SMALL and f.engine_idle + f.learner_idle >= 0.9:
        return Bound.TURNS, min(f.engine_idle, f.learner_idle)
    if max(f.engine_idle, f.learner_idle) < SMALL:
        return Bound.BALANCED, max(f.engine_idle, f.learner_idle)
    if f.learner_idle >= f.engine_idle:
        return Bound.GENERATION, f.learner_idle
    return Bound.LEARNER, f.engine_idle


def _finding(bound: Bound, f: Fractions) -> str:
    match bound:
        case Bound.GENERATION:
            return f"the learner waits for episodes {f.learner_idle:.0%} of the time; the engine works {_work(f)[0]}."
        case Bound.LEARNER:
            return f"the engine waits for its turn {f.engine_idle:.0%} of the time; the learner works {_work(f)[1]}."
        case Bound.SCORING:
            return f"engine and learner both stand idle {f.scoring:.0%} of the time because rewards are outstanding."
        case Bound.SYNC:
            return f"{f.sync:.0%} of the time somebody stands still because weights are on their way."
        case Bound.TURNS:
            return (
                f"the engine works {_work(f)[0]} of the time and the learner {_work(f)[1]}, hardly ever both at once."
            )
        case Bound.BALANCED:
            return f"the engine works {_work(f)[0]} of the time, the learner {_work(f)[1]}."


def _work(f: Fractions) -> tuple[str, str]:
    return f"{1 - f.engine_idle:.0%}", f"{1 - f.learner_idle:.0%}"
