"""The controller's end of every process: the contracts of engine, learner, scorer and environment, over a channel."""

from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.environment import EnvPeer, EnvPool, EnvPoolConfig
from headrace.launch.clients.learner import LearnerClient, RankClient
from headrace.launch.clients.scoring import ScorerPool, ScorerPoolConfig, ScoringStage

__all__ = [
    "EngineClient",
    "EnvPeer",
    "EnvPool",
    "EnvPoolConfig",
    "LearnerClient",
    "RankClient",
    "ScorerPool",
    "ScorerPoolConfig",
    "ScoringStage",
]
