"""The writer of metrics for TensorBoard: ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.base.types.metrics import find
from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, make_missing_package_error

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoard(WriterSection):
    """The settings of the writer ``tensorboard``: the metrics of the run become TensorBoard's event files in the run
    directory."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: RunFacts) -> MetricWriter:
        """Return the writer of ``run``, which writes into ``tensorboard/`` of the run directory. Raises
        :class:`~headrace.base.errors.ConfigError` if the package ``tensorboardX`` is not installed."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise make_missing_package_error("tensorboardX", "tensorboard") from None
        return _TensorboardWriter(
            SummaryWriter(logdir=str(run.run_dir / "tensorboard"), flush_secs=10, write_to_disk=True)
        )


class _TensorboardWriter:
    """The writer that :meth:`TensorBoard.open` returns: it adds each metric of each step to the event files."""

    def __init__(self, files: SummaryWriter) -> None:
        """Create a writer to ``files``, the event files of TensorBoard."""
        self._files = files

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Add the metrics of an optimizer step to the event files, with their meanings and units as descriptions.
        ``unix_s`` is when the step ended, in seconds since 1970."""
        for name, value in values.items():
            metric_and_label = find(name)
            words = ""
            if metric_and_label is not None:
                metric, _ = metric_and_label
                words = f"{metric.meaning} ({metric.unit or 'a number'})"
            self._files.add_scalar(name, value, step, walltime=unix_s, summary_description=words)

    def close(self) -> None:
        """Write the buffered metrics and close the event files."""
        self._files.close()
