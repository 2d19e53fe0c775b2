"""One engine of a fleet, and where requests were among them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from headrace.base.errors import DeadlineError, RequestError
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.base import Engine

TICK_S = 1.0
"""How often the engines are looked at."""
HOMES = 65_536
"""Requests of which it is known where they were, for forks."""


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """What a fleet knows of an engine."""

    name: str
    engine: Engine
    address: str
    """Where weights can be sent to it; empty where it fetches them."""
    version: int = NOT_SAMPLED
    """In use."""
    staged: int = NOT_SAMPLED
    """The newest that it has brought."""
    missed: str = ""
    """Why the newest version does not reach it; empty where that does, or may."""
    gone: bool = False
    """It has left."""
    heard: EngineStats = field(default_factory=EngineStats)
    """What it said last."""
    silent_s: float = 0.0
    """Since it said that."""

    def listen(self, load: int) -> None:
        """Called once a tick; ``load``: the sequences of which it should say something."""
        said = self.engine.stats()
        self.silent_s = self.silent_s + TICK_S if said is self.heard and load else 0.0
        self.heard = said

    def too_silent(self, load: int) -> DeadlineError:
        """What is wrong with it then."""
        return DeadlineError(
            f"{self.name} has said nothing for {self.silent_s:g} s and has {load} sequences",
            remedy="look at its log in the run directory; raise launch.engine_silence_s if its steps take long",
        )


class StickyRoutes:
    """Who served which request, and under which number."""

    def __init__(self) -> None:
        self._homes: OrderedDict[int, tuple[Member, int]] = OrderedDict()

    def put(self, request: int, member: Member, number: int) -> None:
        """``member`` calls it ``number``."""
        self._homes[request] = (member, number)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)

    def of(self, fork: ForkRequest) -> tuple[Member, ForkRequest]:
        """The one engine that can serve a fork, and the fork in its words. Raises
        :class:`~headrace.base.errors.RequestError` where that cannot."""
        member, parent = self._homes.get(fork.parent, (None, -1))
        if member is None:
            where = "has not been heard of for long"
        elif member.gone:
            where = f"was with {member.name}, which is gone"
        elif member.missed:
            where = f"was with {member.name}, which has not the newest weights"
        else:
            return member, msgspec.structs.replace(fork, parent=parent)
        problem = f"a fork of request {fork.parent}, which {where}"
        raise RequestError(problem, remedy="send its tokens as a prompt")
