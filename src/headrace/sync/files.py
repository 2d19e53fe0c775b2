"""A transport through files, in any folder that fsspec can reach, for engines on other machines or that start later.

    folder/v00000007-3f2a91c0.safetensors     an image: its tensors one after the other, readable as safetensors
    folder/v00000007-3f2a91c0.delta           a difference from the version before

A file gets its name only when it is complete. An engine that joins late finds the newest versions: as many are kept as
a difference needs. The header before the tensors follows from the manifest, so that no engine has to parse it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

from headrace.base.errors import ConfigError, NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, NUM_SLOTS, Manifest, WeightUpdate
from headrace.sync.base import SendRequest, Sent
from headrace.sync.config import RunPlaces, SyncConfig, Transport, TransportCost
from headrace.sync.manifest import private_memory

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The names of dtypes in safetensors."""
_HEAD_ALIGNMENT = 64
_NAME_PATTERN = "v????????-????????"
_RESEND_REMEDY = "send the version again: the file was cut off or changed"


class FilesOutbox:
    """The learner's side. It writes into ``folder``, a path or URL, which no other run may use, and removes what it
    wrote."""

    def __init__(self, folder: str) -> None:
        self._files, self._folder = _open_filesystem(folder)
        self._written: deque[str] = deque()
        with contextlib.suppress(OSError):  # what a killed run left
            for name in (f"{_NAME_PATTERN}.safetensors", f"{_NAME_PATTERN}.delta", f".{_NAME_PATTERN}.*.part"):
                for path in self._files.glob(f"{self._folder}/{name}"):
                    self._files.rm(path)

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Write a version to a file in the shared folder, under its final name only when it is whole, and remove old
        ones."""
        name = f"v{request.version:08d}-{secrets.token_hex(4)}.{'safetensors' if request.whole else 'delta'}"
        path, unfinished = f"{self._folder}/{name}", f"{self._folder}/.{name}.part"
        try:
            self._files.makedirs(self._folder, exist_ok=True)
            with self._files.open(unfinished, "wb") as file:
                if request.whole:
                    file.write(safetensors_header(request.manifest, request.version))
                for bucket in _buckets(request.payload, request.manifest if request.whole else None):
                    file.write(bucket)
            self._files.mv(unfinished, path)
            self._written.append(path)
            while len(self._written) > NUM_SLOTS:
                self._remove(self._written.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._remove(unfinished)
            raise WeightsError(
                f"version {request.version} cannot be written to {path} ({len(request.payload)} bytes): {error}",
                remedy="make room there, let this user write there, or set sync.directory",
            ) from None
        return Sent(path=name)

    def close(self) -> None:
        for path in self._written:
            self._remove(path)

    def _remove(self, path: str) -> None:
        """Remove a file, which may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(path)


class FilesInbox:
    """The engine's side. It reads from ``folder`` only, whatever path an update names."""

    address = ""
    lasting = False

    def __init__(self, folder: str) -> None:
        self._files, self._folder = _open_filesystem(folder)

    def view(self, update: WeightUpdate) -> None:
        return None

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Read a version from its file in the shared folder. Raises :class:`~headrace.base.errors.NeedsFull` if it
        cannot be read."""
        if "/" in update.path or "\\" in update.path or update.path.startswith("."):
            raise WeightsError(
                f"version {update.version} names the file {update.path!r}, which is not one of {self._folder}",
                remedy="publish the version again",
            )
        path = f"{self._folder}/{update.path}"
        try:
            self._read(path, update, into)
        except OSError as error:
            raise NeedsFull(
                f"version {update.version} cannot be read from {path}, where the learner wrote it: {error}",
                remedy="let the engine reach the learner's sync.directory, under the same name",
            ) from None

    def skip(self, update: WeightUpdate) -> None:
        """Do nothing: the file remains for other engines."""

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _read(self, path: str, update: WeightUpdate, into: memoryview) -> None:
        """Read the payload from ``path``. Raises :class:`~headrace.base.errors.NeedsFull` if the file is not the one
        that was announced."""
        whole = update.manifest if update.base is None else None
        before = b"" if whole is None else safetensors_header(whole, update.version)
        buckets = list(_buckets(into, whole))
        expected = len(before) + sum(map(len, buckets))
        found = self._files.size(path)
        if found == expected:
            with self._files.open(path, "rb") as file:
                if file.read(len(before)) != before:
                    raise NeedsFull(f"{path} does not begin as version {update.version} does", remedy=_RESEND_REMEDY)
                found = len(before) + sum(_fill(file, bucket) for bucket in buckets)
        if found != expected:
            text = f"version {update.version}: {path} holds {found} bytes, expected were {expected}"
            raise NeedsFull(text, remedy=_RESEND_REMEDY)


def safetensors_header(manifest: Manifest, version: int) -> bytes:
    """Return the header of a safetensors file: its length, then names, dtypes, shapes and offsets of the tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version)}}
    end = 0
    for entry in manifest.entries:
        start, end = end, end + entry.num_bytes
        entries[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _buckets(payload: memoryview, whole: Manifest | None) -> Iterator[memoryview]:
    """Yield the payload in pieces; for an image, only its tensors, since the format allows no gaps."""
    pieces = [payload] if whole is None else [payload[e.offset_bytes :][: e.num_bytes] for e in whole.entries]
    for piece in pieces:
        for start in range(0, len(piece), BUCKET_BYTES):
            yield piece[start : start + BUCKET_BYTES]


def _fill(file: Any, bucket: memoryview) -> int:
    """Read until the buffer is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(bucket) and (count := file.readinto(bucket[done:])):
        done += count
    return done


def _open_filesystem(folder: str) -> tuple[Any, str]:
    """Return the file system of ``folder``, which is a path or a URL, and the path within it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(
            "sync.transport='files' needs fsspec, which is not installed",
            remedy="pip install 'headrace[files]', or set sync.transport = 'shm'",
        ) from None
    try:
        files, path = url_to_fs(folder)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"sync.directory={folder!r} cannot be reached: {error}", remedy="name a folder or a URL that fsspec knows"
        ) from None
    return files, path.rstrip("/")


def _folder(sync: SyncConfig, places: RunPlaces) -> str:
    """Return the folder of this run, since several runs may share ``sync.directory``."""
    if not sync.directory:
        return str(places.run_dir / "weights")
    # other machines may have run directories of the same name
    where = hashlib.blake2b(f"{platform.node()}:{places.run_dir}".encode(), digest_size=4).hexdigest()
    return f"{sync.directory.rstrip('/')}/{places.run_dir.name}-{where}"


FILES = Transport(
    open_outbox=lambda route, token: FilesOutbox(route.address),
    open_inbox=lambda route, token, limit_bytes: FilesInbox(route.address),
    address=_folder,
    settings={"directory": "writes no files"},
    cost=TransportCost(gb_s=2.0, fixed_s=0.5),
)
