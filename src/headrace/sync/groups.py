"""Process groups of torch.distributed that a part has for itself, beside the default one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.base.config.addresses import LOOPBACK
from headrace.base.types.weights import BUCKET_BYTES

torch_distributed: Any = dist
"""Much of it is not in torch's stubs."""


class ProcessGroup:
    """A process group of this process's own, beside the default one."""

    def __init__(self, backend: Any, deadline_s: float) -> None:
        self._group, self._timeout = backend, timedelta(seconds=deadline_s)

    def broadcast(self, buffer: memoryview) -> None:
        """From rank 0 to the others, a bucket at a time."""
        if buffer:
            for bucket in torch.frombuffer(buffer, dtype=torch.uint8).split(BUCKET_BYTES):
                self.broadcast_one(bucket)

    def broadcast_one(self, tensor: Tensor) -> None:
        """From rank 0 to the others."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)


def gloo_group(store: Any, place: tuple[int, int], deadline_s: float, host: str = LOOPBACK) -> ProcessGroup:
    """A Gloo group of those that meet in ``store``, made by all of them at once; ``place``: this one's rank, and their
    number. ``host``: the address at which the others reach it. ``RuntimeError`` where one does not come in time."""
    gloo = torch_distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_s)
    return ProcessGroup(gloo(store, *place, options), deadline_s)


def meet(directory: Path, name: str, place: tuple[int, int], deadline_s: float) -> ProcessGroup:
    """A Gloo group of processes of this machine, which find each other in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    store = torch_distributed.FileStore(str(directory / f"weights-{name}"), place[1])
    store.set_timeout(timedelta(seconds=deadline_s))
    return gloo_group(store, place, deadline_s)
