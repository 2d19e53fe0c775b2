"""The routing of sequences to engines: decisions over plain data, without a clock and without waiting.

    join ──▶ JOINING ── it has the weights ──▶ SERVING ◀── hold, release ──▶ HELD
                │  ▲                              │                           │
                │  └── it misses the newest ──────┤                           │
                │                                 ├────────── retire ─────────┘
                │                                 ▼
                └──────────── leave ◀───────── LEAVING    its sequences are assigned again

A sequence is assigned to the engine that served its session before; else to the engine that computed the longest
beginning of its prompt under the weights that the engine still uses; else to the least loaded engine, which also
replaces a preferred engine that has clearly more sequences. An engine that is *held*, because a commit stops it, gets
new sequences only if no other engine can serve them. An engine that misses new weights keeps its sequences, because it
still uses the weights with which they began. An engine that is leaving keeps its sequences, too, and never gets new
ones. Here a *sequence* is the caller's number of one request; a *session* is a
name that related requests share; a prompt is identified by the hashes of its beginnings.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np
import xxhash

from headrace.base.types.columns import IntColumn
from headrace.base.types.versions import NOT_SAMPLED

K = TypeVar("K")
V = TypeVar("V")
Rank = tuple[int, int, int, str]
"""The rank of an engine: its load, the numbers of its latest assignment and of its joining, and its name."""

LOAD_MARGIN = 8
"""The number of sequences that an engine may have more than the least loaded one and still be preferred for its
cache."""
LOAD_MARGIN_SHARE = 0.25
"""A further allowance, as a share of the load of the least loaded engine; it is added to ``LOAD_MARGIN``."""
MEMORY = 65_536
"""The number of sessions, and of beginnings of prompts, whose engine is recorded."""
_PREFIX_INTERVALS = ((32, 1024), (256, 8192), (2048, 1 << 62))
"""Pairs of tokens (interval, limit): up to each limit, the beginnings of a prompt are distinguished at that interval,
which grows with the length."""


class EngineState(enum.Enum):
    """The state of an engine in the router."""

    JOINING = enum.auto()
    """The engine lacks the weights that the other engines have, and gets no new sequences."""
    SERVING = enum.auto()
    """The engine gets new sequences."""
    HELD = enum.auto()
    """A commit stops the engine for a while; it gets new sequences only if no other engine can."""
    LEAVING = enum.auto()
    """The engine is being removed from the run: it ends the sequences that it has, and never gets new ones."""

    @property
    def takes_sequences(self) -> bool:
        """Whether the engine may get new sequences."""
        return self in (EngineState.SERVING, EngineState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """The constraints (``only``, ``version``) and preferences (``session``, ``prefixes``) for the engine of a
    sequence."""

    session: str = ""
    """The name that sequences of one session share; empty: no session."""
    prefixes: tuple[int, ...] = ()
    """The keys of the beginnings of the sequence's prompt, as :func:`prefix_keys` returns them."""
    only: str = ""
    """The only engine that can serve the sequence; empty: any."""
    version: int | None = None
    """The version that has to compute the sequence; ``None``: the version that the engine uses."""


ANY_ENGINE = RouteRequest()
"""The request without constraints or preferences."""


@dataclass(slots=True, eq=False, kw_only=True)
class EngineLoad:
    """The router's record of one engine."""

    name: str
    join_number: int
    """The number of its joining, which breaks ties between engines that have no sequence yet."""
    state: EngineState = EngineState.JOINING
    version: int = NOT_SAMPLED
    """The version that the engine uses."""
    sequences: dict[int, None] = field(default_factory=dict)
    """The sequences that the engine serves, in the order of their assignment."""
    last_choice: int = 0
    """The number of its latest assignment, which breaks ties between equal loads."""

    @property
    def load(self) -> int:
        """The number of sequences that the engine serves."""
        return len(self.sequences)

    @property
    def rank(self) -> Rank:
        """The key by which engines are ordered: the least loaded first; among engines with the same load, the engine
        whose latest assignment is the oldest."""
        return len(self.sequences), self.last_choice, self.join_number, self.name


class Router:
    """The router of a fleet: the record of the engines and of the sequences that each serves, and the choice of an
    engine for each new sequence. The caller numbers the sequences."""

    def __init__(self) -> None:
        """Make a router without engines. It records the engine of each sequence, and the engine that served each
        session and each prefix of a prompt last."""
        self._engines: dict[str, EngineLoad] = {}
        """The engines that are present, by name."""
        self._ranks: list[Rank] = []
        """The ranks of all engines, ascending."""
        self._assigned: dict[int, EngineLoad] = {}
        """The engine that serves each sequence."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """The name of the engine that served each session last, the least recently used session first."""
        self._prefixes: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """The engine that computed each prefix last, and its version then, the least recently used prefix first."""
        self._choices, self._joins = count(1), count()
        """The numbers of the next assignment (``_choices``) and of the next engine that joins (``_joins``)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all engines, joining ones included."""
        return tuple(self._engines)

    def state(self, name: str) -> EngineState | None:
        """Return the state of the engine ``name``; ``None`` if it is absent."""
        engine = self._engines.get(name)
        return None if engine is None else engine.state

    def takes_sequences(self, name: str) -> bool:
        """Return whether the engine ``name`` is present and may get new sequences."""
        state = self.state(name)
        return state is not None and state.takes_sequences

    def load(self, name: str) -> int:
        """Return the number of sequences that the engine ``name`` serves."""
        return self._engines[name].load

    def where(self, sequence: int) -> str | None:
        """Return the name of the engine that serves ``sequence``; ``None`` if none does."""
        engine = self._assigned.get(sequence)
        return None if engine is None else engine.name

    def has_session(self, session: str) -> bool:
        """Return whether the engine that served ``session`` last is still present."""
        return self._sessions.get(session, "") in self._engines

    @property
    def has_serving_engine(self) -> bool:
        """Whether any engine accepts sequences."""
        return any(engine.state.takes_sequences for engine in self._engines.values())

    def add(self, name: str) -> None:
        """Add an engine under ``name``. It gets sequences once :meth:`use` has recorded its weights. Raises
        ``ValueError`` if an engine of this name is present."""
        if name in self._engines:
            raise ValueError(f"{name} is there already")
        engine = self._engines[name] = EngineLoad(name=name, join_number=next(self._joins))
        insort(self._ranks, engine.rank)

    def remove(self, name: str) -> tuple[int, ...]:
        """Remove the engine ``name``. Return the sequences that it served, in the order of their assignment; they have
        no engine now."""
        engine = self._engines.pop(name)
        self._remove_rank(engine)
        unassigned = tuple(engine.sequences)
        for sequence in unassigned:
            del self._assigned[sequence]
        return unassigned

    def use(self, name: str, version: int) -> None:
        """Record that the engine ``name`` uses ``version`` from now on. An engine that was joining starts to serve.
        Prompts that it computed with other weights no longer count in the choice of an engine."""
        engine = self._engines[name]
        engine.version = version
        if engine.state is EngineState.JOINING:
            engine.state = EngineState.SERVING

    def set_aside(self, name: str) -> None:
        """Assign no new sequences to the engine ``name`` until :meth:`use` records newer weights, because it has missed
        a version. It keeps the sequences that it has."""
        engine = self._engines[name]
        if engine.state is not EngineState.LEAVING:
            engine.state = EngineState.JOINING

    def retire(self, name: str) -> None:
        """Assign no new sequences to the engine ``name`` any more, because it is about to leave. It keeps the sequences
        that it has."""
        self._engines[name].state = EngineState.LEAVING

    def hold(self, name: str) -> None:
        """Assign no new sequences to the engine ``name`` while other engines can serve them, because a commit is about
        to stop it."""
        engine = self._engines[name]
        if engine.state is EngineState.SERVING:
            engine.state = EngineState.HELD

    def release(self, name: str) -> None:
        """End :meth:`hold` of the engine ``name``. Nothing happens if the engine is absent or was not held."""
        engine = self._engines.get(name)
        if engine is not None and engine.state is EngineState.HELD:
            engine.state = EngineState.SERVING

    def assign(self, sequence: int, request: RouteRequest = ANY_ENGINE, avoid: Collection[str] = ()) -> str | None:
        """Choose an engine for ``sequence``, according to ``request``, assign the sequence to it and return the
        engine's name; ``None`` if no engine can serve it. Engines named in ``avoid`` are not chosen. Raises
        ``ValueError`` for a sequence that is assigned already."""
        if sequence in self._assigned:
            raise ValueError(f"sequence {sequence} has a place already")
        least = self._least_loaded(request, avoid)
        if least is None:
            return None
        preferred = self._preferred(request, avoid, least.state)
        choice = preferred if preferred is not None and preferred.load <= allowed_load(least.load) else least
        self._remove_rank(choice)
        choice.last_choice = next(self._choices)
        choice.sequences[sequence] = None
        insort(self._ranks, choice.rank)
        self._assigned[sequence] = choice
        self._remember(request, choice)
        return choice.name

    def end(self, sequence: int) -> None:
        """Remove the assignment of ``sequence``, if it has one."""
        engine = self._assigned.pop(sequence, None)
        if engine is not None:
            self._remove_rank(engine)
            del engine.sequences[sequence]
            insort(self._ranks, engine.rank)

    def _remove_rank(self, engine: EngineLoad) -> None:
        """Remove an engine from the order; its load may be changed then."""
        del self._ranks[bisect_left(self._ranks, engine.rank)]

    def _least_loaded(self, request: RouteRequest, avoid: Collection[str]) -> EngineLoad | None:
        """Return the least loaded engine that can serve the request and is not in ``avoid``; ``None`` if there is none.
        An engine that is held is returned only if no serving engine qualifies."""
        held = None
        for engine in self._candidates(request):
            if not _meets_constraints(engine, request) or engine.name in avoid:
                continue
            if engine.state is EngineState.SERVING:
                return engine
            held = held or engine
        return held

    def _candidates(self, request: RouteRequest) -> Iterator[EngineLoad]:
        """Yield the engines that may serve the request, the least loaded first; only the required engine, if it is
        present, for a request that names one."""
        if request.only:
            if request.only in self._engines:
                yield self._engines[request.only]
            return
        for *_, name in self._ranks:
            yield self._engines[name]

    def _preferred(self, request: RouteRequest, avoid: Collection[str], state: EngineState) -> EngineLoad | None:
        """Return the engine that served the request's session before, or else the engine that computed the longest
        beginning of its prompt with the weights that it still uses. Only engines that can serve the request, are in
        ``state`` and are not in ``avoid`` are considered; ``None`` if there is none."""

        def usable(name: str) -> EngineLoad | None:
            """Return the engine ``name`` if it may be chosen, else ``None``."""
            engine = self._engines.get(name)
            if engine is None or engine.state is not state or name in avoid or not _meets_constraints(engine, request):
                return None
            return engine

        if request.session and (before := usable(self._sessions.get(request.session, ""))) is not None:
            return before
        for key in reversed(request.prefixes):
            name, version = self._prefixes.get(key, ("", NOT_SAMPLED))
            engine = usable(name)
            if engine is not None and engine.version == version:
                return engine
        return None

    def _remember(self, request: RouteRequest, engine: EngineLoad) -> None:
        """Record which engine has the request's session and prefixes in its cache."""
        if request.session:
            _store_newest(self._sessions, request.session, engine.name)
        for key in request.prefixes:
            _store_newest(self._prefixes, key, (engine.name, engine.version))


def _meets_constraints(engine: EngineLoad, request: RouteRequest) -> bool:
    """Return whether the engine has weights and meets the constraints of the request: its required engine and its
    required version."""
    return (
        engine.state.takes_sequences
        and request.only in ("", engine.name)
        and request.version in (None, engine.version)
    )  # fmt: skip


def _store_newest(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Store an entry as the newest of ``memory``, and remove the oldest entry if there are more than ``MEMORY``."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MEMORY:
        memory.popitem(last=False)


def allowed_load(smallest_load: int) -> int:
    """Return how many sequences an engine may have and still be preferred for its cache, where the least loaded engine
    has ``smallest_load`` sequences.

    >>> allowed_load(0), allowed_load(100)
    (8, 133)
    """
    return smallest_load + LOAD_MARGIN + int(smallest_load * LOAD_MARGIN_SHARE)


def prefix_keys(prompt_ids_T: IntColumn) -> tuple[int, ...]:
    """Return the keys (64-bit hashes) of the beginnings of the prompt ``prompt_ids_T``, the longest last. Two prompts
    share the keys of their common beginnings, so equal keys show which engine has a beginning in its cache.

    >>> one, other = prefix_keys(np.arange(100)), prefix_keys(np.arange(70))
    >>> len(one), len(other), [key in one for key in other]
    (4, 3, [True, True, False])
    """
    data = np.ascontiguousarray(prompt_ids_T, np.int32)
    hashed, keys, start = xxhash.xxh3_64(), [], 0
    for interval, limit in _PREFIX_INTERVALS:
        while start + interval <= min(len(data), limit):
            hashed.update(data[start : start + interval].data)
            keys.append(hashed.intdigest())
            start += interval
    if start < len(data):
        hashed.update(data[start:].data)
        keys.append(hashed.intdigest())
    return tuple(keys)
