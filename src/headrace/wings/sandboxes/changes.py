"""What an agent has changed: the files below a directory of a session, from one command to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from shlex import quote

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSession

MOST_NAMES = 12
"""The most files that are named; of others only the number is told."""
MOST_BYTES = 8 * MIB
"""The longest list of files that is read; of a directory with more files no changes are told."""
LIST_S = 10.0
"""The longest time of making a list."""


class FileChanges:
    """The changes of files below one directory of a session. The time of a change that the kernel keeps (``ctime``)
    tells them apart, which no program can set."""

    def __init__(self, directory: str) -> None:
        """Watch ``directory``."""
        self._directory = directory
        self._session: SandboxSession | None = None
        self._before: Mapping[str, str] | None = None

    async def begin(self, session: SandboxSession) -> None:
        """Look at the files of a session, unless it is the one of before."""
        if session is not self._session:
            self._session, self._before = session, await self._list(session)

    async def look(self, session: SandboxSession) -> str:
        """Return what has changed since the last look: ``+ new, ~ changed, - gone``, with names below the directory;
        empty where the files cannot be listed."""
        before, self._before = self._before, await self._list(session)
        return "" if before is None or self._before is None else describe_changes(before, self._before)

    async def _list(self, session: SandboxSession) -> Mapping[str, str] | None:
        """Return when each file was changed last; ``None`` where that cannot be found out."""
        command = rf"cd {quote(self._directory)} && find . -xdev ! -type d -printf '%C@ %P\0'"
        limits = replace(session.spec.limits, wall_s=LIST_S, output_bytes=MOST_BYTES)
        try:
            done = await session.inspect(command, limits=limits)
        except EpisodeError:  # the session has ended: the next command tells so
            return None
        entries = (entry.partition(" ") for entry in done.stdout.split("\0") if entry)
        return {name: changed for changed, _, name in entries} if done.ok else None


def describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return in words how two lists of files differ.

    >>> describe_changes({"a": "1", "b": "1", "d": "1"}, {"b": "2", "c": "1", "d": "1"})
    '+ c, ~ b, - a'
    """
    found = [f"+ {name}" for name in sorted(after.keys() - before.keys())]
    found += [f"~ {name}" for name in sorted(after.keys() & before.keys()) if after[name] != before[name]]
    found += [f"- {name}" for name in sorted(before.keys() - after.keys())]
    more = len(found) - MOST_NAMES
    return ", ".join([*found[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])
