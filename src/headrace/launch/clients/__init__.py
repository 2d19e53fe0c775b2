"""The controller's side of every process: the contracts of engine, learner and scorer, spoken over a channel."""

from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.learner import LearnerClient
from headrace.launch.clients.scorer import ScorerPool, Terms

__all__ = ["EngineClient", "LearnerClient", "ScorerPool", "Terms"]
