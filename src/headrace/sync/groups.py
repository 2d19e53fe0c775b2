"""Broadcasts of tensors from one sender to its receivers: over process groups of torch.distributed that are independent
of the default group, or through a file. The members of a process group are numbered by *ranks*; rank 0 is always the
sender."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.base.config.addresses import LOOPBACK
from headrace.base.types.weights import BUCKET_BYTES
from headrace.sync.files import fill

torch_distributed: Any = dist
"""The module ``torch.distributed``, untyped: much of it is missing in torch's stubs."""


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens on a free port of ``host``."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_store(host: str, deadline: timedelta) -> Any:
    """Open and return a store of torch.distributed at a free port of ``host``; its calls wait for at most
    ``deadline``. Raises ``OSError`` if this machine cannot listen there."""
    listener = listen_at(host)
    port = listener.getsockname()[1]
    return torch_distributed.TCPStore(
        host, port, None, True, deadline, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Broadcasts(ABC):
    """The contract of broadcasts from one sender to its receivers. All sides make the same calls in the same order with
    tensors of the same sizes; the calls fill the receivers' tensors."""

    @abstractmethod
    def broadcast_one(self, tensor: Tensor) -> None:
        """Send the bytes of ``tensor``, or receive them into it, as one message."""

    def broadcast(self, buffer: memoryview) -> None:
        """Send ``buffer``, or receive into it, one bucket after the other."""
        if buffer:
            for bucket in torch.frombuffer(buffer, dtype=torch.uint8).split(BUCKET_BYTES):
                self.broadcast_one(bucket)

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Send the bytes of the contiguous ``tensor``, or receive into it, one bucket after the other."""
        if tensor.numel():
            for bucket in tensor.reshape(-1).view(torch.uint8).split(BUCKET_BYTES):
                self.broadcast_one(bucket)


class ProcessGroup(Broadcasts):
    """Broadcasts over a process group that is independent of torch's default group, with a deadline for every
    transfer."""

    def __init__(self, backend: Any, deadline_s: float) -> None:
        """Use ``backend``, a process group object of torch. A transfer may take ``deadline_s`` seconds."""
        self._group, self._timeout = backend, timedelta(seconds=deadline_s)

    def broadcast_one(self, tensor: Tensor) -> None:
        """Broadcast ``tensor`` from rank 0 into the tensors of the other ranks. Raises ``RuntimeError`` after the
        deadline."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._group.broadcast([tensor], options).wait(self._timeout)


class WrittenBroadcasts(Broadcasts):
    """The sender's side of broadcasts through a file, to which the bytes of all tensors are written one after the
    other."""

    def __init__(self, file: Any) -> None:
        """Write to ``file``, which is open for writing."""
        self._file = file

    def broadcast_one(self, tensor: Tensor) -> None:
        """Write the bytes of ``tensor``."""
        self._file.write(_view_bytes(tensor))


class ReadBroadcasts(Broadcasts):
    """A receiver's side of broadcasts through a file that :class:`WrittenBroadcasts` has written."""

    def __init__(self, file: Any) -> None:
        """Read from ``file``, which is open for reading."""
        self._file = file

    def broadcast_one(self, tensor: Tensor) -> None:
        """Read the bytes of ``tensor`` from the file into it. Raises ``RuntimeError`` if the file ends too early."""
        target = _view_bytes(tensor)
        num_read = fill(self._file, target)
        if num_read != len(target):
            raise RuntimeError(f"the file ends {len(target) - num_read} bytes too early")


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of the contiguous ``tensor`` as bytes, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers


def gloo_group(store: Any, rank_and_size: tuple[int, int], deadline_s: float, host: str = LOOPBACK) -> ProcessGroup:
    """Return a Gloo group of the processes that are connected to ``store``; all of them make this call at the same
    time.

    ``rank_and_size`` is the rank of this process and the number of processes; ``host`` is the address at which the
    other processes connect to this one. Raises ``RuntimeError`` if a process does not join within ``deadline_s``
    seconds.
    """
    gloo = torch_distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_s)
    return ProcessGroup(gloo(store, *rank_and_size, options), deadline_s)


def join_local_group(directory: Path, name: str, rank_and_size: tuple[int, int], deadline_s: float) -> ProcessGroup:
    """Return a Gloo group of processes of this machine, which exchange their addresses through a file in ``directory``.
    ``name`` must differ from the names of earlier groups. The other arguments and the error are the same as in
    :func:`gloo_group`."""
    directory.mkdir(parents=True, exist_ok=True)
    store = torch_distributed.FileStore(str(directory / f"weights-{name}"), rank_and_size[1])
    store.set_timeout(timedelta(seconds=deadline_s))
    return gloo_group(store, rank_and_size, deadline_s)
