"""Writers of metrics to other programs: TensorBoard, Weights & Biases, trackio, MLflow, Prometheus. Each is one
file."""

from headrace.run.observe.writers.base import MetricWriter, RunFacts
from headrace.run.observe.writers.posting import Posting
from headrace.run.observe.writers.registry import WriterConfig

__all__ = ["MetricWriter", "Posting", "RunFacts", "WriterConfig"]
