"""Ctrl-C where a run is not alone: in a notebook, twice, and a hang of an evaluation."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import StallError
from headrace.control import RunSection
from headrace.control.evaluation import EvaluationListener
from headrace.run.session.evaluating import measure_rewards
from headrace.run.session.running import Interrupts, first_cause, run_in_own_loop
from headrace.testing import FakeScorer, fake_parts
from tests.run.session.runs import first_words, hangup, make_run, running, verb


def in_a_notebook(main: object) -> object:
    async def cell() -> object:
        return run_in_own_loop(main)

    loop = asyncio.new_event_loop()  # asyncio.run would take the first Ctrl-C for itself; a notebook does not
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_interrupt_in_a_notebook_asks_the_run_to_stop_and_waits_for_it() -> None:
    async def main(interrupts: Interrupts) -> str:
        stopping = asyncio.Event()
        interrupts.handler = stopping.set
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await stopping.wait()
        return "stopped in good order"

    assert in_a_notebook(main) == "stopped in good order"


def test_interrupt_that_nobody_handles_cancels_what_runs_in_a_notebook() -> None:
    cleaned: list[bool] = []

    async def main(_: Interrupts) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        in_a_notebook(main)
    assert cleaned == [True]


def test_evaluation_that_hangs_ends_in_words(tmp_path: Path) -> None:
    class Mute(FakeScorer):
        async def score(self, task: object, completions: tuple[str, ...], context: object = None) -> object:
            await asyncio.Event().wait()

    async def main() -> None:
        parts = fake_parts(tmp_path, scorer=Mute())
        update = await parts.learner.wait_until_published(await parts.learner.snapshot(0, 0))
        await parts.engine.stage(update)
        await parts.engine.commit(0)
        serving = replace(parts, eval_tasks=parts.tasks[:2])
        await measure_rewards(
            serving, RunSection(stall_timeout_s=20.0), EvaluationListener(on_tokens=lambda _: None, warn=lambda _: None)
        )

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main())
    error = first_cause(caught.value)
    assert isinstance(error, StallError)
    assert "answers to the held-out tasks" in str(error)


def test_second_ctrl_c_ends_a_run_at_once_in_words(tmp_path: Path, model_dir: Path) -> None:
    slow = """
        import time

        def reward(completion):
            time.sleep(0.2)
            return len(set(completion)) / 4
    """
    run_file = make_run(tmp_path, model_dir, reward=slow, run={"dir": "run", "steps": 200})
    with running("train", run_file) as life:
        life.until_step(1)
        life.process.send_signal(signal.SIGINT)
        while not any("Ctrl-C again" in line for line in life.lines):
            life.lines.append(life.process.stdout.readline())
        life.process.send_signal(signal.SIGTERM)
        assert life.rest() == first_words(run_file) + (
            f"stopped at once; --resume continues\ncontinue headrace train {run_file} --resume\n"
        )
        assert life.process.returncode == 130
    assert '"status": "stopped"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_while_a_run_starts_ends_it_with_words(
    tmp_path: Path, model_dir: Path, number: signal.Signals, code: int
) -> None:
    slow = """
        import time

        time.sleep(30)
        def reward(completion):
            return 1.0
    """
    run_file = make_run(tmp_path, model_dir, reward=slow, run={"dir": "run", "steps": 1})
    with running("train", run_file, program=hangup("SIG_DFL")) as life:
        while not any("starting scoring workers" in line for line in life.lines):
            life.lines.append(life.process.stdout.readline())
        life.process.send_signal(number)
        assert life.rest() == first_words(run_file) + (
            f"stopped by {number.name} while it was starting\n"
            "there is nothing to continue: the same command starts anew\n"
        )
        assert life.process.returncode == code
    (tmp_path / "reward.py").write_text("def reward(completion):\n    return float(len(set(completion)))\n")
    assert "step 1" in verb("train", run_file)


def test_run_goes_on_when_whoever_read_its_output_has_left(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(tmp_path, model_dir, run={"dir": "run", "steps": 4})
    with running("train", run_file) as life:
        life.until_step(1)
        life.process.stdout.close()
        error = life.process.stderr.read()
        assert life.process.wait() == 0
    assert error.startswith(first_words(run_file))
    more = error.removeprefix(first_words(run_file))
    assert re.fullmatch(
        r"(warning: standard output is gone \(.*Errno 32.*\n)?", more
    )  # unless it ends before it sees that
    assert '"status": "finished"' in (tmp_path / "run" / "summary.json").read_text()


pytestmark = pytest.mark.timeout(60)
