"""Environments: objects that define one attempt at a task, their settings, and the choice of rows."""

from headrace.rollout.environments.base import AttemptOutcome, Environment, OpenEpisode, SingleTurn
from headrace.rollout.environments.config import DataConfig, EnvConfig
from headrace.rollout.environments.curriculum import Curriculum, CurriculumConfig

__all__ = [
    "AttemptOutcome",
    "Curriculum",
    "CurriculumConfig",
    "DataConfig",
    "EnvConfig",
    "Environment",
    "OpenEpisode",
    "SingleTurn",
]
