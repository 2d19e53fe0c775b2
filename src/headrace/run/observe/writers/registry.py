"""The writers, one row each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.run.observe.writers.mlflow import Mlflow
from headrace.run.observe.writers.prometheus import Prometheus
from headrace.run.observe.writers.tensorboard import TensorBoard
from headrace.run.observe.writers.trackio import Trackio
from headrace.run.observe.writers.wandb import Wandb

WriterConfig = Annotated[TensorBoard | Wandb | Trackio | Mlflow | Prometheus, Field(discriminator="kind")]
"""Any of them. Each is a file, a row here and an extra; ``metrics.jsonl`` is always written."""
