"""The record of what an engine was told between which of its steps: with it, a run can be repeated.

An engine that is told the same in the same order before the same steps gives the same tokens and logprobs, bit for bit.
When a message arrives depends on everything else in the run; so that is written down, a line for each message, and all
other randomness follows from the run's seed. A request is named by the seed of its draws, a commit by its version.
"""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from headrace.base.errors import DataError


def interleaving_file(engine: str) -> str:
    """The name of an engine's record in the run directory."""
    return f"interleaving-{engine}.jsonl"


class EngineInput(enum.StrEnum):
    """What the engine was told."""

    GENERATE = "generate"
    ABORT = "abort"
    COMMIT = "commit"
    SCORE = "score"
    PAUSE = "pause"
    RESUME = "resume"


class Handled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message, at the moment the engine was told."""

    steps: int
    """Steps that the engine had made: it was told before the next."""
    told: EngineInput
    seeds: tuple[int, ...] = ()
    """With ``generate`` and ``abort``: the requests, in order."""
    version: int | None = None
    """With ``commit``."""


def read_interleaving(path: Path) -> list[Handled]:
    """The record in ``path``. A last line that was cut off when its writer was killed is left out.

    Raises :class:`~headrace.base.errors.DataError`, with the line, for a record that no engine has written.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="replay a run that has kept it") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    handled: list[Handled] = []
    steps, version = 0, -1
    for number, line in enumerate(lines, start=1):
        try:
            handled.append(msgspec.json.decode(line, type=Handled))
            problem = _misfit(handled[-1], steps, version)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = str(error)
        if problem:
            raise DataError(f"{path}, line {number}: {problem}", remedy="restore it from a copy")
        steps = handled[-1].steps
        version = version if handled[-1].version is None else handled[-1].version
    return handled


def _misfit(line: Handled, steps: int, version: int) -> str:
    """Why it cannot follow a line of so many ``steps``, under ``version``; empty where it can."""
    if line.steps < steps:
        return f"steps={line.steps} after a line of steps={steps}: time runs forward"
    if len(set(line.seeds)) < len(line.seeds):
        return "a seed twice"
    if bool(line.seeds) != (line.told in (EngineInput.GENERATE, EngineInput.ABORT)):
        return f"{line.told} with {len(line.seeds)} seeds"
    if (line.version is not None) != (line.told is EngineInput.COMMIT):
        return f"{line.told} with version={line.version}"
    if line.version is not None and line.version <= version:
        return f"a commit of version {line.version} after that of version {version}"
    return ""
