"""Settings of what people see."""

from __future__ import annotations

from typing import Literal

from headrace.base.config import Section
from headrace.run.observe.alarms.config import AlarmsConfig
from headrace.run.observe.writers.registry import WriterConfig


class ObserveConfig(Section):
    """What is shown while a run goes on, and what it leaves behind."""

    view: Literal["auto", "plain", "none"] = "auto"
    """``auto``: a live picture on a terminal, one line per step elsewhere; ``plain``: lines; ``none``: silence."""
    report: bool = True
    """Write the report with pictures at the end."""
    writers: tuple[WriterConfig, ...] = ()
    """Where metrics go besides ``metrics.jsonl``, a table ``[[observe.writers]]`` for each: ``tensorboard``, ``wandb``,
    ``trackio``, ``mlflow`` or ``prometheus``."""
    alarms: AlarmsConfig = AlarmsConfig()
    """When the run complains, and when it stops by itself."""
    env_column: str = "env"
    """The column of a row that names its environment: metrics are told apart by it. Rows without it are of none."""
    record_entropy: bool = False
    """Record with every token the entropy of the distribution it was drawn from: four bytes a token, and a pass of the
    engine over its logits. The dashboard colours by it; ``headrace view``."""
