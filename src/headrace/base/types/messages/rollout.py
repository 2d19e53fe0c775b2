"""The messages that a rollout shard receives. A rollout shard is a process that runs episodes beside the controller."""

from __future__ import annotations

import msgspec

from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.task import Task
from headrace.base.types.versions import NOT_SAMPLED


class EngineStateChange(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine of the run in the controller's fleet. The first record with a name announces a new engine,
    to which the shard may send requests."""

    name: str
    orders: str = ""
    """The address at which the engine receives orders on this machine."""
    first_request: int = 0
    """The number of the first request to a new engine. The 2³² numbers from this number on belong to this shard."""
    state: str = ""
    """The name of the engine's :class:`~headrace.engine.fleet.router.EngineState`. Empty: the engine has left the run,
    and its sequences continue on other engines."""
    version: int = NOT_SAMPLED
    """The version of the weights that the engine uses."""
    paused: bool = False
    """Whether the engine is paused, so that it may send nothing for a while."""


class EngineStateChanges(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that the state of some engines has changed."""

    engines: tuple[EngineStateChange, ...]


class StartEpisodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to run episodes of one group. The shard reports every episode once, after it has ended."""

    call: int
    """The number of the order, which the reports repeat."""
    group: int
    """The number of the group in the run."""
    places: tuple[int, ...]
    """The indices of the episodes in the group."""
    task: Task
    """The task that the episodes attempt."""
    partial_turns: tuple[TokenChunk, ...] = ()
    """The recorded tokens of turns that were sampled before the run was interrupted or another shard died, from which
    the episodes continue."""
    together: bool = False
    """Whether the order starts all episodes of a group without recorded tokens, none of which will be withdrawn."""


class WithdrawEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to end an episode early. It keeps its tokens and is reported as usual."""

    key: EpisodeKey
    reason: str


class EndCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to cancel all episodes of a ``StartEpisodes``, which are then not reported."""

    call: int
    """The number of the order ``StartEpisodes``."""


Message = EngineStateChanges | StartEpisodes | WithdrawEpisode | EndCall | Shutdown
