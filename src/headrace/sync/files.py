"""Weights through files, in any folder that fsspec can reach: for engines on other machines, or none yet.

    folder/v00000007-3f2a91c0.safetensors     an image: its tensors one after the other, for whatever reads safetensors
    folder/v00000007-3f2a91c0.delta           a difference from the version before

A file has its name only when it is whole. An engine that joins late finds the newest versions: as many stay as a
difference needs. What stands before the tensors follows from the manifest, so that nobody has to read it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

from headrace.base.errors import ConfigError, NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, Manifest, WeightUpdate
from headrace.sync.base import NUM_SLOTS, Parcel, Sent
from headrace.sync.config import Route
from headrace.sync.manifest import private_memory

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""What safetensors calls them."""
_HEAD_ALIGNMENT = 64
_OURS = "v????????-????????"
_AGAIN = "send the version again: the file was cut off or changed"


class FilesOutbox:
    """Writes into ``folder``, a path or URL, which it makes and has to itself; removes what it wrote."""

    def __init__(self, folder: str) -> None:
        self._files, self._folder = _reach(folder)
        self._written: deque[str] = deque()
        with contextlib.suppress(OSError):  # what a killed run left
            for name in (f"{_OURS}.safetensors", f"{_OURS}.delta", f".{_OURS}.*.part"):
                for path in self._files.glob(f"{self._folder}/{name}"):
                    self._files.rm(path)

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, parcel: Parcel) -> Sent:
        name = f"v{parcel.version:08d}-{secrets.token_hex(4)}.{'safetensors' if parcel.whole else 'delta'}"
        path, unfinished = f"{self._folder}/{name}", f"{self._folder}/.{name}.part"
        try:
            self._files.makedirs(self._folder, exist_ok=True)
            with self._files.open(unfinished, "wb") as file:
                if parcel.whole:
                    file.write(head(parcel.manifest, parcel.version))
                for bucket in _buckets(parcel.payload, parcel.manifest if parcel.whole else None):
                    file.write(bucket)
            self._files.mv(unfinished, path)
            self._written.append(path)
            while len(self._written) > NUM_SLOTS:
                self._remove(self._written.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._remove(unfinished)
            raise WeightsError(
                f"version {parcel.version} cannot be written to {path} ({len(parcel.payload)} bytes): {error}",
                remedy="make room there, let this user write there, or set sync.directory",
            ) from None
        return Sent(path=name)

    def close(self) -> None:
        for path in self._written:
            self._remove(path)

    def _remove(self, path: str) -> None:
        """Unless somebody else did."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(path)


class FilesInbox:
    """Reads from ``folder`` and nowhere else, whatever an update names."""

    address = ""
    lasting = False

    def __init__(self, folder: str) -> None:
        self._files, self._folder = _reach(folder)

    def lend(self, update: WeightUpdate) -> None:
        return None

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
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
        """It stays where it is."""

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, path: str, update: WeightUpdate, into: memoryview) -> None:
        whole = update.manifest if update.base is None else None
        before = b"" if whole is None else head(whole, update.version)
        buckets = list(_buckets(into, whole))
        expected = len(before) + sum(map(len, buckets))
        found = self._files.size(path)
        if found == expected:
            with self._files.open(path, "rb") as file:
                if file.read(len(before)) != before:
                    raise NeedsFull(f"{path} does not begin as version {update.version} does", remedy=_AGAIN)
                found = len(before) + sum(_fill(file, bucket) for bucket in buckets)
        if found != expected:
            words = f"version {update.version}: {path} holds {found} bytes, expected were {expected}"
            raise NeedsFull(words, remedy=_AGAIN)


def head(manifest: Manifest, version: int) -> bytes:
    """What stands before the tensors of a safetensors file: its length, then names, dtypes, shapes and places."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version)}}
    end = 0
    for entry in manifest.entries:
        start, end = end, end + entry.num_bytes
        entries[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
    words = json.dumps(entries, separators=(",", ":")).encode()
    words += b" " * (-(8 + len(words)) % _HEAD_ALIGNMENT)
    return len(words).to_bytes(8, "little") + words


def _buckets(payload: memoryview, whole: Manifest | None) -> Iterator[memoryview]:
    """The payload in pieces; of an image only its tensors, since the format knows no gaps."""
    pieces = [payload] if whole is None else [payload[e.offset_bytes :][: e.num_bytes] for e in whole.entries]
    for piece in pieces:
        for start in range(0, len(piece), BUCKET_BYTES):
            yield piece[start : start + BUCKET_BYTES]


def _fill(file: Any, bucket: memoryview) -> int:
    done = 0
    while done < len(bucket) and (count := file.readinto(bucket[done:])):
        done += count
    return done


def open_outbox(route: Route, token: str) -> FilesOutbox:
    """``route.address`` is the folder."""
    return FilesOutbox(route.address)


def open_inbox(route: Route, token: str, limit_bytes: int) -> FilesInbox:
    """``route.address`` is the folder."""
    return FilesInbox(route.address)


def _reach(folder: str) -> tuple[Any, str]:
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
