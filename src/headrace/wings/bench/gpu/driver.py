"""The driver of ``headrace bench gpu``, which runs the stages one after the other, each in a process of its own with a
time limit.

    request ──▶ process of a stage ──▶ its lines ──▶ outcome ──▶ JSON file ──▶ next stage
                    │                                   ▲
                    └── fails, or is killed at its limit: the lines that it has written are used

The limit of a stage is its share of the remaining time, so that later stages can use the time that an earlier stage
did not need. A stage whose share is too short for it is left out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from headrace.base.clock import Clock
from headrace.base.environ import PROCESS_GONE, program_environment
from headrace.wings.bench.gpu.base import GpuStageOutcome, StageRequest, read_lines
from headrace.wings.bench.gpu.stages import STAGES, StageKind

STAGE_PROGRAM = "headrace.wings.bench.gpu.stage"
LOOK_S = 0.2
"""The interval, in seconds, at which the processor time of a stage's processes is read."""
_LAST_LINES = 12
"""The number of last lines of a stage's output that its outcome contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesPlan:
    """The stages to run, with their time budget, their directory and their environment."""

    names: Sequence[str]
    """The names of the stages, in their order."""
    budget_s: float
    """The time limit of all stages together, in seconds."""
    directory: Path
    """The directory for the files of all stages."""
    pretend: bool = False
    vllm: str = ""
    device: str = "cuda"
    program: str = STAGE_PROGRAM
    """The Python module that runs one stage."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the stages."""
    host_variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables, with ``pretend``, of stages that do not run on the claimed device."""
    kinds: Mapping[str, StageKind] = field(default_factory=lambda: STAGES)
    """The stages by name."""


def run_stages(
    plan: StagesPlan,
    clock: Clock,
    flush: Callable[[Sequence[GpuStageOutcome]], None],
    on_progress: Callable[[str], None],
) -> list[GpuStageOutcome]:
    """Run all stages of ``plan``, and return the outcome of each. ``flush`` is called after every stage with the
    outcomes so far, and ``on_progress`` with lines of progress. ``clock`` measures the time."""
    outcomes: list[GpuStageOutcome] = []
    end_s = clock.now() + plan.budget_s
    figures: dict[str, float] = {}
    for place, name in enumerate(plan.names):
        kind = plan.kinds[name]
        left_s = end_s - clock.now()
        limit_s = left_s * kind.share_s / sum(plan.kinds[other].share_s for other in plan.names[place:])
        if limit_s < kind.min_s:
            why = f"its share of the {max(0.0, left_s):.0f} s left is {max(0.0, limit_s):.0f} s, and it needs "
            why += f"{kind.min_s:g}: raise --budget, or choose fewer --stages"
            outcomes.append(GpuStageOutcome(name=name, state="left out", why=why))
        else:
            on_progress(f"{name}: {kind.description} (at most {limit_s:.0f} s)")
            outcomes.append(_run_stage(plan, name, limit_s, figures, clock))
            figures |= outcomes[-1].figures
        flush(outcomes)
    return outcomes


def _run_stage(
    plan: StagesPlan, name: str, limit_s: float, figures: Mapping[str, float], clock: Clock
) -> GpuStageOutcome:
    """Run the stage ``name`` of ``plan``, kill it after ``limit_s`` seconds, and return its outcome. ``figures`` are
    the figures of earlier stages. ``clock`` measures the duration."""
    kind, directory = plan.kinds[name], plan.directory / name
    directory.mkdir()
    models = plan.directory / "models"
    models.mkdir(exist_ok=True)
    lines, log, order = (plan.directory / f"{name}.{ending}" for ending in ("jsonl", "log", "order.json"))
    on_host = plan.pretend and kind.on_host
    request = StageRequest(
        stage=name, module=kind.module, device=plan.device, pretend=plan.pretend, directory=str(directory),
        models=str(models), seconds=limit_s, lines=str(lines), ceilings=dict(figures), vllm=plan.vllm,
    )  # fmt: skip
    order.write_bytes(msgspec.json.encode(request))
    command = [sys.executable, "-m", STAGE_PROGRAM if on_host else plan.program, str(order)]
    variables = plan.host_variables if on_host else plan.variables
    start_s = clock.now()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=program_environment(variables), stdin=subprocess.PIPE, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        processor_s = _wait(process, start_s + limit_s, clock)
    finally:
        timed_out = process.poll() is None
        _end(process)
    found = read_lines(lines)
    state = "out of time" if timed_out else "failed" if process.returncode else "done"
    remedy = f"killed after {limit_s:.0f} s: raise --budget, or choose fewer --stages\n" if timed_out else ""
    return GpuStageOutcome(
        name=name, state=state, why="" if state == "done" else remedy + _log_tail(log), seconds=clock.now() - start_s,
        processor_s=processor_s, limit_s=limit_s,
        rows=[line.row for line in found if line.row is not None],
        targets=[line.target for line in found if line.target is not None],
        figures={key: value for line in found for key, value in (line.figures or {}).items()},
    )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], end_s: float, clock: Clock) -> float:
    """Wait until the process has ended, at most until the time ``end_s``. Return the processor time of the process and
    of all its descendants in seconds, as far as it was read before they ended."""
    used: dict[int, float] = {}
    while process.poll() is None and clock.now() < end_s:
        with suppress(*PROCESS_GONE):
            top = psutil.Process(process.pid)
            for one in (top, *top.children(recursive=True)):
                used[one.pid] = _processor_s(one, used.get(one.pid, 0.0))
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(LOOK_S, end_s - clock.now())))
    return sum(used.values())


def _processor_s(process: psutil.Process, former_s: float) -> float:
    """Return the processor time of a process in seconds; ``former_s``, the value read before, if it has ended."""
    try:
        times = process.cpu_times()
    except PROCESS_GONE:
        return former_s
    return float(times.user + times.system)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all its descendants that still run, also descendants in other process groups."""
    started: list[psutil.Process] = []
    with suppress(*PROCESS_GONE):
        started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with suppress(*PROCESS_GONE):
            one.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _log_tail(log: Path) -> str:
    """Return the last lines of ``log``, the file with the output of a stage's process."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
