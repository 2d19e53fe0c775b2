"""Environments: what an attempt at a task is."""

from headrace.env.base import Env, Policy
from headrace.env.config import DataConfig, EnvConfig
from headrace.env.curriculum import Curriculum, CurriculumConfig
from headrace.env.single_turn import SingleTurn

__all__ = ["Curriculum", "CurriculumConfig", "DataConfig", "Env", "EnvConfig", "Policy", "SingleTurn"]
