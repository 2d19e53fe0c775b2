"""Messages between a session and the process that asked for it. Standard library only.

A frame is two lengths, a record as JSON, and bytes that belong to it, such as the output of a command.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Record = dict[str, Any]
HEADER = struct.Struct(">II")
"""The lengths of the record and of the bytes after it."""


def packed(record: Record, data: bytes = b"") -> bytes:
    """Return a record and its bytes as one frame."""
    text = json.dumps(record).encode()
    return HEADER.pack(len(text), len(data)) + text + data


def unpack(received: bytearray) -> tuple[Record, bytes] | None:
    """Remove the first frame from what was received, and return its record and its bytes; ``None`` if it is not
    complete yet.

    >>> received = bytearray(packed({"do": "run"}, b"in") + b"..")
    >>> unpack(received), bytes(received)
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
