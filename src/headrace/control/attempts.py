"""What is noted of groups while they run, for the metrics of the step that trains them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.types.episode import EpisodeKey
from headrace.types.metrics import as_label
from headrace.types.trace import Span


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One group."""

    env: str = ""
    """The environment that its task names; empty where it names none."""
    ends_s: list[float] = field(default_factory=list)
    """When its episodes came to their ends, on the clock."""


class Attempts:
    """The groups that have begun in this life of the run, until they are trained, and when their episodes ran.

    That an episode has ended is noted thousands of times a second: whatever is made of it is made for many at once.
    """

    def __init__(self, env_column: str) -> None:
        self._env_column = env_column
        self._by_number: dict[int, Attempt] = {}
        self._ended: list[tuple[EpisodeKey, float, float]] = []
        """Of which no span has been told."""
        self._num_filed = 0
        """How many of those their groups know of."""

    def begin(self, number: int, row: Mapping[str, Any]) -> None:
        """A group of that task starts."""
        named = row.get(self._env_column)
        self._by_number[number] = Attempt(env="" if named is None else as_label(str(named)))

    def ended(self, key: EpisodeKey, start_s: float, end_s: float) -> None:
        """An episode has come to its end."""
        self._ended.append((key, start_s, end_s))

    def spans(self) -> list[Span]:
        """Of the episodes that have ended since this was last asked."""
        self._file()
        ended, self._ended, self._num_filed = self._ended, [], 0
        return [
            Span(lane="rollout", name="episode", start_s=start_s, end_s=end_s, of=f"{group}.{place}")
            for (group, place), start_s, end_s in ended
        ]

    def _file(self) -> None:
        """Tell groups of the ends of their episodes."""
        for (number, _), _, end_s in self._ended[self._num_filed :]:
            if number in self._by_number:
                self._by_number[number].ends_s.append(end_s)
        self._num_filed = len(self._ended)

    def take(self, numbers: Iterable[int]) -> dict[int, Attempt]:
        """Those of a batch; one that a former life began is told nothing of."""
        self._file()
        return {number: self._by_number.pop(number, Attempt()) for number in numbers}

    def keep(self, alive: Container[int]) -> None:
        """Forget the groups that are no more."""
        for number in [number for number in self._by_number if number not in alive]:
            del self._by_number[number]
