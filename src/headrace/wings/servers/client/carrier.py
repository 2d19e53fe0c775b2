"""How versions get to the machines of a server that shares no folder with this one.

    engine's process, rank 0              one worker of each machine, ranks 1, 2, ...
    carry ────────── order: bring ──────▶ a thread joins the group, once
    bucket, bucket, ... ══ broadcast ══▶  files in the shared memory of that machine, while it decodes
          ◀───── brought: hashes ────────

The commit loads them from there. Gloo, or NCCL where both ends have GPUs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit, NeedsFull
from headrace.base.types.weights import BUCKET_BYTES
from headrace.models.devices import CPU
from headrace.sync.groups import ProcessGroup, gloo_group, torch_distributed
from headrace.wings.servers.client.ownership import REMEDY, public_name
from headrace.wings.servers.client.wire import Wire

LOOK_S = 0.05
"""Between two questions whether a version has been brought."""
ASK_S = 60.0
"""Longest that the workers may take to answer one."""

AskWorkers = Callable[..., Awaitable[list[Any]]]
"""Has the workers of the server that a client leads to do something, by its name and arguments; what each returned."""


class _CarrierReply(msgspec.Struct):
    """What a worker says of the last order."""

    attempt: str = ""
    path: str = ""
    hashes: list[str] = []
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierConfig:
    """How versions are carried."""

    backend: str
    """``gloo`` or ``nccl``."""
    host: str
    """Address of this machine, at which the workers find this process."""
    device: str
    """Of this machine, that NCCL sends from."""
    deadline_s: float
    """Longest wait for whoever is silent."""

    def refuse_impossible(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` where this machine cannot."""
        try:
            _listening(self.host).close()
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
class _Meeting:
    """Where the members of a group find each other."""

    terms: dict[str, Any]
    """What the others are told of it."""
    store: Any
    group: ProcessGroup | None = None
    """``None`` until they have met."""


class Carrier:
    """Used by one thread at a time."""

    def __init__(self, wire: Wire, ask_workers: AskWorkers, way: CarrierConfig) -> None:
        self._wire, self._ask_workers, self._way = wire, ask_workers, way
        self._run = public_name()
        self._room = f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
        self._meeting: _Meeting | None = None
        self._used = False

    def carry(self, directory: Path, version: int) -> Path:
        """Bring ``version`` to the server's machines, all that lies in ``directory``; the directory in which it lies
        there. Raises :class:`~headrace.base.errors.NeedsFull` where it does not arrive whole in time."""
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        attempt = secrets.token_hex(4)
        try:
            meeting = self._meeting = self._meeting or self._called()
            order = {
                "attempt": attempt,
                "group": meeting.terms,
                "run": self._run,
                "room": self._room,
                "version": version,
                "files": list(sizes.items()),
                "bucket": BUCKET_BYTES,
            }
            self._used = True
            self._ask("bring", json.dumps(order))
            group = meeting.group = meeting.group or self._met(meeting)
            hashes = [self._send(group, path, sizes[name]) for name, path in files.items()]
            return self._arrived(attempt, hashes)
        except (OSError, RuntimeError, ValueError) as error:
            self._meeting = None
            words = self._last_words(attempt) or f"{type(error).__name__}: {_first_line(error)}"
            raise NeedsFull(
                f"version {version} ({sum(sizes.values())} bytes) was not brought to the server's machines by "
                f"{self._way.backend}: {words}",
                remedy=f"can they open TCP connections to {self._way.host} (engine.server.weights_host), and have they "
                "room in /dev/shm?",
            ) from None

    def close(self) -> None:
        """Have the workers forget everything."""
        self._meeting = None
        if self._used:
            with suppress(ComponentDied):
                self._ask("leave")

    def _called(self) -> _Meeting:
        """A new group, of this process and those who take versions in."""
        takers = self._ask("carries", self._run)
        if not takers:
            raise ValueError("none of its workers takes versions in")
        if taken_by := next(filter(None, takers), ""):
            raise EngineUnfit(f"the server gets its weights from another run, at {taken_by}", remedy=REMEDY)
        host, deadline = self._way.host, timedelta(seconds=self._way.deadline_s)
        listener = _listening(host)
        port = listener.getsockname()[1]
        store = torch_distributed.TCPStore(
            host, port, None, True, deadline, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        terms = {
            "name": secrets.token_hex(8),
            "host": host,
            "port": port,
            "size": 1 + len(takers),
            "backend": self._way.backend,
            "deadline_s": self._way.deadline_s,
        }
        return _Meeting(terms=terms, store=store)

    def _met(self, meeting: _Meeting) -> ProcessGroup:
        place = (0, meeting.terms["size"])
        if self._way.backend == "gloo":
            try:
                return gloo_group(meeting.store, place, self._way.deadline_s, self._way.host)
            except RuntimeError as error:
                raise ValueError(f"its workers have not joined the group ({_first_line(error)})") from None
        nccl = torch_distributed.ProcessGroupNCCL
        torch.cuda.set_device(self._way.device)
        options = nccl.Options()
        options._timeout = timedelta(seconds=self._way.deadline_s)
        return ProcessGroup(nccl(meeting.store, *place, options), self._way.deadline_s)

    def _send(self, group: ProcessGroup, path: Path, num_bytes: int) -> str:
        """A file, to all at once; its SHA-256."""
        digest = hashlib.sha256()
        device = self._way.device if self._way.backend == "nccl" else CPU
        whole = torch.from_file(str(path), size=num_bytes, dtype=torch.uint8)
        for bucket in whole.split(BUCKET_BYTES) if num_bytes else ():  # of what is empty nobody waits for a bucket
            group.broadcast_one(bucket.to(device))
            digest.update(memoryview(bucket.numpy()))
        return digest.hexdigest()

    def _arrived(self, attempt: str, hashes: list[str]) -> Path:
        told = self._wire.call(self._in_time(attempt), self._way.deadline_s + ASK_S)
        if any(each.error for each in told):
            raise ValueError("it was not taken in")
        if any(each.hashes != hashes for each in told):
            raise ValueError("its bytes changed on the way")
        (path,) = {each.path for each in told}
        return Path(path)

    async def _in_time(self, attempt: str) -> list[_CarrierReply]:
        try:
            async with asyncio.timeout(self._way.deadline_s):
                return await self._ended(attempt)
        except TimeoutError:
            words = f"it had not arrived {self._way.deadline_s:g} s after its last byte was sent"
            raise ValueError(words) from None

    async def _ended(self, attempt: str) -> list[_CarrierReply]:
        """What the workers say of that order when it is done, or has failed in one."""
        while True:
            told = await self._told(attempt)
            if any(each.error for each in told) or (told and all(each.path for each in told)):
                return told
            await asyncio.sleep(LOOK_S)

    def _last_words(self, attempt: str) -> str:
        try:
            told = self._wire.call(self._told(attempt), ASK_S)
        except (ComponentDied, ValueError):
            return ""
        return next((each.error for each in told if each.error), "")

    async def _told(self, attempt: str) -> list[_CarrierReply]:
        """What the workers say of that order."""
        told = [msgspec.convert(each, _CarrierReply) for each in await self._asked("brought")]
        return [each for each in told if each.attempt == attempt]

    def _ask(self, method: str, *arguments: str) -> list[Any]:
        return self._wire.call(self._asked(method, *arguments), ASK_S)

    async def _asked(self, method: str, *arguments: str) -> list[Any]:
        """What it returns in each worker that takes versions in."""
        told = await self._ask_workers(self._wire.client, method, *arguments)
        return [each for each in told if each is not None]


def _listening(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
