"""The transfer of weight versions to the machines of a server that shares no folder with this machine.

    engine's process, rank 0                     one worker of each machine, ranks 1, 2, ...
    carry ───────── order: start_receiving ────▶ a thread joins the process group, once
    bucket, bucket, ... ══════ broadcast ═════▶  files in the shared memory of that machine, while it decodes
          ◀──── receive_status: hashes ────────

The server loads the received files at the commit. The backend is Gloo, or NCCL if both ends have GPUs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit, NeedsFull, first_line
from headrace.base.types.weights import BUCKET_BYTES
from headrace.models.devices import CPU
from headrace.sync.groups import ProcessGroup, gloo_group, listen_at, serve_store, torch_distributed
from headrace.wings.servers.client.ownership import REMEDY, public_name
from headrace.wings.servers.client.wire import Wire

POLL_S = 0.05
"""Seconds between two status requests while a version is being received."""
CALL_S = 60.0
"""Longest wait for the workers' answer to one call, in seconds."""

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""A function that calls a method of the server's workers, and returns the result of each worker. Its arguments are the
HTTP client, the method's name, and the method's arguments."""


class _ReceiveStatus(msgspec.Struct):
    """The state of the latest transfer in one worker, as reported by the worker."""

    attempt: str = ""
    """Name of this attempt to send a version."""
    path: str = ""
    """Directory of the received files on the worker's machine; empty until all have arrived."""
    hashes: list[str] = []
    """SHA-256 of each received file, in order."""
    error: str = ""
    """Why the transfer failed; empty if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierConfig:
    """The settings of the transfer of versions to the server's machines."""

    backend: str
    """The backend of the process group: ``gloo`` or ``nccl``."""
    host: str
    """Address of this machine to which the workers connect."""
    device: str
    """Device of this machine from which NCCL sends."""
    deadline_s: float
    """Longest wait for the workers to join, and for each bucket, in seconds."""

    def refuse_impossible(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if this process cannot listen at ``host``, or if NCCL is
        chosen and is not available on this machine."""
        try:
            listen_at(self.host).close()
        except OSError as error:
            raise ConfigError(
                f"engine.server.weights_host={self.host!r} cannot be listened at: {error}",
                remedy="name the address of one interface of this machine",
            ) from None
        if self.backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ConfigError(
                "engine.server.weights_by='nccl' wants a GPU, and a torch with NCCL: there is none here",
                remedy="set it to 'gloo'",
            )


@dataclass(slots=True, kw_only=True)
class _GroupOffer:
    """A process group whose store this process has opened, and which the workers are invited to join."""

    invitation: dict[str, Any]
    """The data that the workers need to join the group, sent with each order."""
    store: Any
    """The TCP store of torch.distributed through which the members find each other."""
    group: ProcessGroup | None = None
    """The process group; ``None`` until all members have joined."""


class Carrier:
    """A sender of versions to the machines of a server. It reuses one process group with a worker of each machine, and
    opens a new group after a failure. Only one thread may use it at a time."""

    def __init__(self, wire: Wire, call_workers: CallWorkers, config: CarrierConfig) -> None:
        """Create a sender, without a process group. ``wire`` has the connections to the server, and ``call_workers``
        calls methods of its workers through these connections."""
        self._wire, self._call_workers, self._config = wire, call_workers, config
        self._run = public_name()
        """Name of this run, by which the workers recognise its sender."""
        self._directory_name = f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
        """Name of the directory for the received files on each of the server's machines."""
        self._offer: _GroupOffer | None = None
        """The process group in use, or the offer to join it; ``None`` before the first transfer and after a failure."""
        self._used = False
        """Whether any transfer was begun, so that the workers must clean up."""

    def carry(self, directory: Path, version: int) -> Path:
        """Send the version ``version``, which consists of all files in ``directory``, to the server's machines, and
        return the path of the directory with the files on those machines. Raises
        :class:`~headrace.base.errors.NeedsFull` if the files do not arrive complete and in time."""
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        attempt = secrets.token_hex(4)
        try:
            offer = self._offer = self._offer or self._offer_group()
            order = {
                "attempt": attempt,
                "group": offer.invitation,
                "run": self._run,
                "directory": self._directory_name,
                "version": version,
                "files": list(sizes.items()),
                "bucket": BUCKET_BYTES,
            }
            self._used = True
            self._call("start_receiving", json.dumps(order))
            group = offer.group = offer.group or self._join_group(offer)
            hashes = [self._send(group, path, sizes[name]) for name, path in files.items()]
            return self._verify_arrival(attempt, hashes)
        except (OSError, RuntimeError, ValueError) as error:
            self._offer = None
            problem = self._worker_error(attempt) or f"{type(error).__name__}: {first_line(error)}"
            raise NeedsFull(
                f"version {version} ({sum(sizes.values())} bytes) was not brought to the server's machines by "
                f"{self._config.backend}: {problem}",
                remedy=f"can they open TCP connections to {self._config.host} (engine.server.weights_host), and have "
                "they room in /dev/shm?",
            ) from None

    def close(self) -> None:
        """Make the workers leave the process group and delete the files that they received."""
        self._offer = None
        if self._used:
            with suppress(ComponentDied):
                self._call("stop_receiving")

    def _offer_group(self) -> _GroupOffer:
        """Open the store of a new process group of this process and the workers, and return the offer to join it.
        Raises ``ValueError`` if no worker receives versions, and :class:`~headrace.base.errors.EngineUnfit` if another
        run sends weights to the server."""
        # one entry per machine: the address from which another run sends, or an empty string
        sources = self._call("other_source", self._run)
        if not sources:
            raise ValueError("none of its workers receives versions")
        if source := next(filter(None, sources), ""):
            raise EngineUnfit(f"the server gets its weights from another run, at {source}", remedy=REMEDY)
        host, deadline = self._config.host, timedelta(seconds=self._config.deadline_s)
        store = serve_store(host, deadline)
        invitation = {
            "name": secrets.token_hex(8),
            "host": host,
            "port": store.port,
            "size": 1 + len(sources),
            "backend": self._config.backend,
            "deadline_s": self._config.deadline_s,
        }
        return _GroupOffer(invitation=invitation, store=store)

    def _join_group(self, offer: _GroupOffer) -> ProcessGroup:
        """Wait until all workers have joined the offered process group, and return the group, in which this process has
        rank 0. Raises an error if a worker has not joined within ``deadline_s`` seconds."""
        rank_and_size = (0, offer.invitation["size"])
        if self._config.backend == "gloo":
            try:
                return gloo_group(offer.store, rank_and_size, self._config.deadline_s, self._config.host)
            except RuntimeError as error:
                raise ValueError(f"its workers have not joined the group ({first_line(error)})") from None
        nccl = torch_distributed.ProcessGroupNCCL
        torch.cuda.set_device(self._config.device)
        options = nccl.Options()
        options._timeout = timedelta(seconds=self._config.deadline_s)
        return ProcessGroup(nccl(offer.store, *rank_and_size, options), self._config.deadline_s)

    def _send(self, group: ProcessGroup, path: Path, num_bytes: int) -> str:
        """Broadcast the ``num_bytes`` bytes of the file at ``path`` to all workers in buckets, and return the SHA-256
        hash of the file."""
        digest = hashlib.sha256()
        device = self._config.device if self._config.backend == "nccl" else CPU
        whole = torch.from_file(str(path), size=num_bytes, dtype=torch.uint8)
        for bucket in whole.split(BUCKET_BYTES) if num_bytes else ():  # an empty file has no bucket
            group.broadcast_one(bucket.to(device))
            digest.update(memoryview(bucket.numpy()))
        return digest.hexdigest()

    def _verify_arrival(self, attempt: str, hashes: list[str]) -> Path:
        """Wait until the workers have received the files of the transfer ``attempt``, compare the files' ``hashes``,
        and return the directory of the files on the workers' machines. Raises ``ValueError`` if a worker failed or
        received other bytes."""
        statuses = self._wire.call(self._wait_until_received(attempt), self._config.deadline_s + CALL_S)
        if any(status.error for status in statuses):
            raise ValueError("a worker failed to receive it")
        if any(status.hashes != hashes for status in statuses):
            raise ValueError("its bytes changed on the way")
        (path,) = {status.path for status in statuses}
        return Path(path)

    async def _wait_until_received(self, attempt: str) -> list[_ReceiveStatus]:
        """Wait until all workers have received the transfer ``attempt`` or one has failed, and return the status of
        each worker. Raises ``ValueError`` after ``deadline_s`` seconds."""
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await self._poll_until_received(attempt)
        except TimeoutError:
            problem = f"it had not arrived {self._config.deadline_s:g} s after its last byte was sent"
            raise ValueError(problem) from None

    async def _poll_until_received(self, attempt: str) -> list[_ReceiveStatus]:
        """Request the workers' statuses every :data:`POLL_S` seconds, and return them once all workers have received
        the transfer ``attempt`` or one has failed."""
        while True:
            statuses = await self._statuses(attempt)
            if any(status.error for status in statuses) or (statuses and all(status.path for status in statuses)):
                return statuses
            await asyncio.sleep(POLL_S)

    def _worker_error(self, attempt: str) -> str:
        """Return the first error that a worker reports for the transfer ``attempt``; empty if no worker reports an
        error."""
        try:
            statuses = self._wire.call(self._statuses(attempt), CALL_S)
        except (ComponentDied, ValueError):
            return ""
        return next((status.error for status in statuses if status.error), "")

    async def _statuses(self, attempt: str) -> list[_ReceiveStatus]:
        """Return the statuses of the workers whose latest transfer is ``attempt``."""
        statuses = [msgspec.convert(status, _ReceiveStatus) for status in await self._call_async("receive_status")]
        return [status for status in statuses if status.attempt == attempt]

    def _call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of the workers from a synchronous thread; see :meth:`_call_async`."""
        return self._wire.call(self._call_async(method, *arguments), CALL_S)

    async def _call_async(self, method: str, *arguments: str) -> list[Any]:
        """Call ``method`` of the workers, and return the result of each worker that receives versions. The other
        workers return ``None``, which is left out."""
        results = await self._call_workers(self._wire.client, method, *arguments)
        return [result for result in results if result is not None]
