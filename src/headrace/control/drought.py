"""Groups that filters drop, one after the other: counted until one is kept, and told in words when it is too many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.errors import NothingToLearn
from headrace.flow.filters import FilterSection


@dataclass(slots=True, kw_only=True)
class ZeroSignalCounter:
    """What was dropped since the last group that was kept."""

    most: int
    """Groups in a row after which the run ends."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""
    num_rewards: int = 0
    """Rewards of those groups."""
    reward_sum: float = 0.0
    """Of these."""
    lowest: float = math.inf
    """Of these."""
    highest: float = -math.inf
    """Of these."""
    advice: dict[str, str] = field(default_factory=dict)
    """By reason, what the filter's user may do."""

    @property
    def length(self) -> int:
        """Groups in a row."""
        return self.reasons.total()

    def kept(self) -> None:
        """A group was kept: it is over."""
        self.reasons.clear()
        self.num_rewards, self.reward_sum, self.lowest, self.highest = 0, 0.0, math.inf, -math.inf

    def dropped(self, reason: str, by: FilterSection, rewards: Sequence[float]) -> None:
        """``by`` dropped a group with these rewards. :class:`~headrace.base.errors.NothingToLearn` if it is too
        many."""
        self.reasons[reason] += 1
        self.num_rewards += len(rewards)
        self.reward_sum += sum(rewards)
        self.lowest, self.highest = min(self.lowest, *rewards), max(self.highest, *rewards)
        self.advice[reason] = by.advice
        if self.length >= self.most:
            raise NothingToLearn(self.in_words(), remedy=self._remedy())

    def in_words(self) -> str:
        """How many, by which filter, and what the rewards were."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        return f"filters dropped {self.length} groups in a row and kept none: {reasons}; {self._rewards()}"

    def _rewards(self) -> str:
        if self.lowest == self.highest:
            return f"all {self.num_rewards} rewards were {self.lowest:g}"
        mean = self.reward_sum / self.num_rewards
        return f"{self.num_rewards} rewards between {self.lowest:g} and {self.highest:g}, {mean:.3g} on average"

    def _remedy(self) -> str:
        (reason, _), *_ = self.reasons.most_common(1)
        first = "look at completions and reward; "
        if self.lowest == self.highest:
            first = "look whether the reward function works: it told no answer from another; "
        return f"{first}{self.advice[reason]}; or take the filter away, or raise flow.max_idle_batches; then --resume"
