"""The learner, which computes gradients from batches and updates the weights of the policy."""

from headrace.learner.base import Learner
from headrace.learner.config import LearnerConfig

__all__ = ["Learner", "LearnerConfig"]
