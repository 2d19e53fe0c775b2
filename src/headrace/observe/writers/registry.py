"""The writers, one row each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.observe.writers.mlflow import Mlflow
from headrace.observe.writers.prometheus import Prometheus
from headrace.observe.writers.tensorboard import TensorBoard
from headrace.observe.writers.trackio import Trackio
from headrace.observe.writers.wandb import Wandb

WriterConfig = Annotated[TensorBoard | Wandb | Trackio | Mlflow | Prometheus, Field(discriminator="kind")]
"""Any of them. Each is a file, a row here and an extra; ``metrics.jsonl`` is always written."""
