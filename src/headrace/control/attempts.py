"""What is noted of groups while they run, for the metrics of the step that trains them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.types.metrics import as_label


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One group."""

    env: str = ""
    """The environment that its task names; empty where it names none."""
    ends_s: list[float] = field(default_factory=list)
    """When its episodes came to their ends, on the clock."""


class Attempts:
    """The groups that have begun in this life of the run, until they are trained."""

    def __init__(self, env_column: str) -> None:
        self._env_column = env_column
        self._by_number: dict[int, Attempt] = {}

    def begin(self, number: int, row: Mapping[str, Any]) -> None:
        """A group of that task starts."""
        named = row.get(self._env_column)
        self._by_number[number] = Attempt(env="" if named is None else as_label(str(named)))

    def ended(self, number: int, at_s: float) -> None:
        """An episode of the group has come to its end."""
        attempt = self._by_number.get(number)
        if attempt is not None:
            attempt.ends_s.append(at_s)

    def take(self, numbers: Iterable[int]) -> dict[int, Attempt]:
        """Those of a batch; one that a former life began is told nothing of."""
        return {number: self._by_number.pop(number, Attempt()) for number in numbers}

    def keep(self, alive: Container[int]) -> None:
        """Forget the groups that are no more."""
        for number in [number for number in self._by_number if number not in alive]:
            del self._by_number[number]
