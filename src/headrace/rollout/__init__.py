"""The rollout package: it runs environments against engines and turns tasks into finished episodes. The rollout loop of
the controller uses :class:`EpisodeRunner`."""

from headrace.rollout.chat import Chat
from headrace.rollout.conversations import UNLIMITED, Conversations, EpisodeLimits
from headrace.rollout.runner import EnginePolicy, EpisodeRunner, Withdrawal

__all__ = ["UNLIMITED", "Chat", "Conversations", "EnginePolicy", "EpisodeLimits", "EpisodeRunner", "Withdrawal"]
