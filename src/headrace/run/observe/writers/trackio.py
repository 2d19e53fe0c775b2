"""The writer of metrics for trackio, a local dashboard: ``trackio show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, make_missing_package_error

if TYPE_CHECKING:
    from trackio import Run


class Trackio(WriterSection):
    """The settings of the writer ``trackio``: the metrics of the run become a run of a trackio project, in trackio's
    own folder or in a Hugging Face Space."""

    kind: Literal["trackio"] = "trackio"
    project: str = "headrace"
    """The name of the project, which is created if there is none."""
    space_id: str | None = None
    """The Hugging Face Space that shows the metrics; unset: this machine alone."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Start the trackio run of ``run``, or continue it if ``run`` was resumed, and return the writer that logs to
        it. Raises :class:`~headrace.base.errors.ConfigError` if the package is not installed."""
        try:
            import trackio
        except ImportError:
            raise make_missing_package_error("trackio", "trackio") from None
        started = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.key[:6]}",
            space_id=self.space_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        return _TrackioWriter(started)


class _TrackioWriter:
    """The writer that :meth:`Trackio.open` returns: it logs each step to one run of trackio."""

    def __init__(self, run: Run) -> None:
        """Create a writer to ``run``, trackio's own object for the run."""
        self._run = run

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step. trackio sets the time itself, so ``unix_s`` is not used."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Tell trackio that its run has ended."""
        self._run.finish()
