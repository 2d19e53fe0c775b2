"""The benchmark of a GPU, ``headrace bench gpu``: all measurements of a GPU in one command.

    options ──▶ refusals ──▶ driver ──▶ a process for each stage ──▶ one JSON file, written after each ──▶ report
                   ▲                       facts, kernels, exact, engine, vllm, learner, sync, sharing, demo, soak
                   └── probe: a process that reads the facts about the GPU from torch

With ``--pretend`` all stages run on tiny models and on a *claimed device*, a CPU device that claims to be a GPU
(:mod:`headrace.testing.claimed`). Errors of the program are thereby found without a GPU.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.environ import program_environment
from headrace.base.errors import ConfigError
from headrace.wings.bench.base import Report, Row, Target, at_most, make_report
from headrace.wings.bench.gpu.base import GpuStageOutcome
from headrace.wings.bench.gpu.driver import StagesPlan, run_stages
from headrace.wings.bench.gpu.files import (
    GpuFile,
    compare_figures,
    make_card_rates,
    merge_figures,
    read_file,
    write_file,
)
from headrace.wings.bench.gpu.refusals import model_folder, query_card, refuse_card, refuse_options
from headrace.wings.bench.gpu.stages import choose_stages

BUDGET_S = 600.0
CLAIMED, CLAIMED_STAGE = "headrace.testing.claimed", "headrace.testing.claimed.stage"
"""The module that compiles the claimed device, and the module that runs a stage on it."""


def measure(
    on_progress: Callable[[str], None],
    *,
    stages: str = "",
    budget: float = BUDGET_S,
    compare: str = "",
    pretend: bool = False,
    vllm: str = "",
    out: str = "",
) -> Report:
    """Run the stages in ``stages`` (names separated by commas; empty: all), within ``budget`` seconds, and return their
    report. ``on_progress`` is called with lines of progress. The outcomes are also written to the file ``out``, after
    each stage.

    ``compare`` is such a file of an earlier measurement, ``vllm`` an interpreter that has vLLM, and with ``pretend``
    the stages run on the claimed device. Raises :class:`~headrace.base.errors.ConfigError` before any stage starts, if
    an option or the GPU cannot be used.
    """
    clock = RealClock()
    names = choose_stages(stages)
    made = datetime.datetime.fromtimestamp(clock.wall()).strftime("%Y%m%d-%H%M%S")
    path = Path(out or f"gpu-{made}.json")
    refuse_options(budget=budget, vllm=vllm, out=path)
    before = read_file(Path(compare)) if compare else None
    card = "claimed" if pretend else _usable_card(names)
    folder = Path(tempfile.gettempdir()) if pretend else model_folder()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=folder) as scratch:
        plan = StagesPlan(names=names, budget_s=budget, directory=Path(scratch), pretend=pretend, vllm=vllm)
        if pretend:
            plan = _on_claimed_device(plan, Path(scratch))

        def flush(outcomes: Sequence[GpuStageOutcome]) -> None:
            """Write the file with the outcomes so far."""
            rates = make_card_rates(card, outcomes)
            content = GpuFile(
                made=made, pretend=pretend, card=card, budget_s=budget, rates=rates, stages=list(outcomes)
            )  # fmt: skip
            write_file(path, content)

        flush([])
        outcomes = run_stages(plan, clock, flush, on_progress)
    on_progress(f"all figures are in {path}")
    return _report(outcomes, before)


def _usable_card(stages: Sequence[str]) -> str:
    """Return the name of this machine's GPU. Raises :class:`~headrace.base.errors.ConfigError` if the machine has no
    GPU on which the ``stages`` can run."""
    card = query_card()
    refuse_card(card, stages)
    return card.name


def _on_claimed_device(plan: StagesPlan, scratch: Path) -> StagesPlan:
    """Compile the claimed device in ``scratch``, and return a copy of the plan with its program and its environment
    variables. Raises :class:`~headrace.base.errors.ConfigError` if the device cannot be compiled."""
    device = scratch / "claimed"
    device.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", CLAIMED, str(device)], env=program_environment({}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(
            f"--pretend: {done.stderr.strip()[-800:]}", remedy="it needs torch's CPU build and a C++ compiler"
        )
    variables = json.loads(done.stdout.splitlines()[-1])
    return replace(plan, program=CLAIMED_STAGE, variables=variables, host_variables={"TRITON_INTERPRET": "1"})


def _report(outcomes: Sequence[GpuStageOutcome], before: GpuFile | None) -> Report:
    """Return the report: a row for each stage, the rows and targets of all stages, and the comparison with the file
    ``before``, if there is one. A target does not hold if a stage failed or was killed."""
    rows: list[Row] = []
    targets: list[Target] = []
    for outcome in outcomes:
        row: Row = {"stage": outcome.name, "state": outcome.state, "s": outcome.seconds, "limit_s": outcome.limit_s}
        rows.append(row | {"processor_s": outcome.processor_s} | ({"why": outcome.why} if outcome.why else {}))
        rows += outcome.rows
        targets += outcome.targets
    broken = [outcome.name for outcome in outcomes if outcome.state in ("failed", "out of time")]
    targets.append(at_most(" ".join(["stages that failed or were killed", *broken]), len(broken), 0, "stages"))
    if before is not None:
        rows += compare_figures(merge_figures(outcomes), merge_figures(before.stages))
    return make_report(rows, targets)
