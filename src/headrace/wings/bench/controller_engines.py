"""The process of many engines without a model for the controller benchmark. They answer over the real sockets of
engines, as fast as they can, with tokens that mean nothing.

    python -m headrace.wings.bench.controller_engines DIRECTORY NUM FLUSH LAYERS SLOTS RATE

DIRECTORY holds the sockets of the engines ``engine-0`` to ``engine-(NUM-1)``; a chunk has up to FLUSH tokens, with
eight experts in each of LAYERS layers, which lie in a store where the package has one. An engine samples SLOTS
sequences at a time, and all together RATE tokens a second, 0 for as many as they can. The process reads the secret of
the run from its input, and ends with the process that started it.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from headrace.base.clock import RealClock
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages import engine
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Chunks, Committed, EngineStats, Ready, Staged
from headrace.base.types.recorded import Routing
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import SwapReport

try:
    from headrace.base.store import COLUMNS, ColumnStore
except ImportError:  # a version before the store
    ColumnStore = None  # type: ignore[assignment, misc]

WAIT_MS = 1000
"""Milliseconds after which an idle process looks whether the process that started it still runs."""

EXPERTS = 8
"""The number of experts of a token in each layer."""


@dataclass(slots=True, eq=False)
class _IdleEngine:
    """One engine: its sockets, the sequences that it samples, and its counters."""

    orders: Any
    reports: Any
    left: dict[int, int] = field(default_factory=dict)
    """The number of tokens that each running sequence still gets, by the number of its request."""
    readers: dict[int, Any] = field(default_factory=dict)
    """The socket to which the chunks of a sequence go, by the number of its request."""
    version: int = NOT_SAMPLED
    generated: int = 0

    def stats(self) -> EngineStats:
        """Return the counters of the engine."""
        return EngineStats(
            version=self.version, generated_tokens=self.generated, steps=self.generated, running=len(self.left)
        )  # fmt: skip


class IdleEngines:
    """The engines of this process, and the loop that serves them."""

    def __init__(
        self, directory: Path, num: int, token: str, *, flush: int, layers: int, slots: int, rate: int
    ) -> None:
        """Connect to the controller's sockets of ``num`` engines in ``directory``. Chunks have up to ``flush``
        tokens with experts of ``layers`` layers, and an engine samples ``slots`` sequences at a time, and all together
        ``rate`` tokens a second; ``token`` proves that the engines are of this run."""
        self._codec = MessageCodec(engine.Message)
        self._flush = flush
        self._layers = layers
        self._slots = slots
        self._rate = rate
        self._sampled = 0
        self._begun_s = 0.0
        self._store = ColumnStore(directory / COLUMNS, "engines") if layers and ColumnStore is not None else None
        self._context = zmq.Context(4)
        self._context.set(zmq.MAX_SOCKETS, 4 * num + 64)
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, _IdleEngine] = {}
        self._answers: dict[str, Any] = {}
        """The sockets to rollout shards, by their addresses."""
        self._columns: dict[tuple[int, int], Tokens] = {}
        for number in range(num):
            (name,) = directory.glob(f"engine-{number}.*.reports")
            one = _IdleEngine(self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH))
            one.orders.bind(f"ipc://{name.with_suffix('.orders')}")
            one.reports.connect(f"ipc://{name}")
            self._by_socket[one.orders] = one
            self._poller.register(one.orders, zmq.POLLIN)
            self._send(one, Ready(token=token, pid=os.getpid(), facts={}))

    def serve(self) -> None:
        """Answer orders, and sample for all running sequences, until the starter of this process has ended."""
        starter = os.getppid()
        busy: dict[_IdleEngine, None] = {}
        while os.getppid() == starter:
            for socket, _ in self._poller.poll(self._ahead_ms() if busy else WAIT_MS):
                one = self._by_socket[socket]
                for order in self._orders(socket):
                    self._handle(one, order)
                if one.left:
                    busy[one] = None
            for one in list(busy) if not self._ahead_ms() else ():
                self._answer(one)
                if not one.left:
                    del busy[one]

    def _ahead_ms(self) -> int:
        """Return the milliseconds until the engines may sample on, so that they do not sample faster than they
        should."""
        if not self._rate:
            return 0
        now_s = RealClock().now()
        self._begun_s = self._begun_s or now_s
        return max(0, int((self._begun_s + self._sampled / self._rate - now_s) * 1000))

    def _answer(self, one: _IdleEngine) -> None:
        """Send the next chunk of each running sequence of an engine to the process that asked for it."""
        read: dict[Any, list[TokenChunk]] = {}
        for chunk in self._sample(one):
            read.setdefault(one.readers[chunk.request_id], []).append(chunk)
            if chunk.ended:
                del one.readers[chunk.request_id]
        for socket, chunks in read.items():
            socket.send(self._codec.encode(Chunks(chunks=tuple(chunks), stats=one.stats(), spans=())))

    def _reader(self, address: str, one: _IdleEngine) -> Any:
        """Return the socket to the process that receives answers at ``address``; empty: the controller."""
        if address and address not in self._answers:
            self._answers[address] = self._context.socket(zmq.PUSH)
            self._answers[address].connect(address)
        return self._answers.get(address, one.reports)

    def _orders(self, socket: Any) -> Iterator[Any]:
        """Yield the orders that have arrived at ``socket``."""
        while True:
            try:
                yield self._codec.decode(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _handle(self, one: _IdleEngine, order: Any) -> None:
        """Carry out one order."""
        match order:
            case engine.Generate(requests=requests):
                # an earlier version of the package has no such field
                reader = self._reader(msgspec.structs.asdict(order).get("answers_to", ""), one)
                for request in requests:
                    one.readers[request.request_id] = reader
                    one.left[request.request_id] = request.sampling.max_new_tokens
            case engine.Stage(call=call, update=update):
                self._send(one, Staged(call=call, version=update.version, seconds=0.0))
            case engine.Commit(call=call, version=version, mode=mode):
                one.version = version
                report = SwapReport(version=version, gap_s=0.0, carried_over=len(one.left), restarted=0, mode=mode)
                self._send(one, Committed(call=call, report=report))

    def _sample(self, one: _IdleEngine) -> Iterator[TokenChunk]:
        """Yield the next chunk of each running sequence of an engine."""
        for request_id, left in list(itertools.islice(one.left.items(), self._slots)):
            size = min(left, self._flush)
            one.generated += size
            self._sampled += size
            one.left[request_id] -= size
            stop = StopReason.LENGTH if size == left else None
            if stop is not None:
                del one.left[request_id]
            chunk = TokenChunk(request_id=request_id, tokens=self._tokens(one.version, size), stop_reason=stop)
            yield chunk if self._store is None else self._store.chunk(chunk)

    def _tokens(self, version: int, size: int) -> Tokens:
        """Return ``size`` tokens of ``version``."""
        found = self._columns.get((version, size))
        if found is None:
            found = self._columns[version, size] = Tokens(
                ids_T=np.arange(size, dtype=np.int32) % 97,
                logprobs_T=np.full(size, -1.0, np.float32),
                versions_T=np.full(size, version, np.int32),
                routing=self._routing(size) if self._layers else None,
            )
        return found

    def _routing(self, size: int) -> Routing:
        """Return the experts of ``size`` tokens."""
        experts_RLK = np.arange(size * self._layers * EXPERTS, dtype=np.int64).astype(np.uint8)
        return Routing(known_T=np.ones(size, bool), experts_RLK=experts_RLK.reshape(size, self._layers, EXPERTS))

    def _send(self, one: _IdleEngine, message: Any) -> None:
        """Send a report of an engine to the controller."""
        one.reports.send(self._codec.encode(message))


if __name__ == "__main__":
    _num, _flush, _layers, _slots, _rate = (int(argument) for argument in sys.argv[2:])
    _token = sys.stdin.readline().strip()
    IdleEngines(Path(sys.argv[1]), _num, _token, flush=_flush, layers=_layers, slots=_slots, rate=_rate).serve()
