"""Rollouts: run environments against engines, from tasks to ended episodes."""

from headrace.rollout.chat import Chat
from headrace.rollout.conversations import UNLIMITED, Conversations, EpisodeLimits
from headrace.rollout.runner import EnginePolicy, EpisodeRunner, Withdrawal

__all__ = ["UNLIMITED", "Chat", "Conversations", "EnginePolicy", "EpisodeLimits", "EpisodeRunner", "Withdrawal"]
