"""Frames: the messages between a session's supervisor and its client. Standard library only.

A frame contains two lengths, a record as JSON, and the bytes of the record, such as the output of a command.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Record = dict[str, Any]
HEADER = struct.Struct(">II")
"""The lengths of the record and of its bytes, as unsigned 32-bit integers."""


def pack_frame(record: Record, data: bytes = b"") -> bytes:
    """Return one frame with ``record`` and its bytes ``data``."""
    text = json.dumps(record).encode()
    return HEADER.pack(len(text), len(data)) + text + data


def unpack_frame(received: bytearray) -> tuple[Record, bytes] | None:
    """Remove the first frame from the buffer ``received``, and return its record and its bytes; ``None`` if the frame
    is not complete yet.

    >>> received = bytearray(pack_frame({"do": "run"}, b"in") + b"..")
    >>> unpack_frame(received), bytes(received)
    (({'do': 'run'}, b'in'), b'..')
    """
    if len(received) < HEADER.size:
        return None
    text_bytes, data_bytes = HEADER.unpack_from(received)
    end = HEADER.size + text_bytes + data_bytes
    if len(received) < end:
        return None
    with memoryview(received) as view:
        record = json.loads(bytes(view[HEADER.size : HEADER.size + text_bytes]))
        data = bytes(view[HEADER.size + text_bytes : end])
    del received[:end]
    return record, data
