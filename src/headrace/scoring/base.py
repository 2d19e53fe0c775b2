"""What a scorer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.types.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What scoring some completions came to."""

    rewards: tuple[float | None, ...]
    """One per completion; ``None``: the function's own word for 'do not count this one'."""
    failure: str = ""
    """``reason: words`` where there are no rewards: ``reward_error``, ``reward_nan``, ``reward_timeout``,
    ``reward_crashed``."""


class Scorer(Protocol):
    """Scores completions; never raises for what a reward function did."""

    by_group: bool
    """Whether it wants all completions of a group at once."""

    async def score(self, task: Task, completions: tuple[str, ...]) -> Scores:
        """Score completions of ``task``: one, or a whole group where :attr:`by_group`."""
        ...
