"""The stage ``demo``: the demo's run, with engine and learner on the device in processes of their own. The stage kills
the engine, which the run replaces, and then the learner, and resumes the run; the model must learn all the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from headrace.run.session.directory import read_status
from headrace.wings.bench.base import at_least
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.program import run_training
from headrace.wings.recipes.demo import build_demo, lay_out, write_untrained

ACCURACY = 0.9
"""The target for the held-out accuracy after the run."""


@dataclass(slots=True, kw_only=True)
class DemoRun:
    """The observations of a run, over all its lives."""

    kills: dict[str, int] = field(default_factory=dict)
    """The pid of each process that was killed, by its role."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The summary that the run prints at its end; empty before."""
    errors: str = ""
    """The standard error of the last life, if it failed."""


def run(stage: StageContext) -> None:
    """Train the demo while its parts are killed, and resume it if a kill ends it; with ``--vllm`` also train it with
    vLLM as its engine. ``stage`` records the results."""
    folder = stage.directory / "demo"
    if stage.pretend:
        run_file = lay_out(folder, seed=0)
        write_untrained(folder, seed=0)
    else:
        run_file = build_demo(folder, seed=0).run_file
    with as_file(files("headrace.wings.bench") / "user_code.py") as user_code:
        settings = [
            f"run.dir={folder / 'run'}", "observe.report=false",
            f"engine.device={stage.request.device}", f"learner.device={stage.request.device}",
        ]  # fmt: skip
        if stage.pretend:  # an untrained model solves no task, so that all rewards of the demo would be equal
            settings += [
                "run.checkpoint_every=2",
                "run.steps=30", "data.eval_path=", "flow.groups_per_step=4", f"env.reward={user_code}:odd"
            ]  # fmt: skip
        else:
            settings += ["run.checkpoint_every=20"]
        asyncio.run(_run_lives(stage, run_file, settings, folder / "run"))
        if stage.request.vllm and not stage.pretend:
            asyncio.run(_run_with_vllm(stage, run_file, folder, settings))


async def _run_lives(stage: StageContext, run_file: Path, settings: Sequence[str], run_dir: Path) -> None:
    """Run the demo of ``run_file`` with ``settings`` in ``run_dir`` until the learner is killed, resume it, and record
    the figures of the run in ``stage``."""
    arguments = [str(run_file), *(word for each in settings for word in ("--set", each)), "--json"]
    seen = DemoRun()
    for life, victims in enumerate((["engine", "learner"], [])):
        await _run_life(stage, arguments, run_dir, seen, victims, resume=life > 0)
        if seen.summary:
            break
    accuracy, done = seen.summary.get("eval_after"), seen.summary.get("steps", 0)
    stage.add_row(
        what="demo", killed=seen.kills, steps=done, eval_before=seen.summary.get("eval_before"), eval_after=accuracy,
        trained_tok_s=seen.summary.get("trained_tok_s"), errors=seen.errors[-300:],
    )  # fmt: skip
    stage.add_target(at_least("demo, parts killed while it ran", len(seen.kills), 2, "parts"))
    stage.add_target(at_least("demo, runs that ended after kills and a resume", float(bool(seen.summary)), 1, "runs"))
    if not stage.pretend:
        stage.add_target(at_least("demo, held-out accuracy after", accuracy or 0.0, ACCURACY, "fraction"))


async def _run_life(
    stage: StageContext, arguments: Sequence[str], run_dir: Path, seen: DemoRun, victims: list[str], *, resume: bool
) -> None:
    """Run one life of ``headrace train`` with ``arguments`` until it ends, resumed if ``resume`` is true, and add the
    observations to ``seen``. Meanwhile kill the processes with the roles ``victims``, one after the other. ``stage`` is
    the context of the stage, and ``run_dir`` the directory of the run."""
    async with run_training(arguments, resume=resume) as program, asyncio.TaskGroup() as group:
        assert program.stdout is not None
        assert program.stderr is not None
        killing = group.create_task(_kill(run_dir, seen, victims))
        errors = group.create_task(program.stderr.read())
        async with asyncio.timeout(max(5.0, stage.left_s() - 5.0)):
            output = (await program.stdout.read()).decode()
        killing.cancel()
        failed = await program.wait()
        seen.errors = (await errors).decode() if failed else ""  # a run that ends well writes its progress there
        if not failed:
            seen.summary = json.loads(output[output.index("{") :])


async def _kill(run_dir: Path, seen: DemoRun, victims: list[str]) -> None:
    """Kill a process of each role in ``victims``, in order, each when the run has made two more steps since the last
    kill, and add the kills to ``seen``."""
    for number, role in enumerate(victims):
        while role not in seen.kills:
            status = read_status(run_dir)
            parts = [] if status is None or status.steps_done <= 1 + 2 * number else status.components
            _kill_ready(
                [part.pid for part in parts if part.role.startswith(role) and part.state == "ready"], role, seen
            )
            await asyncio.sleep(0.05)


def _kill_ready(pids: Sequence[int], role: str, seen: DemoRun) -> None:
    """Kill the processes ``pids``, which have this ``role``, and add the kills to ``seen``."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            seen.kills[role] = pid


async def _run_with_vllm(stage: StageContext, run_file: Path, folder: Path, settings: Sequence[str]) -> None:
    """Run the demo once more with vLLM as its engine, without kills, and record its accuracy."""
    if not stage.has_time_for("the demo with vLLM", 60):
        return
    own = [f"run.dir={folder / 'vllm'}", "engine.kind=vllm", f"engine.server.python={stage.request.vllm}"]
    chosen = [each for each in settings if not each.startswith("run.dir")] + own
    arguments = [str(run_file), *(word for each in chosen for word in ("--set", each)), "--json"]
    seen = DemoRun()
    await _run_life(stage, arguments, folder / "vllm", seen, [], resume=False)
    accuracy = seen.summary.get("eval_after") or 0.0
    stage.add_row(what="demo with vLLM", eval_after=accuracy, errors=seen.errors[-300:])
    stage.add_target(at_least("demo with vLLM, held-out accuracy after", accuracy, ACCURACY, "fraction"))
