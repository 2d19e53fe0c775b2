"""Directories that are written completely or removed, and the checksums of their files. Snapshots and saved models use
both.

    seal ──▶ checksums.xxh3: one line for each file, "HASH  NAME", as ``xxh128sum`` writes it
    verify ◀── before any file of the directory is used

Each line is XXH3 with 128 bits over the bytes of one file. A damaged line does not match its file, so the file of
checksums needs no checksum itself. ``xxh128sum -c checksums.xxh3`` gives the same answer without Headrace.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from headrace.base.errors import CheckpointError, DataError
from headrace.models.load import RESUMED, refuse_damaged_weights

CHECKSUMS_FILE = "checksums.xxh3"
_HASH_DIGITS = 32
_PIECE_BYTES = 1 << 22


class Damaged(DataError):
    """The error for a file that is missing or has changed since its checksum was written."""


def checksum(path: Path) -> str:
    """Return the XXH3 hash (128 bits) of the bytes of the file ``path``, in hexadecimal."""
    hashed, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(piece):
            hashed.update(piece[:num_bytes])
    return hashed.hexdigest()


def compute_checksums(directory: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each of ``files``, by the file's path within ``directory``."""
    return {path.relative_to(directory).as_posix(): checksum(path) for path in files}


def seal(directory: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Write the hash of every file below ``directory`` into its file of checksums.

    ``checksums`` are hashes that were computed while the files were written, by path. These hashes, and hashes that an
    earlier call has written, are not computed again. Raises ``OSError`` if a file cannot be read or written.
    """
    listed = {**listed_checksums(directory), **(checksums or {})}
    new = [path for path in sorted(directory.rglob("*")) if path.is_file() and _name(directory, path) not in listed]
    listed |= compute_checksums(directory, [path for path in new if path.name != CHECKSUMS_FILE])
    write_checksums(directory, listed)


def write_checksums(directory: Path, listed: Mapping[str, str]) -> None:
    """Replace the file of checksums of ``directory`` atomically. ``listed`` are the hashes in hexadecimal, by path
    within ``directory``."""
    text = "".join(f"{found}  {name}\n" for name, found in sorted(listed.items()))
    temporary = directory / f".{CHECKSUMS_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(directory / CHECKSUMS_FILE)


def verify(directory: Path, names: Iterable[str] | None = None) -> bool:
    """Compare the files of ``directory`` with their checksums. Return false if the directory has no checksums, else
    true.

    ``names`` are the paths of the files to compare, which must have checksums; ``None``: all files with checksums.
    Raises :class:`Damaged` with the name of the first file that is missing or has changed.
    """
    if not (directory / CHECKSUMS_FILE).exists():
        return False
    listed = listed_checksums(directory)
    for name in listed if names is None else names:
        problem = _difference(directory / name, listed.get(name))
        if problem:
            raise Damaged(f"{directory / name} {problem}", remedy=_REMEDY)
    return True


def verify_model(directory: Path) -> bool:
    """Verify the files from which a model or an adapter is loaded, without the files that only a resumed run reads.
    Return whether there are any checksums. Raises :class:`Damaged`, and :class:`~headrace.base.errors.ModelError` if
    weights are missing or truncated.

    The checksums of a snapshot include the adapters of agents in it, so the checksums of the directory two levels above
    are used, too.
    """
    found = False
    for sealed in (directory, directory.parent.parent):
        found |= verify(sealed, [name for name in listed_checksums(sealed) if not name.startswith(RESUMED)])
    refuse_damaged_weights(directory)  # most models have no checksums
    return found


_REMEDY = f"copy it again from where it is whole; if you have changed it on purpose, remove {CHECKSUMS_FILE} beside it"


def _difference(path: Path, expected: str | None) -> str:
    """Return the difference of a file from its checksum ``expected``, in words; empty if there is none. ``None``: the
    file of checksums has no line for this file, which counts as a difference."""
    if expected is None:
        return f"has no line in {CHECKSUMS_FILE} beside it: one of the two has changed since they were written"
    try:
        found = checksum(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found == expected:
        return ""
    return f"has changed since it was written: its checksum is {found}, and {CHECKSUMS_FILE} beside it says {expected}"


def listed_checksums(directory: Path) -> dict[str, str]:
    """Return the hashes in the file of checksums of ``directory``, by path; empty if there is no such file. Raises
    :class:`Damaged` if it cannot be read."""
    path = directory / CHECKSUMS_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, NotADirectoryError):  # loading reports missing files
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be read: {error}", remedy=_REMEDY) from None
    wrong = [number for number, line in enumerate(lines[:-1], 1) if line[_HASH_DIGITS : _HASH_DIGITS + 2] != "  "]
    if wrong or lines[-1]:
        at = wrong[0] if wrong else len(lines)
        raise Damaged(f"{path}, line {at}: it is not a hash and a name", remedy=_REMEDY)
    return {line[_HASH_DIGITS + 2 :]: line[:_HASH_DIGITS] for line in lines[:-1]}


def _name(directory: Path, path: Path) -> str:
    """Return the path of a file within ``directory``, with slashes, as in the file of checksums."""
    return path.relative_to(directory).as_posix()


SLACK_BYTES = 1 << 20
"""The free space in bytes that is required besides the tensors, for small files."""

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip
"""Patterns of the tokenizer's files, which a model directory needs beside its configuration and weights."""


def copy_tokenizer(model_dir: Path, directory: Path) -> None:
    """Copy the tokenizer's files of the model in ``model_dir`` into ``directory``."""
    for pattern in TOKENIZER_FILES:
        for path in model_dir.glob(pattern):
            shutil.copyfile(path, directory / path.name)


FreeBytes = Callable[[Path], int]


def free_bytes(directory: Path) -> int:
    """Return the number of bytes that can still be written below ``directory``."""
    return shutil.disk_usage(directory).free


@contextmanager
def whole_or_nothing(directory: Path, num_bytes: int, free: FreeBytes = free_bytes) -> Iterator[None]:
    """Return a context in which the caller writes about ``num_bytes`` into ``directory``. At its end, all files are
    flushed to the disk.

    If the files do not fit, or a write fails, the directory is removed and
    :class:`~headrace.base.errors.CheckpointError` is raised, with the needed and the free space. ``free`` returns the
    free bytes of a folder.
    """
    try:
        if free(directory) < num_bytes:
            raise OSError("not enough space")
        yield
        flush(directory)
    except (OSError, SafetensorError) as error:
        num_free = free(directory.parent)  # before the written files are removed
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"snapshot {directory} cannot be written: {error}; it needs about {num_bytes} bytes in all, "
            f"{num_free} were free there when it failed",
            remedy=f"free space at {directory.parent} (df -h), keep fewer snapshots, or choose another run directory; "
            "the last whole snapshot is untouched",
        ) from error


def flush(directory: Path) -> None:
    """Flush every file below ``directory``, and the directories themselves, to the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            flush_one(Path(folder, name))
        flush_one(Path(folder))


def flush_one(path: Path) -> None:
    """Flush the file ``path``, or the entries of the directory ``path``, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
