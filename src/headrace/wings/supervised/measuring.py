"""The measurement of rewards and pass@k of a run's weights while the run trains, by the table ``[eval]``.

    snapshot ──▶ measured/step-N, weights in the Hugging Face format ──▶ another process: the evaluation of headrace,
    with an engine and scoring workers ──▶ its result, in the metrics of the run's next step

One measurement runs at a time, in the order of versions. Versions that a killed run has not measured stay on the disk,
and are measured when the run is resumed.
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
"""The directory, in the run directory, of the weights to measure and of the log of measurements."""
MOST_WAITING = 2
"""The largest number of versions that wait on the disk to be measured; beyond it, training waits for a measurement."""
RESULT, LOG = "result.json", "measuring.log"
Tree = dict[str, Any]


class VersionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the evaluation of one version of the weights."""

    version: int
    mean_reward: float
    """The mean over all attempts; a failed attempt counts as 0."""
    pass_at: dict[int, float]
    """pass@k by k: the share of tasks that at least one of k attempts solves."""
    warnings: list[str] = []
    """Warnings of the evaluation, in words."""


def check_measuring(settings: Tree, model: str) -> None:
    """Check, before training, that the evaluation can start: its settings, its rows and its reward. ``settings`` is the
    table ``[eval]``, sections of a run file of ``headrace train``; ``model`` is the directory of the first weights.
    Raises :class:`~headrace.base.errors.HeadraceError`, whose text names the table."""
    try:
        prepare(load_config(merge(settings, {"model": {"path": model}})), Inputs(thorough=True), training=False)
    except HeadraceError as error:
        error.problem = f"[eval]: {error.problem}"
        raise


class Measurements:
    """The queue of versions to measure in one run, and the process that measures the first of them. The run calls
    :meth:`begin` with each version and :meth:`take` for results; :meth:`close` kills the process."""

    def __init__(self, settings: Tree, run_dir: Path, base: str) -> None:
        """Create the queue, and start to measure the versions that an earlier life of the run did not measure.
        ``settings`` is the table ``[eval]``, ``run_dir`` the directory of the run, and ``base`` the directory of the
        run's first weights, version 0."""
        self._settings, self._run_dir, self._base = settings, run_dir, base
        self._directory = run_dir / MEASURED
        """Directory of the weights to measure."""
        self._queue = deque(sorted(int(path.name.removeprefix("step-")) for path in self._directory.glob("step-*")))
        """The versions to measure, in order; the first is being measured."""
        self._results: list[VersionRewards] = []
        """The results that were not taken yet."""
        self._running: _MeasuringProcess | None = None
        """The process that measures the first version; ``None`` if none is queued."""
        self._start_next()

    def begin(self, version: int) -> None:
        """Queue ``version`` for measurement. Its weights are exported from the run's newest snapshot to a directory;
        version 0 uses the run's first weights. A version that is queued already, from an earlier life, is not added
        again. While more than :data:`MOST_WAITING` versions wait, wait for results."""
        if self._weights(version).exists():
            return
        if version:
            export(self._run_dir, self._weights(version))
        else:
            # an empty directory marks version 0 as queued, also after a kill
            self._weights(version).mkdir(parents=True)
        self._queue.append(version)
        self._start_next()
        while len(self._queue) > MOST_WAITING:
            self._finish_running()

    def take(self) -> Sequence[VersionRewards]:
        """Return the results since the last call, in the order of versions, without waiting; empty if there are none.
        Raises :class:`~headrace.base.errors.EnvError` if a measurement has failed."""
        while self._running is not None and self._running.has_ended:
            self._finish_running()
        ended, self._results = self._results, []
        return ended

    def finish(self) -> None:
        """Wait until all queued versions are measured."""
        while self._running is not None:
            self._finish_running()

    def close(self) -> None:
        """Kill the running measurement, if there is one. Its weights stay on the disk for the next life of the run."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def _weights(self, version: int) -> Path:
        """Return the directory of the exported weights of ``version``."""
        return self._directory / f"step-{version}"

    def _start_next(self) -> None:
        """Start the process that measures the first queued version, if no process runs."""
        if self._running is None and self._queue:
            version = self._queue.popleft()
            model = str(self._weights(version)) if version else self._base
            tree = merge(self._settings, {"model": {"path": model}})
            self._running = _MeasuringProcess(tree, self._directory, version)

    def _finish_running(self) -> None:
        """Wait for the running measurement, store its result, remove its weights, and start the next measurement."""
        running, self._running = self._running, None
        assert running is not None
        self._results.append(running.result())
        shutil.rmtree(self._weights(running.version), ignore_errors=True)
        self._start_next()


class _MeasuringProcess:
    """The process that measures one version."""

    def __init__(self, tree: Tree, directory: Path, version: int) -> None:
        """Start the process, which measures ``version``. ``tree`` is the settings of the evaluation with the model;
        ``directory`` is for its result and log."""
        self.version = version
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / RESULT).unlink(missing_ok=True)
        arguments = [str(directory / RESULT)]
        self._process = TiedProcess(__name__, json.dumps(tree).encode(), directory / LOG, arguments=arguments)

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, without waiting for it."""
        return self._process.has_ended

    def result(self) -> VersionRewards:
        """Wait for the process to end, and return its result. Raises :class:`~headrace.base.errors.EnvError` if the
        process failed."""
        status = self._process.wait()
        self._process.end()
        if status != 0:
            raise EnvError(
                f"the weights of version {self.version} could not be measured: "
                + (self._process.last_lines() or f"status {status}"),
                remedy=f"look at {self._process.log}, mend [eval], and --resume",
            )
        found = json.loads((self._directory / RESULT).read_bytes())
        pass_at = {int(k): each["value"] for k, each in found["pass_at"].items()}
        return VersionRewards(
            version=self.version, mean_reward=found["mean_reward"], pass_at=pass_at, warnings=found["warnings"]
        )

    def end(self) -> None:
        """Kill the process and its child processes."""
        self._process.end()


def main() -> None:
    """Run the evaluation of one version; this is the program of the measuring process. Read its settings as JSON, and
    write the result to the file that the first argument names."""
    from headrace.run.session import evaluate

    tree = json.loads(read_order())
    try:
        measured = evaluate(load_config(tree))
    except HeadraceError as error:
        sys.exit(str(error))
    write_json(Path(sys.argv[1]), measured)
