"""Metrics for TensorBoard: ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.base.config import Section
from headrace.base.types.metrics import find
from headrace.run.observe.writers.base import MetricWriter, RunFacts, lacks

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoard(Section):
    """Event files in the run directory."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: RunFacts) -> MetricWriter:
        """Raises :class:`~headrace.base.errors.ConfigError` without the package."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise lacks("tensorboardX", "tensorboard") from None
        return _TensorboardWriter(
            SummaryWriter(logdir=str(run.run_dir / "tensorboard"), flush_secs=10, write_to_disk=True)
        )


class _TensorboardWriter:
    def __init__(self, files: SummaryWriter) -> None:
        self._files = files

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            found = find(name)
            words = "" if found is None else f"{found[0].what} ({found[0].unit or 'a number'})"
            self._files.add_scalar(name, value, step, walltime=unix_s, summary_description=words)

    def close(self) -> None:
        self._files.close()
