"""The messages that a rollout shard receives: a process that runs episodes beside the controller."""

from __future__ import annotations

import msgspec

from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.task import Task
from headrace.base.types.versions import NOT_SAMPLED


class EngineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine of the run, as the controller's fleet sees it. The first record of a name says that the
    engine may be asked."""

    name: str
    orders: str = ""
    """The address at which the engine receives orders on this machine."""
    first_request: int = 0
    """The number of the first request to a new engine. The 2³² numbers from there on belong to this shard."""
    state: str = ""
    """The name of its :class:`~headrace.engine.fleet.router.EngineState`; empty: it has left the run, and its sequences
    continue on other engines."""
    version: int = NOT_SAMPLED
    """The version of the weights that it uses."""
    paused: bool = False
    """Whether it is paused, so that it need not send anything."""


class EnginesSeen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message about engines whose state has changed."""

    engines: tuple[EngineSeen, ...]


class StartEpisodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to run episodes of one group. Every episode is reported once, when it has ended."""

    call: int
    """The number of the order, which the reports repeat."""
    group: int
    """The number of the group in the run."""
    places: tuple[int, ...]
    """The indices of the episodes in the group."""
    task: Task
    """The task that they attempt."""
    begun: tuple[TokenChunk, ...] = ()
    """The recorded tokens of turns that were sampled before the run was interrupted or another shard died."""
    together: bool = False
    """Whether these are all episodes of the group, of which nothing is recorded and none will be withdrawn."""


class WithdrawEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to end an episode, which keeps its tokens. It is reported like any other."""

    key: EpisodeKey
    reason: str


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to cancel the episodes of an order to start some. They are not reported."""

    call: int
    """The number of that order."""


Message = EnginesSeen | StartEpisodes | WithdrawEpisode | EndCall | Shutdown
