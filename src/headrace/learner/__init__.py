"""The learner, which turns batches into gradients and new weights."""

from headrace.learner.base import Learner
from headrace.learner.config import LearnerConfig

__all__ = ["Learner", "LearnerConfig"]
