"""The files that each command of an agent has created, changed or deleted below a directory of a session."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSession

MOST_NAMES = 12
"""The largest number of changed files that are named; further files are only counted."""
MOST_BYTES = 8 * MIB
"""The largest size of a list of files in bytes. For a directory with a longer list no changes are reported."""
LIST_S = 10.0
"""The longest time to list the files, in seconds."""
_PLAIN = re.compile(r"[\w./@+=%-]+")
"""Matches file names that are shown unquoted. Other names are quoted, so that no name looks like several changes."""
_LIST = """cd -- "$1" && find . -xdev ! -type d -printf '%C@ %P\\0'"""
"""A script that lists the files below the directory ``$1``, each with the time of its last change."""


class FileChanges:
    """Finds the changes of files below one directory of a session from one command to the next. A file has changed if
    its ``ctime`` differs, which programs cannot set."""

    def __init__(self, directory: str) -> None:
        """Create the object, which observes the files below ``directory``."""
        self._directory = directory
        self._session: SandboxSession | None = None
        """The observed session; ``None`` before its first command."""
        self._before: Mapping[str, str] | None = None
        """The ``ctime`` of each file before the last command, by name; ``None`` if the files could not be listed."""

    async def begin(self, session: SandboxSession) -> None:
        """List the files of ``session`` before its first command; do nothing for a session that is observed already."""
        if session is not self._session:
            self._session, self._before = session, await self._list(session)

    async def describe_new_changes(self, session: SandboxSession) -> str:
        """Return the changes in ``session`` since the last list in words: ``+ new, ~ changed, - deleted``, with names
        relative to the directory. Return an empty text if nothing has changed or the files cannot be listed."""
        before, self._before = self._before, await self._list(session)
        return "" if before is None or self._before is None else describe_changes(before, self._before)

    async def _list(self, session: SandboxSession) -> Mapping[str, str] | None:
        """Return the ``ctime`` of each file by name; ``None`` if the files cannot be listed."""
        limits = replace(session.spec.limits, wall_s=LIST_S, output_bytes=MOST_BYTES)
        try:
            done = await session.run_apart(_LIST, self._directory, limits=limits)
        except EpisodeError:  # the session has ended: the next command raises the error
            return None
        if done.status != 0:
            return None
        entries = done.stdout.decode("utf-8", "replace").rstrip("\0").split("\0")
        return {name: changed for changed, _, name in (entry.partition(" ") for entry in entries)}


def describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return in words how two lists of files (``ctime`` by name), ``before`` and ``after`` a command, differ."""
    found = [f"+ {_quote(name)}" for name in sorted(after.keys() - before.keys())]
    found += [f"~ {_quote(name)}" for name in sorted(after.keys() & before.keys()) if after[name] != before[name]]
    found += [f"- {_quote(name)}" for name in sorted(before.keys() - after.keys())]
    more = len(found) - MOST_NAMES
    return ", ".join([*found[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])


def _quote(name: str) -> str:
    """Return the name of a file as it is shown: quoted unless it is plain."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
