"""``headrace eval``: measure a model in its environment on the held-out rows, without training.

Each row (task) is attempted several times; an attempt is one episode with a reward, and *passes* with a reward of at
least ``pass_reward``.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.base.types.observation import Event
from headrace.control import RunSection, Serving
from headrace.control.board import ActivityBoard, LoopContract
from headrace.control.evaluation import (
    EvaluationListener,
    Evaluator,
    IntervalEstimate,
    estimate_mean,
    estimate_share,
    pass_at_k,
    pass_hat_k,
)
from headrace.control.observer import Observers
from headrace.engine.remote import RemoteEndpoint, RemoteEngine, connect
from headrace.launch.local import launch_serving
from headrace.run.observe.pages import PageInputs, PageWriter
from headrace.run.observe.words import plural
from headrace.run.session.config import RunConfig, RunFile, load_config
from headrace.run.session.directory import write_json
from headrace.run.session.engine_fit import find_slowdowns
from headrace.run.session.prepare import Inputs, Prepared, Rows, make_order, prepare, refuse_inside_a_run
from headrace.run.session.running import first_cause, run_in_own_loop

RESULT = "evaluation.json"
"""The name of the result's file in the directory of an evaluation."""
PROGRESS_EVERY_S = 10.0
"""The interval between two progress lines about the number of sampled tokens, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The options of an evaluation that are not in the run file: the measures to compute, the engine to use, and the
    files to keep."""

    ks: Sequence[int] = ()
    """The values of ``k`` for pass@k and pass^k; empty: 1, 2, 4, ... up to the number of attempts at each task."""
    pass_reward: float = 1.0
    """The smallest reward with which an attempt passes."""
    directory: str | Path = ""
    """The directory for the pages, one line for each attempt, the result and the logs of the processes; empty: no
    file is kept."""
    max_pages: int = 1000
    """The maximum number of episodes that get a page."""
    running_engine: RemoteEndpoint | None = None
    """An engine that is running already, with the model's tokenizer; ``None``: the engines of the run file are
    started."""

    def choose_ks(self, samples: int) -> tuple[int, ...]:
        """Return the values of ``k`` for ``samples`` attempts at each task.

        Raises :class:`~headrace.base.errors.ConfigError` for a ``k`` that is larger than ``samples`` or smaller than 1.
        """
        wrong = [k for k in self.ks if not 1 <= k <= samples]
        if wrong:
            raise ConfigError(
                f"k={wrong[0]} cannot be told from {samples} attempts at each task",
                remedy=f"raise run.eval_samples (--n) to at least {max(wrong)}, and ask for k >= 1",
            )
        return tuple(dict.fromkeys(self.ks)) or tuple(k for k in _POWERS if k <= samples)


_POWERS = tuple(2**power for power in range(16))
"""The default values of ``k``; values above the number of attempts are skipped."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an evaluation, which :func:`evaluate` returns. An estimate is a value with its 95 % interval."""

    model: str
    """The path of the model, from the settings."""
    mean_reward: float
    """The mean reward over all attempts (avg@k, where k is the number of attempts at each task); a failed attempt
    counts as 0."""
    avg: IntervalEstimate
    """The mean reward with its 95 % interval."""
    pass_at: dict[int, IntervalEstimate]
    """By k, the probability that at least one of k attempts passes (pass@k)."""
    pass_hat: dict[int, IntervalEstimate]
    """By k, the probability that all of k attempts pass (pass^k)."""
    pass_reward: float
    """The smallest reward with which an attempt passes."""
    tasks: int
    """The number of tasks."""
    samples: int
    """The number of attempts at each task."""
    temperature: float
    """The sampling temperature; 0 means greedy decoding, the most likely token."""
    tokens: int
    """The number of tokens sampled in all attempts."""
    seconds: float
    """The time from the first request to the last reward, in seconds."""
    warnings: list[str]
    """Warnings about the evaluation, in words."""
    directory: str = ""
    """The directory of the pages; empty if none were written."""

    def figures(self) -> dict[str, IntervalEstimate]:
        """Return avg@n, and pass@k and pass^k for each k, by name, each with its interval."""
        return {
            f"avg@{self.samples}": self.avg,
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
            **{f"pass^{k}": estimate for k, estimate in self.pass_hat.items()},
        }


def evaluate(
    config: RunFile | RunConfig,
    *,
    eval_data: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    measures: Measures | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Measure the model ``model.path`` of the run file ``config`` in its environment, and return the result.

    Each row of ``data.eval_path`` (or of ``eval_data``) is attempted ``run.eval_samples`` times. ``reward`` replaces
    ``env.reward``; it must be a function that is defined in a file. ``overrides`` are ``section.key=value`` pairs that
    replace settings of the run file, and ``measures`` are the other options. ``on_progress`` is called with one line of
    text when a long stage begins.

    Raises :class:`~headrace.base.errors.HeadraceError`.
    """
    refuse_inside_a_run()
    measures = measures or Measures()
    inputs = Inputs(eval_data=eval_data, reward=reward)
    prepared = prepare(load_config(config, overrides), inputs, training=False)
    measures.choose_ks(prepared.config.run.eval_samples)
    with tempfile.TemporaryDirectory(prefix="headrace-eval-") as logs:
        directory = Path(measures.directory).expanduser().resolve() if measures.directory else Path(logs)
        return run_in_own_loop(lambda _: _evaluate(prepared, measures, directory, on_progress))


async def _evaluate(
    prepared: Prepared, measures: Measures, directory: Path, on_progress: Callable[[str], None]
) -> Evaluation:
    """Start the scoring and environment workers and the engines, attempt every held-out row of ``prepared``, and return
    the result. If ``measures`` names a running engine, this engine is used in place of the policy's own engines.

    ``directory`` is for the pages of episodes, the result and the logs; if the user chose no directory, it is a
    temporary directory for the logs alone. ``on_progress`` is called with one line of text at a time. If several errors
    occur together, the error that explains the others is raised.
    """
    run, clock = prepared.config.run, RealClock()
    tokens, reported_s = 0, clock.now()
    warnings = [] if measures.running_engine else find_slowdowns(prepared.config, prepared.devices)
    warnings += prepared.isolation_warnings
    for warning in prepared.isolation_warnings:
        on_progress(f"warning: {warning}")

    def count(num_new: int) -> None:
        """Add ``num_new`` sampled tokens to the count, and report it every :data:`PROGRESS_EVERY_S`."""
        nonlocal tokens, reported_s
        tokens += num_new
        if clock.now() - reported_s >= PROGRESS_EVERY_S:
            reported_s = clock.now()
            on_progress(f"{tokens:,} tokens sampled so far")

    pages = _make_page_writer(prepared, measures, directory)
    order = replace(
        make_order(prepared, run_dir=directory, snapshot=None, observers=Observers(())),
        on_event=partial(_keep_warning, warnings, on_progress),
    )
    listener = EvaluationListener(
        on_tokens=count, warn=warnings.append, on_attempt=None if pages is None else pages.keep
    )
    on_progress(
        f"starting scoring workers, {order.devices if measures.running_engine is None else measures.running_engine.url}"
    )
    try:
        running: AbstractAsyncContextManager[RemoteEngine | None] = nullcontext()
        if measures.running_engine is not None:
            running = connect(measures.running_engine)
        async with running as remote, launch_serving(order, remote) as serving:
            began_s = clock.now()
            on_progress(f"{plural(len(prepared.eval_tasks), 'row')} × {plural(run.eval_samples, 'attempt')}")
            rewards = await measure_rewards(serving, run, listener)
            seconds = clock.now() - began_s
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    evaluation = _summarize(prepared, measures, rewards)
    evaluation = msgspec.structs.replace(evaluation, tokens=tokens, seconds=seconds, warnings=warnings)
    if pages is not None:
        evaluation = msgspec.structs.replace(evaluation, directory=str(directory))
        pages.finish(evaluation.model, evaluation.figures(), warnings)
        write_json(directory / RESULT, evaluation)
    return evaluation


def _keep_warning(warnings: list[str], on_progress: Callable[[str], None], event: Event) -> None:
    """If ``event`` is a warning about the processes of the evaluation, pass it to ``on_progress``, and append it to
    ``warnings``. Other events are not shown."""
    if event.level == "warning":
        on_progress(f"warning: {event.text}")
        warnings.append(event.text)


def _make_page_writer(prepared: Prepared, measures: Measures, directory: Path) -> PageWriter | None:
    """Return the writer of the pages of episodes, which writes into ``directory``; ``None`` if the user has chosen no
    directory in ``measures``, in which case no pages are written. ``prepared`` has the held-out tasks."""
    if not measures.directory:
        return None
    shown = PageInputs(
        rows=[task.row for task in prepared.eval_tasks],
        num_attempts=prepared.config.run.eval_samples,
        decode=partial(prepared.chat.tokenizer.decode, skip_special_tokens=False),
        max_pages=measures.max_pages,
    )
    return PageWriter(directory, shown)


def _summarize(prepared: Prepared, measures: Measures, rewards: Sequence[Sequence[float]]) -> Evaluation:
    """Return the result of an evaluation with the ``measures`` of ``rewards``, which are indexed by task and attempt.
    ``prepared`` has the settings. The fields ``tokens``, ``seconds`` and ``warnings`` are left empty, for the
    caller."""
    run, engine = prepared.config.run, prepared.config.engine
    avg = estimate_mean([sum(task) / len(task) for task in rewards])
    passed = [sum(reward >= measures.pass_reward for reward in task) for task in rewards]
    ks = measures.choose_ks(run.eval_samples)
    return Evaluation(
        model=prepared.config.model.path,
        mean_reward=avg.value,
        avg=avg,
        pass_at={k: estimate_share([pass_at_k(run.eval_samples, count, k) for count in passed]) for k in ks},
        pass_hat={k: estimate_share([pass_hat_k(run.eval_samples, count, k) for count in passed]) for k in ks},
        pass_reward=measures.pass_reward,
        tasks=len(rewards),
        samples=run.eval_samples,
        temperature=engine.temperature if run.eval_temperature is None else run.eval_temperature,
        tokens=0,
        seconds=0.0,
        warnings=[],
    )


_CONTRACT = LoopContract(
    name="eval",
    consumes="held-out tasks",
    produces="rewards",
    waits_for="tokens; the scorers",
    unblocked_by="engine, scoring workers",
)
"""The description of the evaluation's only loop, for the error of a stall."""


async def measure_rewards(serving: Serving, run: RunSection, listener: EvaluationListener) -> list[list[float]]:
    """Run every attempt at the held-out tasks, and return the rewards, indexed by task and attempt; a failed attempt
    counts as 0. ``serving`` has the engines, workers and tasks; ``run`` has the number of attempts, the temperature and
    the seed; the functions of ``listener`` are called with tokens, warnings and ended episodes.

    Raises :class:`~headrace.base.errors.StallError` if there is no progress for ``run.stall_timeout_s``.
    """
    board = ActivityBoard((_CONTRACT,), serving.clock)
    evaluator = Evaluator(serving, samples=run.eval_samples, temperature=run.eval_temperature, run_seed=run.seed)

    def on_tokens(tokens: int) -> None:
        """Report progress to the watchdog, and pass the number of new tokens on to the listener."""
        board.record_progress()
        listener.on_tokens(tokens)

    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(
            board.watch(run.stall_timeout_s, pulse=serving.num_steps, standstills=serving.standstills)
        )
        with board.waiting("eval", "answers to the held-out tasks", on="engine, scoring workers"):
            rewards = await evaluator.rewards(replace(listener, on_tokens=on_tokens))
        watchdog.cancel()
    return rewards
