"""``headrace eval``: a model in its environment on the held-out rows, without training."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.control import RunSection, Serving
from headrace.control.board import ActivityBoard, LoopContract
from headrace.control.estimates import IntervalEstimate, mean_of, pass_at_k, pass_hat_k, share_of
from headrace.control.evaluation import EvaluationListener, Evaluator
from headrace.control.observer import Observers
from headrace.engine.remote import Elsewhere, RemoteEngine, reached
from headrace.launch.local import local_serving
from headrace.run.observe.pages import Book, Figure, Shown
from headrace.run.session.config import RunConfig, RunFile, load_config
from headrace.run.session.directory import write_json
from headrace.run.session.engine_fit import slower_here
from headrace.run.session.order import make_order
from headrace.run.session.prepare import Inputs, Prepared, Rows, prepare, refuse_inside_a_run
from headrace.run.session.running import first_cause, in_own_loop

RESULT = "evaluation.json"
PROGRESS_EVERY_S = 10.0
"""Between two lines about what has been sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What is measured, and what is kept of it."""

    ks: Sequence[int] = ()
    """The ``k`` of pass@k and pass^k; empty: 1, 2, 4, ... up to the attempts at each task."""
    pass_reward: float = 1.0
    """An attempt passes that earns at least this."""
    directory: str | Path = ""
    """Where the pages, a line for each attempt, the result and the parts' logs go; empty: nowhere."""
    max_pages: int = 1000
    """Episodes that get a page."""
    elsewhere: Elsewhere | None = None
    """An engine that somebody else runs, with the model's tokenizer; ``None``: those of the run file are started."""

    def chosen(self, samples: int) -> tuple[int, ...]:
        """The ``k`` for so many attempts; :class:`~headrace.base.errors.ConfigError` where they cannot say it."""
        wrong = [k for k in self.ks if not 1 <= k <= samples]
        if wrong:
            raise ConfigError(
                f"k={wrong[0]} cannot be told from {samples} attempts at each task",
                remedy=f"raise run.eval_samples (--n) to at least {max(wrong)}, and ask for k >= 1",
            )
        return tuple(dict.fromkeys(self.ks)) or tuple(k for k in _POWERS if k <= samples)


_POWERS = tuple(2**power for power in range(16))


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    model: str
    mean_reward: float
    """Over all attempts (avg@k, where k is their number); one that fails counts as 0."""
    avg: IntervalEstimate
    """The same with its 95 % interval."""
    pass_at: dict[int, IntervalEstimate]
    """By k: how likely at least one of k attempts passes."""
    pass_hat: dict[int, IntervalEstimate]
    """By k: how likely all of k attempts pass (pass^k)."""
    pass_reward: float
    """What an attempt must earn to pass."""
    tasks: int
    samples: int
    """Attempts at each."""
    temperature: float
    """At which the attempts were sampled; 0: the most likely token."""
    tokens: int
    """Sampled in all attempts."""
    seconds: float
    """From the first request to the last reward."""
    warnings: list[str]
    directory: str = ""
    """Where its pages are; empty where none were written."""


def evaluate(
    config: RunFile | RunConfig,
    *,
    eval_data: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
    measures: Measures | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """The model ``model.path`` in its environment, on the rows of ``data.eval_path`` (or ``eval_data``), each of them
    ``run.eval_samples`` times. ``tell`` is called with a line for people when something long begins.

    Raises :class:`~headrace.base.errors.HeadraceError`.
    """
    refuse_inside_a_run()
    measures = measures or Measures()
    inputs = Inputs(eval_data=eval_data, reward=reward)
    prepared = prepare(load_config(config, overrides), inputs, training=False)
    measures.chosen(prepared.config.run.eval_samples)
    with tempfile.TemporaryDirectory(prefix="headrace-eval-") as logs:
        where = Path(measures.directory).expanduser().resolve() if measures.directory else Path(logs)
        return in_own_loop(lambda _: _evaluate(prepared, measures, where, tell))


async def _evaluate(prepared: Prepared, measures: Measures, where: Path, tell: Callable[[str], None]) -> Evaluation:
    run, clock = prepared.config.run, RealClock()
    tokens, told_s = 0, clock.now()
    warnings = [] if measures.elsewhere else slower_here(prepared.config, prepared.devices)

    def count(arrived: int) -> None:
        nonlocal tokens, told_s
        tokens += arrived
        if clock.now() - told_s >= PROGRESS_EVERY_S:
            told_s = clock.now()
            tell(f"{tokens:,} tokens sampled so far")

    book = _book(prepared, measures, where)
    order = make_order(prepared, run_dir=where, snapshot=None, observers=Observers(()))
    told = EvaluationListener(on_tokens=count, warn=warnings.append, keep=None if book is None else book.keep)
    tell(f"starting scoring workers, {order.devices if measures.elsewhere is None else measures.elsewhere.url}")
    try:
        async with _engine(measures.elsewhere) as remote, local_serving(order, remote) as serving:
            began_s = clock.now()
            tell(f"{len(prepared.eval_tasks):,} rows × {run.eval_samples} attempts")
            rewards = await watched(serving, run, told)
            seconds = clock.now() - began_s
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    evaluation = _summed_up(prepared, measures, rewards)
    evaluation = msgspec.structs.replace(evaluation, tokens=tokens, seconds=seconds, warnings=warnings)
    if book is not None:
        evaluation = msgspec.structs.replace(evaluation, directory=str(where))
        book.finish(evaluation.model, _figures(evaluation), warnings)
        write_json(where / RESULT, evaluation)
    return evaluation


@asynccontextmanager
async def _engine(where: Elsewhere | None) -> AsyncIterator[RemoteEngine | None]:
    if where is None:
        yield None
        return
    async with reached(where) as remote:
        yield remote


def _book(prepared: Prepared, measures: Measures, where: Path) -> Book | None:
    if not measures.directory:
        return None
    shown = Shown(
        rows=[task.row for task in prepared.eval_tasks],
        num_attempts=prepared.config.run.eval_samples,
        spell=partial(prepared.chat.tokenizer.decode, skip_special_tokens=False),
        max_pages=measures.max_pages,
    )
    return Book(where, shown)


def _summed_up(prepared: Prepared, measures: Measures, rewards: Sequence[Sequence[float]]) -> Evaluation:
    run, engine = prepared.config.run, prepared.config.engine
    avg = mean_of([sum(task) / len(task) for task in rewards])
    passed = [sum(reward >= measures.pass_reward for reward in task) for task in rewards]
    ks = measures.chosen(run.eval_samples)
    return Evaluation(
        model=prepared.config.model.path,
        mean_reward=avg.value,
        avg=avg,
        pass_at={k: share_of([pass_at_k(run.eval_samples, count, k) for count in passed]) for k in ks},
        pass_hat={k: share_of([pass_hat_k(run.eval_samples, count, k) for count in passed]) for k in ks},
        pass_reward=measures.pass_reward,
        tasks=len(rewards),
        samples=run.eval_samples,
        temperature=engine.temperature if run.eval_temperature is None else run.eval_temperature,
        tokens=0,
        seconds=0.0,
        warnings=[],
    )


def _figures(evaluation: Evaluation) -> list[Figure]:
    named = {f"avg@{evaluation.samples}": evaluation.avg}
    named |= {f"pass@{k}": estimate for k, estimate in evaluation.pass_at.items()}
    named |= {f"pass^{k}": estimate for k, estimate in evaluation.pass_hat.items()}
    return [Figure(name=name, value=each.value, low=each.low, high=each.high) for name, each in named.items()]


_CONTRACT = LoopContract(
    name="eval",
    consumes="held-out tasks",
    produces="rewards",
    waits_for="tokens; the scorers",
    unblocked_by="engine, scoring workers",
)


async def watched(serving: Serving, run: RunSection, told: EvaluationListener) -> list[list[float]]:
    """The reward of every attempt at the held-out tasks; :class:`~headrace.base.errors.StallError` if nothing moves for
    ``run.stall_timeout_s``."""
    board = ActivityBoard((_CONTRACT,), serving.clock)
    evaluator = Evaluator(serving, samples=run.eval_samples, temperature=run.eval_temperature, run_seed=run.seed)

    def arrived(tokens: int) -> None:
        board.progress()
        told.on_tokens(tokens)

    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(board.watch(run.stall_timeout_s, serving.num_steps, serving.standing))
        with board.waiting("eval", "answers to the held-out tasks", on="engine, scoring workers"):
            rewards = await evaluator.rewards(EvaluationListener(on_tokens=arrived, warn=told.warn, keep=told.keep))
        watchdog.cancel()
    return rewards
