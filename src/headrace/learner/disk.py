"""Files that are whole and on the disk, or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headrace.base.errors import CheckpointError

SLACK_BYTES = 1 << 20
"""For the small files beside the tensors."""

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt",
    "spiece.model", "sentencepiece*.model", "*.tiktoken",
)  # fmt: skip
"""What makes a model directory usable, beside its configuration and weights."""

FreeBytes = Callable[[Path], int]


def free_bytes(directory: Path) -> int:
    """Bytes that can still be written below ``directory``."""
    return shutil.disk_usage(directory).free


@contextmanager
def whole_or_nothing(directory: Path, num_bytes: int, free: FreeBytes = free_bytes) -> Iterator[None]:
    """Write about ``num_bytes`` into ``directory``; at the end everything in it is flushed to the disk.

    If they do not fit, or a write fails, the directory is removed and :class:`~headrace.base.errors.CheckpointError`
    says what was needed and what is free.
    """
    try:
        if free(directory) < num_bytes:
            raise OSError("not enough space")
        yield
        flush(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"snapshot {directory} cannot be written: {error}; it needs {num_bytes} bytes, "
            f"{free(directory.parent)} are free there",
            remedy=f"free space at {directory.parent} (df -h), keep fewer snapshots, or choose another run directory; "
            "the last whole snapshot is untouched",
        ) from error


def flush(directory: Path) -> None:
    """Force every file below ``directory``, and the directories that name them, onto the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            flush_one(Path(folder, name))
        flush_one(Path(folder))


def flush_one(path: Path) -> None:
    """Force one file, or the names in one directory, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
