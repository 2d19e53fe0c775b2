"""Runs whose terminal is closed, whose output has no place, and whose directory is taken away."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.lasting import LossTolerantStream
from tests.run.session.runs import DEADLINE_S, command, hangup, headrace, make_run, running, tiny_model, verb

LONG = {"run": {"dir": "run", "steps": 400, "checkpoint_every": 100_000}, "learner": {"lr": 1e-6}}
"""A run that outlasts what is done to it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lost") / "model")


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], int]]]:
    """Start the program with a terminal of its own as output; the process, and the other end of the terminal."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str | Path, **more: Any) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        process = subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment, **more
        )
        os.close(theirs)
        begun.append(process)
        return process, ours

    yield start
    for process in begun:
        process.kill()
        process.wait()


def until_step(run_dir: Path, process: subprocess.Popen[bytes], terminal: int, step: int) -> None:
    """Read what the terminal shows until the run has made ``step`` steps."""
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + DEADLINE_S
    while steps_done(run_dir) < step:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            os.read(terminal, 1 << 16)
        except BlockingIOError:
            signal.sigtimedwait([], 0.02)


def test_terminal_that_hangs_up_is_one_until_a_write_fails() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        lasting = LossTolerantStream(stream)
        assert lasting.isatty()
        os.close(ours)
        assert not stream.isatty()
        assert lasting.isatty(), "or a live picture is never drawn again, and its loss never noticed"
        print("a picture", file=lasting, flush=True)
        assert "Errno 5" in lasting.lost
        assert not lasting.isatty()


def test_a_terminal_or_a_pipe_that_is_gone_is_noticed_without_a_write() -> None:
    ours, theirs = pty.openpty()
    reading, writing = os.pipe()
    for here, there, number in (ours, theirs, 5), (reading, writing, 32):
        with open(there, "w") as stream:
            lasting = LossTolerantStream(stream)
            lasting.detect_loss()
            assert not lasting.lost
            os.close(here)
            lasting.detect_loss()
            assert f"Errno {number}" in lasting.lost


@pytest.mark.parametrize("view", ["auto", *(pytest.param(view, marks=pytest.mark.slow) for view in ("plain", "none"))])
def test_a_closed_terminal_does_not_matter(
    tmp_path: Path, model: Path, on_terminal: Callable[..., Any], view: str
) -> None:
    """With the view "none" nothing is ever written, and the loss is told all the same."""
    sections = {**LONG, "observe": {"view": view}, "run": {**LONG["run"], "steps": 150}}
    run_file = make_run(tmp_path, model, **sections)
    process, terminal = on_terminal("train", run_file, "--set", f"run.dir={tmp_path / 'run'}", start_new_session=True)
    until_step(tmp_path / "run", process, terminal, 2)
    os.close(terminal)
    assert process.wait(DEADLINE_S) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    told = [each["text"] for each in events(tmp_path / "run") if each["level"] == "warning"]
    assert sum("standard output is gone" in text and "Errno 5" in text for text in told) == 1


def test_hangup_ends_a_run_in_order_with_a_snapshot_and_an_exit_code_of_its_own(tmp_path: Path, model: Path) -> None:
    run_file = make_run(tmp_path, model, **LONG)
    run_dir = tmp_path / "run"
    program = hangup("SIG_DFL")  # whatever started these tests may ignore it, as nohup does
    with running("train", run_file, "--set", f"run.dir={run_dir}", program=program) as run:
        run.until_step(2)
        for _ in range(2):  # the kernel and a shell may both send it
            run.process.send_signal(signal.SIGHUP)
        run.rest()
        assert run.process.returncode == 128 + signal.SIGHUP
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"]) == ("stopped", "SIGHUP")
    assert (run_dir / "checkpoints" / f"step-{summary['steps']:06d}").is_dir()
    steps = summary["steps"] + 2
    done = headrace("train", run_file, "--resume", "--set", f"run.dir={run_dir}", "--set", f"run.steps={steps}")
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {summary['steps']}" in done.stdout


@pytest.mark.slow
def test_hangup_that_is_ignored_from_the_start_stays_ignored(tmp_path: Path, model: Path) -> None:
    run_file = make_run(tmp_path, model, **{**LONG, "run": {"dir": "run", "steps": 40}})
    with running("train", run_file, "--set", f"run.dir={tmp_path / 'run'}", program=hangup("SIG_IGN")) as run:
        run.until_step(2)
        run.process.send_signal(signal.SIGHUP)
        run.rest()
        assert run.process.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_full_disk_behind_standard_output_costs_a_run_its_output_alone(tmp_path: Path, model: Path) -> None:
    run_file = make_run(tmp_path, model)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("train", run_file, "--set", f"run.dir={tmp_path / 'run'}"),
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "standard output is gone ([Errno 28]" in done.stderr
    verb("ledger", tmp_path / "run")


@pytest.mark.parametrize("words", [["recipes"], ["--help"], ["recipes", "--json"]])
def test_a_verb_whose_output_has_no_place_says_so_in_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*words), stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "--json"]])
def test_a_verb_whose_reader_leaves_says_nothing(words: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            command(*words), stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "fate",
    ["removed", *(pytest.param(fate, marks=pytest.mark.slow) for fate in ("moved", "replaced", "ledger removed"))],
)
def test_a_run_whose_directory_is_taken_away_ends_within_seconds_and_says_so(
    tmp_path: Path, model: Path, fate: str
) -> None:
    run_file, run_dir, elsewhere = make_run(tmp_path, model, **LONG), tmp_path / "run", tmp_path / "elsewhere"
    with running("train", run_file, "--set", f"run.dir={run_dir}", "--set", "run.steps=100000") as run:
        run.until_step(2)
        match fate:
            case "moved":
                run_dir.rename(elsewhere)
            case "ledger removed":
                (run_dir / "ledger.sqlite").unlink()
            case _:
                shutil.rmtree(run_dir)
        if fate == "replaced":
            second = headrace("train", run_file, "--set", f"run.dir={run_dir}", "--set", "run.steps=3")
            assert second.returncode == 0, second.stderr
        error = run.rest(timeout_s=20)
        assert run.process.returncode == 1
    assert "Traceback" not in error
    assert {"moved": "was moved to", "ledger removed": "ledger.sqlite was removed"}.get(fate, "was removed") in error
    if fate == "moved":
        assert not run_dir.exists()
        assert str(elsewhere) in error
        assert "the books balance" in verb("ledger", elsewhere)
    if fate == "removed":
        assert not run_dir.exists(), "nothing of the run comes back"
    if fate == "replaced":
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("finished", 3)
        assert "the books balance" in verb("ledger", run_dir)
