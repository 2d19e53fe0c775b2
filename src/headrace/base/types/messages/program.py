"""The messages that a run receives from the program ``headrace`` while it goes on, and its answers. They travel as
lines of JSON."""

from __future__ import annotations

import msgspec


class ListEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request for the run's engines."""


class AddEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request to add engines to the run."""

    count: int
    """The number of engines to add."""


class RemoveEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request to remove engines from the run."""

    name: str = ""
    """The engine to remove; empty: the last ``count``."""
    count: int = 1
    """The number of engines to remove where no name is given."""
    drain_s: float
    """Seconds that the engines have to end their sequences; the other engines continue the rest."""


ProgramRequest = ListEngines | AddEngines | RemoveEngines
"""The requests that a run receives."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one engine of a run."""

    name: str
    pid: int
    """The process id on the machine of the engine; 0 while it is being started."""
    state: str
    """``starting``, ``serving``, ``waiting`` for new weights, ``leaving``, or why its process is halted."""
    version: int
    """The version of its weights; −1 if it has none."""
    device: str
    """The device on which it computes, as in ``cuda:1``."""
    threads: int | None
    """The number of cores that it computes with; ``None`` while it starts."""
    sequences: int
    """The number of sequences that it serves now."""
    restarts: int
    """The number of times that it died and was started again."""
    node: str
    """The address of its machine; empty for the controller's machine."""


class ChangeProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The news about a change that is under way."""

    text: str


class ChangeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last answer to a request that was carried out."""

    changed: tuple[str, ...] = ()
    """The names of the engines that were added or removed."""
    engines: tuple[EngineStatus, ...]
    """All engines that the run has now."""


class ChangeRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last answer to a request that was not carried out, or not as a whole."""

    problem: str
    remedy: str


ProgramAnswer = ChangeProgress | ChangeDone | ChangeRefused
"""The answers to such a request."""
