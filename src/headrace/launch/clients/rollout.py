"""The client of a rollout shard, a process that runs episodes for the controller. The controller sends orders to run
episodes, and the shard sends the episodes back when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace.base.types.episode import EpisodeGraph, TokenChunk
from headrace.base.types.messages.controller import EpisodesEnded, Noted, TurnsGrown, WorkerSeen, WorkersSeen
from headrace.base.types.messages.rollout import EndCall, StartEpisodes
from headrace.launch.channel import ControllerChannel, answers_address
from headrace.launch.clients.peer import Peer

Ended = Sequence[EpisodeGraph]
"""Episodes that have ended together. An empty sequence means that the shard has died."""


class RolloutClient(Peer):
    """The client of one rollout shard. The supervisor of the shards sets the callbacks for messages that the shard
    sends without an order."""

    def __init__(self, name: str, channel: ControllerChannel, *, token: str) -> None:
        """Create the client of the shard ``name`` over ``channel``. ``token`` is the run's secret."""
        super().__init__(name, channel, token=token, on_spans=lambda _: None)
        self.answers_address = answers_address(channel.addresses)
        """The address at which the shard receives the answers of engines."""
        self.on_parts: Callable[[Sequence[TokenChunk]], None] = lambda _: None
        """Called with the tokens of running turns that have to be recorded."""
        self.on_note: Callable[[str], None] = lambda _: None
        """Called with short texts about unusual events."""
        self.workers: tuple[WorkerSeen, ...] = ()
        """The environment workers of the shard."""
        self._calls: dict[int, asyncio.Queue[Ended]] = {}
        """The queue in which the ended episodes of each running order arrive, by the number of the order."""
        self._lost = False
        """Whether the shard has died."""

    @property
    def awaits_answer(self) -> bool:
        """Whether episodes are running in the shard."""
        return bool(self._calls)

    def send(self, message: Any) -> None:
        """Send an order without waiting. An order to a dead shard is dropped."""
        if not self._lost:
            super().send(message)

    def begin(self, order: StartEpisodes) -> asyncio.Queue[Ended]:
        """Send the order to run episodes, and return the queue in which the episodes arrive when they have ended. If
        the shard dies, an empty entry follows. The caller must call :meth:`forget` afterwards."""
        queue = self._calls[order.call] = asyncio.Queue(maxsize=len(order.places) + 1)
        if self._lost:
            queue.put_nowait(())
        self.send(order)
        return queue

    def forget(self, order: StartEpisodes, *, ended: bool) -> None:
        """Stop expecting episodes of ``order``. Unless all of them have ``ended``, the shard cancels the remaining
        episodes."""
        del self._calls[order.call]
        if not ended:
            self.send(EndCall(call=order.call))

    def lose(self) -> int:
        """Notify all tasks that wait for episodes that the shard has died, and return the number of its orders."""
        self._lost = True
        for queue in self._calls.values():
            queue.put_nowait(())
        return len(self._calls)

    def handle(self, message: Any) -> None:
        """Handle a report of the shard. Episodes of an order that is not expected any more are dropped."""
        match message:
            case EpisodesEnded(call=call, episodes=episodes):
                if call in self._calls:
                    self._calls[call].put_nowait(episodes)
            case TurnsGrown(parts=parts):
                self.on_parts(parts)
            case Noted(text=text):
                self.on_note(text)
            case WorkersSeen(workers=workers):
                self.workers = workers
            case _:
                super().handle(message)
