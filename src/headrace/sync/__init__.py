"""Weights from the learner to the engines: stage while they decode, commit between two steps.

``base`` says what a transport and a codec promise, ``transports`` and ``codecs`` which there are.
"""

from headrace.sync.config import SyncConfig

__all__ = ["SyncConfig"]
