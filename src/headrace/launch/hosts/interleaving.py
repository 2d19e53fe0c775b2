"""What passes between an engine's channel and its step loop, so that a run can be repeated.

channel ──▶ Gate (in a replay) ──▶ Scribe ──▶ the engine
            holds messages back    writes down which message came
            until the recorded     before which step
            step, in its order
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ReplayDiffers
from headrace.base.types.messages.controller import Chunk
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
from headrace.launch.interleaving import EngineInput, Handled

_TOLD: dict[type, EngineInput] = {
    Generate: EngineInput.GENERATE,
    Abort: EngineInput.ABORT,
    Commit: EngineInput.COMMIT,
    ScoreTokens: EngineInput.SCORE,
    Pause: EngineInput.PAUSE,
    Resume: EngineInput.RESUME,
}
"""What is written down. Staging has a thread of its own and changes no token."""


class Names:
    """The requests in the engine: their ids are new in every life, their seeds are not."""

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._ids: dict[int, int] = {}

    def begun(self, requests: Iterable[GenerateRequest]) -> None:
        """The engine has them."""
        for request in requests:
            self._seeds[request.request_id] = request.sampling.seed
            self._ids[request.sampling.seed] = request.request_id

    def ended(self, chunks: Iterable[Chunk]) -> None:
        """It has no longer those of which these are the last."""
        for chunk in chunks:
            if chunk.stop_reason is not None or chunk.error:
                seed = self._seeds.pop(chunk.request_id, None)
                if seed is not None and self._ids.get(seed) == chunk.request_id:
                    del self._ids[seed]

    def seeds(self, request_ids: Iterable[int]) -> tuple[int, ...]:
        """Of those that are there."""
        return tuple(self._seeds[one] for one in request_ids if one in self._seeds)

    def ids(self, seeds: Iterable[int]) -> tuple[int, ...]:
        """Of those that are there."""
        return tuple(self._ids[seed] for seed in seeds if seed in self._ids)


class DeliveryRecorder:
    """Appends to the record in ``path``. A line is with the system when its message is with the engine: it outlives a
    kill. A disk that takes no more costs the record, not the run: what is missing shows when it is replayed."""

    def __init__(self, path: Path, names: Names) -> None:
        self._names = names
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._give_up(error)

    def write(self, messages: Iterable[Message], steps: int) -> None:
        """The engine is told ``messages`` after ``steps`` steps."""
        lines = b"".join(self._line(message, steps) for message in messages if type(message) in _TOLD)
        if not lines or self._file is None:
            return
        try:
            if os.write(self._file, lines) < len(lines):
                self._give_up("the disk is full")
        except OSError as error:
            self._give_up(error)

    def ended(self, chunks: Iterable[Chunk]) -> None:
        """The engine has said this."""
        self._names.ended(chunks)

    def _line(self, message: Message, steps: int) -> bytes:
        seeds: tuple[int, ...] = ()
        version = None
        match message:
            case Generate(requests=requests):
                seeds = tuple(request.sampling.seed for request in requests)
                self._names.begun(requests)
            case Abort(request_ids=request_ids):
                seeds = self._names.seeds(request_ids)
                if not seeds:  # they had ended: nothing happens
                    return b""
            case Commit():
                version = message.version
        line = Handled(steps=steps, told=_TOLD[type(message)], seeds=seeds, version=version)
        return self._encoder.encode(line) + b"\n"

    def _give_up(self, why: object) -> None:
        self._file = None
        sys.stderr.write(f"{self._path} cannot be written: {why}; this run cannot be replayed\n")


class ReplayGate:
    """Lets messages through before the very step at which a recorded engine had them, in its order.

    What became of the weights is decided with the last recorded commit: the gate opens then. Requests are withdrawn
    when the record says so: whoever withdraws them may be faster or slower than it was.
    """

    def __init__(
        self,
        recorded: Sequence[Handled],
        names: Names,
        clock: Clock,
        *,
        deadline_s: float,
        whose: Callable[[int], str],
    ) -> None:
        last = max((place for place, each in enumerate(recorded) if each.told is EngineInput.COMMIT), default=-1)
        self._due = deque(recorded[: last + 1])
        self._names = names
        self._clock = clock
        self._deadline_s = deadline_s
        self._whose = whose
        self._requests: dict[int, deque[GenerateRequest]] = defaultdict(deque)
        self._others: dict[EngineInput, deque[Message]] = defaultdict(deque)
        self._late_since_s: float | None = None

    @property
    def open(self) -> bool:
        """Whether messages pass as they come."""
        return not self._due

    def holds(self, steps: int) -> bool:
        """Whether the engine must wait for a message before it makes one step more than ``steps``."""
        return bool(self._due) and self._due[0].steps <= steps

    def lacks(self, steps: int) -> bool:
        """Whether the engine waits for one that has not come."""
        return self.holds(steps) and not self._here(self._due[0])

    def release(self, messages: list[Message], steps: int) -> list[Message]:
        """Those of ``messages``, and of the ones that came before, that the engine is told after ``steps`` steps.

        Raises :class:`~headrace.base.errors.ReplayDiffers` when one that it needs does not come.
        """
        if self.open:
            return messages
        at_once = [message for message in messages if not self._held(message)]
        due: list[Message] = []
        while self.holds(steps):
            if not self._here(self._due[0]):
                self._wait(self._due[0])
                break
            self._late_since_s = None
            due.append(self._take(self._due.popleft()))
        return [*at_once, *due, *(self._rest() if self.open else ())]

    def refuse_idleness(self, steps: int) -> None:
        """Raise where the engine has nothing to do after ``steps`` steps, and the recorded one had."""
        if not self.open and not self.holds(steps):
            expected = self._due[0]
            raise ReplayDiffers(
                f"the engine has nothing left to do after {steps} steps; the recorded one made {expected.steps} before "
                f"it was told to {self._words(expected)}",
                remedy="the record is damaged, or the engine computes something else than it did",
            )

    def _held(self, message: Message) -> bool:
        match message:
            case Generate(requests=requests):
                for request in requests:
                    self._requests[request.sampling.seed].append(request)
            case Commit() | ScoreTokens() | Pause() | Resume():
                self._others[_TOLD[type(message)]].append(message)
            case Abort():
                pass  # when, the record knows
            case _:
                return False
        return True

    def _here(self, line: Handled) -> bool:
        """Whether the message that ``line`` tells of has come."""
        if line.told is EngineInput.GENERATE:
            return all(self._requests.get(seed) for seed in line.seeds)
        return line.told is EngineInput.ABORT or bool(self._others[line.told])

    def _take(self, line: Handled) -> Message:
        """That message, which is here."""
        if line.told is EngineInput.ABORT:
            return Abort(request_ids=self._names.ids(line.seeds))
        if line.told is EngineInput.GENERATE:
            found = tuple(self._requests[seed].popleft() for seed in line.seeds)
            self._names.begun(found)  # the next line may withdraw one of them
            for seed in line.seeds:
                if not self._requests[seed]:
                    del self._requests[seed]
            return Generate(requests=found)
        first = self._others[line.told].popleft()
        if isinstance(first, Commit) and first.version != line.version:
            raise ReplayDiffers(
                f"after {line.steps} steps the recorded engine was told to {self._words(line)}, and now to commit "
                f"version {first.version}",
                remedy="the record is damaged, or of another run",
            )
        return first

    def _rest(self) -> list[Message]:
        """What is held back when the gate opens."""
        requests = tuple(request for waiting in self._requests.values() for request in waiting)
        others = [message for waiting in self._others.values() for message in waiting]
        self._requests.clear()
        self._others.clear()
        return [*([Generate(requests=requests)] if requests else []), *others]

    def _wait(self, line: Handled) -> None:
        now = self._clock.now()
        if self._late_since_s is None:
            self._late_since_s = now
        if line.told is EngineInput.COMMIT or now - self._late_since_s < self._deadline_s:
            return  # a learner's step may take long, and has a deadline of its own
        kept = ", ".join(self._whose(seed) for seed in list(self._requests)[:3])
        instead = f"; {len(self._requests)} others are there, of {kept} …" if kept else ""
        raise ReplayDiffers(
            f"before step {line.steps + 1} of the engine the recorded run told it to {self._words(line)}; the "
            f"controller has not sent that for {self._deadline_s:g} s{instead}",
            remedy="the record is damaged or of another run, or a reward differs; if the controller is only slow, "
            "raise run.stall_timeout_s",
        )

    def _words(self, line: Handled) -> str:
        if line.told is EngineInput.COMMIT:
            return f"commit version {line.version}"
        if line.told is EngineInput.GENERATE:
            missing = [seed for seed in line.seeds if not self._requests.get(seed)]
            names = ", ".join(self._whose(seed) for seed in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            return f"generate {names}{more}"
        return str(line.told)
