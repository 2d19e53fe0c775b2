"""What an agent has changed: the files below a directory of a session, from one command to the next."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSession

MOST_NAMES = 12
"""The largest number of files that are named; others are only counted."""
MOST_BYTES = 8 * MIB
"""The longest list of files that is read; for a directory with more files no changes are reported."""
LIST_S = 10.0
"""The longest time of making a list."""
_PLAIN = re.compile(r"[\w./@+=%-]+")
"""The names that are shown as they are; others are quoted, so that no name looks like several changes."""
_LIST = """cd -- "$1" && find . -xdev ! -type d -printf '%C@ %P\\0'"""
"""A script that lists the files below a directory, each with the time of its last change."""


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
        limits = replace(session.spec.limits, wall_s=LIST_S, output_bytes=MOST_BYTES)
        try:
            done = await session.run_apart(_LIST, self._directory, limits=limits)
        except EpisodeError:  # the session has ended: the next command tells so
            return None
        if done.status != 0:
            return None
        entries = done.stdout.decode("utf-8", "replace").rstrip("\0").split("\0")
        return {name: changed for changed, _, name in (entry.partition(" ") for entry in entries)}


def describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return in words how two lists of files differ.

    >>> describe_changes({"a": "1", "b": "1", "d": "1"}, {"b": "2", "c": "1", "d": "1"})
    '+ c, ~ b, - a'
    >>> print(describe_changes({}, {"a, ~ b": "1", "é.py": "1"}))
    + "a, ~ b", + é.py
    """
    found = [f"+ {_quoted(name)}" for name in sorted(after.keys() - before.keys())]
    found += [f"~ {_quoted(name)}" for name in sorted(after.keys() & before.keys()) if after[name] != before[name]]
    found += [f"- {_quoted(name)}" for name in sorted(before.keys() - after.keys())]
    more = len(found) - MOST_NAMES
    return ", ".join([*found[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])


def _quoted(name: str) -> str:
    """Return the name of a file as it is shown."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
