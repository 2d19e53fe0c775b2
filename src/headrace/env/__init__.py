"""Environments: what an attempt at a task is."""

from headrace.env.base import Environment, OpenEpisode, Outcome
from headrace.env.config import DataConfig, EnvConfig
from headrace.env.curriculum import Curriculum, CurriculumConfig
from headrace.env.single_turn import SingleTurn

__all__ = [
    "Curriculum",
    "CurriculumConfig",
    "DataConfig",
    "EnvConfig",
    "Environment",
    "OpenEpisode",
    "Outcome",
    "SingleTurn",
]
