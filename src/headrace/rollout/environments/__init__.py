"""Environments: what an attempt at a task is."""

from headrace.rollout.environments.base import AttemptOutcome, Environment, OpenEpisode
from headrace.rollout.environments.config import DataConfig, EnvConfig
from headrace.rollout.environments.curriculum import Curriculum, CurriculumConfig
from headrace.rollout.environments.single_turn import SingleTurn

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
