"""Rewards and pass@k of the weights of a run on given rows, measured while it goes on training.

    snapshot ──▶ MEASURED/step-N, as other programs load it ──▶ a process of its own: headrace's evaluation, with an
    engine and scoring workers ──▶ the measured version, in the metrics of the next step

One measurement runs at a time, in order. What a killed run has not measured lies there still, and is measured when it
is resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config import merge
from headrace.base.errors import EnvError, HeadraceError
from headrace.run.session import load_config
from headrace.run.session.directory import write_json
from headrace.run.session.exporting import export
from headrace.run.session.prepare import Inputs, prepare

MEASURED = "measured"
"""The directory, in that of the run, of the weights that are or will be measured, and of the logs of it."""
MOST_WAITING = 2
"""The most versions that lie on the disk and wait; training waits for the first of them when there are more."""
RESULT, LOG = "result.json", "measuring.log"
_PROGRAM = "from headrace.wings.supervised.measuring import main; main()"
Tree = dict[str, Any]


class VersionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of one version of the weights."""

    version: int
    mean_reward: float
    """The mean over all attempts; one that fails counts as 0."""
    pass_at: dict[int, float]
    """By k, the share of tasks that at least one of k attempts solves."""
    warnings: list[str] = []


def check_measuring(settings: Tree, model: str) -> None:
    """Check the settings, the rows and the reward with the weights in ``model``: ``settings`` are sections of a run
    file of ``headrace train``. Raises :class:`~headrace.base.errors.HeadraceError`, which names the table."""
    try:
        prepare(load_config(merge(settings, {"model": {"path": model}})), Inputs(look=True), training=False)
    except HeadraceError as error:
        error.problem = f"[eval]: {error.problem}"
        raise


class Measurements:
    """The measurements of one run. :meth:`close` ends the one that runs."""

    def __init__(self, settings: Tree, run_dir: Path, base: str) -> None:
        """``base`` is the model with which the run begins. Versions that an earlier life left are measured first."""
        self._settings, self._run_dir, self._base = settings, run_dir, base
        self._place = run_dir / MEASURED
        self._waiting = deque(sorted(int(path.name.removeprefix("step-")) for path in self._place.glob("step-*")))
        self._ended: list[VersionRewards] = []
        self._running: _Process | None = None
        self._next()

    def begin(self, version: int) -> None:
        """Measure the weights of the newest snapshot, which is of ``version``, as soon as those before it are; of
        version 0, those with which the run begins. A version that an earlier life left is measured once. Waits if many
        versions wait already."""
        if self._weights(version).exists():
            return
        if version:
            export(self._run_dir, self._weights(version))
        else:
            self._weights(version).mkdir(parents=True)  # empty: what is left after a kill is told by these directories
        self._waiting.append(version)
        self._next()
        while len(self._waiting) > MOST_WAITING:
            self._wait()

    def take(self) -> Sequence[VersionRewards]:
        """Return the measurements that have ended since the last call, in order."""
        while self._running is not None and self._running.has_ended:
            self._wait()
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> None:
        """Wait until everything is measured."""
        while self._running is not None:
            self._wait()

    def close(self) -> None:
        """End the measurement that runs; its weights stay for the next life of the run."""
        if self._running is not None:
            self._running.kill()
            self._running = None

    def _weights(self, version: int) -> Path:
        return self._place / f"step-{version}"

    def _next(self) -> None:
        """Start the first measurement that waits, if none runs."""
        if self._running is None and self._waiting:
            version = self._waiting.popleft()
            model = str(self._weights(version)) if version else self._base
            tree = merge(self._settings, {"model": {"path": model}})
            self._running = _Process(tree, self._place, version)

    def _wait(self) -> None:
        """Wait for the measurement that runs, keep its result, and start the next."""
        running, self._running = self._running, None
        assert running is not None
        self._ended.append(running.result())
        shutil.rmtree(self._weights(running.version), ignore_errors=True)
        self._next()


class _Process:
    """A process that measures one version, in a process group of its own, which ends when this process does."""

    def __init__(self, tree: Tree, place: Path, version: int) -> None:
        self.version = version
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        (place / RESULT).unlink(missing_ok=True)
        with (place / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(place / RESULT)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(tree).encode() + b"\n")
        self._process.stdin.flush()  # and stays open: its end tells the process that this one has ended

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> VersionRewards:
        """Wait for the end, and return what was measured. Raises :class:`~headrace.base.errors.EnvError` if the
        process failed."""
        status = self._process.wait()
        self._close()
        if status != 0:
            lines = (self._place / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            cause = " / ".join(lines[-3:]) or f"status {status}"
            raise EnvError(
                f"the weights of version {self.version} could not be measured: {cause}",
                remedy=f"look at {self._place / LOG}, mend [eval], and --resume",
            )
        found = json.loads((self._place / RESULT).read_bytes())
        pass_at = {int(k): each["value"] for k, each in found["pass_at"].items()}
        return VersionRewards(
            version=self.version, mean_reward=found["mean_reward"], pass_at=pass_at, warnings=found["warnings"]
        )

    def kill(self) -> None:
        """End the process and all that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


def main() -> None:
    """Measure what the first line of the standard input says, and write the result into the file that the first
    argument names. When the standard input ends, the process and its children are killed."""
    from headrace.run.session import evaluate

    tree = json.loads(sys.stdin.buffer.readline())

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)  # nothing else is written: this returns at the end
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        measured = evaluate(load_config(tree))
    except HeadraceError as error:
        sys.exit(str(error))
    write_json(Path(sys.argv[1]), measured)
