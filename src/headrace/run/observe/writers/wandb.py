"""Metrics for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headrace.base.config import Section
from headrace.run.observe.writers.base import MetricWriter, RunFacts, lacks

if TYPE_CHECKING:
    from wandb import Run


class Wandb(Section):
    """A run of a project there; its key is what ``wandb login`` has stored."""

    kind: Literal["wandb"] = "wandb"
    project: str = "headrace"
    """Its name; made where there is none."""
    entity: str | None = None
    """User or team; unset: that of the key."""
    mode: Literal["online", "offline"] = "online"
    """``offline``: files in the run directory, for ``wandb sync``."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Raises :class:`~headrace.base.errors.ConfigError` without the package."""
        try:
            import wandb
        except ImportError:
            raise lacks("wandb", "wandb") from None
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
