"""Metrics for trackio, a local dashboard: ``trackio show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.base.config import Section
from headrace.run.observe.writers.base import MetricWriter, RunFacts, lacks

if TYPE_CHECKING:
    from trackio import Run


class Trackio(Section):
    """A run of a project in trackio's own folder, or in a Space."""

    kind: Literal["trackio"] = "trackio"
    project: str = "headrace"
    """Its name; made where there is none."""
    space_id: str | None = None
    """A Hugging Face Space to show it in; unset: this machine."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Raises :class:`~headrace.base.errors.ConfigError` without the package."""
        try:
            import trackio
        except ImportError:
            raise lacks("trackio", "trackio") from None
        begun = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.key[:6]}",
            space_id=self.space_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        return _TrackioWriter(begun)


class _TrackioWriter:
    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
