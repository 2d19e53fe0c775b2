"""Metrics elsewhere: TensorBoard, Weights & Biases, trackio, MLflow, Prometheus; one file each."""

from headrace.observe.writers.base import MetricWriter, RunFacts
from headrace.observe.writers.posting import Posting
from headrace.observe.writers.registry import WriterConfig

__all__ = ["MetricWriter", "Posting", "RunFacts", "WriterConfig"]
