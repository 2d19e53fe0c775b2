"""The recorder and the replay gate between an engine's channel and its step loop, with which a run can be repeated.

channel ──▶ ReplayGate (in a replay) ──▶ DeliveryRecorder ──▶ the engine
            holds messages back          records which message came
            until the recorded           before which step
            step, in its order

A *step* is one pass of the engine; "after n steps" is before the engine makes step n + 1. A request is identified by
its sampling seed, which is the same in every replay.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ReplayDiffers
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import (
    Abort,
    Commit,
    Generate,
    GenerateRequest,
    Message,
    Pause,
    Resume,
    ScoreTokens,
)
from headrace.launch.interleaving import EngineInput, RecordedInput, with_checksum

_INPUTS: dict[type, EngineInput] = {
    Generate: EngineInput.GENERATE,
    Abort: EngineInput.ABORT,
    Commit: EngineInput.COMMIT,
    ScoreTokens: EngineInput.SCORE,
    Pause: EngineInput.PAUSE,
    Resume: EngineInput.RESUME,
}
"""The kinds of messages that are recorded. Staging has a thread of its own and changes no token, so it is not."""


class RequestNames:
    """The requests in the engine. A request is recorded by its seed, since its id is a new one in every life of the
    run."""

    def __init__(self) -> None:
        """Make the record without requests."""
        self._seeds: dict[int, int] = {}
        self._ids: dict[int, int] = {}

    def begun(self, requests: Iterable[GenerateRequest]) -> None:
        """Add requests that the engine receives now."""
        for request in requests:
            self._seeds[request.request_id] = request.sampling.seed
            self._ids[request.sampling.seed] = request.request_id

    def ended(self, chunks: Iterable[TokenChunk]) -> None:
        """Remove the requests for which one of these chunks is the last."""
        for chunk in chunks:
            if chunk.ended:
                seed = self._seeds.pop(chunk.request_id, None)
                if seed is not None and self._ids.get(seed) == chunk.request_id:
                    del self._ids[seed]

    def seeds(self, request_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the seeds of the requests with these ids, in order; those that are no longer in the engine are left
        out."""
        return tuple(self._seeds[one] for one in request_ids if one in self._seeds)

    def ids(self, seeds: Iterable[int]) -> tuple[int, ...]:
        """Return the ids of the requests with these seeds, in order; those that are not in the engine are left out."""
        return tuple(self._ids[seed] for seed in seeds if seed in self._ids)


class DeliveryRecorder:
    """A recorder that appends each message to the file ``path`` before the engine handles it, so that the line survives
    if the process is killed. ``names`` has the requests in the engine, by which messages are recorded. If the disk is
    full, recording stops and the run continues; a replay then fails at the missing lines."""

    def __init__(self, path: Path, names: RequestNames) -> None:
        """Open the record for appending, after what an earlier life of the run has written there."""
        self._names = names
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._file: int | None = None
        self._crc = 0
        """The CRC-32 of what the record holds."""
        try:
            if path.is_file():
                self._crc = zlib.crc32(path.read_bytes())
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._stop_recording(error)

    def write(self, messages: Iterable[Message], steps: int) -> None:
        """Record that the engine handles ``messages`` after ``steps`` steps."""
        told = (self._line(message, steps) for message in messages if type(message) in _INPUTS)
        lines = b"".join(map(self._seal, filter(None, told)))
        if not lines or self._file is None:
            return
        try:
            if os.write(self._file, lines) < len(lines):
                self._stop_recording("the disk is full")
        except OSError as error:
            self._stop_recording(error)

    def ended(self, chunks: Iterable[TokenChunk]) -> None:
        """Remove the requests from ``names`` that have ended with these chunks, which the engine returned."""
        self._names.ended(chunks)

    def _line(self, message: Message, steps: int) -> bytes:
        """Return the line that records a message, delivered after ``steps`` steps of the engine; empty if the message
        has no effect."""
        seeds: tuple[int, ...] = ()
        version = None
        match message:
            case Generate(requests=requests):
                seeds = tuple(request.sampling.seed for request in requests)
                self._names.begun(requests)
            case Abort(request_ids=request_ids):
                seeds = self._names.seeds(request_ids)
                if not seeds:  # the requests had ended, so the message has no effect
                    return b""
            case Commit():
                version = message.version
        line = RecordedInput(steps=steps, kind=_INPUTS[type(message)], seeds=seeds, version=version)
        return self._encoder.encode(line)

    def _seal(self, line: bytes) -> bytes:
        """Return a line of the record with its checksum, which covers the lines before it too, and remember that for
        the next line."""
        sealed = with_checksum(line, self._crc)
        self._crc = zlib.crc32(sealed, self._crc)
        return sealed

    def _stop_recording(self, why: object) -> None:
        """Record nothing more, and write to the log that this run cannot be replayed, and why."""
        self._file = None
        sys.stderr.write(f"{self._path} cannot be written: {why}; this run cannot be replayed\n")


class ReplayGate:
    """The gate of a replay: it holds each message back until the step before which the recorded engine handled it, and
    releases them in the recorded order. ``recorded`` are the lines of the record; ``deadline_s`` is the longest wait
    for a message that is due; ``name_request`` names a request by its seed, for errors.

    The gate opens after the last recorded commit, since the weights are decided then. Requests are aborted when the
    record says so, because the controller of the replay may send an abort earlier or later.
    """

    def __init__(
        self,
        recorded: Sequence[RecordedInput],
        names: RequestNames,
        clock: Clock,
        *,
        deadline_s: float,
        name_request: Callable[[int], str],
    ) -> None:
        """Make the gate, which holds messages back until the last commit of ``recorded`` is released. The arguments are
        described at the class."""
        last = max((place for place, each in enumerate(recorded) if each.kind is EngineInput.COMMIT), default=-1)
        self._due = deque(recorded[: last + 1])
        """The lines of the record, up to the last commit, whose messages have not been released yet."""
        self._names = names
        self._clock = clock
        self._deadline_s = deadline_s
        self._name_request = name_request
        self._requests: dict[int, deque[GenerateRequest]] = defaultdict(deque)
        self._others: dict[EngineInput, deque[Message]] = defaultdict(deque)
        self._late_since_s: float | None = None

    @property
    def open(self) -> bool:
        """Whether the gate is open: every recorded message up to the last recorded commit of weights has been released,
        so that messages now pass as they arrive."""
        return not self._due

    def must_wait(self, steps: int) -> bool:
        """Return whether a message is due before the engine makes another step after ``steps`` steps."""
        return bool(self._due) and self._due[0].steps <= steps

    def waits_at(self, steps: int) -> bool:
        """Return whether a message is due after ``steps`` steps that the controller has not sent yet, so that the
        engine has to wait for it."""
        return self.must_wait(steps) and not self._has_arrived(self._due[0])

    def release(self, messages: list[Message], steps: int) -> list[Message]:
        """Return those of ``messages``, and of the messages held back, that the engine must handle after ``steps``
        steps.

        Raises :class:`~headrace.base.errors.ReplayDiffers` if a message that is due does not come.
        """
        if self.open:
            return messages
        at_once = [message for message in messages if not self._held(message)]
        due: list[Message] = []
        while self.must_wait(steps):
            if not self._has_arrived(self._due[0]):
                self._wait(self._due[0])
                break
            self._late_since_s = None
            due.append(self._take(self._due.popleft()))
        return [*at_once, *due, *(self._release_rest() if self.open else ())]

    def refuse_idleness(self, steps: int) -> None:
        """Raise :class:`~headrace.base.errors.ReplayDiffers` if the engine has nothing to do after ``steps`` steps,
        unlike the recorded one."""
        if not self.open and not self.must_wait(steps):
            expected = self._due[0]
            raise ReplayDiffers(
                f"the engine has nothing left to do after {steps} steps; the recorded one made {expected.steps} before "
                f"it was told to {self._describe(expected)}",
                remedy="the record is damaged, or the engine computes something else than it did",
            )

    def _held(self, message: Message) -> bool:
        """Store ``message`` until its line of the record is due, and return ``True``; return ``False`` for a message
        that passes at once, such as the order to stage. An abort is dropped: the record decides about it."""
        match message:
            case Generate(requests=requests):
                for request in requests:
                    self._requests[request.sampling.seed].append(request)
            case Commit() | ScoreTokens() | Pause() | Resume():
                self._others[_INPUTS[type(message)]].append(message)
            case Abort():
                pass  # the record decides when requests are aborted
            case _:
                return False
        return True

    def _has_arrived(self, line: RecordedInput) -> bool:
        """Return whether the message that ``line`` records has come from the controller. An abort need not come."""
        if line.kind is EngineInput.GENERATE:
            return all(self._requests.get(seed) for seed in line.seeds)
        return line.kind is EngineInput.ABORT or bool(self._others[line.kind])

    def _take(self, line: RecordedInput) -> Message:
        """Remove and return the message that ``line`` records, which has come. Raises
        :class:`~headrace.base.errors.ReplayDiffers` for a commit of another version."""
        if line.kind is EngineInput.ABORT:
            return Abort(request_ids=self._names.ids(line.seeds))
        if line.kind is EngineInput.GENERATE:
            found = tuple(self._requests[seed].popleft() for seed in line.seeds)
            self._names.begun(found)  # the next line may withdraw one of them
            for seed in line.seeds:
                if not self._requests[seed]:
                    del self._requests[seed]
            return Generate(requests=found)
        first = self._others[line.kind].popleft()
        if isinstance(first, Commit) and first.version != line.version:
            raise ReplayDiffers(
                f"after {line.steps} steps the recorded engine was told to {self._describe(line)}, and now to commit "
                f"version {first.version}",
                remedy="the record is damaged, or of another run",
            )
        return first

    def _release_rest(self) -> list[Message]:
        """Remove and return all messages that were held back, when the gate opens."""
        requests = tuple(request for waiting in self._requests.values() for request in waiting)
        others = [message for waiting in self._others.values() for message in waiting]
        self._requests.clear()
        self._others.clear()
        return [*([Generate(requests=requests)] if requests else []), *others]

    def _wait(self, line: RecordedInput) -> None:
        """Check how long the message that ``line`` records is late, without waiting. Raises
        :class:`~headrace.base.errors.ReplayDiffers` once it is late by more than the deadline."""
        now = self._clock.now()
        if self._late_since_s is None:
            self._late_since_s = now
        if line.kind is EngineInput.COMMIT or now - self._late_since_s < self._deadline_s:
            return  # a commit may wait for a long learner step, which has a deadline of its own
        kept = ", ".join(self._name_request(seed) for seed in list(self._requests)[:3])
        instead = f"; {len(self._requests)} others are there, of {kept} …" if kept else ""
        raise ReplayDiffers(
            f"before step {line.steps + 1} of the engine the recorded run told it to {self._describe(line)}; the "
            f"controller has not sent that for {self._deadline_s:g} s{instead}",
            remedy="the record is damaged or of another run, or a reward differs; if the controller is only slow, "
            "raise run.stall_timeout_s",
        )

    def _describe(self, line: RecordedInput) -> str:
        """Return a recorded input as text for an error message; of requests, it names those that have not arrived."""
        if line.kind is EngineInput.COMMIT:
            return f"commit version {line.version}"
        if line.kind is EngineInput.GENERATE:
            missing = [seed for seed in line.seeds if not self._requests.get(seed)]
            names = ", ".join(self._name_request(seed) for seed in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            return f"generate {names}{more}"
        return str(line.kind)
