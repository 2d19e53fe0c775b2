"""The learner over several ranks: torch's sharding through transformers, exact whatever the cut."""

from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig

__all__ = ["MemoryConfig", "OptimizerConfig", "ParallelConfig"]
