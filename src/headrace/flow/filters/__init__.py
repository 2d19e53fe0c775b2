"""Filters of scored groups: they decide which groups, and which episodes of a group, are trained. A new filter is a
class in this folder and a member of the union ``AnyFilter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator

from headrace.base.config.kinds import Kinds
from headrace.base.errors import ConfigError
from headrace.flow.filters.base import (
    FilterContext,
    FilterSection,
    apply_filters,
    as_tables,
    comparable_rewards,
    get_rewards,
    undo_filters,
)
from headrace.flow.filters.length import LengthFilter
from headrace.flow.filters.oversampling import REDUNDANT, Redundancy, ResampleCorrect
from headrace.flow.filters.rewards import DynamicSampling, ZeroVariance

AnyFilter = ZeroVariance | DynamicSampling | Redundancy | ResampleCorrect | LengthFilter
FILTERS = Kinds(AnyFilter, group="headrace.filters", setting="flow.filters", contract=FilterSection)
"""The registry of all kinds of filters, including filters of installed packages."""
FilterConfig = Annotated[AnyFilter, FILTERS]
FiltersConfig = Annotated[tuple[FilterConfig, ...], BeforeValidator(as_tables)]
"""The type of the setting ``flow.filters``: a list of filters, or a single filter. A name stands for the table of that
kind with default settings."""


def refuse_impossible(filters: Sequence[FilterSection], *, group_size: int, min_episodes: int) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``filters``, applied in order to groups of ``group_size``
    episodes, would drop every group, or contain a filter that has no effect. A group with fewer than ``min_episodes``
    episodes is dropped. The flow's settings call this when they are loaded."""
    left = group_size
    for place, each in enumerate(filters):
        name = f"flow.filters[{place}] {type(each).model_fields['kind'].default!r}"
        earlier = filters[:place]
        if each in earlier or (each.first is not None and any(other.first is not None for other in earlier)):
            raise ConfigError(f"{name} stands twice in flow.filters", remedy="keep one of them")
        problem = each.problem(left, min_episodes)
        if problem is not None:
            raise ConfigError(f"{name}: {problem[0]}", remedy=problem[1])
        left = each.episodes_left(left)
        if left < min_episodes:
            raise ConfigError(
                f"{name} leaves {left} episodes of a group, and flow.min_episodes={min_episodes}: every group would be "
                "dropped",
                remedy=f"set keep >= {min_episodes}, or lower flow.min_episodes",
            )


__all__ = [
    "REDUNDANT",
    "FilterContext",
    "FilterSection",
    "FiltersConfig",
    "LengthFilter",
    "apply_filters",
    "comparable_rewards",
    "get_rewards",
    "refuse_impossible",
    "undo_filters",
]
