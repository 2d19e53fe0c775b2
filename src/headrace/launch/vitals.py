"""Signs of life of the processes of a run: which of them is stopped, hangs, or takes far longer than usual is told by
name, long before somebody who waits for it gives up.

    every process           is it, or one that it has started, stopped by a signal or a debugger? The system knows.
    a learner, each rank    does it go on? It says once a second which unit of work it is at (a micro-batch, an update,
                            a copy of the weights), and how long such units take; and the system knows whether its
                            process computes, reads or writes.

A step has no honest bound, so a learner that computes is never ended for being slow. One that neither ends a unit nor
computes, reads or writes gives no sign of work, and where nothing else moves either the stall watchdog ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from headrace.base.clock import Clock, off_loop
from headrace.control.board import OWN_STANDSTILL_S, Standstill
from headrace.launch.child import Child
from headrace.launch.clients import RankClient
from headrace.launch.here import halted_below

LOOK_S = 1.0
"""How often the processes are looked at, at most."""
LATEST_LOOK_S = 5.0
"""The same, at least; or an eighth of ``run.stall_timeout_s``, where that is less."""
LOOK_SHARE = 0.02
"""Within these bounds looking takes at most this share of the time: a machine may have thousands of processes."""
FAR_LOOK_S = 5.0
"""How often those of other machines are looked at, each by a message."""
STOPPED_S = 3.0
"""A process that is stopped for less is not worth a line."""
SHARE = 0.5
"""What is wrong for this share of ``run.stall_timeout_s`` is told."""
FAR = 10.0
"""So many times as long as units of its kind usually take is far longer than usual."""
FIRST = 4.0
"""The same for the first unit of a kind, which may compile, in times of ``run.stall_timeout_s``."""
COMPUTES = 0.2
"""A process that computes uses, or waits for, at least this share of one core; its heartbeat alone much less."""


class Tell(Protocol):
    """Where what is found goes."""

    def __call__(self, text: str, *, kind: str = "") -> None:
        """``kind``: what warnings that differ in their figures alone have in common; empty for good news."""
        ...


@dataclass(slots=True, eq=False)
class _Case:
    """What is known of one process."""

    words: str = ""
    """What keeps it from going on; empty where nothing does."""
    since_s: float = 0.0
    """When that was seen first, on the clock."""
    told: bool = False


@dataclass(slots=True, eq=False)
class _Work:
    """What is known of a learner's work."""

    num_units: int = 0
    used: float = 0.0
    """Seconds computed, and bytes read and written."""
    looked_s: float = 0.0
    busy: bool = False
    """Whether it has something to do."""
    unit_s: float = 0.0
    """When it was seen to end a unit, or to wait for orders."""
    sign_s: float = 0.0
    """When it gave its last sign of work."""
    told: str = ""
    """The unit about which something was told; empty: nothing was."""
    stands: str = ""
    """What is wrong with it, in words, where it gives no sign of work."""


@dataclass(slots=True, eq=False, kw_only=True)
class Vitals:
    """Looks at the processes of one run."""

    children: Callable[[], Sequence[Child]]
    timeout_s: float
    """``run.stall_timeout_s``: what is wrong is told before it has passed."""
    clock: Clock
    tell: Tell
    others: Callable[[], dict[str, int]] = dict
    """Processes of this machine beside the children, by name: their pids."""
    num_signs: int = 0
    """Signs of work that learners have given."""
    _cases: dict[tuple[str, int], _Case] = field(default_factory=dict)
    _works: dict[Child, _Work] = field(default_factory=dict)
    _far_s: float = float("-inf")

    def standing(self) -> list[Standstill]:
        """The processes that do not go on."""
        stopped = [
            Standstill(words=self._in_words(name, pid, case), stopped=True)
            for (name, pid), case in self._cases.items()
        ]  # fmt: skip
        return stopped + [Standstill(words=work.stands, stopped=False) for work in self._works.values() if work.stands]

    def send_to(self, tell: Tell) -> None:
        """From now on, tell ``tell`` what is found."""
        self.tell = tell

    async def watch(self) -> None:
        """Look at them again and again; ends only by cancellation."""
        while True:
            begun_s = self.clock.now()
            children = [child for child in self.children() if child.state != "ended"]
            await self._see_stopped(children)
            await self._see_work([child for child in children if isinstance(child.peer, RankClient)])
            took_s = self.clock.now() - begun_s
            nap_s = min(max(LOOK_S, took_s / LOOK_SHARE), LATEST_LOOK_S, self.timeout_s / 8)
            asleep_s = self.clock.now()
            await asyncio.sleep(nap_s)
            late_s = self.clock.now() - asleep_s - nap_s
            if late_s > OWN_STANDSTILL_S:  # nobody was heard meanwhile
                self._forgive(late_s)

    def _forgive(self, late_s: float) -> None:
        """This process itself stood still for that long: it counts against nobody."""
        for child, work in self._works.items():
            assert isinstance(child.peer, RankClient)
            child.peer.heard_s += late_s
            work.looked_s, work.unit_s, work.sign_s = (
                at_s + late_s for at_s in (work.looked_s, work.unit_s, work.sign_s)
            )

    # -- stopped ----------------------------------------------------------------------------------------------------

    async def _see_stopped(self, children: Sequence[Child]) -> None:
        near = [child for child in children if not child.node]
        others = self.others()
        halted = await off_loop(_halted, near, others.values()) if near or others else {}
        for child in near:
            child.peer.halted = halted.get(child.working_pid) or halted.get(child.pid, "")
        found = {(name, pid): halted[pid] for name, pid in others.items() if pid in halted}
        far = [child for child in children if child.node]
        if far and self.clock.now() - self._far_s >= FAR_LOOK_S:
            self._far_s = self.clock.now()
            for child, words in zip(far, await asyncio.gather(*(child.halted() for child in far)), strict=True):
                child.peer.halted = words
        found |= {(child.role, child.pid): child.peer.halted for child in children if child.peer.halted}
        self._note(found, {*((child.role, child.pid) for child in children), *others.items()})

    def _note(self, found: dict[tuple[str, int], str], alive: Container[tuple[str, int]]) -> None:
        now_s = self.clock.now()
        for (name, pid), case in list(self._cases.items()):
            if (name, pid) not in found:
                del self._cases[name, pid]
                if case.told:
                    now = "goes on" if (name, pid) in alive else "has ended"
                    self.tell(f"{name} (pid {pid}) was stopped for {now_s - case.since_s:.0f} s, and {now}")
        for who, words in found.items():
            case = self._cases.setdefault(who, _Case(words=words, since_s=now_s))
            if not case.told and now_s - case.since_s >= min(STOPPED_S, SHARE * self.timeout_s):
                case.told = True
                self.tell(
                    f"{self._in_words(*who, case)}: it does nothing until it continues", kind=f"{who[0]} is stopped"
                )

    def _in_words(self, name: str, pid: int, case: _Case) -> str:
        return f"{name} (pid {pid}) {case.words}, for {self.clock.now() - case.since_s:.0f} s"

    # -- at work ----------------------------------------------------------------------------------------------------

    async def _see_work(self, ranks: Sequence[Child]) -> None:
        """Count the signs of work of a learner's ranks, and tell what is wrong with them."""
        self._works = {child: work for child, work in self._works.items() if child in ranks}
        for child in ranks:
            await self._look(child)
        now_s = self.clock.now()
        hangs = all(now_s - work.sign_s >= self._soon_s for work in self._works.values())
        for child, work in self._works.items():  # while one works, or is stopped, the others wait for it
            self._judge(child, work, hangs=hangs)

    async def _look(self, child: Child) -> None:
        peer, now_s = child.peer, self.clock.now()
        assert isinstance(peer, RankClient)
        if peer.working is None:  # it is not ready, or has just become so
            return
        said, used = peer.working, await self._used(child)
        work = self._works.setdefault(child, _Work(used=used, looked_s=now_s, unit_s=now_s, sign_s=now_s))
        work.busy = bool(said.what) or (peer.owes and now_s - peer.heard_s > self._soon_s)
        computes = used - work.used > COMPUTES * (now_s - work.looked_s)
        ended = said.num_units != work.num_units
        work.num_units, work.used, work.looked_s = said.num_units, used, now_s
        if work.busy and (ended or computes):
            self.num_signs += 1
        if ended or not work.busy:
            self._goes_on(child, work)
        if peer.halted:  # it is told of as that, and begins anew afterwards
            work.told = ""
        if ended or not work.busy or peer.halted:
            work.unit_s = work.sign_s = now_s
        elif computes:
            work.sign_s = now_s

    @property
    def _soon_s(self) -> float:
        return SHARE * self.timeout_s

    async def _used(self, child: Child) -> float:
        """What the process has used so far: seconds of processors, and bytes of files as if each were a second."""
        used = await child.computed_s()
        if not child.node:
            with contextlib.suppress(psutil.Error, AttributeError):  # it has just ended; no such figures on macOS
                io = psutil.Process(child.pid).io_counters()
                used += io.read_bytes + io.write_bytes
        return used

    def _judge(self, child: Child, work: _Work, *, hangs: bool) -> None:
        """``hangs``: no rank has given a sign of work for long."""
        assert isinstance(child.peer, RankClient)
        said, now_s = child.peer.working, self.clock.now()
        assert said is not None
        unit_s, silent_s = now_s - work.unit_s, now_s - child.peer.heard_s
        usual = f"usually at most {said.usual_s:.1f} s" if said.usual_s else "the first of its kind"
        at = f"{child.role} (pid {child.pid}) is at {said.what or 'an order'} for {unit_s:.0f} s ({usual})"
        if silent_s > self._soon_s:
            at += f", has shown no heartbeat for {silent_s:.0f} s"
        work.stands = ""
        if hangs and work.busy:
            work.stands = f"{at} and neither computes, reads nor writes (its process is {_state(child)})"
        long_s = max(self._soon_s, FAR * said.usual_s if said.usual_s else FIRST * self.timeout_s)
        if work.told or not (work.stands or (work.busy and unit_s >= long_s)):
            return
        work.told = said.what or "an order"
        if work.stands:
            self.tell(
                f"{work.stands}: it hangs, or waits for something outside; where nothing else moves either, "
                f"run.stall_timeout_s={self.timeout_s:g} ends the run; look at logs/{child.role}.log",
                kind=f"{child.role} hangs",
            )
        else:
            self.tell(
                f"{at}, far longer than usual; it computes, so the run waits for it", kind=f"{child.role} is slow"
            )

    def _goes_on(self, child: Child, work: _Work) -> None:
        if work.told:
            self.tell(
                f"{child.role} (pid {child.pid}) goes on: {work.told} took {self.clock.now() - work.unit_s:.0f} s"
            )
        work.told = work.stands = ""


def _halted(near: Sequence[Child], others: Collection[int]) -> dict[int, str]:
    """What keeps processes of this machine from going on, by pid."""
    return halted_below([*others, *(pid for child in near for pid in (child.pid, child.working_pid))])


def _state(child: Child) -> str:
    """What the system says of its process."""
    if child.node:
        return f"on {child.node}"
    try:
        status = psutil.Process(child.pid).status()
    except psutil.Error:
        return "gone"
    return "waiting for a disk or a network file system" if status == psutil.STATUS_DISK_SLEEP else str(status)
