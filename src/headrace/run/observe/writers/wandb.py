"""The writer of metrics for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, missing_package

if TYPE_CHECKING:
    from wandb import Run


class Wandb(WriterSection):
    """Metrics as a run of a Weights & Biases project. The key is the one that ``wandb login`` has stored."""

    kind: Literal["wandb"] = "wandb"
    project: str = "headrace"
    """The name of the project, which is created where there is none."""
    entity: str | None = None
    """The user or the team that owns the project; unset: the owner of the key."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files into the run directory, for ``wandb sync``."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Return the writer of ``run``. Raises :class:`~headrace.base.errors.ConfigError` where the package is not
        installed."""
        try:
            import wandb
        except ImportError:
            raise missing_package("wandb", "wandb") from None
        begun = wandb.init(
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
        return _WandbWriter(begun)


class _WandbWriter:
    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": unix_s}, step=step)

    def close(self) -> None:
        self._run.finish()
