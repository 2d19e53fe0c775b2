"""The weight sync: the transfer of weights from the learner to the engines. Engines stage a version while they decode,
and commit it between two steps.

:mod:`.base` contains the contracts of transports and codecs, :mod:`.config` the registry of transports, and
:mod:`.codecs` the codecs.
"""

from headrace.sync.config import SyncConfig

__all__ = ["SyncConfig"]
