"""Requests for samples that run or have ended, with the answers that clients may still ask for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.wings.tinker.samplers import SamplerRecord

KEPT_S, KEPT_BYTES = 600.0, 2**28
"""Seconds for which the answer to a request for samples is kept, and the size of all answers above which the oldest go
earlier, first those that their clients have had."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer to a request for a result."""

    body: bytes
    media: str = JSON
    status: int = 200
    """The HTTP status."""


@dataclass(slots=True, kw_only=True, eq=False)
class SampleJob:
    """A request for samples, and its answer when there is one."""

    task: asyncio.Task[Found]
    ids: list[str]
    """The name of each sampled sequence."""
    record: SamplerRecord
    """The sampling session."""
    num_samples: int
    ended_s: float | None = None
    """When its answer was there, by the clock; ``None`` before."""
    num_bytes: int = 0
    """The size of the answer."""
    fetched: bool = False
    """Whether the client has had the answer."""


class SampleJobs(dict[str, SampleJob]):
    """The requests by name. What is forgotten is asked for again by its client."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes = 0  # of all answers

    def __delitem__(self, name: str) -> None:
        self._num_bytes -= self[name].num_bytes
        super().__delitem__(name)

    def forget(self, name: str) -> None:
        """Forget a request, if it is still known."""
        if name in self:
            del self[name]

    def end(self, name: str, now_s: float) -> None:
        """Note that a request has ended, with an answer or without."""
        if name in self:
            self[name].ended_s = now_s

    def keep(self, name: str, found: Found) -> None:
        """Keep the answer ``found``, and forget the oldest others while all of them exceed :data:`KEPT_BYTES`."""
        if name not in self:
            return
        self[name].num_bytes = len(found.body)
        self._num_bytes += len(found.body)
        if self._num_bytes <= KEPT_BYTES:
            return
        others = [each for each, job in self.items() if job.num_bytes and each != name]
        for each in sorted(others, key=lambda each: (not self[each].fetched, self[each].ended_s)):
            if self._num_bytes > KEPT_BYTES:
                del self[each]

    def forget_old(self, now_s: float) -> None:
        """Forget answers that were there :data:`KEPT_S` ago."""
        for name, job in list(self.items()):
            if job.task.done() and job.ended_s is not None and now_s - job.ended_s > KEPT_S:
                del self[name]
