"""Runs environments against engines: tasks in, ended episodes out."""

from headrace.rollout.runner import EnginePolicy, EpisodeRunner
from headrace.rollout.withdrawal import Withdrawal

__all__ = ["EnginePolicy", "EpisodeRunner", "Withdrawal"]
