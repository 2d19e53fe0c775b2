"""What is noted of groups and episodes while they run, for the trace and the metrics of the step that trains them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.metrics import as_label
from headrace.base.types.trace import Span


class Attempts:
    """The environments of groups that have begun in this life of the run, until they are trained, and the episodes that
    have ended since a span of each was last told.

    That an episode has ended is noted thousands of times a second: whatever is made of it is made for many at once.
    """

    def __init__(self, env_column: str) -> None:
        self._env_column = env_column
        self._envs: dict[int, str] = {}
        """Of groups whose tasks name one."""
        self._ended: list[tuple[EpisodeGraph, float, float]] = []
        """Of which no span has been told."""

    def begin(self, number: int, row: Mapping[str, Any]) -> None:
        """A group of that task starts."""
        named = row.get(self._env_column)
        if named is not None:
            self._envs[number] = as_label(str(named))

    def ended(self, episode: EpisodeGraph, start_s: float, end_s: float) -> None:
        """An episode has come to its end."""
        episode.ended_s = end_s
        self._ended.append((episode, start_s, end_s))

    def spans(self) -> list[Span]:
        """Of the episodes that have ended since this was last asked."""
        ended, self._ended = self._ended, []
        return [
            Span(lane="rollout", name="episode", start_s=start_s, end_s=end_s, of=episode.key)
            for episode, start_s, end_s in ended
        ]

    def envs(self, numbers: Iterable[int], alive: Container[int]) -> list[str]:
        """Those of a batch, empty for a task that names none; forgets groups that are not ``alive`` any more."""
        found = [self._envs.pop(number, "") for number in numbers]
        self._envs = {number: env for number, env in self._envs.items() if number in alive}
        return found
