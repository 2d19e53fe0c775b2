"""The messages between a run and ``headrace join``, a program on another machine that runs processes for the run.
There, each process has a *supervisor*, an object that starts and watches it."""

from __future__ import annotations

from typing import Literal

import msgspec


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request of a machine to join a run, sent by ``headrace join``."""

    token: str
    """The token of the invitation to the run that the machine was given."""
    headrace: str
    """The version of Headrace on that machine."""
    address: str
    """The address of the machine, as shown to people."""
    workers: int
    """The number of processes that the machine may run."""
    entry: str = ""
    """The path of the environment's code on that machine; empty for the path that the run file names."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer that accepts a machine into the run."""

    orders: str
    """The address at which the machine receives its orders."""
    reports: str
    """The address to which the machine sends its answers."""
    key: str
    """The key of both connections, which no other machine gets."""
    token: str
    """The run's token, for the processes that the machine will start."""


class JoinRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer that refuses a machine, or ends its membership."""

    problem: str
    remedy: str


class Do(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of one supervisor's method on the machine, which answers with ``Done``."""

    call: int
    supervisor: int
    """The number of the supervisor; the first call with a number creates it."""
    what: Literal["look", "begin", "ended", "computed_s", "halted"]
    """The method that is called."""
    asked: bytes = b""
    """The argument of the call as JSON; empty for calls without one."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to end the supervisor with this number, and its process."""

    supervisor: int
    """The number of the supervisor."""


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message to a machine that the run has ended."""


JoinAnswer = Welcome | JoinRefused
"""The answers to a :class:`JoinRequest`."""
Message = Do | Drop | JoinRefused | Farewell
"""The messages that a machine receives after it has joined."""
