"""``headrace train``: run the training that a run file describes, with restarts of the learner, and write its summary.

The *parts* of a run are its processes: engines, learner, scoring workers and environment workers; the controller is
this process. A *life* of a run is the time from one start or resumption to the end of its processes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores
from headrace.base.errors import (
    ConfigError,
    HeadraceError,
    LearnerLost,
    LedgerError,
    NoRewards,
    NothingToLearn,
    RunError,
    StallError,
    StoppedAtStart,
)
from headrace.base.heap import gc_frozen
from headrace.base.types.observation import Event, LiveState
from headrace.control import Controller, ControlSettings, Summary
from headrace.control.recovery import StartingPoint, find_starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger import Ledger, LedgerWriter, ThreadedWriter
from headrace.flow.ledger.opening import has_ledger, make_ledger
from headrace.launch.forking import ForkServer, open_fork_server
from headrace.launch.local import launch_run
from headrace.launch.order import ComponentStatus, LaunchedRun, LaunchOrder
from headrace.learner import checkpoint
from headrace.models.devices import CPU
from headrace.run.observe import VerdictSettings, make_verdict_settings, write_report
from headrace.run.rules.settings import find_idle_clip
from headrace.run.session.config import RunConfig, RunFile, load_config, make_recorded_settings, with_recorded_models
from headrace.run.session.directory import (
    CONFIG_FILE,
    FACTS_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    LockedDirectory,
    Status,
    choose_directory,
    find_changed_settings,
    find_final_num_engines,
    lock_directory,
    read_summary,
    write_json,
    write_sealed,
)
from headrace.run.session.engine_fit import compute_explained_gap
from headrace.run.session.prepare import (
    Inputs,
    Prepared,
    Rows,
    make_curriculum,
    make_order,
    make_row_order,
    prepare,
    refuse_inside_a_run,
)
from headrace.run.session.repeating import ReplayComparison, ReplayRecording, open_recording
from headrace.run.session.requests import serve_requests
from headrace.run.session.running import Interrupts, first_cause, run_in_own_loop
from headrace.run.session.watching import RunWatchers

FINAL_FLUSH_S = 30.0
"""The maximum wait for the ledger at the end of a run that failed, in seconds."""
REDRAW_S = 1.0
"""The interval at which the live view and ``status.json`` are updated, in seconds."""
GARBAGE_THRESHOLD = 50_000
"""The number of new objects in the controller after which Python collects garbage. The episodes of a step have tens of
objects each, arrive together, and are freed together a step or two later, so that more frequent collections would only
visit objects that are still in use."""


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
    """Train a model with the settings ``config`` (the path of a TOML file, a tree, or a record), and return the summary
    of the run.

    ``data`` and ``eval_data`` are rows in place of ``data.path`` and ``data.eval_path``; ``reward``, a function that is
    defined in a file, replaces ``env.reward``; ``overrides`` are ``section.key=value`` pairs that replace settings.
    ``resume`` continues the run in ``run.dir``. Ctrl-C, SIGTERM and SIGHUP (unless it is ignored, as under nohup) end
    the run with a checkpoint, after the steps that the learner has received; a second Ctrl-C or SIGTERM ends the run at
    once, with ``KeyboardInterrupt``.

    ``replay`` is the directory of a recorded run with the same settings, which is repeated bit for bit in a new
    directory; :class:`~headrace.base.errors.ReplayDiffers` is raised at the first difference.

    Raises :class:`~headrace.base.errors.HeadraceError`. After training has started, ``summary.json`` is written also if
    an error is raised.
    """
    refuse_inside_a_run()
    loaded = load_config(config, overrides)
    if resume and loaded.run.dir:
        loaded = with_recorded_models(loaded, Path(loaded.run.dir) / CONFIG_FILE)
    with ExitStack() as stack:
        # the fork server imports torch while the run is prepared
        forks = stack.enter_context(open_fork_server(loaded.launch))
        prepared = prepare(loaded, Inputs(data=data, eval_data=eval_data, reward=reward))
        run_dir = choose_directory(prepared.config.run.dir, RealClock())
        recording = stack.enter_context(open_recording(replay, prepared, resume=resume))
        locked_dir = stack.enter_context(lock_directory(run_dir, resume=resume))
        first = RunLife(
            prepared=prepared,
            run_dir=run_dir,
            locked_dir=locked_dir,
            recording=recording,
            forks=forks,
            preceding_error=None,
        )
        try:
            summary = _run_with_restarts(first)
        except BaseException:
            with suppress(HeadraceError):  # the user must see the first error, not an error of the report
                _write_run_report(first)
            raise
        _write_run_report(first)
        return summary


def _run_with_restarts(first: RunLife) -> Summary:
    """Launch the run and return its summary. If the learner dies, launch the run again from its last snapshot, at most
    ``launch.learner_restarts`` times; a replay is never launched again. ``first`` is the first life."""
    max_restarts = 0 if first.recording is not None else first.prepared.config.launch.learner_restarts
    life = first
    for restarts_left in reversed(range(max_restarts + 1)):
        try:
            return run_in_own_loop(partial(_train, life))
        except LearnerLost as error:
            if not restarts_left or not has_ledger(first.run_dir):  # without a ledger nothing was trained yet
                raise
            # its frames would keep the whole life in memory, with the files that it has mapped
            error.__traceback__ = error.__context__ = error.__cause__ = None
            life = replace(first, preceding_error=error)
    raise AssertionError("the last life returns or raises")


def _write_run_report(life: RunLife) -> None:
    """Write the report of the run, its dashboard as one HTML file, after its last life, if ``observe.report`` is true
    and the run has a summary."""
    if life.prepared.config.observe.report and (life.run_dir / SUMMARY_FILE).exists():
        life.locked_dir.refuse_lost()
        write_report(life.run_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife:
    """The inputs of one life of a run. A life lasts from a start or resumption to the end of the run's processes."""

    prepared: Prepared
    """The checked settings, rows and models of the run."""
    run_dir: Path
    """The directory of the run."""
    locked_dir: LockedDirectory
    """The locked ``run_dir``, which detects that the directory was removed or moved."""
    recording: ReplayRecording | None
    """The recorded run that this run repeats; ``None`` if this run is not a replay."""
    forks: ForkServer | None
    """The process from which engines and learner are forked; ``None`` if each is a new interpreter."""
    preceding_error: LearnerLost | None
    """The loss of the learner that ended the preceding life, in this call of :func:`train`; ``None`` for the first
    life."""


async def _train(life: RunLife, interrupts: Interrupts) -> Summary:
    """Run one life of a run, and return its summary: open the ledger and the watchers, then launch the parts and run
    the controller. ``interrupts`` passes Ctrl-C on from another thread.

    Raises :class:`~headrace.base.errors.ConfigError` if the run has trained ``run.steps`` steps already.
    """
    prepared, run_dir, recording = life.prepared, life.run_dir, life.recording
    config = prepared.config
    checkpoint.sweep(run_dir / CHECKPOINTS)
    start = find_starting_point(run_dir)
    if start.step > config.run.steps or (start.step == config.run.steps and _has_finished(run_dir)):
        raise ConfigError(
            f"run.steps={config.run.steps}, and the run has {start.step} steps behind it",
            remedy=f"set run.steps > {start.step} to continue",
        )
    with ExitStack() as stack:
        ledgers: list[Ledger] = []  # the open ledger, if there is one
        if has_ledger(run_dir):  # an unusable ledger is refused before any process is launched
            ledgers.append(_open_ledger(config, run_dir, stack, start))
        warnings = list(_describe_changes(life, start))  # before the settings of the earlier life are overwritten
        write_sealed(run_dir / CONFIG_FILE, make_recorded_settings(config))
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # the summary of an earlier life
        watchers = RunWatchers(config, run_dir, stack, settings=_make_verdict_settings(prepared))
        for words in warnings:
            watchers.observers.event(Event(wall_s=0.0, text=words, level="warning"))
        comparisons: list[ReplayComparison] = []

        def control(world: LaunchedRun) -> Controller:
            """Return the controller of the launched run ``world``, with its ledger and its observers. The facts that
            the processes have reported are recorded, and in a replay compared with the recorded run."""
            facts = world.facts()
            if recording is not None:
                recording.refuse_machine(facts)
            write_sealed(run_dir / FACTS_FILE, facts)
            ledger = ledgers[0] if ledgers else _open_ledger(config, run_dir, stack, start)
            writer: LedgerWriter = ThreadedWriter(ledger)
            stack.callback(writer.close)
            settings = _make_control_settings(prepared)
            if recording is not None:
                settings = recording.adapt_settings(settings)
                writer = ReplayComparison(writer, recording)
                comparisons.append(writer)
            observers = watchers.observers
            watchers.controller = Controller(world.parts, settings, ledger=ledger, writer=writer, observers=observers)
            for warning in _collect_startup_warnings(prepared, facts):
                watchers.controller.state.warn(warning)
            return watchers.controller

        context = RunContext(locked_dir=life.locked_dir, watchers=watchers, interrupts=interrupts)
        summary = await _run(_make_launch_order(life, start, watchers), control, start, context)
        return comparisons[0].finish(summary) if comparisons else summary


def _describe_changes(life: RunLife, start: StartingPoint) -> Iterator[str]:
    """Yield warnings about what differs from the earlier life of the run, with which the directory of ``life`` was
    written, and about ``start``, from which the run continues: changed settings, another number of engines, a learner
    that was lost, and a snapshot without checksums."""
    config, run_dir = life.prepared.config, life.run_dir
    changed = find_changed_settings(run_dir, make_recorded_settings(config))
    if changed:
        more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
        yield f"settings have changed since the run was last started: {'; '.join(changed[:5])}{more}"
    engines = find_final_num_engines(run_dir)
    if engines is not None:
        yield (
            f"the run had {engines} engines when it ended, and begins again with engine.count={config.engine.count}; "
            f"headrace engines {run_dir} adds and removes engines while it goes on"
        )
    if life.preceding_error is not None:
        cause = life.preceding_error.problem.partition("\n")[0]
        yield f"{cause}; the run continues from step {start.step}"
    if not start.sealed:
        yield f"{start.snapshot} was written without checksums: that its files are unchanged cannot be told"


def _make_control_settings(prepared: Prepared) -> ControlSettings:
    """Return the part of the settings in ``prepared`` that the controller of the run reads, with the order in which
    rows are attempted."""
    config = prepared.config
    return ControlSettings(
        run=config.run,
        flow=config.flow,
        order=make_row_order(config, len(prepared.tasks)),
        curriculum=make_curriculum(config, len(prepared.tasks)),
        has_teachers=bool(config.learner.teachers),
        env_column=config.observe.env_column,
        largest_gap=compute_explained_gap(config),
        fingerprint=prepared.fingerprint(),
    )


def _collect_startup_warnings(prepared: Prepared, facts: Mapping[str, Mapping[str, object]]) -> tuple[str, ...]:
    """Return the warnings about the run ``prepared`` that are known when the parts have started: about a slower code
    path of a part, which the part reports in its ``facts`` (by role), a loss whose clip never acts, and programs that
    are not isolated."""
    fallbacks = (str(each["fallback"]) for each in facts.values() if "fallback" in each)
    return (*fallbacks, *find_idle_clip(prepared.config), *map(str, prepared.isolation_warnings))


def _make_verdict_settings(prepared: Prepared) -> VerdictSettings:
    """Return the values of the settings in ``prepared`` that the verdict's advice names, and the number of processors
    that the run may use."""
    devices = prepared.devices
    on_cpu = CPU in (*devices.engines, *devices.learner)
    tree = prepared.config.model_dump(mode="json")
    return make_verdict_settings(tree, processors=num_cores(), on_cpu=on_cpu)


def _make_launch_order(life: RunLife, start: StartingPoint, watchers: RunWatchers) -> LaunchOrder:
    """Return the order for the launcher: the processes to start, with their settings. ``start`` is the step and the
    snapshot from which the run begins."""
    order = make_order(life.prepared, run_dir=life.run_dir, snapshot=start.snapshot, observers=watchers.observers)
    order = replace(order, forks=life.forks)
    if life.recording is None:
        return order
    return life.recording.adapt_order(order, life.prepared.config.run.stall_timeout_s)


def _has_finished(run_dir: Path) -> bool:
    """Return whether the last life of the run in ``run_dir`` ended regularly, by its summary; false for a life that
    failed, was stopped or was killed."""
    summary = read_summary(run_dir)
    return summary is not None and summary["status"] == "finished"


def _open_ledger(config: RunConfig, run_dir: Path, stack: ExitStack, start: StartingPoint) -> Ledger:
    """Open the ledger of the run in ``run_dir`` with the settings ``config``, or create it, and return it; ``stack``
    closes it. A new run calls this function only after its parts have started, so that a start that failed can be
    repeated. Errors name the checkpoint in ``start``, from which the user may start another run."""
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
class RunContext:
    """The objects around the controller in one life of a run, which record the run, and may end it."""

    locked_dir: LockedDirectory
    """The locked directory of the run. The run ends if the directory is removed or replaced."""
    watchers: RunWatchers
    """The watchers of the run, which record it, show it and raise alarms."""
    interrupts: Interrupts
    """The link by which Ctrl-C in the main thread stops the run in another thread."""


async def _run(
    order: LaunchOrder, control: Callable[[LaunchedRun], Controller], start: StartingPoint, context: RunContext
) -> Summary:
    """Launch the parts of the run by ``order``, and run the controller that ``control`` returns for them from ``start``
    on. Write the summary in every case, and return it, or raise the error that explains all others."""
    controller: Controller | None = None
    try:
        async with _end_on_signals(order, context), launch_run(order) as world:
            controller = control(world)
            summary = await _run_controller(controller, world, start, context)
    except BaseException as error:
        cause = _find_lost_directory(context.locked_dir) or first_cause(error)
        if controller is not None:
            _add_loop_table(controller, cause)
            await _write_failed_summary(controller, cause, context)
        if cause is error:
            raise
        raise cause from None
    return summary


async def _run_controller(
    controller: Controller, world: LaunchedRun, start: StartingPoint, context: RunContext
) -> Summary:
    """Run the controller of the launched run ``world`` from ``start`` to the end of the run, and return its summary.
    Meanwhile the status in the directory of ``context`` is renewed, and requests of the user are answered."""
    world.send_warnings_to(partial(_warn, controller))
    world.send_signs_to(partial(_report_silence, controller))
    world.send_recoveries_to(controller.record_recovery)
    world.changes.send_changes_to(controller.record_engine_change)
    async with serve_requests(world.private, world.changes) as address, asyncio.TaskGroup() as group:
        renewal = group.create_task(_renew_status(controller, world, context, address))
        with _stop_on_signals(controller, context.interrupts), gc_frozen(GARBAGE_THRESHOLD):
            summary = _write_summary(controller, await controller.run(start), context)
        renewal.cancel()
    return summary


def _find_lost_directory(locked_dir: LockedDirectory) -> RunError | None:
    """Return the error that the run's directory was removed, moved or replaced, which explains all other errors;
    ``None`` if the directory is in place."""
    try:
        locked_dir.refuse_lost()
    except RunError as error:
        return error
    return None


def _warn(controller: Controller, text: str) -> None:
    """Record a warning of a worker process as a warning of the run. Its kind is the text before the parenthesis with
    the pid of the process; later warnings of the same kind are only counted."""
    controller.state.warn(text, kind=text.partition(" (")[0])


def _report_silence(controller: Controller, text: str, *, kind: str, over: bool = False) -> None:
    """Record the warning ``text`` that a process of the run does not respond, even if it was recorded before. If
    ``over`` is true, record instead that the process responds again. ``kind`` identifies the warning: the call that
    ends it passes the same value."""
    if over:
        controller.state.resolve_warning(text, kind=kind)
    else:
        controller.state.warn(text, kind=kind, always=True)


_WITHOUT_LOOP_TABLE = (StallError, NoRewards, NothingToLearn)
"""The errors to which the table of loops is not added: a stall contains it already, and the others do not depend on the
loops."""


def _add_loop_table(controller: Controller, cause: BaseException) -> None:
    """Add to ``cause``, the error that ended the run, the table of the controller's loops, which shows what each loop
    was doing or waiting for, if all loops have started and the table helps to explain the error."""
    if not controller.state.board.all_started:
        return
    if isinstance(cause, HeadraceError) and not isinstance(cause, _WITHOUT_LOOP_TABLE):
        cause.problem = "\n".join([cause.problem, *controller.state.board.brief_lines()])


async def _write_failed_summary(controller: Controller, cause: BaseException, context: RunContext) -> None:
    """Write the summary of a run that ended by the error ``cause``, with the status ``stopped`` if the user ended the
    run, else ``failed``. Errors of the ledger and of the disk are suppressed here, since they may be the cause
    itself."""
    # if the ledger does not respond, its groups cannot be counted for the summary either
    with suppress(HeadraceError, TimeoutError):
        with suppress(HeadraceError):
            controller.state.flow.running_turns.record_all()
            await asyncio.wait_for(controller.state.flow.flush(), FINAL_FLUSH_S)
        status = "stopped" if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt) else "failed"
        _write_summary(controller, controller.summary(status, cause=str(cause)), context)


def _write_summary(controller: Controller, summary: Summary, context: RunContext) -> Summary:
    """Add the account of the run's time and the verdict to ``summary``, write it to ``summary.json``, and return it.
    Raises :class:`~headrace.base.errors.RunError` if the run's directory is lost."""
    context.locked_dir.refuse_lost()
    summary = context.watchers.add_account(summary)
    write_json(controller.state.parts.run_dir / SUMMARY_FILE, summary)
    return summary


async def _renew_status(controller: Controller, world: LaunchedRun, context: RunContext, address: str) -> None:
    """Update the terminal view and ``status.json`` every :data:`REDRAW_S`, and at once when the engines change, since
    their number must be known after a kill, until the task is cancelled at the end of the run. In the last status all
    parts have ended. The run receives requests at the socket ``address``."""

    def write() -> None:
        """Write the present status."""
        components = world.components()
        context.locked_dir.refuse_lost()
        live = context.watchers.update(controller, components)
        _write_status(controller, live, world, components, requests=address)

    def record(text: str, *, changed: bool = True, lost: bool = False) -> None:
        """Record a change of the engines in the log of the run and in the status."""
        controller.record_engine_change(text, changed=changed, lost=lost)
        write()

    world.changes.send_changes_to(record)
    try:
        while True:
            write()
            await asyncio.sleep(REDRAW_S)
    finally:
        world.changes.send_changes_to(controller.record_engine_change)
        ended = [msgspec.structs.replace(part, state="ended") for part in world.components()]
        with suppress(HeadraceError):  # the disk may be the reason why the run ends
            context.locked_dir.refuse_lost()
            _write_status(controller, context.watchers.update(controller, ended), world, ended)


def _write_status(
    controller: Controller,
    live: LiveState,
    world: LaunchedRun,
    components: list[ComponentStatus],
    *,
    requests: str = "",
) -> None:
    """Write ``status.json``, which ``headrace status`` shows: the present state ``live``, the ``components``
    (processes), what each loop waits for, warnings, and the socket at which the run receives ``requests``; empty if it
    does not any more."""
    status = Status(
        phase=live.phase,
        steps_done=live.steps_done,
        steps_total=live.steps_total,
        version=live.engine_version,
        written_s=world.parts.clock.wall(),
        components=components,
        waits=controller.state.board.describe().splitlines(),
        warnings=controller.state.warnings,
        rewards=dict(controller.state.metrics.rewards.get_failing()),
        engines=world.changes.num_engines,
        requests=requests,
    )
    write_json(world.parts.run_dir / STATUS_FILE, status)


@asynccontextmanager
async def _end_on_signals(order: LaunchOrder, context: RunContext) -> AsyncIterator[None]:
    """Report to the watchers in ``order`` that the run starts, and handle signals during the start: Ctrl-C, SIGTERM or
    SIGHUP cancels the body of the context and raises :class:`StoppedAtStart`; ``context`` passes Ctrl-C on from another
    thread. Later, :func:`_stop_on_signals` handles the signals."""
    caught: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def handle(number: signal.Signals) -> None:
        """Store the signal, and cancel the task that starts the run."""
        caught.append(number)
        task.cancel()

    with _handle_signals(loop, context.interrupts, handle):
        order.on_event(Event(wall_s=0.0, text=f"starting scoring workers, {order.devices}"))
        try:
            yield
        except asyncio.CancelledError:
            if not caught:
                raise
            raise StoppedAtStart(caught[0].name) from None


@contextmanager
def _stop_on_signals(controller: Controller, interrupts: Interrupts) -> Iterator[None]:
    """Stop the run gracefully at the first Ctrl-C, SIGTERM or SIGHUP, and at once, with ``KeyboardInterrupt``, at
    another Ctrl-C or SIGTERM.

    A terminal that is closed sends SIGHUP more than once; therefore another SIGHUP has no effect.
    """
    at_once = False
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def handle(number: signal.Signals) -> None:
        """Handle one signal: at the first, request a stop after the steps that the learner has received; at a later
        signal, except SIGHUP, cancel the run's task."""
        nonlocal at_once
        if not controller.state.stop_requested:
            cause = "the terminal was closed: " if number is signal.SIGHUP else ""
            controller.state.event(f"{cause}stopping after the steps that are ordered; Ctrl-C again to end at once")
            controller.stop(number.name)
        elif number is not signal.SIGHUP:
            at_once = True
            task.cancel()

    with _handle_signals(loop, interrupts, handle):
        try:
            yield
        except asyncio.CancelledError:
            if not at_once:
                raise
            raise KeyboardInterrupt("stopped at once; --resume continues") from None


@contextmanager
def _handle_signals(
    loop: asyncio.AbstractEventLoop, interrupts: Interrupts, handle: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Call ``handle`` with the signal, in the event loop ``loop``, for each Ctrl-C (SIGINT), SIGTERM and SIGHUP while
    the context is open. SIGHUP stays ignored if it was ignored before, as under nohup.

    Only the main thread can handle signals. In another thread, ``interrupts`` passes on Ctrl-C alone.
    """
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and the run continues
            numbers.append(signal.SIGHUP)
    interrupts.handler = partial(handle, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        interrupts.handler = None
        for number in numbers:
            loop.remove_signal_handler(number)
        if signal.SIGHUP in numbers:  # another SIGHUP must not kill the process while it writes its last files
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
