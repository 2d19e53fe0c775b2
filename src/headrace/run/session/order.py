"""From what is prepared to what is launched."""

from __future__ import annotations

from pathlib import Path

from headrace.control.observer import Observers
from headrace.launch.order import LaunchOrder
from headrace.rollout.environments import Curriculum
from headrace.rollout.environments.data import RowOrder
from headrace.run.session.config import RunConfig
from headrace.run.session.prepare import Prepared


def make_order(prepared: Prepared, *, run_dir: Path, snapshot: Path | None, observers: Observers) -> LaunchOrder:
    """The launcher's order; ``snapshot`` is where a resumed run's weights and optimizer are."""
    config = prepared.config
    return LaunchOrder(
        model=config.model,
        snapshot=snapshot,
        engine=config.engine,
        learner=config.learner,
        algo=config.algo,
        env=config.env,
        agents=prepared.agents,
        teachers=prepared.teachers,
        sync=config.sync,
        launch=config.launch,
        devices=prepared.devices,
        tasks=prepared.tasks,
        eval_tasks=prepared.eval_tasks,
        sampling=prepared.sampling,
        max_context=prepared.max_context,
        decode=prepared.decode,
        chat=prepared.chat,
        run_dir=run_dir,
        total_steps=config.run.steps,
        branch_weight=1.0 if config.flow.pivots is None else config.flow.pivots.weight,
        on_spans=observers.spans,
        on_event=observers.event,
        stall_timeout_s=config.run.stall_timeout_s,
    )


def row_order(config: RunConfig, num_rows: int) -> RowOrder:
    """Which row a group attempts, without a curriculum."""
    data = config.data
    return RowOrder(num_rows=num_rows, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)


def curriculum(config: RunConfig, num_rows: int) -> Curriculum | None:
    """The curriculum that the run file asks for."""
    data = config.data
    if data.curriculum is None:
        return None
    return Curriculum(
        data.curriculum, num_rows=num_rows, seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs
    )
