"""A transport through files in any folder that fsspec can open, for engines on other machines and engines that start
later.

    folder/v00000007-3f2a91c0.safetensors     an image: its tensors one after the other, readable as safetensors
    folder/v00000007-3f2a91c0.delta           a difference from the version before

An image is a buffer with all tensors of one version. A file is written under a temporary name and renamed when it is
complete. The two newest versions are kept, so that an engine that joins late can read them, and a difference has its
base. The header before the tensors follows from the manifest (the layout of the image), so no engine has to parse it.
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
"""The header is padded with spaces to a multiple of this number of bytes."""
_NAME_PATTERN = "v????????-????????"
"""The pattern of the names of the files that this transport writes, without their endings."""
_RESEND_REMEDY = "send the version again: the file was cut off or changed"


class VersionFolder:
    """A folder in which one learner, or one rank of it, writes its versions as files, and from which engines read them.
    A file is renamed to its final name only when it is complete."""

    def __init__(self, folder: str) -> None:
        """Open ``folder``, a path or URL, which no other run may use. Raises :class:`~headrace.base.errors.ConfigError`
        if it cannot be reached."""
        self._files, self._folder = _open_filesystem(folder)
        """The file system of the folder, and the folder's path in it."""
        self._written: deque[str] = deque()
        """The names of the files that this process has written, the oldest first."""

    def get_path(self, name: str) -> str:
        """Return the path or URL of the file ``name``."""
        return f"{self._folder}/{name}"

    @staticmethod
    def make_name(version: int) -> str:
        """Return the name of a new file of ``version``, without its ending."""
        return f"v{version:08d}-{secrets.token_hex(4)}"

    def remove_left(self) -> None:
        """Remove the files that a killed run has left."""
        with contextlib.suppress(OSError):
            for name in (f"{_NAME_PATTERN}.*", f".{_NAME_PATTERN}.*.part"):
                for path in self._files.glob(f"{self._folder}/{name}"):
                    self._files.rm(path)

    @contextlib.contextmanager
    def writing(self, name: str, version: int, num_bytes: int) -> Iterator[Any]:
        """Return a context that yields a temporary file, open for writing about ``num_bytes`` bytes of ``version``. At
        its end, rename the file to ``name``, and remove files of older versions. Raises
        :class:`~headrace.base.errors.WeightsError` if the file cannot be written."""
        path, unfinished = self.get_path(name), self.get_path(f".{name}.part")
        try:
            self._files.makedirs(self._folder, exist_ok=True)
            with self._files.open(unfinished, "wb") as file:
                yield file
            self._files.mv(unfinished, path)
            self._written.append(path)
            while len(self._written) > NUM_SLOTS:
                self._remove(self._written.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._remove(unfinished)
            raise WeightsError(
                f"version {version} cannot be written to {path} ({num_bytes} bytes): {error}",
                remedy="make room there, let this user write there, or set sync.directory",
            ) from None

    @contextlib.contextmanager
    def reading(self, name: str, version: int) -> Iterator[tuple[Any, int]]:
        """Return a context that yields the file ``name`` of ``version``, open for reading, and its size in bytes.
        Raises :class:`~headrace.base.errors.NeedsFull` if the file cannot be read, and
        :class:`~headrace.base.errors.WeightsError` for a name that leads out of the folder."""
        if "/" in name or "\\" in name or name.startswith("."):
            raise WeightsError(
                f"version {version} names the file {name!r}, which is not one of {self._folder}",
                remedy="publish the version again",
            )
        path = self.get_path(name)
        try:
            with self._files.open(path, "rb") as file:
                yield file, self._files.size(path)
        except OSError as error:
            raise NeedsFull(
                f"version {version} cannot be read from {path}, where the learner wrote it: {error}",
                remedy="let the engine reach the learner's sync.directory, under the same name",
            ) from None

    def close(self) -> None:
        """Remove all files that were written."""
        for path in self._written:
            self._remove(path)

    def _remove(self, path: str) -> None:
        """Remove a file, if it still exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(path)


class FilesOutbox:
    """The learner's side of the transport through files. It writes one file for each version, and removes old ones."""

    def __init__(self, folder: str) -> None:
        """Open ``folder``, a path or URL, which no other run may use, and remove the files that a killed run has left
        there."""
        self._folder = VersionFolder(folder)
        """The folder of the versions."""
        self._folder.remove_left()

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of this process for the slots."""
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Write the payload of ``request`` to a file in the folder, remove files of older versions, and return the
        file's name."""
        name = f"{self._folder.make_name(request.version)}.{'safetensors' if request.whole else 'delta'}"
        with self._folder.writing(name, request.version, len(request.payload)) as file:
            if request.whole:
                file.write(safetensors_header(request.manifest, request.version))
            for bucket in _buckets(request.payload, request.manifest if request.whole else None):
                file.write(bucket)
        return Sent(path=name)

    def close(self) -> None:
        """Remove all files that were written."""
        self._folder.close()


class FilesInbox:
    """The engine's side of the transport through files. It reads from one folder only; other paths are refused."""

    address = ""
    lasting = False

    def __init__(self, folder: str) -> None:
        """Read updates from ``folder``, a path or URL."""
        self._folder = VersionFolder(folder)
        """The folder of the versions."""

    def view(self, update: WeightUpdate) -> None:
        """Return ``None``: a file has to be fetched."""

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Read the payload of ``update`` from its file into ``into``. Raises :class:`~headrace.base.errors.NeedsFull`
        if the file cannot be read, or if its size or header differs from the announced version, and
        :class:`~headrace.base.errors.WeightsError` for a path that leads out of the folder."""
        whole = update.manifest if update.base is None else None
        header = b"" if whole is None else safetensors_header(whole, update.version)
        buckets = list(_buckets(into, whole))
        expected, path = len(header) + sum(map(len, buckets)), self._folder.get_path(update.path)
        with self._folder.reading(update.path, update.version) as (file, size):
            num_found = size
            if size == expected:
                if file.read(len(header)) != header:
                    raise NeedsFull(f"{path} does not begin as version {update.version} does", remedy=_RESEND_REMEDY)
                num_found = len(header) + sum(fill(file, bucket) for bucket in buckets)
        if num_found != expected:
            text = f"version {update.version}: {path} holds {num_found} bytes, expected were {expected}"
            raise NeedsFull(text, remedy=_RESEND_REMEDY)

    def skip(self, update: WeightUpdate) -> None:
        """Do nothing: the file remains for other engines."""

    def close(self) -> None:
        """Do nothing: there is no resource to release."""


def safetensors_header(manifest: Manifest, version: int) -> bytes:
    """Return the header of a safetensors file for a version with the layout ``manifest``: the length of the JSON text,
    then the text with names, dtypes, shapes and offsets of the tensors, which follow each other without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version)}}
    end = 0
    for entry in manifest.entries:
        start, end = end, end + entry.num_bytes
        entries[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _buckets(payload: memoryview, whole: Manifest | None) -> Iterator[memoryview]:
    """Yield ``payload`` in buckets of at most ``BUCKET_BYTES`` bytes. ``whole`` is the layout of a payload that is an
    image, of which only the bytes of tensors are yielded, since the file format allows no gaps; ``None`` for a
    difference."""
    pieces = [payload] if whole is None else [payload[e.offset_bytes :][: e.num_bytes] for e in whole.entries]
    for piece in pieces:
        for start in range(0, len(piece), BUCKET_BYTES):
            yield piece[start : start + BUCKET_BYTES]


def fill(file: Any, bucket: memoryview) -> int:
    """Read from ``file`` into ``bucket`` until it is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(bucket) and (count := file.readinto(bucket[done:])):
        done += count
    return done


def _open_filesystem(folder: str) -> tuple[Any, str]:
    """Return the file system of ``folder``, which is a path or a URL, and the path within it. Raises
    :class:`~headrace.base.errors.ConfigError` if it cannot be reached."""
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


def folder_of_run(sync: SyncConfig, places: RunPlaces) -> str:
    """Return the folder in which the run with the directories ``places`` writes its versions: ``weights`` in the run
    directory, or a folder of its own in ``sync.directory``, which several runs may share."""
    if not sync.directory:
        return str(places.run_dir / "weights")
    # run directories of other machines may have the same name
    where = hashlib.blake2b(f"{platform.node()}:{places.run_dir}".encode(), digest_size=4).hexdigest()
    return f"{sync.directory.rstrip('/')}/{places.run_dir.name}-{where}"


FILES = Transport(
    open_outbox=lambda route, token: FilesOutbox(route.address),
    open_inbox=lambda route, token, limit_bytes: FilesInbox(route.address),
    address=folder_of_run,
    # two versions are kept while the next one is written; for differences, only the first whole version is certain
    copies=lambda sync: 1 if sync.codec == "delta" else NUM_SLOTS + 1,
    settings={"directory": "writes no files", "network_gb_s": "uses no network"},
    cost=TransportCost(gb_s=2.0, fixed_s=0.5),
)
