"""``headrace eval``: a model on the held-out rows, without training."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.control import RunSection, Serving
from headrace.control.board import Board, LoopContract
from headrace.control.evaluation import Evaluator
from headrace.control.observer import Observers
from headrace.launch import local_serving
from headrace.session.config import RunConfig, RunFile, load_config
from headrace.session.order import make_order
from headrace.session.prepare import Inputs, Prepared, Rows, prepare, refuse_inside_a_run
from headrace.session.running import first_cause, in_own_loop


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    model: str
    mean_reward: float
    """Over all attempts; one whose reward fails counts as 0."""
    tasks: int
    samples: int
    """Attempts at each."""
    temperature: float
    """At which the attempts were sampled; 0: the most likely token."""
    tokens: int
    """Sampled in all attempts."""
    warnings: list[str]


def evaluate(
    config: RunFile | RunConfig,
    *,
    eval_data: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """The mean reward of the model ``model.path`` on the rows of ``data.eval_path`` (or ``eval_data``).

    Raises :class:`~headrace.errors.HeadraceError`.
    """
    refuse_inside_a_run()
    inputs = Inputs(eval_data=eval_data, reward=reward)
    prepared = prepare(load_config(config, overrides), inputs, training=False)
    with tempfile.TemporaryDirectory(prefix="headrace-eval-") as logs:
        return in_own_loop(lambda _: _evaluate(prepared, Path(logs)))


async def _evaluate(prepared: Prepared, logs: Path) -> Evaluation:
    run = prepared.config.run
    tokens = 0
    warnings: list[str] = []

    def count(arrived: int) -> None:
        nonlocal tokens
        tokens += arrived

    order = make_order(prepared, run_dir=logs, snapshot=None, observers=Observers(()))
    try:
        async with local_serving(order) as serving:
            mean_reward = await watched(serving, run, count, warnings.append)
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    assert mean_reward is not None
    temperature = run.eval_temperature
    return Evaluation(
        model=prepared.config.model.path,
        mean_reward=mean_reward,
        tasks=len(prepared.eval_tasks),
        samples=run.eval_samples,
        temperature=prepared.config.engine.temperature if temperature is None else temperature,
        tokens=tokens,
        warnings=warnings,
    )


_CONTRACT = LoopContract(
    name="eval",
    consumes="held-out tasks",
    produces="a mean reward",
    waits_for="tokens; the scorers",
    unblocked_by="engine, scoring workers",
)


async def watched(
    serving: Serving, run: RunSection, count: Callable[[int], None], warn: Callable[[str], None]
) -> float | None:
    """The mean reward on the held-out tasks; :class:`~headrace.errors.StallError` if nothing moves for
    ``run.stall_timeout_s``."""
    board = Board((_CONTRACT,), serving.clock)
    evaluator = Evaluator(serving, samples=run.eval_samples, temperature=run.eval_temperature, run_seed=run.seed)

    def arrived(tokens: int) -> None:
        board.progress()
        count(tokens)

    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(board.watch(run.stall_timeout_s, lambda: serving.engine.stats().steps))
        with board.waiting("eval", "answers to the held-out tasks", on="engine, scoring workers"):
            mean_reward = await evaluator.mean_reward(arrived, warn)
        watchdog.cancel()
    return mean_reward
