"""What of Headrace takes versions in on a machine of a server that shares no folder with the engine's process: one
worker of each machine, in a thread beside its decoding.

It imports nothing of Headrace, which need not be installed there. The other end:
``headrace/wings/servers/client/carrier.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

LOCK = "lock"
"""Held as long as the room is in use: whoever finds it free may remove the room."""
LOOK_S = 2.0
"""Longest that a run which is there may take to be reached."""
_ROOM = re.compile(r"headrace-\d+-")
_SHARED_MEMORY = Path("/dev/shm")
_distributed: Any = dist  # much of it is not in torch's stubs


class Carried:
    """The versions that were brought to this machine. Only the last order may change anything: the thread of one before
    it, which is still waiting for bytes, ends."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the worker's, through which NCCL brings them."""
        self._device = device
        self._group: _Group | None = None
        self._room = _SharedDirectory()
        self._said: dict[str, Any] = {}
        self._changing = threading.Lock()

    def taken_by(self, run: str) -> str:
        """Address of the machine from which another run than ``run`` brings its versions here; empty: none does. Its
        store answers as long as it is there."""
        group = self._group
        if group is not None and group.run != run:
            with contextlib.suppress(OSError), socket.create_connection(group.place, LOOK_S):
                return str(group.place[0])
        return ""

    def bring(self, order: str) -> None:
        """Begin to take in what ``order`` says, in JSON: ``attempt``, a name of this order; ``run``, whose it is;
        ``group``, which one to join, and how; ``room``, what to call the directory of all versions; ``version``, a
        number; ``files``, their names and lengths; ``bucket``, bytes at a time."""
        wanted = json.loads(order)
        with self._changing:
            self._said = {"attempt": wanted["attempt"]}
        threading.Thread(target=self._bring, args=(wanted,), name="bring", daemon=True).start()

    def brought(self) -> dict[str, Any]:
        """What has become of the last order: its ``attempt``; and when it has ended ``path`` and ``hashes``, or
        ``error``."""
        return self._said

    def leave(self) -> None:
        """Forget everything."""
        with self._changing:
            self._said, self._group = {}, None
            self._room.close()

    def _bring(self, order: dict[str, Any]) -> None:
        attempt = order["attempt"]
        try:
            said = {"attempt": attempt, **self._taken_in(order)}
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever gave the order is told
            said = {"attempt": attempt, "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        with contextlib.suppress(_Overtaken), self._last(attempt):
            self._said = said
            if "error" in said:
                self._group = None
                self._room.drop(order["room"], order["version"])

    def _taken_in(self, order: dict[str, Any]) -> dict[str, Any]:
        attempt, hashes = order["attempt"], []
        group = self._joined(order, attempt)
        with self._last(attempt):
            directory = self._room.version(order["room"], order["version"])
        for name, size in order["files"]:
            with self._last(attempt):
                file = _opened(directory / name)
            with file:
                hashes.append(group.receive(file, size, order["bucket"]))
        return {"path": str(directory), "hashes": hashes}

    def _joined(self, order: dict[str, Any], attempt: str) -> _Group:
        group, wanted = self._group, order["group"]
        if group is None or group.name != wanted["name"]:
            with self._last(attempt):
                self._group = group = None
            group = _Group(wanted, order["run"], self._device)
            with self._last(attempt):
                self._group = group
        return group

    @contextlib.contextmanager
    def _last(self, attempt: str) -> Iterator[None]:
        """Within this that order is the last one."""
        with self._changing:
            if self._said.get("attempt") != attempt:
                raise _Overtaken("another order came, or the end")
            yield


class _Overtaken(Exception):
    """An order is not the last one any more."""


class _Group:
    """The engine's process, rank 0, and one worker of each machine."""

    def __init__(self, wanted: dict[str, Any], run: str, device: torch.device) -> None:
        self.name, self.run = wanted["name"], run
        self.place = host, port = wanted["host"], wanted["port"]
        nccl = wanted["backend"] == "nccl"
        self._timeout = timedelta(seconds=wanted["deadline_s"])
        self._device = device if nccl else torch.device("cpu")
        if nccl:
            torch.cuda.set_device(device)  # of this thread
        store = _distributed.TCPStore(host, port, None, False, self._timeout)
        place = store.add("members", 1), wanted["size"]
        if nccl:
            options = _distributed.ProcessGroupNCCL.Options()
            make = _distributed.ProcessGroupNCCL
        else:
            make = _distributed.ProcessGroupGloo
            options = make._Options()
            with socket.create_connection((host, port), wanted["deadline_s"]) as towards:
                options._devices = [make.create_device(hostname=towards.getsockname()[0])]
        options._timeout = self._timeout
        self._group = make(store, *place, options)

    def receive(self, file: BinaryIO, num_bytes: int, bucket_bytes: int) -> str:
        """Write that many bytes; their SHA-256."""
        room = torch.empty(min(num_bytes, bucket_bytes), dtype=torch.uint8, device=self._device)
        digest = hashlib.sha256()
        order = dist.BroadcastOptions()
        order.rootRank = 0
        order.timeout = self._timeout
        for start in range(0, num_bytes, bucket_bytes):
            bucket = room[: min(bucket_bytes, num_bytes - start)]
            self._group.broadcast([bucket], order).wait(self._timeout)
            data: Any = bucket.cpu().numpy()
            file.write(data)
            digest.update(data)
        return digest.hexdigest()


class _SharedDirectory:
    """A directory in the shared memory of this machine, which only this user can enter. What others left when they were
    killed is removed."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1

    def version(self, name: str, number: int) -> Path:
        """An empty directory for a version, in the room of that name. Of those before, the newest stays: it may be
        about to be loaded."""
        if self._root is None or self._root.name != name:
            self.close()
            self._root = self._made(name)
        path = self._root / f"v{number}"
        shutil.rmtree(path, ignore_errors=True)
        for older in sorted(self._root.glob("v*"), key=lambda each: int(each.name[1:]))[:-1]:
            shutil.rmtree(older, ignore_errors=True)
        path.mkdir()
        return path

    def drop(self, name: str, number: int) -> None:
        """What has come of a version is of no use, and takes the place of another."""
        if self._root is not None and self._root.name == name:
            shutil.rmtree(self._root / f"v{number}", ignore_errors=True)

    def close(self) -> None:
        """Remove it."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = None

    def _made(self, name: str) -> Path:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        for left in parent.glob("headrace-*"):
            if _ROOM.match(left.name) and left.is_dir():
                with contextlib.suppress(OSError):  # in use, or another user's
                    os.close(_locked(left / LOCK, os.O_RDWR))
                    shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=".headrace-", dir=parent))
        self._lock = _locked(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return made.rename(parent / name)  # it has its name once it is locked


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _locked(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
