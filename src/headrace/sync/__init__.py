"""The transfer of weights from the learner to the engines: staged while they decode, committed between two steps.

``base`` has the contracts of transports and codecs, ``config`` the registry of transports, ``codecs`` the codecs.
"""

from headrace.sync.config import SyncConfig

__all__ = ["SyncConfig"]
