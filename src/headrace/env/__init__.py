"""Environments: what an attempt at a task is."""

from headrace.env.base import AttemptOutcome, Environment, OpenEpisode
from headrace.env.config import DataConfig, EnvConfig
from headrace.env.curriculum import Curriculum, CurriculumConfig
from headrace.env.single_turn import SingleTurn

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
