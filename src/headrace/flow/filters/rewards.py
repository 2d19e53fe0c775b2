"""Filters that compare the rewards of a group: ``zero_variance`` drops a group whose rewards are all equal, and
``dynamic_sampling`` a group whose share of correct answers is out of bounds. A group holds the attempts at one task."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict, comparable_rewards, get_rewards


class ZeroVariance(FilterSection):
    """A filter that drops a group whose rewards are all equal. Where agents earned rewards of their own, it drops the
    group if the rewards are equal within every role. The dropped groups are counted under the reason ``zero_variance``.

    Advantages within such a group are 0, so its tokens would only dilute the mean over the batch.
    """

    advice: ClassVar[str] = (
        "make tasks easier where rewards are low and harder where they are high, raise flow.group_size or "
        "engine.temperature"
    )
    """Advice for a user whose groups are all dropped by this filter."""

    kind: Literal["zero_variance"] = "zero_variance"
    """Selects this filter."""
    tolerance: float = Field(default=0.0, ge=0)
    """Rewards whose difference is at most this value count as equal."""

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return the problem and the remedy, for an error message, if groups have a single episode, so that every group
        would be dropped; otherwise ``None``."""
        if num_episodes > 1:
            return None
        return "a group of one has nothing to compare, and would be dropped", "leave it out, or raise flow.group_size"

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return the decision to drop ``group`` if its rewards differ by no more than ``tolerance``; otherwise
        :data:`KEEP`."""
        if any(max(rewards) - min(rewards) > self.tolerance for rewards in comparable_rewards(group.counted)):
            return KEEP
        return Verdict(reason="zero_variance", drop=True)


class DynamicSampling(FilterSection):
    """A filter that drops a group unless the share of its correct episodes is strictly between two bounds. The dropped
    groups are counted under the reasons ``accuracy_too_low`` and ``accuracy_too_high``.

    Source: Yu et al. (DAPO), arXiv 2503.14476, eq. 11: 0 < the number of right answers < G, the size of the group;
    sampling continues until the batch is full.
    """

    advice: ClassVar[str] = (
        "make tasks easier where accuracy is too low and harder where it is too high, raise flow.group_size, widen the "
        "filter's low and high, or look whether its threshold tells right from wrong"
    )
    """Advice for a user whose groups are all dropped by this filter."""

    kind: Literal["dynamic_sampling"] = "dynamic_sampling"
    """Selects this filter."""
    low: float = Field(default=0.0, ge=0, le=1)
    """A share of correct answers up to this value is too low."""
    high: float = Field(default=1.0, ge=0, le=1)
    """A share of correct answers from this value on is too high."""
    threshold: float = 0.5
    """An answer with a reward above this value counts as correct."""

    @pydantic.model_validator(mode="after")
    def _refuse_empty_range(self) -> DynamicSampling:
        """Raise :class:`ConfigError` if ``low`` is at or above ``high``, so that no share is between them."""
        if self.low >= self.high:
            raise ConfigError(
                f"filter 'dynamic_sampling' has low={self.low:g} and high={self.high:g}: it drops every group",
                remedy="set low < high",
            )
        return self

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return the problem and the remedy, for an error message, if no number of correct answers in a group of
        ``min_episodes`` to ``num_episodes`` gives a share between the bounds; otherwise ``None``."""
        sizes = range(min_episodes, num_episodes + 1)
        if any(self.low < right / size < self.high for size in sizes for right in range(size + 1)):
            return None
        shares = ", ".join(f"{right / num_episodes:.3g}" for right in range(num_episodes + 1))
        return (
            f"low={self.low:g} and high={self.high:g} leave no room: of {num_episodes} episodes a share of {shares} "
            "can be right",
            "widen low and high, or raise flow.group_size",
        )

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return the decision to drop ``group`` if its share of correct episodes is at most ``low`` or at least
        ``high``; otherwise :data:`KEEP`."""
        rewards = get_rewards(group.counted)
        accuracy = sum(reward > self.threshold for reward in rewards) / len(rewards)
        if accuracy <= self.low:
            return Verdict(reason="accuracy_too_low", drop=True)
        return Verdict(reason="accuracy_too_high", drop=True) if accuracy >= self.high else KEEP
