"""The records that the command ``headrace bench gpu`` and the processes of its stages exchange: the request to a stage,
the lines that a stage writes, and the outcome; and the context of a stage. This module does not import torch."""

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
    """The request to the process of one stage, which reads it from a JSON file."""

    stage: str
    """The name of the stage."""
    module: str
    """The Python module whose function ``run`` is the stage."""
    device: str
    """The device of the stage's computations: ``cuda``."""
    pretend: bool
    """True if the device only claims to be a GPU: all sizes are tiny, and figures mean nothing."""
    directory: str
    """An empty directory for the files of the stage."""
    models: str
    """The directory of the models, which all stages use: each model is written by the first stage that needs it."""
    seconds: float
    """The time after which the process is killed, in seconds. The stage leaves out measurements that would end
    later."""
    lines: str
    """The file to which the stage appends its lines."""
    ceilings: dict[str, float]
    """The figures of earlier stages, by name, among them the highest rates of the GPU, measured by :mod:`.facts`, to
    which other rates are compared."""
    vllm: str = ""
    """The path of an interpreter that has vLLM; empty: vLLM is not measured."""


class StageLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line in the file of a stage. It is written at once, so that a stage that is killed loses no line. Each line
    has one of the three fields."""

    row: Row | None = None
    """One measurement; ``None`` in other lines."""
    target: Target | None = None
    """One figure with its limit; ``None`` in other lines."""
    figures: dict[str, float] | None = None
    """Numbers by name for later stages, for the comparison with another file, and for ``headrace plan``; ``None`` in
    other lines."""


class GpuStageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one stage: how it ended, and the lines that it wrote."""

    name: str
    state: str
    """``done``; ``failed``: its process ended with an error; ``out of time``: it was killed; ``left out``: it was not
    started."""
    why: str = ""
    """The last lines of its process, or the reason why it was left out; empty for ``done``."""
    seconds: float = 0.0
    """The time from its start to its end, in seconds."""
    processor_s: float = 0.0
    """The processor time of its process and of all child processes, in seconds."""
    limit_s: float = 0.0
    """The time limit of the stage, in seconds."""
    rows: list[Row] = []
    targets: list[Target] = []
    figures: dict[str, float] = {}
    """Numbers by name for later stages, for comparisons and for ``headrace plan``."""


class WorkCounter(Protocol):
    """The contract of a counter of a device's work: kernel launches, copies and waits."""

    def count(self, act: Callable[[], object]) -> Mapping[str, int]:
        """Call ``act``, and return the number of kernel launches (``launch``), of copies to the device (``upload``) and
        from the device (``download``), and of waits of the program for the device (``wait``)."""
        ...


@dataclass(slots=True, kw_only=True)
class StageContext:
    """The argument of every stage's function ``run``: the request to the stage, and the methods with which the stage
    measures and records its results."""

    request: StageRequest
    clock: Clock
    work: WorkCounter
    """The counter of the device's work."""
    wait: Callable[[], None]
    """The function that waits until the device has finished all its work."""
    release: Callable[[], None]
    """The function that frees cached memory that is no longer used."""
    started_s: float = field(init=False)
    """The time of the clock at which the stage began."""

    def __post_init__(self) -> None:
        """Store the present time as the beginning of the stage."""
        self.started_s = self.clock.now()

    @property
    def directory(self) -> Path:
        """The directory for the files of the stage."""
        return Path(self.request.directory)

    @property
    def models(self) -> Path:
        """The directory of the models, which all stages use."""
        return Path(self.request.models)

    @property
    def pretend(self) -> bool:
        """True if the device only claims to be a GPU: all sizes are tiny, and figures mean nothing."""
        return self.request.pretend

    def left_s(self) -> float:
        """Return the time until the process is killed, in seconds."""
        return self.request.seconds - (self.clock.now() - self.started_s)

    def has_time_for(self, name: str, needs_s: float) -> bool:
        """Return whether ``needs_s`` seconds are left for the measurement ``name``; if not, record in a row that the
        measurement is left out."""
        left_s = self.left_s()
        if left_s < needs_s:
            self.add_row(what=name, left_out=f"{left_s:.0f} s are left, and it takes about {needs_s:g}; raise --budget")
        return left_s >= needs_s

    def attempt(self, name: str, act: Callable[[], object], *, needs_s: float = 0.0) -> None:
        """Call ``act``, the measurement ``name``, if ``needs_s`` seconds are left, and free its memory. A measurement
        that raises an error is recorded as a target that does not hold, and the stage continues."""
        if not self.has_time_for(name, 0.0 if self.pretend else needs_s):
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the boundary of a measurement
            traceback.print_exc()
            self.add_row(what=name, failed=f"{type(error).__name__}: {error}"[:800])
            self.add_target(at_most(f"{name}: failed", 1, 0, "measurements"))
        self.release()

    def add_row(self, **columns: Any) -> None:
        """Record one measurement, whose ``columns`` are values by name."""
        self._write(StageLine(row=columns))

    def add_target(self, target: Target, *, measured: bool = False) -> None:
        """Record a figure with its limit. A target that is ``measured`` in time is left out with ``--pretend``, where
        times mean nothing."""
        if not (measured and self.pretend):
            self._write(StageLine(target=target))

    def add_figures(self, **numbers: float) -> None:
        """Record numbers by name for later stages, for the comparison with another file, and for ``headrace plan``."""
        self._write(StageLine(figures=numbers))

    def measure_s(self, act: Callable[[], object]) -> float:
        """Call ``act``, and return the seconds until the device has finished its work."""
        self.wait()
        start_s = self.clock.now()
        act()
        self.wait()
        return self.clock.now() - start_s

    def shortest_s(self, act: Callable[[], object], times: int = 5) -> float:
        """Call ``act`` once as a warm-up and then ``times`` times, and return the shortest duration in seconds."""
        act()
        return min(self.measure_s(act) for _ in range(times))

    def _write(self, line: StageLine) -> None:
        """Append a line to the file of the stage, without buffering."""
        with Path(self.request.lines).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_lines(path: Path) -> list[StageLine]:
    """Return the lines that a stage has written into the file ``path``; an empty list if there is no file. A torn last
    line of a killed process is ignored."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=StageLine) for line in whole]
