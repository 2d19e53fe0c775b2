"""What ``headrace join`` on another machine says at the door of a run, and receives there."""

from __future__ import annotations

from typing import Literal

import msgspec


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A machine wants to join."""

    token: str
    """That of its invitation."""
    headrace: str
    """Version."""
    address: str
    """Its own, as the run sees it in words."""
    workers: int
    """Processes that it has room for."""
    entry: str = ""
    """Where it has the environment; empty: under the path that the run names."""
    programs: str = ""
    """``HOST:PORT`` there, at which programs reach their episodes; empty: where the run is reached."""


class Dial(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A connection is opened, that is carried over a Redis server."""

    to: str
    """The name of a socket of the run."""
    number: int
    """Of the connection, drawn by who dials: its streams are named by it."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It may."""

    orders: str
    """Where it hears what it is to do."""
    reports: str
    """Where it answers."""
    key: str
    """For both, told to nobody else."""
    token: str
    """The run's secret, for the processes that it will start."""


class JoinRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It may not, or not any more."""

    problem: str
    remedy: str


class Do(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a keeper there is to do, and to answer."""

    call: int
    keeper: int
    """A number; the first thing that is asked under it makes the keeper."""
    what: Literal["look", "begin", "ended", "computed_s", "halted"]
    asked: bytes = b""
    """JSON, of what takes any."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End that keeper, and its process."""

    keeper: int


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run has ended."""


AtTheDoor = Welcome | JoinRefused
"""The answer to a :class:`JoinRequest`."""
Message = Do | Drop | JoinRefused | Farewell
"""What it hears afterwards."""
