"""Which ways there are to start the processes of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from headrace.base.types.observation import Event
from headrace.launch.child import Starter
from headrace.launch.here import Here
from headrace.launch.order import LaunchOrder


@asynccontextmanager
async def _here(order: LaunchOrder) -> AsyncIterator[Starter]:
    if order.forks is None:
        yield Here()
        return
    with order.forks.attended(lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning"))):
        yield Here(order.forks)


def starting(order: LaunchOrder) -> AbstractAsyncContextManager[Starter]:
    """Who starts the processes of ``order``, as ``launch.kind`` says; what it holds of a cluster is given back after
    the body."""
    if not order.launch.remote:
        return _here(order)
    from headrace.wings.cluster.ray.starter import starting_on_ray

    return starting_on_ray(order)
