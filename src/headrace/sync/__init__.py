"""Weights from the learner to the engines: stage while they decode, commit between two steps."""

from headrace.sync.base import Publisher, Receiver
from headrace.sync.config import SyncConfig

__all__ = ["Publisher", "Receiver", "SyncConfig"]
