"""The clients of the processes of a run. Each client implements the contract of an engine, a learner, a scorer or an
environment by exchanging messages with a process over a channel."""

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
