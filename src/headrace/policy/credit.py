"""The function behind ``Policy.advantages``: it computes advantages from rewards, which are nested like samples (one
list for each prompt) or one flat list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.algo import notebook
from headrace.algo.advantages import make_outcomes
from headrace.algo.config import AlgoConfig
from headrace.base.errors import ConfigError, DataError


def compute_advantages(
    name: str | None, rewards: Sequence[Any], groups: Sequence[Any] | None, options: Mapping[str, Any], algo: AlgoConfig
) -> list[Any]:
    """Return one advantage for each reward, computed by the formula ``name`` with its ``options``, or by the formula of
    ``algo`` if ``name`` is ``None``. ``rewards`` are either one list for each prompt, whose rewards share a baseline,
    or one flat list, for which ``groups`` contains the label of each reward's group. The result is nested like
    ``rewards``. :meth:`headrace.policy.Policy.advantages` calls this. Raises :class:`~headrace.base.errors.DataError`
    without rewards and :class:`~headrace.base.errors.ConfigError` for invalid options.

    >>> compute_advantages("rloo", [[1, 0], [0, 0]], None, {}, AlgoConfig())
    [[1.0, -1.0], [0.0, 0.0]]
    """
    if not len(rewards):
        raise DataError("there are no rewards", remedy="give one for each sample")
    nested = groups is None and all(isinstance(row, list | tuple) for row in rewards)
    flat = [reward for row in rewards for reward in row] if nested else list(rewards)
    labels = [index for index, row in enumerate(rewards) for _ in row] if nested else groups
    if name is not None:
        credit = notebook.advantage(name, flat, groups=labels, **options)
    elif options:
        raise ConfigError(f"option {next(iter(options))!r} is given to no formula", remedy="name the advantage")
    else:
        credit = algo.credit(make_outcomes(flat, labels)).tolist()
    if not nested:
        return credit
    if len(credit) != len(flat):
        raise ConfigError(f"advantage {name!r} credits single tokens", remedy="give flat rewards with groups")
    values = iter(credit)
    return [[next(values) for _ in row] for row in rewards]
