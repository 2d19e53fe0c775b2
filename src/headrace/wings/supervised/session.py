"""A run of ``headrace sft``, ``dpo`` or ``distill``, which trains on the rows of a dataset instead of on sampled
episodes. It opens the run directory, trains step by step with the learner, and records its steps.

    rows of a step ──▶ ledger: TAKEN ──▶ the learner's step ──▶ ledger: TRAINED ──▶ metrics.jsonl, status.json
                                                    └── every checkpoint_every steps ──▶ checkpoints/step-N

The run is sequential, in one process; the learner may use further processes, its ranks (learner.py). A killed run loses
the steps since its last snapshot. When it is resumed, it repeats these steps with the same rows and weights, and with
the same result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.base.clock import Clock, RealClock
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.heap import gc_frozen
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.control.observer import Observer, Observers
from headrace.control.recovery import StartingPoint, find_starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.flow import FlowConfig
from headrace.flow.ledger import Ledger
from headrace.flow.ledger.opening import make_ledger
from headrace.launch.order import ComponentStatus
from headrace.learner import checkpoint
from headrace.learner.checkpoint import SnapshotState
from headrace.run.observe import AlarmWatch, JsonlWriter, QueuedWriter, Raised, Recorder, RunFacts, write_report
from headrace.run.session.directory import (
    CONFIG_FILE,
    STATUS_FILE,
    SUMMARY_FILE,
    LockedDirectory,
    Status,
    choose_directory,
    lock_directory,
    read_summary,
    write_json,
    write_sealed,
)
from headrace.run.session.prepare import refuse_inside_a_run
from headrace.wings.supervised.bookkeeping import RowLedger, make_batch
from headrace.wings.supervised.config import DistillConfig, DpoConfig, SftConfig, TuningConfig, load_tuning
from headrace.wings.supervised.learner import start_learner
from headrace.wings.supervised.measuring import Measurements, VersionRewards
from headrace.wings.supervised.preparing import PreparedTuning, Rows, prepare_tuning
from headrace.wings.supervised.progress import format_figures, open_progress
from headrace.wings.supervised.reading import LeftOut, RowSet
from headrace.wings.supervised.rendering import RenderedSample
from headrace.wings.supervised.stopping import StopRequest, stopping_on_signals
from headrace.wings.supervised.summary import TuningSummary, tuning_metrics
from headrace.wings.supervised.teaching import score_rows

LEFT_OUT_FILE = "left_out.jsonl"
STATUS_EVERY_S = 1.0
"""Seconds between two writings of ``status.json``."""


def sft(config: Any, *, data: Rows | None = None, eval_data: Rows | None = None, resume: bool = False) -> TuningSummary:
    """Fine-tune a model on given rows as ``config`` says (a TOML file, a tree or a record), and return the summary.

    ``data`` and ``eval_data`` are rows in place of ``data.path`` and ``data.eval_path``: a list of dicts, or a
    ``datasets`` object. ``resume`` goes on with the run in ``run.dir``. Ctrl-C, SIGTERM and SIGHUP end the run after
    the present step, with a checkpoint. Raises :class:`~headrace.base.errors.HeadraceError`.
    """
    return tune(load_tuning(SftConfig, config), data=data, eval_data=eval_data, resume=resume)


def dpo(config: Any, *, data: Rows | None = None, eval_data: Rows | None = None, resume: bool = False) -> TuningSummary:
    """Train a model on pairs of answers, of which one is preferred, as ``config`` says, and return the summary. The
    parameters ``data``, ``eval_data`` and ``resume`` are the same as in :func:`sft`."""
    return tune(load_tuning(DpoConfig, config), data=data, eval_data=eval_data, resume=resume)


def distill(config: Any, *, data: Rows | None = None, resume: bool = False) -> TuningSummary:
    """Train a model towards a teacher on the tokens of given rows, as ``config`` says, and return the summary. The
    parameters ``data`` and ``resume`` are the same as in :func:`sft`."""
    return tune(load_tuning(DistillConfig, config), data=data, resume=resume)


def tune(
    config: TuningConfig, *, data: Rows | None = None, eval_data: Rows | None = None, resume: bool = False
) -> TuningSummary:
    """Train with ``config``, the settings of ``headrace sft``, ``dpo`` or ``distill``, and return the summary. The
    parameters ``data``, ``eval_data`` and ``resume`` are the same as in :func:`sft`."""
    refuse_inside_a_run()
    prepared = prepare_tuning(config, data=data, eval_data=eval_data)
    clock = RealClock()
    run_dir = choose_directory(config.run.dir, clock, prefix=f"{prepared.verb}-")
    with lock_directory(run_dir, resume=resume) as locked_dir:
        start = find_starting_point(run_dir)
        _refuse_ended(prepared, start, run_dir)
        with ExitStack() as stack:
            threads = config.run.threads
            if threads is not None:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            summary = TuningRun(prepared, run_dir, locked_dir, clock=clock, start=start, stack=stack).run()
        if config.observe.report:
            write_report(run_dir)
    return summary


def _refuse_ended(prepared: PreparedTuning, start: StartingPoint, run_dir: Path) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the run ``prepared`` in ``run_dir`` cannot go on from
    ``start``: because it has made its last step already, or because its rows or their order have changed since its
    snapshot."""
    steps, summary = prepared.schedule.num_steps, read_summary(run_dir)
    ended = summary is not None and summary["status"] == "finished"
    if start.step > steps or (start.step == steps and ended):
        raise ConfigError(
            f"the run has {start.step} steps behind it, and run.epochs or run.steps make {steps}",
            remedy="raise run.epochs or run.steps to go on",
        )
    before, now = start.fingerprint.partition(":")[0], prepared.fingerprint().partition(":")[0]
    if start.snapshot is not None and before != now:
        raise ConfigError(
            "the rows or their order differ from those the run was begun with, so which of them it has trained cannot "
            "be said",
            remedy="put the files, data, run.seed and run.rows_per_step back; or begin a new run with model.path = "
            f"{str(start.snapshot)!r}",
        )


@dataclass(slots=True, kw_only=True)
class _Totals:
    """The counts and measurements of a run so far. A life of a run is the time from one start or resumption to the end
    of its process. All fields except ``steps_done`` count only the present life."""

    steps_done: int = 0
    """Number of optimizer steps that made the present weights, in all lives."""
    losses: list[float] = field(default_factory=list)
    """The loss of every step."""
    trained_tokens: int = 0
    """Number of tokens that carried loss."""
    tokens: int = 0
    """Number of tokens of the trained rows, prompts included."""
    evals: dict[int, dict[str, float]] = field(default_factory=dict)
    """The metrics of the held-out rows by version."""
    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    """The mean reward and pass@k by version."""
    warnings: list[str] = field(default_factory=list)
    """The warnings that were shown, each once."""
    began_s: float = 0.0
    """The clock's time at the first step of this life, in seconds."""
    figures: str = ""
    """The main figures of the last step, in words; empty before the first."""
    phase: str = "starting"
    """The present activity of the run, for people: ``starting``, ``training``, ``evaluating``, or its last status."""


class TuningRun:
    """One life of a run that trains on the rows of a dataset: from one start or resumption to its end. It owns the
    learner, the ledger and the files of the run; :func:`tune` creates it and calls :meth:`run` once."""

    def __init__(
        self,
        prepared: PreparedTuning,
        run_dir: Path,
        locked_dir: LockedDirectory,
        *,
        clock: Clock,
        start: StartingPoint,
        stack: ExitStack,
    ) -> None:
        """Open the ledger, the files and the model, and restore the state of ``start``: step 0 or a snapshot.
        ``locked_dir`` is the lock of the run directory; ``stack`` closes the opened resources. ``prepared`` is the
        checked run, ``run_dir`` its directory, and ``clock`` gives the time."""
        self._prepared, self._run_dir, self._locked_dir, self._clock = prepared, run_dir, locked_dir, clock
        self._totals = _Totals(steps_done=start.step)
        """The counts and measurements of this life."""
        self._start_s = self._status_s = clock.now()
        """The times at which this life began, and at which ``status.json`` was written last."""
        self._stop = StopRequest()
        """The request of a signal or an alarm to end the run, which is checked before every step."""
        checkpoint.sweep(run_dir / CHECKPOINTS)
        write_sealed(run_dir / CONFIG_FILE, prepared.recorded())
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # the summary of an earlier life
        self._observers = self._open_observers(stack)
        self._ledger = self._open_ledger(stack)
        self._rows = RowLedger(self._ledger, clock)
        """The record of the rows in the ledger."""
        trained = prepared.schedule.places(start.step - 1).stop if start.step else 0
        self._rows.roll_back(start.step, trained)
        self._all_rows = self._training_rows()
        """The rows to train on, as the samples of each row, with a teacher's scores if there is a teacher."""
        snapshot = "" if start.snapshot is None else str(start.snapshot)
        self._started = start_learner(prepared, snapshot, run_dir, stack)
        """The learner with its devices and processes."""
        self._learner = self._started.learner
        self._saved = start.step if start.snapshot is not None else -1
        """The step of the last snapshot; −1 before the first."""
        self._report_start(start)
        self._measurements: Measurements | None = None
        """The evaluation of rewards; ``None`` without the table ``[eval]``."""
        if prepared.config.eval:
            self._measurements = Measurements(prepared.config.eval, run_dir, prepared.config.model.path)
            stack.callback(self._measurements.close)

    def run(self) -> TuningSummary:
        """Train to the last step, or until the run is asked to stop. Return the summary, which is also written to
        ``summary.json``. After an error, write the summary with the status ``failed`` (``stopped`` after a second
        Ctrl-C), and raise the error."""
        try:
            with stopping_on_signals(self._stop, self._event), gc_frozen():
                status = self._train()
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self._finish("stopped" if stopped else "failed", cause=str(error) or type(error).__name__)
            raise
        return self._finish(status)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open_observers(self, stack: ExitStack) -> Observers:
        """Open the observers of the run: its recorder, its writers, its progress display and its alarms. ``stack``
        closes them."""
        observe, recorded = self._prepared.config.observe, self._prepared.recorded()
        observers: list[Observer] = [stack.enter_context(Recorder(self._run_dir))]
        facts = RunFacts(run_dir=self._run_dir, config=recorded)
        for writer in observe.writers:
            observers.append(stack.enter_context(QueuedWriter(writer.kind, writer.open(facts), self._warn)))
        observers.append(stack.enter_context(open_progress(observe.view, self._prepared.schedule.num_steps)))
        observers.append(AlarmWatch(observe.alarms, self._run_dir, self._show_alarm))
        return Observers(observers)

    def _open_ledger(self, stack: ExitStack) -> Ledger:
        """Open the ledger of the run, in which each row of the dataset is a group, and the samples of the row are the
        episodes of that group. ``stack`` closes the ledger."""
        samples, rows = self._prepared.samples_per_row, self._prepared.config.run.rows_per_step
        flow = FlowConfig(group_size=samples, groups_per_step=rows, max_age=0, min_episodes=samples)
        ledger = make_ledger(flow, self._run_dir)
        stack.callback(ledger.close)
        return ledger

    def _training_rows(self) -> Sequence[tuple[RenderedSample, ...]]:
        """Return the rows to train on. If the teacher has an engine, it scores the rows first; the engine's memory is
        free again at the return."""
        config, rows = self._prepared.config, self._prepared.rows
        if isinstance(config, DistillConfig) and config.has_engine:
            return score_rows(config, rows, self._run_dir, self._event)
        return rows.rows

    def _report_start(self, start: StartingPoint) -> None:
        """Record the start of the run, write the first status and the file of left-out rows, and warn the user of
        left-out rows and of settings that have changed since ``start``."""
        self._write_status("running")
        self._rows.note("start", f"step {start.step}")
        if start.step:
            self._event(f"resumed at step {start.step}")
        if start.snapshot is not None and start.fingerprint != self._prepared.fingerprint():
            self._warn("settings differ from those the run was begun with: it goes on with the new ones")
        if self._prepared.note:
            self._event(f"of the rows, {self._prepared.note}")
        left_out: list[LeftOut] = []
        for name, found in (("", self._prepared.rows), ("held-out rows: ", self._prepared.eval_rows)):
            if found is not None and found.words():
                self._warn(f"{name}{found.words()}")
                left_out += found.left_out
        if left_out:
            path = self._run_dir / LEFT_OUT_FILE
            path.unlink(missing_ok=True)
            with JsonlWriter[LeftOut](path) as file:
                file.write(left_out)
            self._event(f"the rows that were left out are listed in {LEFT_OUT_FILE}")

    # -- training -----------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        """Train the remaining steps, with evaluations and snapshots between them, and write a snapshot at the end.
        Return the status of the run: ``finished``, or ``stopped`` if a stop was requested before the last step."""
        schedule, run, totals = self._prepared.schedule, self._prepared.config.run, self._totals
        if not totals.steps_done:
            self._evaluate()
        totals.began_s, totals.phase = self._clock.now(), "training"
        for step in range(totals.steps_done, schedule.num_steps):
            if self._stop.requested:
                break
            self._locked_dir.refuse_lost()
            self._step(step)
            last = step + 1 == schedule.num_steps
            if not last and run.eval_every and (step + 1) % run.eval_every == 0:
                self._evaluate()
            if not last and (step + 1) % run.checkpoint_every == 0:
                self._save()
        ended = totals.steps_done == schedule.num_steps
        if ended:
            self._evaluate()
        if self._saved != totals.steps_done:
            self._save()
        if ended and self._measurements is not None:
            totals.phase = "evaluating"
            self._write_status("running")
            self._measurements.finish()
        self._record_rewards()
        self._rows.note("end", "finished" if ended else "stopped")
        return "finished" if ended else "stopped"

    def _step(self, step: int) -> None:
        """Train step ``step``: lay out its rows as a batch, let the learner train on it, and record the step in the
        ledger and in the metrics."""
        schedule, all_rows = self._prepared.schedule, self._all_rows
        numbers, rows = list(schedule.places(step)), schedule.rows(step)
        batch, episodes = make_batch(
            step, [(number, all_rows[row]) for number, row in zip(numbers, rows, strict=True)]
        )  # fmt: skip
        self._rows.take(step, numbers, rows, episodes)
        report = self._learner.train(batch)
        self._rows.record_step(report, numbers, batch, episodes)
        self._record(report, batch.num_tokens, epoch=schedule.places(step).stop / len(all_rows))

    def _record(self, report: StepReport, num_tokens: int, *, epoch: float) -> None:
        """Add the step of ``report`` to the totals, and send its metrics to the observers. ``num_tokens`` is the number
        of tokens of its batch, prompts included; ``epoch`` is the number of epochs trained so far. The metrics include
        the held-out metrics of the weights before this step, and rewards that were measured since the last step."""
        totals, now_s = self._totals, self._clock.now()
        totals.steps_done = report.step + 1
        totals.losses.append(report.metrics["loss"])
        totals.trained_tokens += report.trained_tokens
        totals.tokens += num_tokens
        before = totals.evals.get(report.step, {})  # measured on the weights before this step
        held_out = {f"eval/{name}": value for name, value in before.items()}
        measured = self._record_rewards()
        pass_at = {f"eval_pass/{k}": value for k, value in measured.pass_at.items()} if measured is not None else {}
        metrics = tuning_metrics(report.metrics) | {"epoch": epoch} | held_out | pass_at
        metrics["trained_tok_s"] = report.trained_tokens / max(report.seconds, 1e-9)
        self._observers.spans(self._learner.take_spans())
        record = StepRecord(
            step=report.step,
            version=report.step + 1,
            clock_s=now_s,
            wall_s=now_s - self._start_s,
            unix_s=self._clock.wall(),
            eval_accuracy=None if measured is None else measured.mean_reward,
            eval_version=None if measured is None else measured.version,
            metrics=metrics,
            trained_tokens=report.trained_tokens,
            seconds=report.seconds,
            dropped_tokens=report.dropped_tokens,
        )
        totals.figures = format_figures(record)
        self._observers.step(record)
        if now_s - self._status_s >= STATUS_EVERY_S:
            self._write_status("running")

    def _evaluate(self) -> None:
        """Measure the loss of the present weights on the held-out rows, if there are any. If the table ``[eval]`` is
        set, queue the weights for the measurement of rewards in another process."""
        found, totals = self._prepared.eval_rows, self._totals
        if self._measurements is not None:
            if totals.steps_done not in (0, self._saved):
                self._save()
            self._measurements.begin(totals.steps_done)
        if found is None:
            return
        phase, totals.phase = totals.phase, "evaluating"
        self._write_status("running")
        metrics = self._evaluate_rows(found)
        totals.evals[totals.steps_done] = metrics
        totals.phase = phase
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._event(f"held-out rows at version {totals.steps_done}: {words}")

    def _record_rewards(self) -> VersionRewards | None:
        """Record the reward measurements that have ended since the last call, and return the last of them; ``None`` if
        none has ended."""
        ended = [] if self._measurements is None else self._measurements.take()
        for each in ended:
            pass_at = {f"pass@{k}": value for k, value in each.pass_at.items()}
            self._totals.rewards[each.version] = {"reward": each.mean_reward} | pass_at
            self._event(f"held-out mean reward {each.mean_reward:.4f} at version {each.version}")
            self._event(", ".join(f"{name} {value:.4f}" for name, value in pass_at.items()))
            for warning in each.warnings:
                self._warn(f"[eval]: {warning}")
        return ended[-1] if ended else None

    def _evaluate_rows(self, held_out: RowSet) -> dict[str, float]:
        """Return the metrics of the present weights on the rows of ``held_out``, without training."""
        batch, _ = make_batch(0, list(enumerate(held_out.rows)))
        metrics = tuning_metrics(self._learner.evaluate(batch))
        return {name: value for name, value in metrics.items() if name != "tokens"}

    def _save(self) -> None:
        """Write a snapshot of the weights and the optimizer at the present step, and delete the oldest snapshots beyond
        ``run.keep_checkpoints``. The ledger is written to the disk first, so that it contains every step of the
        snapshot."""
        step = self._totals.steps_done
        unfinished = checkpoint.begin(self._run_dir / CHECKPOINTS, step)
        try:
            self._learner.save(unfinished)
            self._rows.persist()  # the ledger must contain every step of the snapshot
        except BaseException:
            checkpoint.abandon(unfinished)
            raise
        state = SnapshotState(
            step=step, version=step, config_fingerprint=self._prepared.fingerprint(), controller={}
        )  # fmt: skip
        final = checkpoint.commit(unfinished, state)
        checkpoint.retain(self._run_dir / CHECKPOINTS, self._prepared.config.run.keep_checkpoints)
        self._saved = step
        self._event(f"checkpoint {final.name}")

    # -- what others see ----------------------------------------------------------------------------------------------

    def _event(self, text: str) -> None:
        """Show the user an event, and record it, as a line of text."""
        self._observers.event(Event(wall_s=self._clock.now() - self._start_s, text=text))

    def _warn(self, text: str) -> None:
        """Show the user a warning; the same text is shown only once."""
        if text in self._totals.warnings:
            return
        self._totals.warnings.append(text)
        self._observers.event(Event(wall_s=self._clock.now() - self._start_s, text=text, level="warning"))

    def _show_alarm(self, raised: Raised, stop: bool) -> None:
        """Show the user an alarm as a warning; the alarm observer calls this. With ``stop``, also end the run after the
        present step."""
        self._warn(str(raised))
        if stop and not self._stop.requested:
            self._event(f"stopping because of the alarm {raised.name} (observe.alarms.stop_on)")
            self._stop.requested = True

    def _write_status(self, state: str) -> None:
        """Write ``status.json``, and send the present state to the observers, for the display and for ``headrace
        watch``. ``state`` is ``running`` or ``ended``."""
        totals, now_s, steps = self._totals, self._clock.now(), self._prepared.schedule.num_steps
        self._status_s = now_s
        status = Status(
            phase=totals.phase,
            steps_done=totals.steps_done,
            steps_total=steps,
            version=totals.steps_done,
            written_s=self._clock.wall(),
            components=self._components("ready" if state == "running" else "ended"),
            waits=[],
            warnings=totals.warnings,
        )
        write_json(self._run_dir / STATUS_FILE, status)
        trained_s, done = now_s - totals.began_s, len(totals.losses)
        left_s = trained_s / done * (steps - totals.steps_done) if done else None
        self._observers.update(
            LiveState(
                steps_done=totals.steps_done,
                steps_total=steps,
                title=self._run_dir.name,
                phase=totals.phase,
                wall_s=now_s - self._start_s,
                eta_s=left_s,
                learner_version=totals.steps_done,
                trained_tok_s=totals.trained_tokens / trained_s if done else 0.0,
                warnings=tuple(totals.warnings),
                figures=totals.figures,
            )
        )

    def _components(self, state: str) -> list[ComponentStatus]:
        """Return the status of each process of the run: this process, and the ranks of the learner. All are in
        ``state``."""
        devices, version = self._started.devices, self._totals.steps_done
        own_device = "" if self._started.pids else devices[0]
        ranks = [
            ComponentStatus(role=f"learner-{rank}", pid=pid, state=state, version=version, device=device)
            for rank, (pid, device) in enumerate(zip(self._started.pids, devices, strict=False))
        ]
        version_here = None if ranks else version
        return [
            ComponentStatus(role="controller", pid=os.getpid(), state=state, version=version_here, device=own_device),
            *ranks,
        ]

    def _finish(self, status: str, cause: str = "") -> TuningSummary:
        """Write the last status and the summary, and return the summary. ``status`` is ``finished``, ``stopped`` or
        ``failed``; ``cause`` is the reason of a failure."""
        totals, now_s = self._totals, self._clock.now()
        totals.phase = status
        wall_s = now_s - totals.began_s if totals.began_s else 0.0
        evals, rewards = sorted(totals.evals.items()), sorted(totals.rewards.items())
        tenth = max(1, len(totals.losses) // 10)
        summary = TuningSummary(
            verb=self._prepared.verb,
            status=status,
            stopped_by=self._stop.signal,
            cause=cause,
            steps=totals.steps_done,
            epochs=self._epochs(),
            loss_first=totals.losses[0] if totals.losses else None,
            loss_last=sum(totals.losses[-tenth:]) / tenth if totals.losses else None,
            eval_first=evals[0][1] if evals else {},
            eval_last=evals[-1][1] if evals else {},
            rewards_first=rewards[0][1] if rewards else {},
            rewards_last=rewards[-1][1] if rewards else {},
            tokens=totals.tokens,
            tokens_trained=totals.trained_tokens,
            wall_s=wall_s,
            trained_tok_s=totals.trained_tokens / wall_s if wall_s > 0 else 0.0,
            rows_left_out=len(self._prepared.rows.left_out),
            rows_cut=self._prepared.rows.num_cut,
            ledger=self._ledger.conservation(),
            warnings=totals.warnings,
            run_dir=str(self._run_dir),
        )
        with _ignored_after_failure(failed=status == "failed"):
            self._locked_dir.refuse_lost()
            self._write_status("ended")
            write_json(self._run_dir / SUMMARY_FILE, summary)
            self._observers.flush()
        return summary

    def _epochs(self) -> float:
        """Return the number of epochs trained so far: the number of trained rows over the number of rows."""
        schedule, done = self._prepared.schedule, self._totals.steps_done
        return schedule.places(done - 1).stop / len(self._prepared.rows.rows) if done else 0.0


@contextmanager
def _ignored_after_failure(*, failed: bool) -> Iterator[None]:
    """Ignore a :class:`HeadraceError` of the body if the run has ``failed``, so that the user sees the error of the run
    and not an error of the last writes."""
    try:
        yield
    except HeadraceError:
        if not failed:
            raise
