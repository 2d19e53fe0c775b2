"""The writer of metrics for TensorBoard: ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.base.types.metrics import find
from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, missing_package

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoard(WriterSection):
    """Metrics as event files in the run directory."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: RunFacts) -> MetricWriter:
        """Return the writer of ``run``. Raises :class:`~headrace.base.errors.ConfigError` where the package is not
        installed."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise missing_package("tensorboardX", "tensorboard") from None
        return _TensorboardWriter(
            SummaryWriter(logdir=str(run.run_dir / "tensorboard"), flush_secs=10, write_to_disk=True)
        )


class _TensorboardWriter:
    def __init__(self, files: SummaryWriter) -> None:
        self._files = files

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Write the values of a step to TensorBoard, with their meanings and units."""
        for name, value in values.items():
            found = find(name)
            words = "" if found is None else f"{found[0].what} ({found[0].unit or 'a number'})"
            self._files.add_scalar(name, value, step, walltime=unix_s, summary_description=words)

    def close(self) -> None:
        self._files.close()
