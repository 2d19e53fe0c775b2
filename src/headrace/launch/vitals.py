"""Supervision of processes that are alive but make no progress: processes that are stopped, hang, or are much slower
than usual. Users are warned, with the name of the process, long before the stall watchdog ends the run.

    every process           Has a signal or a debugger stopped it, or a process that it started? The system reports it.
    a learner, each rank    Does it make progress? Once a second it reports its current unit of work (a micro-batch, an
                            update, a copy of the weights) and how long such units take. The system reports whether
                            its process computes, reads or writes.

No time limit is right for all steps, so a learner that computes is never killed because it is slow. A learner that
neither finishes a unit nor computes, reads or writes gives no *sign of work*. If no other part of the run makes
progress either, the stall watchdog ends the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from headrace.base.clock import OWN_STANDSTILL_S, Clock, off_loop
from headrace.base.environ import PROCESS_GONE
from headrace.base.types.observation import Cause
from headrace.base.types.trace import Span
from headrace.control.board import STOPPED_PATIENCE, Standstill
from headrace.launch.child import Child
from headrace.launch.clients import RankClient
from headrace.launch.local_process import describe_halted

CHECK_S = 1.0
"""The shortest time between two checks of the processes, in seconds."""
MAX_CHECK_S = 5.0
"""The longest time between two checks, in seconds, or an eighth of ``run.stall_timeout_s`` if that is shorter."""
CHECK_TIME_SHARE = 0.02
"""The largest fraction of the time that checks use, within these bounds; a machine may have thousands of processes."""
REMOTE_CHECK_S = 5.0
"""Seconds between two checks of the processes on other machines, each of which needs a message."""
WARN_STOPPED_S = 3.0
"""Seconds for which a process must be stopped before users are warned."""
WARN_SHARE = 0.5
"""The fraction of ``run.stall_timeout_s`` after which users are warned."""
SLOW_FACTOR = 10.0
"""A unit of work is far too slow if it takes this many times as long as units of its kind usually take."""
FIRST_UNIT_FACTOR = 4.0
"""The first unit of a kind, which may include compilation, is far too slow after this multiple of
``run.stall_timeout_s``."""
BUSY_SHARE = 0.2
"""A process counts as computing if it uses, or waits for, at least this fraction of one core. Its heartbeat alone needs
much less."""


class SendWarning(Protocol):
    """A function that receives the warnings of :class:`Vitals`."""

    def __call__(self, text: str, *, kind: str, over: bool = False) -> None:
        """Receive a warning. Warnings of the same ``kind`` differ only in their numbers. With ``over``, ``text`` says
        that the cause of the latest warning of this kind has ended."""
        ...


@dataclass(slots=True, eq=False)
class _StopRecord:
    """The record of a process that a signal or a debugger has stopped."""

    words: str = ""
    """The reason why the process is stopped, in words."""
    since_s: float = 0.0
    """The time at which the stop was detected, on the clock."""
    recorded_s: float = 0.0
    """The time up to which the stop is recorded in the event trace."""
    warned: bool = False
    """Whether users have been warned."""


@dataclass(slots=True, eq=False)
class _WorkRecord:
    """The record of the work of one rank of the learner."""

    num_units: int = 0
    """The number of units that the rank had finished at the latest check."""
    used: float = 0.0
    """Seconds of processor time plus bytes read and written, at the latest check."""
    checked_s: float = 0.0
    """The time of the latest check, on the clock."""
    busy: bool = False
    """Whether the rank has work to do."""
    unit_started_s: float = 0.0
    """The time at which the rank was last observed to finish a unit or to wait for orders."""
    last_sign_s: float = 0.0
    """The time of the last sign of work."""
    warned: str = ""
    """The unit about which users were warned; empty if there was no warning."""
    kind: str = ""
    """The kind of that warning, as in :class:`SendWarning`."""
    standstill: str = ""
    """A description of the rank's standstill if it gives no sign of work; empty otherwise."""


@dataclass(slots=True, eq=False, kw_only=True)
class Vitals:
    """The supervision of one run's processes. It checks them at intervals and warns about processes that make no
    progress. It never ends a process."""

    children: Callable[[], Sequence[Child]]
    """Returns the processes of the run."""
    timeout_s: float
    """``run.stall_timeout_s``, in seconds. Warnings are sent before this time has passed."""
    start_timeout_s: float
    """``launch.start_timeout_s``, in seconds: the time limit for the start of a run."""
    clock: Clock
    """The clock that measures all times."""
    warn: SendWarning
    """Receives the warnings."""
    on_span: Callable[[Span], None]
    """Receives the times during which a process was stopped, as spans in the lane ``stopped`` with the process's
    name."""
    other_pids: Callable[[], dict[str, int]] = dict
    """Returns the pids, by name, of processes on this machine that are not among the children."""
    num_work_signs: int = 0
    """Number of signs of work of all ranks of the learner so far."""
    _stops: dict[tuple[str, int], _StopRecord] = field(default_factory=dict)
    """The processes that are stopped, by name and pid."""
    _works: dict[Child, _WorkRecord] = field(default_factory=dict)
    """The work of each rank of the learner."""
    _remote_checked_s: float = float("-inf")
    """The time of the latest check of processes on other machines."""

    def standstills(self) -> list[Standstill]:
        """Return descriptions of the processes that make no progress now: stopped processes, with their last reports,
        and ranks of the learner that neither compute nor read or write. The stall watchdog names them."""
        reports = {(child.role, child.pid): child.peer.last_report() for child in self.children()}
        stopped = [
            Standstill(words="; ".join(filter(None, (self._describe(*key, stop), reports.get(key)))), stopped=True)
            for key, stop in self._stops.items()
        ]
        return stopped + [
            Standstill(words=work.standstill, stopped=False) for work in self._works.values() if work.standstill
        ]

    def stopped(self) -> dict[int, str]:
        """Return what has stopped each process that is stopped now, in words such as ``stopped (SIGSTOP)``, by pid."""
        return {pid: stop.words.removeprefix("is ") for (_, pid), stop in self._stops.items()}

    def send_messages_to(self, warn: SendWarning) -> None:
        """Send all later warnings to ``warn``."""
        self.warn = warn

    async def watch(self) -> None:
        """Check the processes at intervals. This ends only by cancellation."""
        while True:
            start_s = self.clock.now()
            children = [child for child in self.children() if child.state != "ended"]
            await self._check_stopped(children)
            await self._check_work([child for child in children if isinstance(child.peer, RankClient)])
            took_s = self.clock.now() - start_s
            pause_s = min(max(CHECK_S, took_s / CHECK_TIME_SHARE), MAX_CHECK_S, self.timeout_s / 8)
            pause_start_s = self.clock.now()
            await asyncio.sleep(pause_s)
            late_s = self.clock.now() - pause_start_s - pause_s
            if late_s > OWN_STANDSTILL_S:  # the controller received no messages in this time
                self._exclude_own_standstill(late_s)

    def _exclude_own_standstill(self, late_s: float) -> None:
        """Shift all recorded times by the ``late_s`` seconds for which the controller's own process stood still, so
        that no other process is warned about because of them. Warn about the standstill if it was long."""
        now_s = self.clock.now()
        self.on_span(Span(lane=Cause.STOPPED, name=Cause.CONTROLLER, start_s=now_s - late_s, end_s=now_s))
        if late_s >= WARN_STOPPED_S:
            self.warn(
                f"the controller stood still for {late_s:.0f} s: it was stopped (SIGSTOP, Ctrl-Z), or had no processor",
                kind="the controller stood still",
            )
        for child, work in self._works.items():
            assert isinstance(child.peer, RankClient)
            child.peer.heard_s += late_s
            work.checked_s, work.unit_started_s, work.last_sign_s = (
                at_s + late_s for at_s in (work.checked_s, work.unit_started_s, work.last_sign_s)
            )

    # -- stopped ----------------------------------------------------------------------------------------------------

    async def _check_stopped(self, children: Sequence[Child]) -> None:
        """Find processes that a signal or a debugger has stopped, on this machine and, less often, on other machines.
        Store the reason in each child's peer (``halted``), and report them."""
        local = [child for child in children if not child.node]
        other_pids = self.other_pids()
        halted = await off_loop(_find_halted, local, other_pids.values()) if local or other_pids else {}
        for child in local:
            child.peer.halted = halted.get(child.working_pid) or halted.get(child.pid, "")
        stopped = {(name, pid): halted[pid] for name, pid in other_pids.items() if pid in halted}
        remote = [child for child in children if child.node]
        if remote and self.clock.now() - self._remote_checked_s >= REMOTE_CHECK_S:
            self._remote_checked_s = self.clock.now()
            reasons = await asyncio.gather(*(child.halt_reason() for child in remote))
            for child, words in zip(remote, reasons, strict=True):
                child.peer.halted = words
        stopped |= {(child.role, child.pid): child.peer.halted for child in children if child.peer.halted}
        self._report_stopped(stopped, {*((child.role, child.pid) for child in children), *other_pids.items()})

    def _report_stopped(self, stopped: dict[tuple[str, int], str], alive: Container[tuple[str, int]]) -> None:
        """Warn about processes that have been stopped for some time, and report when they continue or end. ``stopped``
        contains the reasons of the stopped processes, by name and pid. ``alive`` contains the names and pids of all
        processes that have not ended."""
        now_s = self.clock.now()
        for (name, pid), stop in list(self._stops.items()):
            if (name, pid) not in stopped:
                del self._stops[name, pid]
                self._record_stop(name, stop)
                if stop.warned:
                    state = "continues" if (name, pid) in alive else "has ended"
                    self.warn(
                        f"{name} (pid {pid}) was stopped for {now_s - stop.since_s:.0f} s, and {state}",
                        kind=_stop_kind(name),
                        over=True,
                    )
        for key, words in stopped.items():
            stop = self._stops.setdefault(key, _StopRecord(words=words, since_s=now_s, recorded_s=now_s))
            self._record_stop(key[0], stop)
            if not stop.warned and now_s - stop.since_s >= min(WARN_STOPPED_S, WARN_SHARE * self.timeout_s):
                stop.warned = True
                self.warn(
                    f"{self._describe(*key, stop)}: it does nothing until it continues; where nothing else moves, the "
                    f"run ends after {STOPPED_PATIENCE * self.timeout_s:g} s, {STOPPED_PATIENCE} times "
                    f"run.stall_timeout_s, and a start after {self.start_timeout_s:g} s, launch.start_timeout_s",
                    kind=_stop_kind(key[0]),
                )

    def _record_stop(self, name: str, stop: _StopRecord) -> None:
        """Record the time for which the process ``name`` was stopped since the last check as a span in the event trace.
        It is recorded at every check, so that the trace is complete even if the run ends while the process is
        stopped."""
        now_s = self.clock.now()
        if now_s > stop.recorded_s:
            self.on_span(Span(lane=Cause.STOPPED, name=name, start_s=stop.recorded_s, end_s=now_s))
            stop.recorded_s = now_s

    def _describe(self, name: str, pid: int, stop: _StopRecord) -> str:
        """Return a description of a stopped process: its name, its pid, the reason, and the duration in seconds."""
        return f"{name} (pid {pid}) {stop.words}, for {self.clock.now() - stop.since_s:.0f} s"

    # -- progress of the learner ------------------------------------------------------------------------------------

    async def _check_work(self, ranks: Sequence[Child]) -> None:
        """Check the work of all ranks of the learner, and report ranks that hang or are far too slow."""
        self._works = {child: work for child, work in self._works.items() if child in ranks}
        for child in ranks:
            await self._observe(child)
        now_s = self.clock.now()
        hangs = all(now_s - work.last_sign_s >= self._warn_after_s for work in self._works.values())
        for child, work in self._works.items():  # while one rank works or is stopped, the others wait for it
            self._report_stuck(child, work, hangs=hangs)

    async def _observe(self, child: Child) -> None:
        """Update the record of a rank's work: whether it is busy, computes and finishes units. The time of its last
        sign of work is set here."""
        peer, now_s = child.peer, self.clock.now()
        assert isinstance(peer, RankClient)
        if peer.working is None:  # not ready, or no heartbeat has arrived yet
            return
        report, used = peer.working, await self._resource_use(child)
        work = self._works.setdefault(
            child, _WorkRecord(used=used, checked_s=now_s, unit_started_s=now_s, last_sign_s=now_s)
        )
        work.busy = bool(report.what) or (peer.awaits_answer and now_s - peer.heard_s > self._warn_after_s)
        computes = used - work.used > BUSY_SHARE * (now_s - work.checked_s)
        has_finished_unit = report.num_units != work.num_units
        work.num_units, work.used, work.checked_s = report.num_units, used, now_s
        if work.busy and (has_finished_unit or computes):
            self.num_work_signs += 1
        if has_finished_unit or not work.busy:
            self._report_resumed(child, work)
        if peer.halted:  # reported as stopped; the time of its work is measured anew when it continues
            work.warned = ""
        if has_finished_unit or not work.busy or peer.halted:
            work.unit_started_s = work.last_sign_s = now_s
        elif computes:
            work.last_sign_s = now_s

    @property
    def _warn_after_s(self) -> float:
        """Seconds without a sign of work, or without a heartbeat, after which users are warned."""
        return WARN_SHARE * self.timeout_s

    async def _resource_use(self, child: Child) -> float:
        """Return the resources that a process has used so far: seconds of processor time plus bytes read and written.
        The two are added although their units differ, because only an increase matters."""
        used = await child.computed_s()
        if not child.node:
            with contextlib.suppress(*PROCESS_GONE, AttributeError):  # macOS does not provide these counters
                io = psutil.Process(child.pid).io_counters()
                used += io.read_bytes + io.write_bytes
        return used

    def _report_stuck(self, child: Child, work: _WorkRecord, *, hangs: bool) -> None:
        """Warn, once per unit of work, if ``child``, a rank of the learner with the record ``work``, hangs or if its
        unit takes far longer than usual. ``hangs`` says that no rank has given a sign of work for a long time; the
        rank's standstill is then recorded too."""
        assert isinstance(child.peer, RankClient)
        report, now_s = child.peer.working, self.clock.now()
        assert report is not None
        unit_s, silent_s = now_s - work.unit_started_s, now_s - child.peer.heard_s
        usual = f"usually at most {report.usual_s:.1f} s" if report.usual_s else "the first of its kind"
        text = f"{child.role} (pid {child.pid}) is at {report.what or 'an order'} for {unit_s:.0f} s ({usual})"
        if silent_s > self._warn_after_s:
            text += f", has shown no heartbeat for {silent_s:.0f} s"
        work.standstill = ""
        if hangs and work.busy:
            work.standstill = f"{text} and neither computes, reads nor writes (its process is {_describe_state(child)})"
        long_s = max(
            self._warn_after_s, SLOW_FACTOR * report.usual_s if report.usual_s else FIRST_UNIT_FACTOR * self.timeout_s
        )
        if work.warned or not (work.standstill or (work.busy and unit_s >= long_s)):
            return
        work.warned = report.what or "an order"
        work.kind = f"{child.role} {'hangs' if work.standstill else 'is slow'}"
        if work.standstill:
            self.warn(
                f"{work.standstill}: it hangs, or waits for something outside; where nothing else moves either, "
                f"run.stall_timeout_s={self.timeout_s:g} ends the run; look at logs/{child.role}.log",
                kind=work.kind,
            )
        else:
            self.warn(f"{text}, far longer than usual; it computes, so the run waits for it", kind=work.kind)

    def _report_resumed(self, child: Child, work: _WorkRecord) -> None:
        """Report to the user that a rank about which a warning was sent continues, and how long its unit of work took.
        Clear the warning."""
        if work.warned:
            took_s = self.clock.now() - work.unit_started_s
            text = f"{child.role} (pid {child.pid}) continues: {work.warned} took {took_s:.0f} s"
            self.warn(text, kind=work.kind, over=True)
        work.warned = work.standstill = ""


def _find_halted(local: Sequence[Child], other_pids: Collection[int]) -> dict[int, str]:
    """Return why processes on this machine are stopped, by pid. The processes ``local`` and processes with the pids
    ``other_pids`` are checked; the result contains only stopped processes."""
    return describe_halted([*other_pids, *(pid for child in local for pid in (child.pid, child.working_pid))])


def _stop_kind(name: str) -> str:
    """Return the ``kind`` of the warnings that the process ``name`` is stopped, by which repeated warnings are
    grouped."""
    return f"{name} is stopped"


def _describe_state(child: Child) -> str:
    """Return the state of the process as the operating system names it. For an ended process the result is ``gone``,
    and for a process on another machine it names the machine."""
    if child.node:
        return f"on {child.node}"
    try:
        status = psutil.Process(child.pid).status()
    except PROCESS_GONE:
        return "gone"
    return "waiting for a disk or a network file system" if status == psutil.STATUS_DISK_SLEEP else str(status)
