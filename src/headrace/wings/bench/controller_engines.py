"""The process of the engines in the controller benchmark: many engines without a model, which answer over the real
sockets of engines, as fast as they can, with arbitrary tokens.

    python -m headrace.wings.bench.controller_engines DIRECTORY NUM FLUSH LAYERS SLOTS RATE

DIRECTORY contains the sockets of the engines ``engine-0`` to ``engine-(NUM-1)``; a chunk has up to FLUSH tokens, with
eight experts in each of LAYERS layers, which are written to a store of columns if the package has one. An engine
samples SLOTS sequences at a time. All engines together sample RATE tokens per second; 0: as many as they can. The
process reads the secret of the run from its standard input, and ends when the process that started it has ended.
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
except ImportError:  # an earlier version of the package without a store
    ColumnStore = None  # type: ignore[assignment, misc]

WAIT_MS = 1000
"""The interval, in milliseconds, at which an idle process checks that the process that started it still runs."""

EXPERTS = 8
"""The number of experts of a token in each layer."""


@dataclass(slots=True, eq=False)
class _IdleEngine:
    """One engine: its sockets, its running sequences, and its counters."""

    orders: Any
    """The socket on which the engine receives messages of the controller."""
    reports: Any
    """The socket on which the engine sends messages to the controller."""
    tokens_left: dict[int, int] = field(default_factory=dict)
    """The number of tokens that are still to be sampled for each running sequence, by the id of its request."""
    readers: dict[int, Any] = field(default_factory=dict)
    """The socket to which the chunks of a sequence are sent, by the id of its request."""
    version: int = NOT_SAMPLED
    generated: int = 0

    def stats(self) -> EngineStats:
        """Return the counters of the engine."""
        running = len(self.tokens_left)
        return EngineStats(
            version=self.version, generated_tokens=self.generated, steps=self.generated, running=running
        )  # fmt: skip


class IdleEngines:
    """The engines of this process, and the loop that handles their messages and samples their tokens."""

    def __init__(
        self, directory: Path, num: int, token: str, *, flush: int, layers: int, slots: int, rate: int
    ) -> None:
        """Create ``num`` engines, and connect them to the controller's sockets in ``directory``. Chunks have up to
        ``flush`` tokens with experts of ``layers`` layers. An engine samples ``slots`` sequences at a time. All engines
        together sample ``rate`` tokens per second; 0: as many as they can. ``token`` is the secret of the run, with
        which an engine proves that it belongs to the run."""
        self._codec = MessageCodec(engine.Message)
        """The format of the messages between the controller and the engines."""
        self._flush = flush
        """The maximum number of tokens in a chunk."""
        self._layers = layers
        """The number of layers for which a token has experts; 0: tokens have no experts."""
        self._slots = slots
        """The maximum number of sequences that an engine samples at the same time."""
        self._rate = rate
        """The number of tokens that all engines together sample in a second; 0: no limit."""
        self._sampled = 0
        """The number of tokens that all engines have sampled so far."""
        self._begun_s = 0.0
        """The time at which the rate was first checked, from which it is measured; 0 before."""
        self._store = ColumnStore(directory / COLUMNS, "engines") if layers and ColumnStore is not None else None
        """The store to which the experts of the chunks are written; None if chunks carry them or have none."""
        self._context = zmq.Context(4)
        self._context.set(zmq.MAX_SOCKETS, 4 * num + 64)
        self._poller = zmq.Poller()
        """Watches the sockets on which the engines receive messages."""
        self._by_socket: dict[Any, _IdleEngine] = {}
        """The engines, by the socket on which each receives messages of the controller."""
        self._shard_sockets: dict[str, Any] = {}
        """The sockets to rollout shards, by their addresses."""
        self._cached_tokens: dict[tuple[int, int], Tokens] = {}
        """The tokens of a chunk, by version and number: they are made once, and sent many times."""
        for number in range(num):
            (name,) = directory.glob(f"engine-{number}.*.reports")
            idle_engine = _IdleEngine(self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH))
            idle_engine.orders.bind(f"ipc://{name.with_suffix('.orders')}")
            idle_engine.reports.connect(f"ipc://{name}")
            self._by_socket[idle_engine.orders] = idle_engine
            self._poller.register(idle_engine.orders, zmq.POLLIN)
            self._send(idle_engine, Ready(token=token, pid=os.getpid(), facts={}))

    def serve(self) -> None:
        """Handle the messages of the controller, and sample tokens for all running sequences, until the process that
        started this process has ended."""
        starter = os.getppid()
        busy: dict[_IdleEngine, None] = {}
        while os.getppid() == starter:
            for socket, _ in self._poller.poll(self._ahead_ms() if busy else WAIT_MS):
                idle_engine = self._by_socket[socket]
                for order in self._orders(socket):
                    self._handle(idle_engine, order)
                if idle_engine.tokens_left:
                    busy[idle_engine] = None
            for idle_engine in list(busy) if not self._ahead_ms() else ():
                self._answer(idle_engine)
                if not idle_engine.tokens_left:
                    del busy[idle_engine]

    def _ahead_ms(self) -> int:
        """Return the number of milliseconds until the engines may sample further tokens without exceeding their rate; 0
        if they may sample now."""
        if not self._rate:
            return 0
        now_s = RealClock().now()
        self._begun_s = self._begun_s or now_s
        return max(0, int((self._begun_s + self._sampled / self._rate - now_s) * 1000))

    def _answer(self, idle_engine: _IdleEngine) -> None:
        """Send the next chunk of each running sequence of the engine ``idle_engine`` to the process that requested it,
        the controller or a rollout shard."""
        by_reader: dict[Any, list[TokenChunk]] = {}
        for chunk in self._sample(idle_engine):
            by_reader.setdefault(idle_engine.readers[chunk.request_id], []).append(chunk)
            if chunk.ended:
                del idle_engine.readers[chunk.request_id]
        for socket, chunks in by_reader.items():
            socket.send(self._codec.encode(Chunks(chunks=tuple(chunks), stats=idle_engine.stats(), spans=())))

    def _reader(self, address: str, idle_engine: _IdleEngine) -> Any:
        """Return the socket to the rollout shard that receives chunks at ``address``; if ``address`` is empty, the
        socket of the engine ``idle_engine`` to the controller."""
        if address and address not in self._shard_sockets:
            self._shard_sockets[address] = self._context.socket(zmq.PUSH)
            self._shard_sockets[address].connect(address)
        return self._shard_sockets.get(address, idle_engine.reports)

    def _orders(self, socket: Any) -> Iterator[Any]:
        """Yield the messages of the controller that have arrived at ``socket``, without waiting."""
        while True:
            try:
                yield self._codec.decode(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _handle(self, idle_engine: _IdleEngine, order: Any) -> None:
        """Handle ``order``, a message of the controller to the engine ``idle_engine``: start sequences, or report that
        weights are staged or committed at once."""
        match order:
            case engine.Generate(requests=requests):
                # the message of an earlier version of the package has no field answers_to
                reader = self._reader(msgspec.structs.asdict(order).get("answers_to", ""), idle_engine)
                for request in requests:
                    idle_engine.readers[request.request_id] = reader
                    idle_engine.tokens_left[request.request_id] = request.sampling.max_new_tokens
            case engine.Stage(call=call, update=update):
                self._send(idle_engine, Staged(call=call, version=update.version, seconds=0.0))
            case engine.Commit(call=call, version=version, mode=mode):
                idle_engine.version = version
                num_running = len(idle_engine.tokens_left)
                report = SwapReport(version=version, gap_s=0.0, carried_over=num_running, restarted=0, mode=mode)
                self._send(idle_engine, Committed(call=call, report=report))

    def _sample(self, idle_engine: _IdleEngine) -> Iterator[TokenChunk]:
        """Yield the next chunk of each sequence that the engine samples at present."""
        for request_id, left in list(itertools.islice(idle_engine.tokens_left.items(), self._slots)):
            size = min(left, self._flush)
            idle_engine.generated += size
            self._sampled += size
            idle_engine.tokens_left[request_id] -= size
            stop = StopReason.LENGTH if size == left else None
            if stop is not None:
                del idle_engine.tokens_left[request_id]
            chunk = TokenChunk(request_id=request_id, tokens=self._tokens(idle_engine.version, size), stop_reason=stop)
            yield chunk if self._store is None else self._store.chunk(chunk)

    def _tokens(self, version: int, size: int) -> Tokens:
        """Return ``size`` arbitrary tokens, sampled by weights of ``version``, from a cache."""
        found = self._cached_tokens.get((version, size))
        if found is None:
            found = self._cached_tokens[version, size] = Tokens(
                ids_T=np.arange(size, dtype=np.int32) % 97,
                logprobs_T=np.full(size, -1.0, np.float32),
                versions_T=np.full(size, version, np.int32),
                routing=self._routing(size) if self._layers else None,
            )
        return found

    def _routing(self, size: int) -> Routing:
        """Return arbitrary experts for ``size`` tokens in every layer (shape legend: R tokens, L layers, K experts)."""
        experts_RLK = np.arange(size * self._layers * EXPERTS, dtype=np.int64).astype(np.uint8)
        return Routing(known_T=np.ones(size, bool), experts_RLK=experts_RLK.reshape(size, self._layers, EXPERTS))

    def _send(self, idle_engine: _IdleEngine, message: Any) -> None:
        """Send ``message`` from the engine ``idle_engine`` to the controller."""
        idle_engine.reports.send(self._codec.encode(message))


if __name__ == "__main__":
    _num, _flush, _layers, _slots, _rate = (int(argument) for argument in sys.argv[2:])
    _token = sys.stdin.readline().strip()
    IdleEngines(Path(sys.argv[1]), _num, _token, flush=_flush, layers=_layers, slots=_slots, rate=_rate).serve()
