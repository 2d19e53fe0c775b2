"""What the command and the processes of its stages share: the order to a stage, the lines that a stage writes while it
measures, and what became of it. Importing this module does not import torch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.base.clock import Clock
from headrace.wings.bench.base import Row, Target, at_most

GIB = 2**30


class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The order to the process of one stage, which reads it from a file."""

    stage: str
    """Name of the stage."""
    module: str
    """Python module whose function ``run`` is the stage."""
    device: str
    """Device that the stage computes on: ``cuda``."""
    pretend: bool
    """Whether the device only claims to be a GPU, so that everything is tiny and no figure means anything."""
    directory: str
    """Empty directory for the files of the stage."""
    models: str
    """Directory of the models, which all stages share: each is written by the first that needs it."""
    seconds: float
    """Seconds after which the process is killed. The stage leaves measurements out that would end later."""
    lines: str
    """File to which the stage appends its lines."""
    ceilings: dict[str, float]
    """Figures of the stages before, by name; the rates of :mod:`.facts` are what other rates are divided by."""
    vllm: str = ""
    """Path of an interpreter that has vLLM; empty: none was given."""


class StageLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a stage, which is flushed when it is written, so that a stage that is killed loses nothing. Each line
    has one of the three."""

    row: Row | None = None
    """One measurement."""
    target: Target | None = None
    """One figure with its limit."""
    figures: dict[str, float] | None = None
    """Numbers for later stages, for the comparison with another file, and for ``headrace plan``, by name."""


class GpuStageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one stage."""

    name: str
    state: str
    """``done``; ``failed``: its process ended with an error; ``out of time``: it was killed; ``left out``: it was not
    started."""
    why: str = ""
    """The last lines of its process, or why it was left out; empty for ``done``."""
    seconds: float = 0.0
    """Seconds from its start to its end."""
    processor_s: float = 0.0
    """Processor time of the process and of all that it started, in seconds."""
    limit_s: float = 0.0
    """Seconds that it was given."""
    rows: list[Row] = []
    targets: list[Target] = []
    figures: dict[str, float] = {}
    """Numbers for later stages, for comparisons and for ``headrace plan``, by name."""


class WorkCounter(Protocol):
    """Counts what a device has to do for a piece of work."""

    def count(self, act: Callable[[], object]) -> Mapping[str, int]:
        """Do ``act``, and return the number of kernel launches (``launch``), copies to the device (``upload``) and from
        it (``download``), and times that the program waited for it (``wait``)."""
        ...


@dataclass(slots=True, kw_only=True)
class StageContext:
    """The order to a stage, and where it puts what it finds; the argument of every stage's function ``run``."""

    request: StageRequest
    clock: Clock
    work: WorkCounter
    """Counts the work of the device, which is real or only claimed."""
    wait: Callable[[], None]
    """Wait until the device has done all that it was ordered to do."""
    release: Callable[[], None]
    """Give memory back that nothing uses any more."""
    started_s: float = field(init=False)
    """Time of the clock at which the stage began."""

    def __post_init__(self) -> None:
        """Note the time."""
        self.started_s = self.clock.now()

    @property
    def directory(self) -> Path:
        """Directory for the files of the stage."""
        return Path(self.request.directory)

    @property
    def models(self) -> Path:
        """Directory of the models, which all stages share."""
        return Path(self.request.models)

    @property
    def pretend(self) -> bool:
        """Whether everything is tiny and no figure means anything."""
        return self.request.pretend

    def left_s(self) -> float:
        """Return how many seconds are left until the process is killed."""
        return self.request.seconds - (self.clock.now() - self.started_s)

    def fits(self, what: str, needs_s: float) -> bool:
        """Return whether ``needs_s`` seconds are left for the measurement ``what``; if not, say in a row that it is
        left out."""
        left_s = self.left_s()
        if left_s < needs_s:
            self.row(what=what, left_out=f"{left_s:.0f} s are left, and it takes about {needs_s:g}; raise --budget")
        return left_s >= needs_s

    def attempt(self, what: str, act: Callable[[], object], *, needs_s: float = 0.0) -> None:
        """Do the measurement ``act``, called ``what``, if ``needs_s`` seconds are left, and give its memory back. One
        that fails is recorded as a target that does not hold, and the others go on."""
        if not self.fits(what, 0.0 if self.pretend else needs_s):
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the boundary of a measurement
            traceback.print_exc()
            self.row(what=what, failed=f"{type(error).__name__}: {error}"[:800])
            self.target(at_most(f"{what}: failed", 1, 0, "measurements"))
        self.release()

    def row(self, **columns: Any) -> None:
        """Record one measurement."""
        self._write(StageLine(row=columns))

    def target(self, target: Target, *, measured: bool = False) -> None:
        """Record a figure with its limit. One that is ``measured`` on the clock means nothing on a device that only
        claims to be one, and is left out there."""
        if not (measured and self.pretend):
            self._write(StageLine(target=target))

    def figures(self, **numbers: float) -> None:
        """Record numbers for later stages, for the comparison with another file, and for ``headrace plan``."""
        self._write(StageLine(figures=numbers))

    def timed(self, act: Callable[[], object]) -> float:
        """Do ``act``, and return the seconds until the device has done it."""
        self.wait()
        start_s = self.clock.now()
        act()
        self.wait()
        return self.clock.now() - start_s

    def shortest_s(self, act: Callable[[], object], times: int = 5) -> float:
        """Do ``act`` once in advance and then ``times`` times, and return the seconds of the shortest time."""
        act()
        return min(self.timed(act) for _ in range(times))

    def _write(self, line: StageLine) -> None:
        """Append a line to the file of the stage; it is in the file when this returns."""
        with Path(self.request.lines).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_lines(path: Path) -> list[StageLine]:
    """Return the lines that a stage has written into the file ``path``; none where there is no file. A last line that a
    killed process has not finished is ignored."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=StageLine) for line in whole]
