"""The recorder and the replay gate of an engine. They are between the engine's channel and its step loop, and make it
possible to repeat a run.

channel ──▶ ReplayGate (in a replay) ──▶ DeliveryRecorder ──▶ the engine
            delays messages until        records which message was handled
            the recorded step,           before which step
            in recorded order

A *step* is one pass of the engine; "after n steps" means before the engine makes step n + 1. A request is identified by
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
"""The kinds of messages that are recorded. Staging is not recorded, because it runs in its own thread and changes no
token."""


class RequestNames:
    """The requests in the engine, by request id and by sampling seed. A request is recorded by its seed, because its id
    is different in every process of the run."""

    def __init__(self) -> None:
        """Create the record without requests."""
        self._seeds: dict[int, int] = {}
        """The seed of each request, by its id."""
        self._ids: dict[int, int] = {}
        """The id of each request, by its seed."""

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        """Add requests that the engine receives now."""
        for request in requests:
            self._seeds[request.request_id] = request.sampling.seed
            self._ids[request.sampling.seed] = request.request_id

    def remove_ended(self, chunks: Iterable[TokenChunk]) -> None:
        """Remove the requests whose last chunk is among ``chunks``."""
        for chunk in chunks:
            if chunk.ended:
                seed = self._seeds.pop(chunk.request_id, None)
                if seed is not None and self._ids.get(seed) == chunk.request_id:
                    del self._ids[seed]

    def get_seeds(self, request_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the seeds of the requests with these ids, in order. Requests that are no longer in the engine are
        skipped."""
        return tuple(self._seeds[request_id] for request_id in request_ids if request_id in self._seeds)

    def get_ids(self, seeds: Iterable[int]) -> tuple[int, ...]:
        """Return the ids of the requests with these seeds, in order. Requests that are not in the engine are
        skipped."""
        return tuple(self._ids[seed] for seed in seeds if seed in self._ids)


class DeliveryRecorder:
    """A recorder that appends each message to the file ``path`` before the engine handles it, so that the line remains
    if the process is killed. ``names`` contains the requests in the engine, whose seeds are recorded. If the disk is
    full, recording stops and the run continues; a replay then fails at the missing lines."""

    def __init__(self, path: Path, names: RequestNames) -> None:
        """Open the record for appending. It may already contain lines of an earlier process of the run."""
        self._names = names
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._file: int | None = None
        """The descriptor of the record; ``None`` if nothing can be recorded."""
        self._crc = 0
        """The CRC-32 of all bytes of the record."""
        try:
            if path.is_file():
                self._crc = zlib.crc32(path.read_bytes())
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._stop_recording(error)

    def write(self, messages: Iterable[Message], steps: int) -> None:
        """Record that the engine handles ``messages`` after ``steps`` steps."""
        encoded = (self._encode_line(message, steps) for message in messages if type(message) in _INPUTS)
        lines = b"".join(map(self._add_checksum, filter(None, encoded)))
        if not lines or self._file is None:
            return
        try:
            if os.write(self._file, lines) < len(lines):
                self._stop_recording("the disk is full")
        except OSError as error:
            self._stop_recording(error)

    def remove_ended(self, chunks: Iterable[TokenChunk]) -> None:
        """Remove the requests from ``names`` that have ended with ``chunks``, which the engine has returned."""
        self._names.remove_ended(chunks)

    def _encode_line(self, message: Message, steps: int) -> bytes:
        """Return the line for a message that is handled after ``steps`` steps of the engine; empty if the message has
        no effect."""
        seeds: tuple[int, ...] = ()
        version = None
        match message:
            case Generate(requests=requests):
                seeds = tuple(request.sampling.seed for request in requests)
                self._names.add(requests)
            case Abort(request_ids=request_ids):
                seeds = self._names.get_seeds(request_ids)
                if not seeds:  # the requests had ended, so the message has no effect
                    return b""
            case Commit():
                version = message.version
        line = RecordedInput(steps=steps, kind=_INPUTS[type(message)], seeds=seeds, version=version)
        return self._encoder.encode(line)

    def _add_checksum(self, line: bytes) -> bytes:
        """Return a line of the record with its checksum, which also covers all lines before it, and update the checksum
        for the next line."""
        sealed = with_checksum(line, self._crc)
        self._crc = zlib.crc32(sealed, self._crc)
        return sealed

    def _stop_recording(self, reason: object) -> None:
        """Stop recording, and write to the log that this run cannot be replayed, for the reason ``reason``."""
        self._file = None
        sys.stderr.write(f"{self._path} cannot be written: {reason}; this run cannot be replayed\n")


class ReplayGate:
    """The gate of a replay: it delays each message until the step before which the recorded engine handled it, and
    releases messages in the recorded order. ``recorded`` are the lines of the record. ``deadline_s`` is the longest
    time to wait for a message that is due, in seconds. ``name_request`` returns the name of a request for its seed, for
    errors.

    The gate opens after the last recorded commit, because no later message can change the weights. Requests are aborted
    at the recorded step, because the controller of the replay may send an abort earlier or later.
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
        """Create the gate, which delays messages until the last commit in ``recorded`` is released. The class describes
        the arguments."""
        commits = (index for index, line in enumerate(recorded) if line.kind is EngineInput.COMMIT)
        self._due = deque(recorded[: max(commits, default=-1) + 1])
        """The lines of the record, up to the last commit, whose messages were not released yet."""
        self._names = names
        self._clock = clock
        self._deadline_s = deadline_s
        self._name_request = name_request
        self._requests: dict[int, deque[GenerateRequest]] = defaultdict(deque)
        """The delayed requests, by their seeds."""
        self._messages: dict[EngineInput, deque[Message]] = defaultdict(deque)
        """All other delayed messages, by their kind."""
        self._late_since_s: float | None = None
        """The time since which the message that is due has been missing; ``None`` if none is missing."""

    @property
    def open(self) -> bool:
        """Whether the gate is open: all recorded messages up to the last recorded commit were released, and later
        messages pass at once."""
        return not self._due

    def must_wait(self, steps: int) -> bool:
        """Return whether, after ``steps`` steps, a recorded message is due before the engine may make another step."""
        return bool(self._due) and self._due[0].steps <= steps

    def awaits_message(self, steps: int) -> bool:
        """Return whether a message is due after ``steps`` steps that the controller has not sent yet, so that the
        engine has to wait for it."""
        return self.must_wait(steps) and not self._can_release(self._due[0])

    def release(self, messages: list[Message], steps: int) -> list[Message]:
        """Return the messages that the engine must handle after ``steps`` steps, from the new ``messages`` and the
        delayed messages.

        Raises :class:`~headrace.base.errors.ReplayDiffers` if a message that is due does not arrive in time.
        """
        if self.open:
            return messages
        at_once = [message for message in messages if not self._delay(message)]
        due: list[Message] = []
        while self.must_wait(steps):
            if not self._can_release(self._due[0]):
                self._check_lateness(self._due[0])
                break
            self._late_since_s = None
            due.append(self._pop(self._due.popleft()))
        return [*at_once, *due, *(self._release_rest() if self.open else ())]

    def refuse_idleness(self, steps: int) -> None:
        """Raise :class:`~headrace.base.errors.ReplayDiffers` if the engine has no work after ``steps`` steps although
        the recorded engine had."""
        if not self.open and not self.must_wait(steps):
            expected = self._due[0]
            raise ReplayDiffers(
                f"the engine has nothing left to do after {steps} steps; the recorded one made {expected.steps} before "
                f"it was told to {self._describe(expected)}",
                remedy="the record is damaged, or the engine computes something else than it did",
            )

    def _delay(self, message: Message) -> bool:
        """Store ``message`` until its line of the record is due, and return ``True``. Return ``False`` for a message
        that passes at once, such as the order to stage. An abort is dropped, because the record contains the aborts."""
        match message:
            case Generate(requests=requests):
                for request in requests:
                    self._requests[request.sampling.seed].append(request)
            case Commit() | ScoreTokens() | Pause() | Resume():
                self._messages[_INPUTS[type(message)]].append(message)
            case Abort():
                pass  # the record decides when requests are aborted
            case _:
                return False
        return True

    def _can_release(self, line: RecordedInput) -> bool:
        """Return whether :meth:`_pop` can return the message that ``line`` records: whether the controller of the
        replay has sent it and it is delayed here. An abort can always be released, because it is made from the line and
        not received."""
        if line.kind is EngineInput.ABORT:
            return True
        if line.kind is EngineInput.GENERATE:
            return all(self._requests.get(seed) for seed in line.seeds)
        return bool(self._messages[line.kind])

    def _pop(self, line: RecordedInput) -> Message:
        """Remove and return the message that ``line`` records and that has arrived. Raises
        :class:`~headrace.base.errors.ReplayDiffers` for a commit of another version."""
        if line.kind is EngineInput.ABORT:
            return Abort(request_ids=self._names.get_ids(line.seeds))
        if line.kind is EngineInput.GENERATE:
            requests = tuple(self._requests[seed].popleft() for seed in line.seeds)
            self._names.add(requests)  # the next line may abort one of them
            for seed in line.seeds:
                if not self._requests[seed]:
                    del self._requests[seed]
            return Generate(requests=requests)
        first = self._messages[line.kind].popleft()
        if isinstance(first, Commit) and first.version != line.version:
            raise ReplayDiffers(
                f"after {line.steps} steps the recorded engine was told to {self._describe(line)}, and now to commit "
                f"version {first.version}",
                remedy="the record is damaged, or of another run",
            )
        return first

    def _release_rest(self) -> list[Message]:
        """Remove and return all delayed messages, when the gate opens."""
        requests = tuple(request for delayed in self._requests.values() for request in delayed)
        messages = [message for delayed in self._messages.values() for message in delayed]
        self._requests.clear()
        self._messages.clear()
        return [*([Generate(requests=requests)] if requests else []), *messages]

    def _check_lateness(self, line: RecordedInput) -> None:
        """Check for how long the message that ``line`` records has been late; this does not wait. Raises
        :class:`~headrace.base.errors.ReplayDiffers` if it is late by more than the deadline."""
        now_s = self._clock.now()
        if self._late_since_s is None:
            self._late_since_s = now_s
        if line.kind is EngineInput.COMMIT or now_s - self._late_since_s < self._deadline_s:
            return  # a commit may wait for a long step of the learner, which has its own deadline
        names = ", ".join(self._name_request(seed) for seed in list(self._requests)[:3])
        instead = f"; {len(self._requests)} others are there, of {names} …" if names else ""
        raise ReplayDiffers(
            f"before step {line.steps + 1} of the engine the recorded run told it to {self._describe(line)}; the "
            f"controller has not sent that for {self._deadline_s:g} s{instead}",
            remedy="the record is damaged or of another run, or a reward differs; if the controller is only slow, "
            "raise run.stall_timeout_s",
        )

    def _describe(self, line: RecordedInput) -> str:
        """Return a recorded input as text for an error message. For requests, the text names the requests that have not
        arrived."""
        if line.kind is EngineInput.COMMIT:
            return f"commit version {line.version}"
        if line.kind is EngineInput.GENERATE:
            missing = [seed for seed in line.seeds if not self._requests.get(seed)]
            names = ", ".join(self._name_request(seed) for seed in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            return f"generate {names}{more}"
        return str(line.kind)
