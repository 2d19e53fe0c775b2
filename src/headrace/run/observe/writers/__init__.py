"""Writers, which copy the metrics of a run to other programs (TensorBoard, Weights & Biases, trackio, MLflow,
Prometheus), and the registry of their kinds."""

from __future__ import annotations

from typing import Annotated

from headrace.base.config.kinds import Kinds
from headrace.run.observe.writers.base import RunFacts, WriterSection
from headrace.run.observe.writers.mlflow import Mlflow
from headrace.run.observe.writers.prometheus import Prometheus
from headrace.run.observe.writers.queued import QueuedWriter
from headrace.run.observe.writers.tensorboard import TensorBoard
from headrace.run.observe.writers.trackio import Trackio
from headrace.run.observe.writers.wandb import Wandb

AnyWriter = TensorBoard | Wandb | Trackio | Mlflow | Prometheus
WRITERS = Kinds(AnyWriter, group="headrace.writers", setting="observe.writers", contract=WriterSection)
"""The registry of all kinds of writers, including kinds of installed packages."""
WriterConfig = Annotated[AnyWriter, WRITERS]
"""The settings of any writer, as one entry of ``observe.writers``. ``metrics.jsonl`` is written without a writer."""

__all__ = ["QueuedWriter", "RunFacts", "WriterConfig"]
