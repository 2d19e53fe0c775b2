"""The record of the messages that an engine handled and of the steps before which it did, to repeat a run.

An engine that handles the same messages in the same order before the same steps gives the same tokens and logprobs, bit
for bit. The arrival of a message depends on everything else in the run, so it is recorded, in a line for each message.
All other randomness follows from the run's seed. A request is named by the seed of its draws, a commit by its version.
Every line ends with the CRC-32 of all bytes of the file before this checksum, so that a changed record is refused.
"""

from __future__ import annotations

import enum
import re
import zlib
from pathlib import Path

import msgspec

from headrace.base.errors import DataError


def interleaving_file(engine: str) -> str:
    """Return the name of the record of the engine named ``engine`` in the run directory."""
    return f"interleaving-{engine}.jsonl"


class EngineInput(enum.StrEnum):
    """The kind of a message to the engine."""

    GENERATE = "generate"
    ABORT = "abort"
    COMMIT = "commit"
    SCORE = "score"
    PAUSE = "pause"
    RESUME = "resume"


class RecordedInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message, recorded at the moment when the engine handled it."""

    steps: int
    """Number of steps that the engine had made: it handled the message before the next step."""
    kind: EngineInput = msgspec.field(name="told")
    """The kind of the message; the record calls this field ``told``."""
    seeds: tuple[int, ...] = ()
    """The requests, in order, for ``generate`` and ``abort``."""
    version: int | None = None
    """The version, for ``commit``."""


_CHECKSUM = re.compile(rb',"crc":(\d+)}\n')
"""The end of a line of the record: its checksum."""


def with_checksum(line: bytes, before: int) -> bytes:
    """Return ``line``, a JSON object without a line break, in the form of the record: with its checksum as the last
    field, and a line break. ``before`` is the CRC-32 of all lines before it."""
    return b'%s,"crc":%d}\n' % (line[:-1], zlib.crc32(line[:-1], before))


def read_interleaving(path: Path) -> list[RecordedInput]:
    """Read the record in the file ``path``, and return its messages in order. A last line that was cut off because its
    writer was killed is left out.

    Raises :class:`~headrace.base.errors.DataError`, with the number of the line, for a record that was changed or that
    no engine can have written.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="replay a run that has kept it") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    handled: list[RecordedInput] = []
    steps, version, before, sealed = 0, -1, 0, False
    for number, line in enumerate(lines, start=1):
        end = _CHECKSUM.search(line)
        content = line[: end.start()] + b"}" if end else line
        try:
            handled.append(msgspec.json.decode(content, type=RecordedInput))
            problem = _misfit(handled[-1], steps, version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = str(error)
        if not problem and sealed and not end:
            problem = "its checksum is missing"
        if not problem and end and zlib.crc32(content[:-1], before) != int(end[1]):
            problem = "it, or a line before it, has changed since the engine wrote it"
        if problem:
            raise DataError(f"{path}, line {number}: {problem}", remedy="restore it from a copy")
        before, sealed = zlib.crc32(line, before), bool(end)  # records of older programs begin without checksums
        steps = handled[-1].steps
        version = version if handled[-1].version is None else handled[-1].version
    return handled


def _misfit(line: RecordedInput, steps: int, version: int) -> str:
    """Return why ``line`` cannot follow a line with ``steps`` steps, where ``version`` is the version committed last
    (−1: none); an empty string if it can."""
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
