"""The sampling requests of a server that run or have ended, with the answers that clients may still fetch.

A client sends a request, receives a name (the request id) at once, and polls for the result under that name.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.wings.tinker.samplers import SamplerRecord

KEPT_S, KEPT_BYTES = 600.0, 2**28
"""Seconds for which the answer to a sampling request is kept, and the total size of answers above which answers are
deleted earlier: first fetched answers, then others, the oldest first."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultResponse:
    """The HTTP response to a client that polls for the result of an earlier request."""

    body: bytes
    """The encoded result, or the error in the client's format."""
    media: str = JSON
    """The content type of the body."""
    status: int = 200
    """The HTTP status."""


@dataclass(slots=True, kw_only=True, eq=False)
class SampleJob:
    """A sampling request that runs as a task or has ended."""

    task: asyncio.Task[ResultResponse]
    """The task that samples; its result is the response for the client."""
    ids: list[str]
    """The id of each sampled sequence, which a client may later send as the provenance of training data."""
    record: SamplerRecord
    """The sampling session whose weights sample."""
    num_samples: int
    """The number of sequences to sample."""
    ended_s: float | None = None
    """The time at which the job ended, by the monotonic clock; ``None`` while it runs."""
    num_bytes: int = 0
    """The size of the answer in bytes; 0 until there is an answer."""
    fetched: bool = False
    """Whether the client has fetched the answer."""


class SampleJobs(dict[str, SampleJob]):
    """The sampling requests of a server by request id. If a client polls for an answer that was deleted, it receives an
    error and sends the request again."""

    def __init__(self) -> None:
        """Create an empty collection."""
        super().__init__()
        self._num_bytes = 0
        """Total size of all answers, in bytes."""

    def __delitem__(self, name: str) -> None:
        """Remove a request, and subtract the size of its answer from the total size."""
        self._num_bytes -= self[name].num_bytes
        super().__delitem__(name)

    def forget(self, name: str) -> None:
        """Remove the request ``name``, if it is present."""
        if name in self:
            del self[name]

    def end(self, name: str, now_s: float) -> None:
        """Record that the request ``name`` ended at ``now_s``, with an answer or without."""
        if name in self:
            self[name].ended_s = now_s

    def keep(self, name: str, response: ResultResponse) -> None:
        """Record the size of the answer ``response`` to the request ``name``. While the total size of answers exceeds
        :data:`KEPT_BYTES`, remove other requests: first requests whose answers were fetched, then others, the oldest
        first."""
        if name not in self:
            return
        self[name].num_bytes = len(response.body)
        self._num_bytes += len(response.body)
        if self._num_bytes <= KEPT_BYTES:
            return
        others = [each for each, job in self.items() if job.num_bytes and each != name]
        for each in sorted(others, key=lambda each: (not self[each].fetched, self[each].ended_s)):
            if self._num_bytes > KEPT_BYTES:
                del self[each]

    def forget_old(self, now_s: float) -> None:
        """Remove the requests that ended more than :data:`KEPT_S` before ``now_s``, with their answers."""
        for name, job in list(self.items()):
            if job.task.done() and job.ended_s is not None and now_s - job.ended_s > KEPT_S:
                del self[name]
