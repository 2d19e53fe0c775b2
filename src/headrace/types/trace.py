"""The unit of the event trace."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something a lane did between two moments of the machine's clock."""

    lane: str
    """Who: ``engine``, ``learner``, ``scoring``, ``sync``."""
    name: str
    """What: ``generate``, ``train``, ``snapshot``, ``wait batch``."""
    start_s: float
    end_s: float
    step: int = -1
    """The step or version it belongs to; −1 for none."""
