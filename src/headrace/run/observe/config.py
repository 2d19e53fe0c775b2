"""The section ``[observe]`` of a run file: the display of a run, its alarms, and its metrics and report."""

from __future__ import annotations

from typing import Literal

from headrace.base.config import Section
from headrace.run.observe.alarms.base import AlarmsConfig
from headrace.run.observe.writers import WriterConfig


class ObserveConfig(Section):
    """The settings of the section ``[observe]``: the display of a run while it runs, its alarms, and the metrics and
    the report that it writes for people."""

    view: Literal["auto", "plain", "none"] = "auto"
    """``auto``: a live picture on a terminal, one line per step elsewhere; ``plain``: always lines; ``none``: no
    output."""
    report: bool = True
    """Write the report at the end: the dashboard of the run as one HTML file."""
    writers: tuple[WriterConfig, ...] = ()
    """The writers of metrics besides ``metrics.jsonl``, a table ``[[observe.writers]]`` for each: ``tensorboard``,
    ``wandb``, ``trackio``, ``mlflow`` or ``prometheus``."""
    alarms: AlarmsConfig = AlarmsConfig()
    """The alarms, and which of them stop the run."""
    env_column: str = "env"
    """The column of a row that names its environment, by which metrics are split. Rows without it count for no
    environment."""
    record_entropy: bool = False
    """Record for every token the entropy of the distribution it was drawn from. This takes four bytes a token and
    one more pass of the engine over its logits. The dashboard (``headrace view``) can colour tokens by it."""
