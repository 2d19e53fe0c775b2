"""The supervisor of a run's engines: it starts and watches them, and restarts an engine that has died, as long as the
number of restarts allows it.

    start ──▶ loading ──ready──▶ joins the fleet ──the newest weights──▶ serves
      ▲                                                                     │ it dies; or it is silent and is killed
      ├─────────── within launch.engine_restarts ───────────────────────────┘ beyond: the run ends, resumable
      └──▶ cannot be started again ──▶ lost, or the run ends

An engine is *silent* if it has sequences and sends nothing, or if it is stopped (SIGSTOP, a debugger) and has not
answered an order. It is killed after ``launch.engine_silence_s`` seconds of silence.

The sequences of a dead engine continue on other engines, or wait for its restart. The learner is not affected. An
engine that is alive but does not receive new weights is not restarted: it finishes its sequences, and serves again
after it has received a later version.

Engines can be added and removed during the run (:mod:`headrace.launch.resizing` chooses them):

    add ──▶ loading ──▶ joins the fleet ──the newest weights──▶ serves     if it ends before, it is removed again, and
                                                                           it is ended if it is late with either
    remove ──▶ gets no new sequences, and finishes its own ──▶ shuts down  after a time, others continue the rest

An engine that cannot be started again, whether the run began with it or it was added, is lost: the run continues as
long as it has another engine that is not being removed and has served, even if that one is being started again, and
ends otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from headrace.base.clock import Clock
from headrace.base.types.observation import Recovery
from headrace.base.types.weights import Interrupt
from headrace.engine.fleet import Fleet
from headrace.engine.fleet.member import TICK_S
from headrace.launch.child import Child
from headrace.launch.clients import EngineClient
from headrace.launch.supervision import Outage, SupervisionConfig, Supervisor

DRAIN_TICK_S = 0.1
"""Seconds between two checks whether an engine that is being removed has ended its sequences."""
DEATH_KNOWN_S = 3.0
"""Seconds after which it is certain whether an engine that did not receive weights is dead."""


def engine_names(count: int) -> tuple[str, ...]:
    """Return the names of a run's ``count`` engines. They are also the names of the engines' log files.

    >>> engine_names(1), engine_names(2)
    (('engine',), ('engine-0', 'engine-1'))
    """
    return ("engine",) if count == 1 else tuple(f"engine-{index}" for index in range(count))


class Engines(Supervisor):
    """The supervisor of the engine processes ``names`` of a run. ``start`` starts the process with a given name. The
    rest of the controller uses all engines together through :attr:`fleet`."""

    def __init__(
        self, start: Callable[[str], Awaitable[Child]], names: Sequence[str], config: SupervisionConfig, clock: Clock
    ) -> None:
        """Create the supervisor without starting a process. :class:`~headrace.launch.supervision.Supervisor` describes
        the arguments."""
        super().__init__(start, names, config, clock)
        # also without restarts, where the end of an engine ends the run: an added engine may end before it serves
        self.fleet = Fleet(clock, size=len(self.names), rolling=config.rolling, end=self.request_kill)
        self.learner_owes: Callable[[], bool] | None = None
        """Returns whether the learner has orders that it has not answered yet: it makes a step, or sends weights. An
        added engine waits for its weights meanwhile. It must be set before engines are added."""

    async def watch(self) -> None:
        """Kill engines that have sequences and are silent for too long. This ends only by cancellation."""
        await self.fleet.watch(self._config.silence_s)

    async def wait_until_complete(self) -> None:
        """Wait until every engine has joined the fleet."""
        await self.fleet.wait_until_complete()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which the present engines receive weights from a learner; empty if the engines fetch
        weights themselves."""
        return self.fleet.addresses(self.fleet.names)

    def addresses_without(self, version: int) -> tuple[str, ...]:
        """Return the weight addresses of the engines that have not staged ``version``."""
        return self.fleet.addresses(self.fleet.engines_without(version))

    def engines_in_step(self) -> dict[str, str]:
        """Return the engines to which the learner may announce its next version directly, because they use the newest
        version. Keys are the addresses at which the engines receive orders on this machine; values are the addresses at
        which they receive weights. Engines on other machines are omitted."""
        peers = [self.client(name) for name in self.fleet.engines_in_step()]
        return {peer.orders_address: peer.weights_address for peer in peers if peer.orders_address}

    def commit_when_staged(self, mode: Interrupt) -> Interrupt | None:
        """Return ``mode`` if the present engines may commit a version in it as soon as each has staged it; ``None`` if
        the controller orders the commits."""
        return mode if self.fleet.commits_when_staged(mode) else None

    def client(self, name: str) -> EngineClient:
        """Return the client of the current process of the engine ``name``."""
        peer = self.children[name].peer
        assert isinstance(peer, EngineClient)
        return peer

    async def serve(self, child: Child, outage: Outage | None) -> None:
        """Add the engine of the new process ``child`` to the fleet. Then report each time the engine misses a version
        and each time it serves again. ``outage`` is the outage that ends when it serves; ``None`` at the first
        start."""
        engine = self.client(child.role)
        self.fleet.add(child.role, engine, version=self._config.version, address=engine.weights_address)
        if child.role in self._additions:
            if problem := await self._await_first_weights(child.role):
                self.request_kill(child.role, f"{child.role} (pid {child.pid}) {problem}")
                return
            self._count_serving(child.role)
        while True:
            reason, since_s = await self.fleet.wait_until_settled(child.role), self.clock.now()
            if reason:
                await asyncio.sleep(DEATH_KNOWN_S)  # otherwise a dead engine would be reported as alive
                reason = await self.fleet.wait_until_settled(child.role)
            if reason:
                outage = self._record_missed_version(child.role, reason, since_s, outage)
                await self.fleet.wait_until_serving(child.role)
            self._count_serving(child.role)
            if outage is not None:
                self.report_recovery(child.role, outage)
                outage = None
            await self.fleet.wait_until_missed(child.role)

    def stop_using(self, name: str) -> int:
        """Remove the engine ``name`` from the fleet, and return the number of sequences that it had."""
        return self.fleet.remove(name)

    @property
    def serving(self) -> tuple[str, ...]:
        """The names of the engines that receive new requests now."""
        return tuple(name for name in self.names if self.fleet.serves(name))

    @property
    def num_lasting(self) -> int:
        """The number of engines that the run has, without those that were added and have not served yet."""
        return len(self.names) - len(self._additions)

    def can_spare(self, name: str) -> bool:
        """Return whether the run has another engine that has served and is not being removed, so that it can go on
        without the engine ``name``."""
        # an engine that is being restarted counts, too: if it finds no place either, this is called for it as well
        return any(other != name and self.will_restart(other) for other in self.names)

    def will_restart(self, name: str) -> bool:
        """Return whether the engine ``name`` is started again if it dies: it has served, and is not being removed."""
        return name not in self._additions and name not in self._removals

    def status(self, name: str) -> str:
        """Return the state of the engine ``name`` in one word: ``starting``, ``serving``, ``waiting`` (for new
        weights) or ``leaving``."""
        if name in self._removals:
            return "leaving"
        if name not in self.fleet.names:
            return "starting"
        return "serving" if self.fleet.serves(name) else "waiting"

    def begin_removal(self, name: str) -> asyncio.Future[int]:
        """Stop sending requests to the engine ``name``, and do not start it again when it ends. Return a future that is
        done when the engine has ended. Its result is the number of sequences of the engine that continue on other
        engines."""
        self.fleet.retire(name)
        return super().begin_removal(name)

    async def end_removal(self, name: str, ended: asyncio.Future[int], drain_s: float) -> int:
        """Wait until the engine ``name`` has finished its sequences, at most ``drain_s`` seconds; then shut its process
        down, and wait for its end. ``ended`` is the future that :meth:`begin_removal` has returned for the engine.
        Return the number of its sequences that continue on other engines."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._drain(name)
        if not ended.done():
            self.request_kill(name, f"{name} was removed", "add another one")  # as its addition may still wait
        return await ended

    async def _await_first_weights(self, name: str) -> str:
        """Wait until the added engine ``name``, which has loaded its model, serves. Return why it does not, in words
        that follow its name: for ``start_timeout_s`` seconds versions did not reach it, or neither the learner nor an
        engine owed an answer. Waiting for an answer has a deadline of its own. Empty if it serves."""
        assert self.learner_owes is not None, "engines are added where there is a learner"
        limit_s, silent_s, missed_s = self._config.start_timeout_s, 0.0, 0.0
        while max(silent_s, missed_s) < limit_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.fleet.wait_until_serving(name)
                return ""
            # the learner sends weights after its step; a version is used by all engines before the next engine gets it
            is_due = self.learner_owes() or any(self.client(each).awaits_answer for each in self.fleet.names)
            silent_s = 0.0 if is_due else silent_s + TICK_S
            missed_s += TICK_S if self.fleet.miss_reason(name) else 0.0
        if reason := self.fleet.miss_reason(name):
            return f"gets no weights: {reason}"
        silence = f"for {limit_s:g} s nothing showed that any were on their way"
        return f"has loaded its model, and got no weights: {silence}"

    async def _drain(self, name: str) -> None:
        """Wait until the engine ``name`` has no sequences, or has left the fleet."""
        while True:
            if name not in self.fleet.names or not self.fleet.load(name):
                return
            await asyncio.sleep(DRAIN_TICK_S)

    def _count_serving(self, name: str) -> None:
        """Record that the engine ``name`` serves. From now on, an added engine counts in the size of the fleet."""
        self._record_serving(name)
        self._update_fleet_size()

    def _forget(self, name: str, carried_over: int = 0) -> None:
        """Remove all records of the engine ``name``, which has ended and is not started again."""
        super()._forget(name, carried_over)
        self._update_fleet_size()

    def _update_fleet_size(self) -> None:
        """Set the size of the fleet to the number of engines. Added engines count as soon as they serve."""
        self.fleet.resize(self.num_lasting)

    def _record_missed_version(self, name: str, reason: str, since_s: float, outage: Outage | None) -> Outage:
        """Report that the engine ``name`` has not received new weights since ``since_s``, for the reason ``reason``.
        Return the current ``outage``, or a new one if ``outage`` is ``None``."""
        cause, load = f"{name} gets no new weights: {reason}", self.fleet.load(name)
        self.report(Recovery(part=name, cause=cause, seconds=None, carried_over=load, lives=True))
        return outage or Outage(cause=cause, since_s=since_s, carried_over=load)
