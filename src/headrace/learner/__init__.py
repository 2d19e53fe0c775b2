"""The learner: batches in, gradients and new weights out."""

from headrace.learner.base import Learner
from headrace.learner.config import LearnerConfig

__all__ = ["Learner", "LearnerConfig"]
