"""Environments: what an attempt at a task is."""

from headrace.env.base import Env, Policy
from headrace.env.config import DataConfig, EnvConfig
from headrace.env.single_turn import SingleTurn

__all__ = ["DataConfig", "Env", "EnvConfig", "Policy", "SingleTurn"]
