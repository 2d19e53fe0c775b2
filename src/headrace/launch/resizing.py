"""Changes of the number of engines during a run: the engines to add, with their devices, and the engines to remove.

    add N     refused, or N names and devices ──▶ each engine loads, takes the newest weights, and serves
    remove    refused, or names ──▶ each engine ends its sequences, and then its process

Changes choose their engines and devices sequentially, so that two changes never choose the same engine or device; the
chosen engines are then started or removed at the same time. An added engine is treated as every other engine as soon as
it serves: it is started again if it dies. An engine that cannot be started again is lost, whether the run began with it
or it was added, as long as the run has another engine that is not being removed and has served. The new number is valid
until the processes of the run end: a resumed run begins with ``engine.count`` engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.base.environ import num_cores
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.types.messages.program import EngineStatus
from headrace.base.types.observation import Event
from headrace.base.types.versions import NOT_SAMPLED
from headrace.launch.config import LAUNCHERS
from headrace.launch.engines import Engines
from headrace.launch.order import OnEngineChange, OnProgress
from headrace.launch.processes import Processes
from headrace.launch.supervision import describe_loss
from headrace.models.devices import CPU


class FleetResizer:
    """The object that changes the number of a run's engines while the processes of the run live. It implements
    :class:`~headrace.launch.order.EngineChanges`."""

    def __init__(self, processes: Processes, engines: Engines) -> None:
        """Change ``engines``, the engines of the policy. Their processes are among ``processes``."""
        self._processes, self._engines = processes, engines
        self._clock = engines.clock
        self._on_change: OnEngineChange = self._report_during_start
        """The callback that receives a sentence about every change."""
        self._choosing = asyncio.Lock()
        """Held while engines to add are chosen and room for them is sought, so that the next change counts them."""
        self._lost: dict[str, None] = {}
        """The names of the engines that were lost and have not been added again, in order."""
        engines.send_losses_to(self._lose)

    def send_changes_to(self, on_change: OnEngineChange) -> None:
        """Call ``on_change`` with one sentence about every later change, for the log of the run."""
        self._on_change = on_change

    @property
    def num_engines(self) -> int:
        """The number of engines of the policy, without those that are being added."""
        return self._engines.num_lasting

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the status of every engine of the policy, and of the engines that were lost."""
        present = self._processes.places.policy
        lost = [name for name in self._lost if name not in present]
        return (*map(self._get_status, present), *map(self._make_lost_status, lost))

    async def add(self, num: int, on_progress: OnProgress) -> tuple[str, ...]:
        """Add ``num`` engines, and wait until all of them serve; see :meth:`EngineChanges.add
        <headrace.launch.order.EngineChanges.add>`."""
        self._refuse_if_fixed()
        async with self._choosing:
            self._processes.places.refuse_too_many(num)
            await self._refuse_no_room(num)
            names = self._processes.places.add(num)
        verb = "starts" if len(names) == 1 else "start"
        on_progress(f"{', '.join(names)} {verb} on {self._describe_devices(names)}")
        outcomes = await asyncio.gather(*(self._add(name, on_progress) for name in names), return_exceptions=True)
        self._raise_first(names, outcomes)
        return names

    async def remove(self, name: str, num: int, drain_s: float, on_progress: OnProgress) -> tuple[str, ...]:
        """Remove engines, and wait until their processes have ended; see :meth:`EngineChanges.remove
        <headrace.launch.order.EngineChanges.remove>`."""
        self._refuse_if_fixed()
        names = self._choose_removed(name, num)
        for each in names:
            on_progress(f"{each} gets no new requests, and ends its {self._get_status(each).sequences} sequences")
        have_served = [self._engines.will_restart(each) for each in names]  # before they begin to leave
        ends = [self._engines.begin_removal(each) for each in names]  # now, so that no other change relies on them
        removals = [
            self._remove(each, ended, drain_s, on_progress, has_served=has_served)
            for each, ended, has_served in zip(names, ends, have_served, strict=True)
        ]
        await asyncio.gather(*removals)
        return names

    # -- one engine -------------------------------------------------------------------------------------------------

    async def _add(self, name: str, on_progress: OnProgress) -> None:
        """Start the engine ``name``, which already has a device, and wait until it serves."""
        start_s, index = self._clock.now(), self._processes.places.index(name)
        try:
            await self._engines.add(name)
        except BaseException as error:
            self._processes.places.remove(index)
            self._processes.forget_ended()
            if isinstance(error, HeadraceError):
                brief = error.problem.partition("\n")[0]
                self._report(f"{name} was not added: {brief}", on_progress, changed=False)
            raise
        self._lost.pop(name, None)
        seconds = self._clock.now() - start_s
        state = f"{self._describe_number()}{self._describe_cores()}"
        self._report(f"{name} was added: it serves after {seconds:.1f} s; {state}", on_progress)

    async def _remove(
        self, name: str, ended: asyncio.Future[int], drain_s: float, on_progress: OnProgress, *, has_served: bool
    ) -> None:
        """Complete the removal of the engine ``name``, which may sample for ``drain_s`` more seconds. ``ended`` is done
        when its process has ended. ``has_served`` is false if the engine was still being added when its removal began:
        then the run has the engines that it had before the addition."""
        index = self._processes.places.index(name)
        carried_over = await self._engines.end_removal(name, ended, drain_s)
        self._processes.places.remove(index)
        self._processes.forget_ended()
        continued = f"; {carried_over} of its sequences continue on other engines" if carried_over else ""
        self._report(f"{name} was removed{continued}; {self._describe_number()}", on_progress, changed=has_served)

    def _lose(self, name: str, error: HeadraceError) -> None:
        """Free the place of the engine ``name``, which could not be started again because of ``error``."""
        self._lost[name] = None
        self._processes.places.remove(self._processes.places.index(name))
        self._processes.forget_ended()
        self._on_change(f"{describe_loss(name, error)}; {self._describe_number()}", lost=True)

    def _report_during_start(self, text: str, *, changed: bool = True, lost: bool = False) -> None:
        """Report a change before the run has a log, as an event without a time."""
        del changed
        self._processes.order.on_event(Event(wall_s=0.0, text=text, level="warning" if lost else "info"))

    def _report(self, text: str, on_progress: OnProgress, *, changed: bool = True) -> None:
        """Report the end of a change to the log of the run, and to the program that requested the change. ``changed``
        is false if the run has the engines that it had before."""
        self._on_change(text, changed=changed)
        on_progress(text)

    # -- refusals ---------------------------------------------------------------------------------------------------

    def _refuse_if_fixed(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the engines of this run cannot be changed."""
        order = self._processes.order
        if order.recorded is not None:
            raise ConfigError(
                "this run is a replay, whose engine repeats a recording", remedy="let it end, or start a run of its own"
            )
        if order.engine.server.is_fixed:
            raise ConfigError(
                "engine.server.urls names the servers of this run, which the run has not started",
                remedy="stop the run (Ctrl-C), and --resume with other engine.server.urls and engine.count",
            )
        if order.launch.lend_cores:
            raise ConfigError(
                "launch.lend_cores=true: the cores are divided between the engines when the run starts",
                remedy="stop the run (Ctrl-C), and --resume with another engine.count, or without launch.lend_cores",
            )

    async def _refuse_no_room(self, num: int) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if ``num`` more engines cannot be started."""
        order, present = self._processes.order, len(self._processes.places.policy)
        refuse_no_room = LAUNCHERS.load(order.launch.kind).refuse_no_room
        if refuse_no_room is None:
            raise ConfigError(
                f"launch.kind={order.launch.kind!r} starts engines only when a run starts",
                remedy="stop the run (Ctrl-C), and --resume with another engine.count",
            )
        try:
            order.engine.server.refuse_run(
                count=present + num, width=order.engine.width, start_timeout_s=order.launch.start_timeout_s
            )
        except ConfigError as error:
            raise ConfigError(
                f"the run has {present} engines, and {num} more cannot be added: {error.problem}", remedy=error.remedy
            ) from None
        waiting = tuple(name for name in self._processes.places.policy if self._awaits_process(name))
        await refuse_no_room(self._processes.starter, (*waiting, *self._processes.places.free_names(num)))

    def _awaits_process(self, name: str) -> bool:
        """Return whether the engine ``name`` is being added or started again, and has no process yet. It may still wait
        for the room that is free now."""
        child = self._engines.children.get(name)
        has_process = child is not None and child.state != "ended"
        return not has_process and self._engines.status(name) != "leaving"

    def _choose_removed(self, name: str, num: int) -> tuple[str, ...]:
        """Return the names of the engines to remove: ``name`` or, if ``name`` is empty, the last ``num`` engines.
        Raises :class:`~headrace.base.errors.ConfigError` if they cannot be removed."""
        present = self._processes.places.policy
        known = self._engines.names  # without those whose process is just being started, or has just ended
        stay = [each for each in present if each in known and self._engines.status(each) != "leaving"]
        if name and name not in present:
            is_known = name in self._processes.places.names
            problem = "is the engine of an agent or a teacher" if is_known else "is not an engine of this run"
            raise ConfigError(f"{name} {problem}", remedy=f"name one of {', '.join(present)}")
        if name and name not in stay:
            raise ConfigError(f"{name} is being removed or added already", remedy="wait until that is done")
        names = (name,) if name else tuple(stay[len(stay) - num :] if num <= len(stay) else stay)
        stay = [each for each in stay if each not in names]
        serving, lasting = set(self._engines.serving), [each for each in stay if self._engines.will_restart(each)]
        if not lasting or num > len(names) or (serving & set(names) and not serving & set(stay)):
            left = ", ".join(f"{each} is {self._engines.status(each)}" for each in stay)
            raise ConfigError(
                f"{', '.join(names)} cannot be removed: no other engine would serve" + (f"; {left}" if left else ""),
                remedy="wait until another engine serves, or add one first (headrace engines RUN add)",
            )
        return names

    # -- in words ---------------------------------------------------------------------------------------------------

    def _get_status(self, name: str) -> EngineStatus:
        """Return the status of the engine ``name``."""
        child, state = self._engines.children.get(name), self._engines.status(name)
        if child is not None and child.state == "ended":  # another process is about to take its place
            child, state = None, state if state == "leaving" else "starting"
        facts = {} if child is None else self._processes.get_facts().get(name, {})
        ready = child is not None and child.state == "ready"
        return EngineStatus(
            name=name,
            pid=0 if child is None else child.pid,
            state=state if child is None or ready else child.state,
            version=self._engines.client(name).stats().version if ready else -1,
            device=self._processes.places.device(name),
            threads=int(facts["threads"]) if "threads" in facts else None,
            sequences=self._engines.fleet.load(name) if name in self._engines.fleet.names else 0,
            restarts=self._engines.restarts[name],
            node="" if child is None else child.node,
        )

    def _make_lost_status(self, name: str) -> EngineStatus:
        """Return the status of the engine ``name``, which was lost."""
        return EngineStatus(
            name=name,
            pid=0,
            state="lost",
            version=NOT_SAMPLED,
            device="",
            threads=None,
            sequences=0,
            restarts=0,
            node="",
        )

    def _describe_number(self) -> str:
        """Return a sentence with the number of engines that serve."""
        num = len(self._engines.serving)
        return f"{num} engine{'' if num == 1 else 's'} serve{'s' if num == 1 else ''}"

    def _describe_devices(self, names: Sequence[str]) -> str:
        """Return a list, as text, of the devices of the engines ``names``."""
        return ", ".join(dict.fromkeys(map(self._processes.places.device, names)))

    def _describe_cores(self) -> str:
        """Return the text that says with how many cores each engine and the learner compute, to be appended to a
        sentence. It is empty if no engine computes on the processors of this machine. A running engine keeps its number
        of cores."""
        places = self._processes.places
        if self._processes.order.launch.remote or CPU not in map(places.device, places.policy):
            return ""
        facts = self._processes.get_facts()
        parts = [name for name in (*places.policy, "learner") if "threads" in facts.get(name, {})]
        cores = ", ".join(f"{name} {facts[name]['threads']}" for name in parts)
        return f" (cores: {cores}, of {num_cores()})"

    def _raise_first(self, names: Sequence[str], outcomes: Sequence[BaseException | None]) -> None:
        """Raise the first error among the ``outcomes`` of the engines ``names``, if there is one. A
        :class:`~headrace.base.errors.HeadraceError` is raised as a new error, which also names the engines that were
        added."""
        failed = {name: error for name, error in zip(names, outcomes, strict=True) if error is not None}
        if not failed:
            return
        error = next(iter(failed.values()))
        if not isinstance(error, HeadraceError):
            raise error
        added = [each for each in names if each not in failed]
        successes = f"; {', '.join(added)} {'serves' if len(added) == 1 else 'serve'}" if added else ""
        verb = "was" if len(failed) == 1 else "were"
        raise ConfigError(f"{', '.join(failed)} {verb} not added{successes}: {error.problem}", remedy=error.remedy)
