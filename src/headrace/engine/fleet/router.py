"""Which engine serves which sequence: decisions over plain data, without a clock and without waiting.

    join ──▶ JOINING ── it has the weights ──▶ SERVING ◀── hold, release ──▶ HELD
                │  ▲                              │                           │
                │  └── the newest do not reach it ┤                           │
                └──────────── leave ──────────────┴───────────────────────────┘   its sequences need another place

A sequence goes where its session was before; else to the engine that computed the longest beginning of its prompt under
the weights it still has; else, and where that one has clearly more to do, to the least loaded. An engine that is held,
because a commit stops it, gets new sequences only where there is no other. One that new weights do not reach keeps the
sequences that it has: they were begun with weights that it still uses.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np
import xxhash

from headrace.base.types.columns import IntColumn
from headrace.base.types.versions import NOT_SAMPLED

K = TypeVar("K")
V = TypeVar("V")

SPARE = 8
"""Sequences that an engine may have more than the least loaded one, and still be preferred for what it knows."""
SPARE_SHARE = 0.25
"""The same as a share of what the least loaded one has; it comes on top."""
MEMORY = 65_536
"""Sessions, and beginnings of prompts, whose engine is remembered."""
_GRAIN = ((32, 1024), (256, 8192), (2048, 1 << 62))
"""A prompt's beginnings are told apart every so many tokens, up to so many; the longer they are, the more coarsely."""


class SeatState(enum.Enum):
    """Where an engine stands."""

    JOINING = enum.auto()
    """It is there, and has not the weights that the others have: it is given nothing new."""
    SERVING = enum.auto()
    HELD = enum.auto()
    """A commit stops it for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """Where a sequence would like to be."""

    session: str = ""
    """Names those that belong together; empty: it belongs to none."""
    prefixes: tuple[int, ...] = ()
    """Of its prompt, as :func:`prefix_keys` names them."""
    only: str = ""
    """The one engine that can serve it; empty: any."""
    version: int | None = None
    """The weights it has to be computed with; ``None``: those in use."""


ANYWHERE = RouteRequest()


@dataclass(slots=True, eq=False, kw_only=True)
class EngineLoad:
    """One engine, as the router sees it."""

    name: str
    state: SeatState = SeatState.JOINING
    version: int = NOT_SAMPLED
    """The weights it uses."""
    sequences: dict[int, None] = field(default_factory=dict)
    """What it serves, in the order of its coming."""
    turn: int = 0
    """When it was chosen last."""

    @property
    def load(self) -> int:
        """How many sequences it serves."""
        return len(self.sequences)


class Router:
    """The books: who is there, and who serves what. A sequence is a number that its owner gives."""

    def __init__(self) -> None:
        self._seats: dict[str, EngineLoad] = {}
        self._places: dict[int, EngineLoad] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prefixes: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._turns = count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Who is there, joining ones included."""
        return tuple(self._seats)

    def state(self, name: str) -> SeatState | None:
        """``None`` for one that is not there."""
        seat = self._seats.get(name)
        return None if seat is None else seat.state

    def load(self, name: str) -> int:
        """How many sequences it serves."""
        return self._seats[name].load

    def where(self, sequence: int) -> str | None:
        """Who serves ``sequence``; ``None``: nobody."""
        seat = self._places.get(sequence)
        return None if seat is None else seat.name

    @property
    def serves(self) -> bool:
        """Whether anybody can be given a sequence."""
        return any(seat.state is not SeatState.JOINING for seat in self._seats.values())

    def join(self, name: str) -> None:
        """An engine is there; it serves once it has weights."""
        if name in self._seats:
            raise ValueError(f"{name} is there already")
        self._seats[name] = EngineLoad(name=name)

    def leave(self, name: str) -> tuple[int, ...]:
        """It is gone; the sequences that it served, which nobody does now, in the order of their coming to it."""
        homeless = tuple(self._seats.pop(name).sequences)
        for sequence in homeless:
            del self._places[sequence]
        return homeless

    def use(self, name: str, version: int) -> None:
        """It uses these weights from now on, and serves. What it knows of prompts was computed with others."""
        seat = self._seats[name]
        seat.version = version
        if seat.state is SeatState.JOINING:
            seat.state = SeatState.SERVING

    def set_aside(self, name: str) -> None:
        """Give it nothing new until it uses newer weights."""
        self._seats[name].state = SeatState.JOINING

    def hold(self, name: str) -> None:
        """Give it nothing new while others serve."""
        seat = self._seats[name]
        if seat.state is SeatState.SERVING:
            seat.state = SeatState.HELD

    def release(self, name: str) -> None:
        """It is as good as the others again; nothing happens to one that is gone or was not held."""
        seat = self._seats.get(name)
        if seat is not None and seat.state is SeatState.HELD:
            seat.state = SeatState.SERVING

    def place(self, sequence: int, wish: RouteRequest = ANYWHERE, avoid: Collection[str] = ()) -> str | None:
        """Find an engine for ``sequence`` and book it there; ``None`` where no engine that is there can be it."""
        if sequence in self._places:
            raise ValueError(f"sequence {sequence} has a place already")
        able = [seat for seat in self._seats.values() if _able(seat, wish) and seat.name not in avoid]
        choice = self._choose(wish, [seat for seat in able if seat.state is SeatState.SERVING] or able)
        if choice is None:
            return None
        choice.turn = next(self._turns)
        choice.sequences[sequence] = None
        self._places[sequence] = choice
        self._remember(wish, choice)
        return choice.name

    def end(self, sequence: int) -> None:
        """It needs no place any more; nothing happens to one that has none."""
        seat = self._places.pop(sequence, None)
        if seat is not None:
            del seat.sequences[sequence]

    def _choose(self, wish: RouteRequest, able: list[EngineLoad]) -> EngineLoad | None:
        if not able:
            return None
        least = min(able, key=lambda seat: (seat.load, seat.turn))
        known = self._known(wish, able)
        return known if known is not None and known.load <= allowed_load(least.load) else least

    def _known(self, wish: RouteRequest, able: list[EngineLoad]) -> EngineLoad | None:
        """The engine that has begun with it, or with one like it."""
        by_name = {seat.name: seat for seat in able}
        if wish.session and (before := by_name.get(self._sessions.get(wish.session, ""))) is not None:
            return before
        for key in reversed(wish.prefixes):
            name, version = self._prefixes.get(key, ("", NOT_SAMPLED))
            seat = by_name.get(name)
            if seat is not None and seat.version == version:
                return seat
        return None

    def _remember(self, wish: RouteRequest, seat: EngineLoad) -> None:
        if wish.session:
            _put(self._sessions, wish.session, seat.name)
        for key in wish.prefixes:
            _put(self._prefixes, key, (seat.name, seat.version))


def _able(seat: EngineLoad, wish: RouteRequest) -> bool:
    """Whether it can serve what wishes for this."""
    return (
        seat.state is not SeatState.JOINING
        and wish.only in ("", seat.name)
        and wish.version in (None, seat.version)
    )  # fmt: skip


def _put(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """The newest is last; the oldest goes where there are too many."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MEMORY:
        memory.popitem(last=False)


def allowed_load(least: int) -> int:
    """How many sequences an engine may have before it is clearly more loaded than one with ``least``.

    >>> allowed_load(0), allowed_load(100)
    (8, 133)
    """
    return least + SPARE + int(least * SPARE_SHARE)


def prefix_keys(prompt_ids_T: IntColumn) -> tuple[int, ...]:
    """Names of the beginnings of a prompt, the longest last: two prompts share the names of what they share.

    >>> one, other = prefix_keys(np.arange(100)), prefix_keys(np.arange(70))
    >>> len(one), len(other), [key in one for key in other]
    (4, 3, [True, True, False])
    """
    data = np.ascontiguousarray(prompt_ids_T, np.int32)
    hashed, keys, start = xxhash.xxh3_64(), [], 0
    for grain, until in _GRAIN:
        while start + grain <= min(len(data), until):
            hashed.update(data[start : start + grain].data)
            keys.append(hashed.intdigest())
            start += grain
    if start < len(data):
        hashed.update(data[start:].data)
        keys.append(hashed.intdigest())
    return tuple(keys)
