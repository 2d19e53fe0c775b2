"""Whole runs of a tiny model: made in a directory, started as the program, watched line by line."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from headrace.flow.ledger.opening import SQLITE_FILE
from headrace.flow.ledger.rows import checksum_rows, seal_all
from headrace.models.tiny import TinySpec, make_tiny
from headrace.run.cli.app import app

DEADLINE_S = 60.0
"""Longest wait for a process of a test."""

REWARD = '''
    """The share of small digits."""

    def reward(completion):
        return sum(character in "01234" for character in completion) / 4
'''

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"path": "model"},
    "data": {"path": "rows.jsonl"},
    "env": {"reward": "reward.py:reward"},
    "engine": {"max_new_tokens": 4, "max_sequences": 16},
    "flow": {"groups_per_step": 2, "group_size": 4},
    "learner": {"lr": 1e-2},
    "launch": {"engine_threads": 1, "learner_threads": 1},
    "observe": {"view": "plain", "report": False},
    "run": {"dir": "run", "steps": 3},
}


def tiny_model(directory: Path, **changes: Any) -> Path:
    """A model with random weights that knows digits, ``+`` and ``=``."""
    spec = {
        "vocab": "0123456789+=",
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 64,
        "max_positions": 32,
        "init_std": 0.3,
        **changes,
    }
    return make_tiny(directory, TinySpec(**spec))


def make_run(directory: Path, model: Path, *, reward: str = REWARD, rows: str | None = None, **sections: Any) -> Path:
    """Rows, reward and run file in ``directory``; ``sections`` change :data:`SETTINGS` table by table."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model").symlink_to(model)
    (directory / "reward.py").write_text(textwrap.dedent(reward))
    lines = [json.dumps({"prompt": f"{a}+{a + 1}=", "answer": 2 * a + 1}) + "\n" for a in range(12)]
    (directory / "rows.jsonl").write_text("".join(lines) if rows is None else rows)
    tree = {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in {**SETTINGS, **sections}}
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tree.items()
    )
    path = directory / "run.toml"
    path.write_text(text)
    return path


PROGRAM = "from headrace.run.cli import main; main()"


def command(*arguments: str | Path, program: str = PROGRAM) -> list[str]:
    """The program ``headrace``."""
    return [sys.executable, "-c", program, *map(str, arguments)]


def headrace(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd, check=False)
    for unseemly in ("Traceback", "nanobind"):
        assert unseemly not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def verb(*arguments: str | Path) -> str:
    """Run the program to its end in this process, which saves its start; what it printed."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def first_words(run_file: Path) -> str:
    """The lines on standard error with which ``headrace train`` begins."""
    begins = f"reading {run_file} and loading what a run needs ...\n"
    return begins + "checking the settings, the rows, the model and this machine ...\n"


class Running:
    """The program at work; its standard output, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def until_step(self, at_least: int = 0) -> int:
        """Read up to the line of that step, or of the first one that comes; its number, from 1."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            match = re.match(r"step (\d+)/", line)
            if match and int(match[1]) >= at_least:
                return int(match[1])
        raise AssertionError(f"it ended without step {at_least}: {self.lines} {self.rest()}")

    def rest(self, timeout_s: float = DEADLINE_S) -> str:
        """Read to the end; what it said on standard error."""
        assert self.process.stderr is not None
        output, error = self.process.communicate(timeout=timeout_s)
        self.lines += output.splitlines(keepends=True)
        return error


def hangup(handling: str) -> str:
    """The program, started where SIGHUP is handled so: what starts the tests may ignore it, as nohup does."""
    return f"import signal; signal.signal(signal.SIGHUP, signal.{handling})\n{PROGRAM}"


@contextmanager
def running(*arguments: str | Path, program: str = PROGRAM) -> Iterator[Running]:
    """Start the program; it does not outlive the body."""
    begun = command(*arguments, program=program)
    with subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def components(run_dir: Path) -> dict[str, int]:
    """Process ids by role, as the run's status tells them."""
    status = json.loads((run_dir / "status.json").read_text())
    return {part["role"]: part["pid"] for part in status["components"]}


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """The processes of ``pids`` that still run after ``timeout_s``; zombies do not."""
    alive = []
    for pid in pids:
        try:
            alive.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(alive, timeout=timeout_s)
    return [process.pid for process in left if process.status() != psutil.STATUS_ZOMBIE]


def shared_buffers(pid: int) -> list[str]:
    """The weight buffers that the run of controller ``pid`` has, or has left."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"headrace-{pid}-")]


def forge(run_dir: Path, statement: str) -> int:
    """Change the ledger of a run as its own program would, with checksums that fit; how many rows were changed."""
    with closing(sqlite3.connect(run_dir / SQLITE_FILE, isolation_level=None)) as db:
        checksum_rows(db)
        changed = db.execute(statement).rowcount
        seal_all(db)
    return changed
