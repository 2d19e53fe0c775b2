"""Runs environments against engines: tasks in, ended episodes out."""

from headrace.rollout.runner import EnginePolicy, EpisodeRunner

__all__ = ["EnginePolicy", "EpisodeRunner"]
