"""Whether what an objective reads and what a learner is told to keep go together."""

from __future__ import annotations

from headrace.algo.base import Column
from headrace.algo.config import AlgoConfig
from headrace.base.errors import ConfigError
from headrace.learner.config import COLUMNS, LearnerConfig


def columns_of(algo: AlgoConfig) -> frozenset[Column]:
    """What its loss and corrections read beyond what is always there."""
    return frozenset[Column]().union(*(part.columns() for part in (algo.loss, *algo.correction)))


def refuse_misfit(algo: AlgoConfig, learner: LearnerConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a column that nobody computes, and for a policy that nobody
    asks.

    A reference is never asked in vain: without a penalty it is measured.
    """
    columns = columns_of(algo)
    if missing := sorted(columns - COLUMNS - {"log_ref", "top_k"}):
        raise ConfigError(
            f"algo.loss={algo.loss.kind!r} with its corrections reads {', '.join(missing)}, which the learner does not "
            "compute",
            remedy="choose another algo.loss or algo.correction",
        )
    distils, credits = "top_k" in columns, algo.advantage.by_teacher
    if not learner.teachers and (distils or credits):
        what = f"algo.loss={algo.loss.kind!r}" if distils else f"algo.advantage={algo.advantage.kind!r}"
        raise ConfigError(
            f"{what} learns from a teacher, and there is none",
            remedy="add [[learner.teachers]] with kind = 'model' and its path; or, to learn from this model's own "
            "past, 'ema' or 'lagged'",
        )
    if learner.teachers and not (distils or credits):
        raise ConfigError(
            f"learner.teachers (kind {learner.teachers[0].kind!r}) has no effect: nothing learns from a teacher",
            remedy="set algo.loss = 'distill' or algo.advantage = 'reverse_kl', or leave learner.teachers out",
        )
    if (algo.old == "kept") != (learner.old is not None):
        said = "algo.old='kept', and learner.old does not say which weights"
        if learner.old is not None:
            said = f"learner.old.kind={learner.old.kind!r} has no effect with algo.old={algo.old!r}"
        raise ConfigError(
            said, remedy="set both: algo.old = 'kept' and learner.old.kind = 'lagged', 'refreshed' or 'ema'; or neither"
        )
