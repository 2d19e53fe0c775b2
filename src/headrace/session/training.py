"""``headrace train``: from a run file to a summary."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace import checkpoint
from headrace.clock import RealClock
from headrace.control import Controller, Settings, Summary
from headrace.control.observer import Observers
from headrace.control.recovery import StartingPoint, starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.env.data import Order as RowOrder
from headrace.errors import ConfigError, HeadraceError
from headrace.flow.ledger import SqliteLedger, ThreadedWriter
from headrace.launch import Component, Order, World, local_world
from headrace.launch.heap import settled_heap
from headrace.observe import Recorder, open_view, write_report
from headrace.observe.report import run_verdict
from headrace.observe.rundata import load_run
from headrace.observe.terminal import PlainView, SilentView, View
from headrace.session.config import RunConfig, RunFile, load_config
from headrace.session.directory import (
    CONFIG_FILE,
    LEDGER_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    Status,
    choose_directory,
    locked,
    write_json,
)
from headrace.session.order import make_order
from headrace.session.prepare import Inputs, Prepared, Rows, prepare, refuse_inside_a_run
from headrace.session.running import Interrupts, first_cause, in_own_loop
from headrace.types.observation import Event, LiveState

FAREWELL_S = 30.0
"""How long a run that failed waits for its ledger."""
REDRAW_S = 0.5
"""How often the live view and ``status.json`` are renewed."""


def train(  # gate: parameters - the public call: everything that a user may hand over, by name
    config: RunFile | RunConfig,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> Summary:
    """Train a model as ``config`` says (a TOML file, a tree, or a record), and say what came of it.

    ``data`` and ``eval_data`` are rows in place of ``data.path`` and ``data.eval_path``; ``reward`` is a function of a
    file in place of ``env.reward``. ``resume`` goes on with the run in ``run.dir``. Ctrl-C ends the run after the steps
    that are ordered, with a checkpoint; a second one ends it at once, with ``KeyboardInterrupt``.

    Raises :class:`~headrace.errors.HeadraceError`; ``summary.json`` is written all the same once training has begun.
    """
    refuse_inside_a_run()
    prepared = prepare(load_config(config, overrides), Inputs(data=data, eval_data=eval_data, reward=reward))
    run_dir = choose_directory(prepared.config.run.dir, RealClock())
    with locked(run_dir, resume=resume):
        try:
            summary = in_own_loop(lambda interrupts: _train(prepared, run_dir, interrupts))
        except BaseException:
            with suppress(HeadraceError):  # what went wrong before is what the user must hear of
                _report(prepared, run_dir)
            raise
        _report(prepared, run_dir)
        return summary


def _report(prepared: Prepared, run_dir: Path) -> None:
    if prepared.config.observe.report and (run_dir / SUMMARY_FILE).exists():
        write_report(run_dir)


async def _train(prepared: Prepared, run_dir: Path, interrupts: Interrupts) -> Summary:
    config = prepared.config
    checkpoint.sweep(run_dir / CHECKPOINTS)
    start = starting_point(run_dir)
    if start.step >= config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}, and the run has {start.step} steps behind it",
            remedy=f"set run.steps > {start.step} to go on",
        )
    with ExitStack() as stack:
        books: list[SqliteLedger] = []
        if (run_dir / LEDGER_FILE).exists():  # one that does not fit is refused before anything is launched
            books.append(_open_books(config, run_dir, stack))
        write_json(run_dir / CONFIG_FILE, config.model_dump(mode="json"))
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier life
        recorder = stack.enter_context(Recorder(run_dir))
        view = stack.enter_context(_view(config))
        observers = Observers((recorder, view))
        order = make_order(prepared, run_dir=run_dir, snapshot=start.snapshot, observers=observers)

        def control(world: World) -> Controller:
            ledger = books[0] if books else _open_books(config, run_dir, stack)
            writer = ThreadedWriter(ledger)
            stack.callback(writer.close)
            settings = Settings(
                run=config.run,
                flow=config.flow,
                order=RowOrder(num_rows=len(prepared.tasks), seed=config.run.seed, shuffle=config.data.shuffle),
                fingerprint=prepared.fingerprint(),
            )
            return Controller(world.parts, settings, ledger=ledger, writer=writer, observers=(observers,))

        return await _run(order, control, start, Watchers(view=view, interrupts=interrupts))


def _open_books(config: RunConfig, run_dir: Path, stack: ExitStack) -> SqliteLedger:
    """The run's ledger; a new run has none until its parts have started, so that a failed start can be tried again."""
    flow = config.flow
    ledger = SqliteLedger(run_dir / LEDGER_FILE, group_size=flow.group_size, groups_per_step=flow.groups_per_step)
    stack.callback(ledger.close)
    return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who watches a run from outside, and may end it."""

    view: View
    interrupts: Interrupts


async def _run(
    order: Order, control: Callable[[World], Controller], start: StartingPoint, watchers: Watchers
) -> Summary:
    """Launch, control, and write the summary however it ends."""
    controller: Controller | None = None
    try:
        order.on_event(Event(wall_s=0.0, text="starting engine, learner and scoring workers"))
        async with local_world(order) as world, asyncio.TaskGroup() as group:
            controller = control(world)
            world.send_warnings_to(partial(_warn, controller))
            pulse = group.create_task(_pulse(controller, world, watchers.view))
            with _stopped_by_ctrl_c(controller, watchers.interrupts), settled_heap():
                summary = _finish(controller, await controller.run(start))
            pulse.cancel()
    except BaseException as error:
        cause = first_cause(error)
        if controller is not None:
            await _last_words(controller, cause)
        if cause is error:
            raise
        raise cause from None
    return summary


def _warn(controller: Controller, text: str) -> None:
    """What the scoring workers have to say; deaths of one kind differ in their pid."""
    controller.state.warn(text, kind=text.partition(" (")[0])


async def _last_words(controller: Controller, cause: BaseException) -> None:
    """Write what the run came to, as far as that can be: the disk or the ledger may be what went wrong."""
    with suppress(HeadraceError, TimeoutError):  # where the ledger hangs, its books cannot be counted either
        with suppress(HeadraceError):
            await asyncio.wait_for(controller.state.flow.flush(), FAREWELL_S)
        status = "stopped" if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt) else "failed"
        _finish(controller, controller.summary(status, cause=str(cause)))


def _finish(controller: Controller, summary: Summary) -> Summary:
    """Write the summary, then once more with the verdict that the report will find."""
    run_dir = controller.state.parts.run_dir
    write_json(run_dir / SUMMARY_FILE, summary)
    verdict = run_verdict(load_run(run_dir)) if summary.tokens_trained else None
    summary = msgspec.structs.replace(summary, verdict=str(verdict or ""))
    write_json(run_dir / SUMMARY_FILE, summary)
    return summary


async def _pulse(controller: Controller, world: World, view: View) -> None:
    """Renew the view and ``status.json``; the last status says that all has ended."""
    try:
        while True:
            live = controller.live()
            view.update(live)
            _write_status(controller, live, world, world.components())
            await asyncio.sleep(REDRAW_S)
    finally:
        ended = [msgspec.structs.replace(part, state="ended") for part in world.components()]
        with suppress(HeadraceError):  # the disk may be what went wrong
            _write_status(controller, controller.live(), world, ended)


def _write_status(controller: Controller, live: LiveState, world: World, components: list[Component]) -> None:
    status = Status(
        phase=live.phase,
        steps_done=live.steps_done,
        steps_total=live.steps_total,
        version=live.engine_version,
        written_s=world.parts.clock.wall(),
        components=components,
        waits=controller.state.board.in_words().splitlines(),
    )
    write_json(world.parts.run_dir / STATUS_FILE, status)


def _view(config: RunConfig) -> View:
    if config.observe.view == "none":
        return SilentView()
    if config.observe.view == "plain":
        return PlainView(sys.stdout, config.run.steps)
    return open_view(sys.stdout, config.run.steps)


@contextmanager
def _stopped_by_ctrl_c(controller: Controller, interrupts: Interrupts) -> Iterator[None]:
    """The first Ctrl-C asks the run to stop, the second ends it at once: ``KeyboardInterrupt``."""
    at_once = False
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def asked() -> None:
        nonlocal at_once
        if controller.state.stop_asked:
            at_once = True
            task.cancel()
            return
        controller.state.event("stopping after the steps that are ordered; Ctrl-C again to end at once")
        controller.stop()

    with _told_of_ctrl_c(loop, interrupts, asked):
        try:
            yield
        except asyncio.CancelledError:
            if not at_once:
                raise
            raise KeyboardInterrupt("stopped at once; --resume goes on") from None


@contextmanager
def _told_of_ctrl_c(
    loop: asyncio.AbstractEventLoop, interrupts: Interrupts, asked: Callable[[], None]
) -> Iterator[None]:
    """By signals in the main thread, which alone may have them; else by whoever waits for this thread."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    interrupts.handler = asked
    for number in signals:
        loop.add_signal_handler(number, asked)
    try:
        yield
    finally:
        interrupts.handler = None
        for number in signals:
            loop.remove_signal_handler(number)
