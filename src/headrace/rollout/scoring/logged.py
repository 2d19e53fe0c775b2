"""The values that a reward function logs beside its rewards: TRL's ``log_metric`` and ``log_extra``."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_TEXT = 4096
"""The most characters of one value of ``log_extra`` that are kept."""


class RewardLog:
    """The values that one call of a reward function logs."""

    def __init__(self, num_completions: int) -> None:
        self._columns: dict[str, list[Any]] = {}
        self._num = num_completions
        self.metrics: dict[str, list[float]] = {}
        """The values of every metric, by name."""

    def metric(self, name: str, value: float) -> None:
        """Record a number: ``metrics.jsonl`` has the mean of a step as ``logged/NAME``."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def column(self, column: str, values: list[Any]) -> None:
        """Record a value for each completion, which is shown with the episodes. A column that is logged again is
        continued."""
        self._columns.setdefault(str(column), []).extend(values)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return the columns of each completion. Raises :class:`ValueError` if a column has not one value for each."""
        for column, values in self._columns.items():
            if len(values) != self._num:
                raise ValueError(f"log_extra({column!r}) was given {len(values)} values for {self._num} completions")
        if not self._columns:
            return ()
        places = range(self._num)
        return tuple({name: _plain(values[place]) for name, values in self._columns.items()} for place in places)


def _plain(value: Any) -> Any:
    """Return a value that can be serialised: numbers and short texts unchanged, anything else as its text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | dict):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, OverflowError):
            value = repr(value)
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
