"""The requests that the program ``headrace`` sends to a run in progress, and the answers of the run. Each message is
one line of JSON."""

from __future__ import annotations

import msgspec


class ListEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request to list the engines of the run."""


class AddEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request to add engines to the run."""

    count: int
    """The number of engines to add."""


class RemoveEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request to remove engines from the run."""

    name: str = ""
    """The engine to remove; empty: the last ``count``."""
    count: int = 1
    """The number of engines to remove if ``name`` is empty."""
    drain_s: float
    """The time in seconds that the engines have to finish their sequences. The other engines continue the sequences
    that are not finished by then."""


ProgramRequest = ListEngines | AddEngines | RemoveEngines
"""The requests that a run receives."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one engine of a run."""

    name: str
    pid: int
    """The process id on the machine of the engine; 0 while it is being started."""
    state: str
    """``starting``, ``serving``, ``waiting`` (for new weights), ``leaving``, the reason why its process is halted, or
    ``lost``: it could not be started again, and the run continues without it."""
    version: int
    """The version of its weights; −1 if it has none."""
    device: str
    """The device on which it computes, as in ``cuda:1``."""
    threads: int | None
    """The number of cores on which it computes; ``None`` while it starts."""
    sequences: int
    """The number of sequences that it serves now."""
    restarts: int
    """The number of times that it died and was started again."""
    node: str
    """The address of its machine; empty for the controller's machine."""


class ChangeProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The report of the progress of a change that is not complete yet."""

    text: str


class ChangeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The final answer to a request that has succeeded."""

    changed: tuple[str, ...] = ()
    """The names of the engines that were added or removed."""
    engines: tuple[EngineStatus, ...]
    """All engines of the run after the change, and the engines that it has lost."""


class ChangeRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The final answer to a request that was refused, or of which only a part has succeeded."""

    problem: str
    remedy: str


ProgramAnswer = ChangeProgress | ChangeDone | ChangeRefused
"""The answers to a request. Any number of :class:`ChangeProgress` may come before the final answer."""
