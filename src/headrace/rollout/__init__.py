"""Runs environments against engines: tasks in, ended episodes out."""

from headrace.rollout.chat import Chat
from headrace.rollout.conversations import UNLIMITED, Conversations, EpisodeLimits
from headrace.rollout.runner import EnginePolicy, EpisodeRunner
from headrace.rollout.withdrawal import Withdrawal

__all__ = ["UNLIMITED", "Chat", "Conversations", "EnginePolicy", "EpisodeLimits", "EpisodeRunner", "Withdrawal"]
