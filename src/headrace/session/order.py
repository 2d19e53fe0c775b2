"""From what is prepared to what is launched."""

from __future__ import annotations

from pathlib import Path

from headrace.control.observer import Observers
from headrace.launch import Order
from headrace.session.prepare import Prepared


def make_order(prepared: Prepared, *, run_dir: Path, snapshot: Path | None, observers: Observers) -> Order:
    """The launcher's order; ``snapshot`` is where a resumed run's weights and optimizer are."""
    config = prepared.config
    return Order(
        model=config.model if snapshot is None else config.model.at(str(snapshot)),
        tokenizer_dir=config.model.path,
        snapshot=snapshot,
        engine=config.engine,
        learner=config.learner,
        algo=config.algo,
        env=config.env,
        sync=config.sync,
        launch=config.launch,
        tasks=prepared.tasks,
        eval_tasks=prepared.eval_tasks,
        sampling=prepared.sampling,
        max_context=prepared.max_context,
        decode=prepared.decode,
        run_dir=run_dir,
        total_steps=config.run.steps,
        on_spans=observers.spans,
        on_event=observers.event,
    )
