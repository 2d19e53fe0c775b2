"""The record of the messages that an engine handled. For each message it contains the number of the engine step before
which it was handled, so that the run can be replayed.

An engine that handles the same messages in the same order before the same steps produces the same tokens and logprobs,
bit for bit. The time at which a message arrives depends on everything else in the run, so each message is recorded as
one line. All other randomness follows from the run's seed. A request is identified by its sampling seed, and a commit
by its version. Every line ends with the CRC-32 of all bytes of the file before this checksum, so that a changed record
can be refused.
"""

from __future__ import annotations

import enum
import re
import zlib
from pathlib import Path

import msgspec

from headrace.base.errors import DataError


def interleaving_file(engine: str) -> str:
    """Return the file name, in the run directory, of the record of the engine named ``engine``."""
    return f"interleaving-{engine}.jsonl"


class EngineInput(enum.StrEnum):
    """The kinds of messages to an engine that are recorded."""

    GENERATE = "generate"
    ABORT = "abort"
    COMMIT = "commit"
    SCORE = "score"
    PAUSE = "pause"
    RESUME = "resume"


class RecordedInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message, recorded when the engine handled it."""

    steps: int
    """Number of steps that the engine had completed. It handled the message before the next step."""
    kind: EngineInput = msgspec.field(name="told")
    """The kind of the message; the record calls this field ``told``."""
    seeds: tuple[int, ...] = ()
    """For ``generate`` and ``abort``: the sampling seeds that identify the requests, in order."""
    version: int | None = None
    """For ``commit``: the committed version."""


_CHECKSUM = re.compile(rb',"crc":(\d+)}\n')
"""A pattern for the end of a line of the record, which contains the checksum."""


def with_checksum(line: bytes, before: int) -> bytes:
    """Return ``line``, a JSON object without a line break, as a line of the record: the checksum becomes its last
    field, and a line break follows. ``before`` is the CRC-32 of all lines before it."""
    return b'%s,"crc":%d}\n' % (line[:-1], zlib.crc32(line[:-1], before))


def read_interleaving(path: Path) -> list[RecordedInput]:
    """Read the record in the file ``path``, and return its messages in order. An incomplete last line, which remains if
    the engine was killed while writing, is ignored.

    Raises :class:`~headrace.base.errors.DataError`, with the number of the line, for a record that was changed or that
    an engine cannot have written.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="replay a run that has kept it") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    handled: list[RecordedInput] = []
    steps, version, before, has_checksum = 0, -1, 0, False
    for number, line in enumerate(lines, start=1):
        end = _CHECKSUM.search(line)
        content = line[: end.start()] + b"}" if end else line
        try:
            handled.append(msgspec.json.decode(content, type=RecordedInput))
            problem = _find_problem(handled[-1], steps, version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = str(error)
        if not problem and has_checksum and not end:
            problem = "its checksum is missing"
        if not problem and end and zlib.crc32(content[:-1], before) != int(end[1]):
            problem = "it, or a line before it, has changed since the engine wrote it"
        if problem:
            raise DataError(f"{path}, line {number}: {problem}", remedy="restore it from a copy")
        before, has_checksum = zlib.crc32(line, before), bool(end)  # older versions wrote lines without checksums
        steps = handled[-1].steps
        version = version if handled[-1].version is None else handled[-1].version
    return handled


def _find_problem(line: RecordedInput, steps: int, version: int) -> str:
    """Return why ``line`` cannot follow a line with ``steps`` steps; empty if it can. ``version`` is the version that
    was committed last, or −1 if none was."""
    if line.steps < steps:
        return f"steps={line.steps} after a line of steps={steps}: time runs forward"
    if len(set(line.seeds)) < len(line.seeds):
        return "a seed twice"
    if bool(line.seeds) != (line.kind in (EngineInput.GENERATE, EngineInput.ABORT)):
        return f"{line.kind} with {len(line.seeds)} seeds"
    if (line.version is not None) != (line.kind is EngineInput.COMMIT):
        return f"{line.kind} with version={line.version}"
    if line.version is not None and line.version <= version:
        return f"a commit of version {line.version} after that of version {version}"
    return ""
