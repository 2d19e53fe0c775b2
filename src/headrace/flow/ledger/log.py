"""A check that the write-ahead log of a SQLite file is complete. A ledger is checked before it is opened.

The log is a header and a sequence of *frames*, each with one page of the database and a cumulative checksum. SQLite
reads the log up to the first frame that does not match its checksum, and silently ignores the rest. That is correct
after a kill, which leaves at most a transaction that was never committed, but wrong if a bit has flipped in the middle.
The format is specified at https://www.sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import psutil

from headrace.base.errors import LedgerError

_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_MAGIC = 0x377F0682
"""The magic number of the log without its lowest bit, which is 1 if the checksums read words of four bytes as
big-endian."""
_WORD = 0xFFFFFFFF
"""The mask that reduces an integer modulo 2³²."""
_Matrix = tuple[int, int, int, int]
_FRAMES_AT_ONCE = 256
"""Number of frames that are read and checked at once."""


def refuse_damaged_log(database: Path) -> None:
    """Raise :class:`~headrace.base.errors.LedgerError` if committed transactions follow a damaged frame in the
    write-ahead log of the SQLite file ``database``.

    No process may have the database open. A log that was last written before this machine started is accepted, because
    a power failure may have truncated it: SQLite reads as much of it as is valid.
    """
    path = database.with_name(f"{database.name}-wal")
    if not path.exists() or path.stat().st_size <= _HEADER_BYTES or path.stat().st_mtime < psutil.boot_time():
        return
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        page_bytes = database_page_bytes(database)
        frame_bytes = _FRAME_HEADER_BYTES + page_bytes
        frames = (path.stat().st_size - _HEADER_BYTES) // frame_bytes
        whole = _count_valid_frames(header, file, page_bytes)
        if whole < frames and _has_commit_after(header, file, whole, frame_bytes):
            raise LedgerError(
                f"the ledger's write-ahead log {path} is damaged at frame {whole + 1} of {frames}: transactions that "
                "were recorded behind it would be lost",
                remedy=f"restore it from a copy; to continue from what {database.name} holds without it: "
                f"mv {path} {path}.damaged, and the same command again",
            )


def database_page_bytes(database: Path) -> int:
    """Return the page size in bytes that the header of the SQLite file ``database`` states; 65536 for an invalid
    value."""
    with database.open("rb") as file:
        page_bytes = int.from_bytes(file.read(18)[16:18], "big")
    return page_bytes if 512 <= page_bytes <= 32768 and not page_bytes & (page_bytes - 1) else 65536


def _count_valid_frames(header: bytes, file: BinaryIO, page_bytes: int) -> int:
    """Return the number of consecutive frames from the first one on that match their checksums; 0 if the header does
    not match its own. ``header`` is the log's header, ``file`` the log, positioned after the header, and ``page_bytes``
    the page size of the database."""
    magic, _, stated_bytes, *_ = struct.unpack(">6I", header[:24])
    order = ">" if magic & 1 else "<"
    sums = _add((0, 0), _checksum_terms(np.frombuffer(header[:24], f"{order}u4").reshape(1, -1))[0], 3)
    if magic & ~1 != _MAGIC or stated_bytes != page_bytes or sums != struct.unpack(">2I", header[24:]):
        return 0
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    num_valid = 0
    while data := file.read(_FRAMES_AT_ONCE * frame_bytes):
        frames = np.frombuffer(data[: len(data) // frame_bytes * frame_bytes], np.uint8).reshape(-1, frame_bytes)
        # the checksum covers the first eight bytes of the frame's header, and the page
        words = np.ascontiguousarray(np.hstack([frames[:, :8], frames[:, _FRAME_HEADER_BYTES:]])).view(f"{order}u4")
        for frame, terms in zip(frames, _checksum_terms(words), strict=True):
            _, _, *salts, first, second = struct.unpack(">6I", frame[:_FRAME_HEADER_BYTES].tobytes())
            # the checksum of a frame continues the checksum of the frame before
            sums = _add(sums, terms, (8 + page_bytes) // 8)
            if tuple(salts) != struct.unpack(">2I", header[16:24]) or sums != (first, second):
                return num_valid
            num_valid += 1
    return num_valid


def _has_commit_after(header: bytes, file: BinaryIO, num_valid: int, frame_bytes: int) -> bool:
    """Return whether a frame after the first ``num_valid`` frames ends a transaction of the current generation of the
    log. ``frame_bytes`` is the size of a frame.

    Frames of the previous generation, which are not overwritten yet, differ from the header in both salts.
    """
    salts = struct.unpack(">2I", header[16:24])
    file.seek(_HEADER_BYTES + num_valid * frame_bytes)
    while len(frame := file.read(frame_bytes)) == frame_bytes:
        _, pages_after_commit, first, second = struct.unpack(">4I", frame[:16])
        if pages_after_commit and (first == salts[0] or second == salts[1]):
            return True
    return False


# The checksum s = (s0, s1) is updated for each pair of words (x, y): s0 += x + s1, then s1 += y + s0, modulo 2^32. That
# is s' = M s + N (x, y), so n pairs give M^n s + the sum of M^(n - 1 - i) N (x_i, y_i). The sum does not depend on s,
# so it is computed for all frames at once.

_M: _Matrix = (1, 1, 1, 2)
_N: _Matrix = (1, 0, 1, 1)


def _product(a: _Matrix, b: _Matrix) -> _Matrix:
    """Return the product of two 2×2 matrices modulo 2³²; a matrix is a tuple of its entries, row by row."""
    return (
        (a[0] * b[0] + a[1] * b[2]) & _WORD,
        (a[0] * b[1] + a[1] * b[3]) & _WORD,
        (a[2] * b[0] + a[3] * b[2]) & _WORD,
        (a[2] * b[1] + a[3] * b[3]) & _WORD,
    )


@cache
def _powers(count: int) -> list[_Matrix]:
    """Return the powers 0 to ``count`` of the matrix M."""
    powers: list[_Matrix] = [(1, 0, 0, 1)]
    for _ in range(count):
        powers.append(_product(_M, powers[-1]))
    return powers


def _checksum_terms(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return, for each row of ``words`` (the words of one frame that the checksum covers), the pair of numbers that
    these words add to the checksum: the sum of M^(n - 1 - i) N (x_i, y_i)."""
    pairs = words.shape[1] // 2
    weights = np.array([_product(power, _N) for power in reversed(_powers(pairs)[:pairs])], np.uint32)
    values = words.astype(np.uint32)
    return np.stack(
        [(values * weights[:, [at, at + 1]].reshape(-1)).sum(axis=1, dtype=np.uint32) for at in (0, 2)], axis=1
    )


def _add(sums: tuple[int, int], term: npt.NDArray[np.uint32], pairs: int) -> tuple[int, int]:
    """Return the checksum after ``pairs`` more pairs of words. ``sums`` is the checksum before them, and ``term`` what
    these words add to it, from :func:`_checksum_terms`."""
    power = _powers(pairs)[pairs]
    first = power[0] * sums[0] + power[1] * sums[1] + int(term[0])
    second = power[2] * sums[0] + power[3] * sums[1] + int(term[1])
    return first & _WORD, second & _WORD
