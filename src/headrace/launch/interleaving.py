"""The record of the messages that an engine handled and of the steps before which it did, to repeat a run.

An engine that handles the same messages in the same order before the same steps gives the same tokens and logprobs, bit
for bit. The arrival of a message depends on everything else in the run, so it is recorded, in a line for each message.
All other randomness follows from the run's seed. A request is named by the seed of its draws, a commit by its version.
"""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from headrace.base.errors import DataError


def interleaving_file(engine: str) -> str:
    """Return the name of an engine's record in the run directory."""
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


def read_interleaving(path: Path) -> list[RecordedInput]:
    """Read the record in ``path``. A last line that was cut off because its writer was killed is left out.

    Raises :class:`~headrace.base.errors.DataError`, with the line, for a record that no engine has written.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="replay a run that has kept it") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    handled: list[RecordedInput] = []
    steps, version = 0, -1
    for number, line in enumerate(lines, start=1):
        try:
            handled.append(msgspec.json.decode(line, type=RecordedInput))
            problem = _misfit(handled[-1], steps, version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = str(error)
        if problem:
            raise DataError(f"{path}, line {number}: {problem}", remedy="restore it from a copy")
        steps = handled[-1].steps
        version = version if handled[-1].version is None else handled[-1].version
    return handled


def _misfit(line: RecordedInput, steps: int, version: int) -> str:
    """Return why a line cannot follow a line with ``steps`` steps, under ``version``; empty if it can."""
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
