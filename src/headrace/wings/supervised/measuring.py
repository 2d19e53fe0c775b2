"""Rewards and pass@k of the weights of a run on given rows, measured while it goes on training, as the table ``[eval]``
of its run file says.

    snapshot ──▶ MEASURED/step-N, as other programs load it ──▶ a process of its own: headrace's evaluation, with an
    engine and scoring workers ──▶ the measured version, in the metrics of the next step

One measurement runs at a time, in order. What a killed run has not measured lies there still, and is measured when it
is resumed.
"""

from __future__ import annotations

import json
import shutil
import sys
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
from headrace.wings.supervised.tied import TiedProcess, read_order

MEASURED = "measured"
"""The directory, in that of the run, of the weights that are or will be measured, and of the logs of it."""
MOST_WAITING = 2
"""The most versions that lie on the disk and wait to be measured; training waits for a measurement when there are
more."""
RESULT, LOG = "result.json", "measuring.log"
Tree = dict[str, Any]


class VersionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The result of measuring one version of the weights."""

    version: int
    mean_reward: float
    """The mean over all attempts; one that fails counts as 0."""
    pass_at: dict[int, float]
    """By k, the share of tasks that at least one of k attempts solves."""
    warnings: list[str] = []
    """Warnings of the evaluation, in words."""


def check_measuring(settings: Tree, model: str) -> None:
    """Check, before training, that the evaluation would start: its settings, its rows and its reward. ``settings`` are
    the table ``[eval]``, sections of a run file of ``headrace train``; ``model`` is the directory of the first weights.
    Raises :class:`~headrace.base.errors.HeadraceError`, whose text names the table."""
    try:
        prepare(load_config(merge(settings, {"model": {"path": model}})), Inputs(thorough=True), training=False)
    except HeadraceError as error:
        error.problem = f"[eval]: {error.problem}"
        raise


class Measurements:
    """The queue of the versions that are to be measured in one run, and the process that measures the first of them.
    The run calls :meth:`begin` with each version, and :meth:`take` for results; :meth:`close` ends the process."""

    def __init__(self, settings: Tree, run_dir: Path, base: str) -> None:
        """``settings`` are the table ``[eval]``; ``base`` is the directory of the weights with which the run begins,
        version 0. Versions that an earlier life of the run left unmeasured are measured first."""
        self._settings, self._run_dir, self._base = settings, run_dir, base
        self._place = run_dir / MEASURED
        self._waiting = deque(sorted(int(path.name.removeprefix("step-")) for path in self._place.glob("step-*")))
        self._ended: list[VersionRewards] = []
        self._running: _Process | None = None
        self._next()

    def begin(self, version: int) -> None:
        """Have ``version`` measured, as soon as the versions before it are. Its weights are those of the run's newest
        snapshot, which are exported to a directory; for version 0, those with which the run begins. A version that
        waits already, from an earlier life, is not added again. If more than :data:`MOST_WAITING` versions wait, this
        waits for results."""
        if self._weights(version).exists():
            return
        if version:
            export(self._run_dir, self._weights(version))
        else:
            self._weights(version).mkdir(parents=True)  # empty: these directories show what is left to do after a kill
        self._waiting.append(version)
        self._next()
        while len(self._waiting) > MOST_WAITING:
            self._wait()

    def take(self) -> Sequence[VersionRewards]:
        """Return the results that have come since the last call, in the order of the versions; empty if there are none.
        This does not wait. Raises :class:`~headrace.base.errors.EnvError` if a measurement has failed."""
        while self._running is not None and self._running.has_ended:
            self._wait()
        ended, self._ended = self._ended, []
        return ended

    def finish(self) -> None:
        """Wait until all versions of the queue are measured."""
        while self._running is not None:
            self._wait()

    def close(self) -> None:
        """Kill the measurement that runs, if one does; its weights stay on the disk for the next life of the run."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def _weights(self, version: int) -> Path:
        """Return the directory of the exported weights of ``version``."""
        return self._place / f"step-{version}"

    def _next(self) -> None:
        """Start the process that measures the first waiting version, if no process runs."""
        if self._running is None and self._waiting:
            version = self._waiting.popleft()
            model = str(self._weights(version)) if version else self._base
            tree = merge(self._settings, {"model": {"path": model}})
            self._running = _Process(tree, self._place, version)

    def _wait(self) -> None:
        """Wait for the measurement that runs, keep its result, remove its weights, and start the next."""
        running, self._running = self._running, None
        assert running is not None
        self._ended.append(running.result())
        shutil.rmtree(self._weights(running.version), ignore_errors=True)
        self._next()


class _Process:
    """The process that measures one version."""

    def __init__(self, tree: Tree, place: Path, version: int) -> None:
        """Start the process. ``tree`` are the settings of the evaluation, model included; ``place`` is the directory of
        its result and its log."""
        self.version = version
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        (place / RESULT).unlink(missing_ok=True)
        arguments = [str(place / RESULT)]
        self._process = TiedProcess(__name__, json.dumps(tree).encode(), place / LOG, arguments=arguments)

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, without waiting for it."""
        return self._process.has_ended

    def result(self) -> VersionRewards:
        """Wait for the process to end, and return what it measured. Raises :class:`~headrace.base.errors.EnvError` if
        the process failed."""
        status = self._process.wait()
        self._process.end()
        if status != 0:
            raise EnvError(
                f"the weights of version {self.version} could not be measured: "
                + (self._process.last_lines() or f"status {status}"),
                remedy=f"look at {self._process.log}, mend [eval], and --resume",
            )
        found = json.loads((self._place / RESULT).read_bytes())
        pass_at = {int(k): each["value"] for k, each in found["pass_at"].items()}
        return VersionRewards(
            version=self.version, mean_reward=found["mean_reward"], pass_at=pass_at, warnings=found["warnings"]
        )

    def end(self) -> None:
        """End the process and all that it has started."""
        self._process.end()


def main() -> None:
    """Run the evaluation in the process that measures one version: read its settings as JSON, and write the result into
    the file that the first argument names."""
    from headrace.run.session import evaluate

    tree = json.loads(read_order())
    try:
        measured = evaluate(load_config(tree))
    except HeadraceError as error:
        sys.exit(str(error))
    write_json(Path(sys.argv[1]), measured)
