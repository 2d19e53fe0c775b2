"""The receiver of weight versions on a machine of a server that shares no folder with the engine's process. It runs in
one worker of each machine, in a thread, while the worker decodes. An order is the sender's request to receive one
version; its ``attempt`` is a unique name.

It imports nothing of Headrace, which need not be installed there. The sender is
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
"""The name of the file that a process locks while it uses the directory of the versions. A directory without a lock may
be removed."""
LOOK_S = 2.0
"""Longest wait for a connection to another run that may be alive, in seconds."""
_DIRECTORY_NAME = re.compile(r"headrace-\d+-")
_SHARED_MEMORY = Path("/dev/shm")
_distributed: Any = dist  # torch's stubs lack many of its names


class VersionReceiver:
    """A receiver of versions for one machine. A new order replaces the previous order: the thread of the previous
    order, which may still wait for bytes, ends without effect."""

    def __init__(self, device: torch.device) -> None:
        """Create a receiver. ``device`` is the worker's device, to which NCCL receives."""
        self._device = device
        self._group: _Group | None = None
        """The process group that this worker has joined; ``None`` before the first order and after a failure."""
        self._directory = _SharedDirectory()
        """Directory of the received versions."""
        self._status: dict[str, Any] = {}
        """State of the latest order, as :meth:`receive_status` returns it."""
        self._changing = threading.Lock()
        """Held while the state changes, so that an order that was replaced changes nothing."""

    def other_source(self, run: str) -> str:
        """Return the address of the machine from which a run other than ``run`` sends versions to this receiver; empty
        if there is no such run. A run counts as alive as long as its TCP store accepts connections."""
        group = self._group
        if group is not None and group.run != run:
            with contextlib.suppress(OSError), socket.create_connection(group.store_address, LOOK_S):
                return str(group.store_address[0])
        return ""

    def start_receiving(self, order: str) -> None:
        """Start to receive a version. ``order`` is a JSON object: ``attempt``, a name of this order; ``run``, the run's
        name; ``group``, the process group to join; ``directory``, the name of the directory of all versions;
        ``version``, a number; ``files``, their names and sizes in bytes; ``bucket``, bytes per broadcast."""
        settings = json.loads(order)
        with self._changing:
            self._status = {"attempt": settings["attempt"]}
        threading.Thread(target=self._receive, args=(settings,), name="receive weights", daemon=True).start()

    def receive_status(self) -> dict[str, Any]:
        """Return the state of the latest order: its ``attempt`` and, once the order has ended, ``path`` and ``hashes``,
        or ``error``."""
        return self._status

    def stop_receiving(self) -> None:
        """Leave the process group and delete the received files, at the end of the run."""
        with self._changing:
            self._status, self._group = {}, None
            self._directory.close()

    def _receive(self, order: dict[str, Any]) -> None:
        """Receive the files of one version, and store the outcome, which the sender requests later; this is the body of
        a thread. If a later order has arrived, store nothing."""
        attempt = order["attempt"]
        try:
            status = {"attempt": attempt, **self._receive_files(order)}
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the sender reads it
            status = {"attempt": attempt, "error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        with contextlib.suppress(_Overtaken), self._while_latest(attempt):
            self._status = status
            if "error" in status:
                self._group = None
                self._directory.drop(order["directory"], order["version"])

    def _receive_files(self, order: dict[str, Any]) -> dict[str, Any]:
        """Receive the files of one version from the process group; return the path of their directory and their SHA-256
        hashes."""
        attempt, hashes = order["attempt"], []
        group = self._join_group(order, attempt)
        with self._while_latest(attempt):
            directory = self._directory.version(order["directory"], order["version"])
        for name, size in order["files"]:
            with self._while_latest(attempt):
                file = _opened(directory / name)
            with file:
                hashes.append(group.receive(file, size, order["bucket"]))
        return {"path": str(directory), "hashes": hashes}

    def _join_group(self, order: dict[str, Any], attempt: str) -> _Group:
        """Return the process group that the order names; join the group first if this worker is not a member."""
        group, settings = self._group, order["group"]
        if group is None or group.name != settings["name"]:
            with self._while_latest(attempt):
                self._group = group = None
            group = _Group(settings, order["run"], self._device)
            with self._while_latest(attempt):
                self._group = group
        return group

    @contextlib.contextmanager
    def _while_latest(self, attempt: str) -> Iterator[None]:
        """Return a context that holds the lock, so that the state may be changed. Raises :class:`_Overtaken` if the
        order ``attempt`` is no longer the latest."""
        with self._changing:
            if self._status.get("attempt") != attempt:
                raise _Overtaken("another order came, or the end")
            yield


class _Overtaken(Exception):
    """The error of an order that is no longer the latest one."""


class _Group:
    """A process group of torch.distributed. Its members are the engine's process, which has rank 0 and sends, and one
    worker of each machine. ``run`` is the name of the sending run."""

    def __init__(self, settings: dict[str, Any], run: str, device: torch.device) -> None:
        """Join the process group that ``settings`` describe: the address of its store, its size, its backend and its
        deadline. ``run`` is the name of the run that sends. ``device`` is the worker's device, to which NCCL receives;
        Gloo receives on the CPU."""
        self.name, self.run = settings["name"], run
        self.store_address = host, port = settings["host"], settings["port"]
        nccl = settings["backend"] == "nccl"
        self._timeout = timedelta(seconds=settings["deadline_s"])
        self._device = device if nccl else torch.device("cpu")
        if nccl:
            torch.cuda.set_device(device)  # the current device is a setting of each thread
        store = _distributed.TCPStore(host, port, None, False, self._timeout)
        rank_and_size = store.add("members", 1), settings["size"]
        if nccl:
            options = _distributed.ProcessGroupNCCL.Options()
            make = _distributed.ProcessGroupNCCL
        else:
            make = _distributed.ProcessGroupGloo
            options = make._Options()
            with socket.create_connection((host, port), settings["deadline_s"]) as probe:
                # Gloo must listen on the interface through which the sender is reached
                options._devices = [make.create_device(hostname=probe.getsockname()[0])]
        options._timeout = self._timeout
        self._group = make(store, *rank_and_size, options)

    def receive(self, file: BinaryIO, num_bytes: int, bucket_bytes: int) -> str:
        """Receive ``num_bytes`` bytes in broadcasts of at most ``bucket_bytes`` bytes, write them to ``file``, and
        return their SHA-256 hash."""
        buffer = torch.empty(min(num_bytes, bucket_bytes), dtype=torch.uint8, device=self._device)
        digest = hashlib.sha256()
        order = dist.BroadcastOptions()
        order.rootRank = 0
        order.timeout = self._timeout
        for start in range(0, num_bytes, bucket_bytes):
            bucket = buffer[: min(bucket_bytes, num_bytes - start)]
            self._group.broadcast([bucket], order).wait(self._timeout)
            data: Any = bucket.cpu().numpy()
            file.write(data)
            digest.update(data)
        return digest.hexdigest()


class _SharedDirectory:
    """A directory in the shared memory of this machine for the received versions, which only this user can open.
    Directories that killed processes have left behind are removed."""

    def __init__(self) -> None:
        """Create the object; the directory is created for the first version."""
        self._root: Path | None = None
        """Path of the directory; ``None`` until it is created."""
        self._lock = -1
        """Descriptor of the locked file in the directory; -1 without a directory."""

    def version(self, name: str, number: int) -> Path:
        """Create and return an empty folder for the version ``number`` in the directory ``name``. Delete the earlier
        versions except the newest, which the server may be about to load."""
        if self._root is None or self._root.name != name:
            self.close()
            self._root = self._make(name)
        path = self._root / f"v{number}"
        shutil.rmtree(path, ignore_errors=True)
        for older in sorted(self._root.glob("v*"), key=lambda each: int(each.name[1:]))[:-1]:
            shutil.rmtree(older, ignore_errors=True)
        path.mkdir()
        return path

    def drop(self, name: str, number: int) -> None:
        """Delete the version ``number``, which is incomplete, from the directory ``name``."""
        if self._root is not None and self._root.name == name:
            shutil.rmtree(self._root / f"v{number}", ignore_errors=True)

    def close(self) -> None:
        """Remove the directory and release its lock."""
        if self._root is not None:
            _remove(self._root)
            os.close(self._lock)
            self._root = None

    def _make(self, name: str) -> Path:
        """Create and lock the directory ``name``, and remove directories that no process uses any more."""
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        for left in parent.glob("headrace-*"):
            if _DIRECTORY_NAME.match(left.name) and left.is_dir():
                with contextlib.suppress(OSError):  # in use, or another user's
                    _remove_unused(left)
        new = Path(tempfile.mkdtemp(prefix=".headrace-", dir=parent))
        self._lock = _locked(new / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return new.rename(parent / name)  # renamed once locked, so that no other process removes it


def _remove_unused(directory: Path) -> None:
    """Remove a directory of versions. Raises ``OSError`` if a process uses it, or if it cannot be removed."""
    try:
        os.close(_locked(directory / LOCK, os.O_RDWR))
    except FileNotFoundError:
        directory.rmdir()  # only an empty directory, all that is left where a removal was interrupted after the lock
    else:
        _remove(directory)


def _remove(directory: Path) -> None:
    """Delete a directory of versions. Its lock is deleted after everything else, so that :func:`_remove_unused` finds
    a directory whose removal is interrupted."""
    with contextlib.suppress(OSError):  # a directory that cannot be listed
        for version in [each for each in directory.iterdir() if each.name != LOCK]:
            shutil.rmtree(version, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _opened(path: Path) -> BinaryIO:
    """Open a new file for writing, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _locked(path: Path, flags: int) -> int:
    """Open a file and lock it for this process alone; return its descriptor. Raises ``OSError`` if another process has
    locked it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
