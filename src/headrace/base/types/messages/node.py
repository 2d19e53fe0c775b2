"""The messages between a run and ``headrace join``, the program that runs processes for the run on another machine. On
that machine, each process has a *supervisor*, an object that starts and monitors it."""

from __future__ import annotations

from typing import Literal

import msgspec


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request of a machine to join a run, sent by ``headrace join``."""

    token: str
    """The token of the invitation with which the machine joins."""
    headrace: str
    """The version of Headrace on that machine."""
    address: str
    """The address of the machine, for people to read."""
    workers: int
    """The number of processes that the machine may run."""
    entry: str = ""
    """The path of the environment's code on that machine; empty for the path in the run file."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer that accepts a machine into the run."""

    orders: str
    """The address at which the machine receives its orders."""
    reports: str
    """The address to which the machine sends its answers."""
    key: str
    """The key of both connections, which no other machine receives."""
    token: str
    """The run's token, for the processes that the machine will start."""


class JoinRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer that refuses a machine, or ends its membership."""

    problem: str
    remedy: str


class Do(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to call one method of a supervisor on the machine. ``Done`` is the answer."""

    call: int
    supervisor: int
    """The number of the supervisor; the first call with a number creates it."""
    method: Literal["describe_node", "start", "wait_until_ended", "computed_s", "halt_reason"]
    """The name of the method."""
    argument: bytes = b""
    """The argument of the call as JSON; empty for calls without one."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stop a supervisor and its process."""

    supervisor: int
    """The number of the supervisor."""


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that the run has ended."""


JoinAnswer = Welcome | JoinRefused
"""The answers to a :class:`JoinRequest`."""
Message = Do | Drop | JoinRefused | Farewell
"""The messages that a machine receives after it has joined the run."""
