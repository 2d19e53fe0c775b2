"""``headrace train``: from a run file to a summary."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.base.errors import ConfigError, HeadraceError, LearnerLost, LedgerError, RunError, StallError
from headrace.base.heap import settled_heap
from headrace.base.types.observation import Event, LiveState
from headrace.control import Controller, ControlSettings, Summary
from headrace.control.recovery import StartingPoint, starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger import Ledger, LedgerWriter, ThreadedWriter
from headrace.flow.ledger.opening import has_ledger, make_ledger
from headrace.launch.forking import ForkServer, forking
from headrace.launch.local import local_world
from headrace.launch.order import ComponentStatus, LaunchedRun, LaunchOrder
from headrace.learner import checkpoint
from headrace.models.devices import CPU
from headrace.run.observe import VerdictSettings as KnownSettings
from headrace.run.observe import settings_of, write_report
from headrace.run.session.config import RunConfig, RunFile, load_config
from headrace.run.session.directory import (
    CONFIG_FILE,
    FACTS_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    HeldDirectory,
    Status,
    choose_directory,
    locked,
    read_summary,
    write_json,
    write_sealed,
)
from headrace.run.session.engine_fit import explained_gap
from headrace.run.session.models import as_recorded, with_recorded_models
from headrace.run.session.order import curriculum, make_order, row_order
from headrace.run.session.prepare import Inputs, Prepared, Rows, prepare, refuse_inside_a_run
from headrace.run.session.repeating import ReplayComparison, ReplayRecording, opened
from headrace.run.session.running import Interrupts, first_cause, in_own_loop
from headrace.run.session.watching import RunWatchers

FAREWELL_S = 30.0
"""How long a run that failed waits for its ledger."""
REDRAW_S = 1.0
"""How often the live view and ``status.json`` are renewed."""
YOUNG = 50_000
"""Objects of the controller until it looks for garbage. The episodes of a step have tens each, come at once, live for a
step or two, and go with it: whoever looks more often walks living ones again and again."""


def train(
    config: RunFile | RunConfig,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    replay: str | Path = "",
) -> Summary:
    """Train a model as ``config`` says (a TOML file, a tree, or a record), and say what came of it.

    ``data`` and ``eval_data`` are rows in place of ``data.path`` and ``data.eval_path``; ``reward`` is a function of a
    file in place of ``env.reward``. ``resume`` goes on with the run in ``run.dir``. Ctrl-C, SIGTERM and SIGHUP (unless
    it is ignored, as under nohup) end the run after the steps that are ordered, with a checkpoint; a second Ctrl-C or
    SIGTERM ends it at once, with ``KeyboardInterrupt``.

    ``replay`` is the directory of a run with the same settings: it is repeated bit for bit, in a directory of its own,
    or :class:`~headrace.base.errors.ReplayDiffers` says what was different first.

    Raises :class:`~headrace.base.errors.HeadraceError`; ``summary.json`` is written all the same once training has
    begun.
    """
    refuse_inside_a_run()
    loaded = load_config(config, overrides)
    if resume and loaded.run.dir:
        loaded = with_recorded_models(loaded, Path(loaded.run.dir) / CONFIG_FILE)
    with ExitStack() as stack:
        forks = stack.enter_context(forking(loaded.launch))  # it imports while the run is prepared
        prepared = prepare(loaded, Inputs(data=data, eval_data=eval_data, reward=reward))
        run_dir = choose_directory(prepared.config.run.dir, RealClock())
        recording = stack.enter_context(opened(replay, prepared, resume=resume))
        held = stack.enter_context(locked(run_dir, resume=resume))
        first = Life(prepared=prepared, run_dir=run_dir, held=held, recording=recording, forks=forks, after=None)
        try:
            summary = _lives(first)
        except BaseException:
            with suppress(HeadraceError):  # what went wrong before is what the user must hear of
                _report(first)
            raise
        _report(first)
        return summary


def _lives(first: Life) -> Summary:
    """The run, and again from its last snapshot where its learner dies, as often as it may."""
    may_restart = 0 if first.recording is not None else first.prepared.config.launch.learner_restarts
    life = first
    for left in reversed(range(may_restart + 1)):
        try:
            return in_own_loop(partial(_train, life))
        except LearnerLost as error:
            if not left or not has_ledger(first.run_dir):  # before there is one nothing was trained
                raise
            life = replace(first, after=error)
    raise AssertionError("the last life returns or raises")


def _report(life: Life) -> None:
    if life.prepared.config.observe.report and (life.run_dir / SUMMARY_FILE).exists():
        life.held.refuse_lost()
        write_report(life.run_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One launch of a run."""

    prepared: Prepared
    run_dir: Path
    held: HeldDirectory
    """The same, as long as it is this run's."""
    recording: ReplayRecording | None
    """What it repeats; ``None``: nothing."""
    forks: ForkServer | None
    """What its engines and learner are forked from; ``None``: each is a new interpreter."""
    after: LearnerLost | None
    """What ended the life before, in this call; ``None``: this is the first."""


async def _train(life: Life, interrupts: Interrupts) -> Summary:
    prepared, run_dir, recording = life.prepared, life.run_dir, life.recording
    config = prepared.config
    checkpoint.sweep(run_dir / CHECKPOINTS)
    start = starting_point(run_dir)
    if start.step > config.run.steps or (start.step == config.run.steps and _ended(run_dir)):
        raise ConfigError(
            f"run.steps={config.run.steps}, and the run has {start.step} steps behind it",
            remedy=f"set run.steps > {start.step} to go on",
        )
    with ExitStack() as stack:
        books: list[Ledger] = []
        if has_ledger(run_dir):  # one that does not fit is refused before anything is launched
            books.append(_open_books(config, run_dir, stack, start))
        write_sealed(run_dir / CONFIG_FILE, as_recorded(config))
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier life
        watching = RunWatchers(config, run_dir, stack, settings=_settings(prepared))
        order = _order(life, start, watching)
        comparisons: list[ReplayComparison] = []

        def control(world: LaunchedRun) -> Controller:
            facts = world.facts()
            if recording is not None:
                recording.refuse_machine(facts)
            write_sealed(run_dir / FACTS_FILE, facts)
            ledger = books[0] if books else _open_books(config, run_dir, stack, start)
            writer: LedgerWriter = ThreadedWriter(ledger)
            stack.callback(writer.close)
            settings = ControlSettings(
                run=config.run,
                flow=config.flow,
                order=row_order(config, len(prepared.tasks)),
                curriculum=curriculum(config, len(prepared.tasks)),
                taught=bool(config.learner.teachers),
                env_column=config.observe.env_column,
                largest_gap=explained_gap(config),
                fingerprint=prepared.fingerprint(),
            )
            if recording is not None:
                settings = recording.settings(settings)
                writer = ReplayComparison(writer, recording)
                comparisons.append(writer)
            observers = watching.observers
            watching.controller = Controller(world.parts, settings, ledger=ledger, writer=writer, observers=observers)
            for words in (each["fallback"] for each in facts.values() if "fallback" in each):
                watching.controller.state.warn(str(words))
            return watching.controller

        summary = await _run(order, control, start, Watchers(held=life.held, watching=watching, interrupts=interrupts))
        return comparisons[0].finish(summary) if comparisons else summary


def _settings(prepared: Prepared) -> KnownSettings:
    """What the verdict must know of the run."""
    devices = prepared.devices
    on_cpu = CPU in (*devices.engines, *devices.learner)
    tree = prepared.config.model_dump(mode="json")
    return settings_of(tree, processors=num_cores(), on_cpu=on_cpu)


def _order(life: Life, start: StartingPoint, watching: RunWatchers) -> LaunchOrder:
    order = make_order(life.prepared, run_dir=life.run_dir, snapshot=start.snapshot, observers=watching.observers)
    order = replace(order, forks=life.forks)
    _tell_what_died(life, order, start)
    if not start.sealed:
        words = f"{start.snapshot} was written without checksums: that its files are unchanged cannot be told"
        order.on_event(Event(wall_s=0.0, text=words, level="warning"))
    if life.recording is None:
        return order
    return life.recording.order(order, life.prepared.config.run.stall_timeout_s)


def _tell_what_died(life: Life, order: LaunchOrder, start: StartingPoint) -> None:
    if life.after is not None:
        cause = life.after.problem.partition("\n")[0]
        words = f"{cause}; the run goes on from step {start.step}"
        order.on_event(Event(wall_s=0.0, text=words, level="warning"))


def _ended(run_dir: Path) -> bool:
    """Whether the run's last life came to its end: one that was killed behind its last snapshot did not."""
    summary = read_summary(run_dir)
    return summary is not None and summary["status"] == "finished"


def _open_books(config: RunConfig, run_dir: Path, stack: ExitStack, start: StartingPoint) -> Ledger:
    """The run's ledger; a new run has none until its parts have started, so that a failed start can be tried again."""
    try:
        ledger = make_ledger(config.flow, run_dir)
    except LedgerError as error:
        if start.snapshot is None:
            raise
        newest = f"the newest whole checkpoint is {start.snapshot}, of step {start.step}"
        raise LedgerError(f"{error.problem}; {newest}", remedy=error.remedy) from None
    stack.callback(ledger.close)
    return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who watches a run from outside, and may end it."""

    held: HeldDirectory
    watching: RunWatchers
    interrupts: Interrupts


async def _run(
    order: LaunchOrder, control: Callable[[LaunchedRun], Controller], start: StartingPoint, watchers: Watchers
) -> Summary:
    """Launch, control, and write the summary however it ends."""
    controller: Controller | None = None
    try:
        order.on_event(Event(wall_s=0.0, text=f"starting scoring workers, {order.devices}"))
        async with local_world(order) as world, asyncio.TaskGroup() as group:
            controller = control(world)
            world.send_warnings_to(partial(_warn, controller))
            world.send_signs_to(partial(_tell, controller))
            world.send_recoveries_to(controller.recovers)
            pulse = group.create_task(_pulse(controller, world, watchers))
            with _stopped_by_signals(controller, watchers.interrupts), settled_heap(YOUNG):
                summary = _finish(controller, await controller.run(start), watchers)
            pulse.cancel()
    except BaseException as error:
        cause = _lost(watchers.held) or first_cause(error)
        if controller is not None:
            _tell_who_waited(controller, cause)
            await _last_words(controller, cause, watchers)
        if cause is error:
            raise
        raise cause from None
    return summary


def _lost(held: HeldDirectory) -> RunError | None:
    """What explains all other errors where the run's directory is gone."""
    try:
        held.refuse_lost()
    except RunError as error:
        return error
    return None


def _warn(controller: Controller, text: str) -> None:
    """What the scoring workers have to say; deaths of one kind differ in their pid."""
    controller.state.warn(text, kind=text.partition(" (")[0])


def _tell(controller: Controller, text: str, *, kind: str = "") -> None:
    """What is found of processes that do not go on, each time, and what goes on again."""
    if kind:
        controller.state.warn(text, kind=kind, always=True)
    else:
        controller.state.event(text)


def _tell_who_waited(controller: Controller, cause: BaseException) -> None:
    """What ended a run gets the table of its loops, as it was then; a stall has it already."""
    if isinstance(cause, HeadraceError) and not isinstance(cause, StallError):
        cause.problem = "\n".join([cause.problem, *controller.state.board.in_brief()])


async def _last_words(controller: Controller, cause: BaseException, watchers: Watchers) -> None:
    """Write what the run came to, as far as that can be: the disk or the ledger may be what went wrong."""
    with suppress(HeadraceError, TimeoutError):  # where the ledger hangs, its books cannot be counted either
        with suppress(HeadraceError):
            controller.state.flow.running_turns.record_all()
            await asyncio.wait_for(controller.state.flow.flush(), FAREWELL_S)
        status = "stopped" if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt) else "failed"
        _finish(controller, controller.summary(status, cause=str(cause)), watchers)


def _finish(controller: Controller, summary: Summary, watchers: Watchers) -> Summary:
    """Write the summary with the verdict on the run, where there is still a place for it."""
    watchers.held.refuse_lost()
    summary = watchers.watching.concluded(summary)
    write_json(controller.state.parts.run_dir / SUMMARY_FILE, summary)
    return summary


async def _pulse(controller: Controller, world: LaunchedRun, watchers: Watchers) -> None:
    """Renew the view and ``status.json``; the last status says that all has ended."""
    try:
        while True:
            components = world.components()
            watchers.held.refuse_lost()
            live = watchers.watching.look(controller, components)
            _write_status(controller, live, world, components)
            await asyncio.sleep(REDRAW_S)
    finally:
        ended = [msgspec.structs.replace(part, state="ended") for part in world.components()]
        with suppress(HeadraceError):  # the disk may be what went wrong
            watchers.held.refuse_lost()
            _write_status(controller, controller.live(), world, ended)


def _write_status(
    controller: Controller, live: LiveState, world: LaunchedRun, components: list[ComponentStatus]
) -> None:
    status = Status(
        phase=live.phase,
        steps_done=live.steps_done,
        steps_total=live.steps_total,
        version=live.engine_version,
        written_s=world.parts.clock.wall(),
        components=components,
        waits=controller.state.board.in_words().splitlines(),
        warnings=controller.state.warnings,
        rewards=dict(controller.state.tally.rewarding.failing()),
    )
    write_json(world.parts.run_dir / STATUS_FILE, status)


@contextmanager
def _stopped_by_signals(controller: Controller, interrupts: Interrupts) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the run to stop; another Ctrl-C or SIGTERM ends it at once:
    ``KeyboardInterrupt``. A terminal that is closed sends SIGHUP more than once, so another SIGHUP changes nothing."""
    at_once = False
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def asked(number: signal.Signals) -> None:
        nonlocal at_once
        if not controller.state.stop_asked:
            why = "the terminal was closed: " if number is signal.SIGHUP else ""
            controller.state.event(f"{why}stopping after the steps that are ordered; Ctrl-C again to end at once")
            controller.stop(number.name)
        elif number is not signal.SIGHUP:
            at_once = True
            task.cancel()

    with _told_of_signals(loop, interrupts, asked):
        try:
            yield
        except asyncio.CancelledError:
            if not at_once:
                raise
            raise KeyboardInterrupt("stopped at once; --resume goes on") from None


@contextmanager
def _told_of_signals(
    loop: asyncio.AbstractEventLoop, interrupts: Interrupts, asked: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """By signals in the main thread, which alone may have them; else by whoever waits for this thread."""
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to be left alone
            numbers.append(signal.SIGHUP)
    interrupts.handler = partial(asked, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, asked, number)
    try:
        yield
    finally:
        interrupts.handler = None
        for number in numbers:
            loop.remove_signal_handler(number)
        if signal.SIGHUP in numbers:  # what is left is to end in order, whether a terminal looks on or not
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
