"""The requests for samples that run or have ended, with the answers that clients may still fetch.

A client sends a request, gets a name for it at once, and then asks for the result under that name until it is there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.wings.tinker.samplers import SamplerRecord

KEPT_S, KEPT_BYTES = 600.0, 2**28
"""Seconds for which the answer to a request for samples is kept, and the size of all answers above which the oldest go
earlier, first those that their clients have had."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultResponse:
    """The HTTP answer to a client that asks for the result of an earlier request."""

    body: bytes
    """The encoded result, or the error in the client's format."""
    media: str = JSON
    """The content type of the body."""
    status: int = 200
    """The HTTP status."""


@dataclass(slots=True, kw_only=True, eq=False)
class SampleJob:
    """A request for samples, which runs as a task, with its answer when there is one."""

    task: asyncio.Task[ResultResponse]
    """The task that samples; its result is the answer."""
    ids: list[str]
    """The name of each sequence that is sampled, by which a client may later tell where training data come from."""
    record: SamplerRecord
    """The sampling session whose weights sample."""
    num_samples: int
    """The number of sequences to sample."""
    ended_s: float | None = None
    """The time at which the job ended, by the monotonic clock; ``None`` while it runs."""
    num_bytes: int = 0
    """The size of the answer in bytes; 0 while there is none."""
    fetched: bool = False
    """Whether the client has had the answer."""


class SampleJobs(dict[str, SampleJob]):
    """The sampling requests of a server, by the name that each client was given. If an answer is asked for after it was
    forgotten, the client gets an error that says so, and sends the request again."""

    def __init__(self) -> None:
        """Make an empty collection."""
        super().__init__()
        self._num_bytes = 0  # of all answers

    def __delitem__(self, name: str) -> None:
        """Remove a request, and subtract its answer from the size of all answers."""
        self._num_bytes -= self[name].num_bytes
        super().__delitem__(name)

    def forget(self, name: str) -> None:
        """Forget a request, if it is still known."""
        if name in self:
            del self[name]

    def end(self, name: str, now_s: float) -> None:
        """Note that the request ``name`` has ended at ``now_s``, with an answer or without."""
        if name in self:
            self[name].ended_s = now_s

    def keep(self, name: str, found: ResultResponse) -> None:
        """Note the size of the answer ``found`` of the request ``name``. While all answers together exceed
        :data:`KEPT_BYTES`, forget others: first those that clients have fetched, the oldest first."""
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
        """Forget the requests that ended more than :data:`KEPT_S` before ``now_s``, with their answers."""
        for name, job in list(self.items()):
            if job.task.done() and job.ended_s is not None and now_s - job.ended_s > KEPT_S:
                del self[name]
