"""The writer of metrics for Weights & Biases, an experiment tracker (package ``wandb``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, make_missing_package_error

if TYPE_CHECKING:
    from wandb import Run


class Wandb(WriterSection):
    """The settings of the writer ``wandb``: the metrics of the run become a run of a Weights & Biases project. The
    package ``wandb`` uses the API key that ``wandb login`` has stored."""

    kind: Literal["wandb"] = "wandb"
    project: str = "headrace"
    """The name of the project, which is created if there is none."""
    entity: str | None = None
    """The user or the team that owns the project; unset: the owner of the key."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files into the run directory, for ``wandb sync``."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Start the Weights & Biases run of ``run``, or continue it if ``run`` was resumed, and return the writer that
        logs to it. Raises :class:`~headrace.base.errors.ConfigError` if the package is not installed."""
        try:
            import wandb
        except ImportError:
            raise make_missing_package_error("wandb", "wandb") from None
        started = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            name=run.name,
            id=run.key,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True),
        )
        return _WandbWriter(started)


class _WandbWriter:
    """The writer that :meth:`Wandb.open` returns: it logs each step to one run of Weights & Biases."""

    def __init__(self, run: Run) -> None:
        """Create a writer to ``run``, the object of the package ``wandb`` for the run."""
        self._run = run

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step. ``unix_s`` is when the step ended, in seconds since 1970."""
        self._run.log({**values, "_timestamp": unix_s}, step=step)

    def close(self) -> None:
        """Send or store the buffered metrics, and end the run of Weights & Biases."""
        self._run.finish()
