"""The controller's side of every process: the contracts of engine, learner and scorer, spoken over a channel."""

from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.environment import EnvPool, EnvTerms
from headrace.launch.clients.learner import LearnerClient, RankClient
from headrace.launch.clients.scorer import ScorerPool, ScorerPoolConfig
from headrace.launch.clients.scoring import ScoringStage
from headrace.launch.clients.shift import EnvPeer

__all__ = [
    "EngineClient",
    "EnvPeer",
    "EnvPool",
    "EnvTerms",
    "LearnerClient",
    "RankClient",
    "ScorerPool",
    "ScorerPoolConfig",
    "ScoringStage",
]
