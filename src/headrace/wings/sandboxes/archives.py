"""Tar archives of task files for sessions. They keep modes, symbolic links and empty folders, and never contain a file
from outside the task's folder.

A link with an absolute path refers to the session's file system, as in docker: it is copied as a link and not followed
here. A link whose relative path leads out of the folder is refused with its name.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from headrace.wings.sandboxes.base import SandboxSession


class RefusedFile(ValueError):
    """The error of a path that lies outside the permitted folder or is not a regular file."""


def read_inside(path: Path, root: Path) -> bytes:
    """Return the content of a file in the folder ``root``. Raises :class:`RefusedFile` if the path, with links
    resolved, lies outside or is not a regular file, and ``OSError`` if it cannot be read."""
    return _read_content(resolve_inside(path, root))[0]


def resolve_inside(path: Path, root: Path) -> Path:
    """Return the path of a file or folder in ``root`` with links resolved. Raises :class:`RefusedFile` if it lies
    outside, and ``OSError`` if it does not exist."""
    try:
        found = path.resolve(strict=True)
    except RuntimeError:  # Python before 3.13 has no OSError for it
        raise RefusedFile(f"{path} is a link that leads to itself") from None
    if not found.is_relative_to(root.resolve()):
        raise RefusedFile(f"{path} leads to {found}, which lies outside {root}")
    return found


def pack_files(
    pairs: Iterable[tuple[Path, str]],
    root: Path,
    *,
    mode: int | None = None,
    leaves_out: Callable[[str], bool] = lambda path: False,
) -> bytes:
    """Return a tar archive, for :func:`unpack`, of pairs of a file or folder in ``root`` and its full path in the
    session. ``mode`` replaces the modes of all files. ``leaves_out`` returns whether a path relative to ``root`` is
    excluded. Raises :class:`RefusedFile` for a path that must not be copied, and ``OSError`` for a file that cannot be
    read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, target in pairs:
            source = resolve_inside(path, root)
            members = (
                _members_below(source, target, root.resolve(), leaves_out) if source.is_dir() else [(source, target)]
            )
            for each, name in members:
                _add(archive, each, name, mode)
    return buffer.getvalue()


async def unpack(session: SandboxSession, archive: bytes) -> None:
    """Unpack an archive of :func:`pack_files` in a session. Where the session has a link to a folder, the files go into
    that folder, as in docker. Raises :class:`~headrace.base.errors.EpisodeError` if they cannot be written."""
    await session.unpack(archive, "-m", "--keep-directory-symlink")


def ignore_rules(text: str) -> Callable[[str], bool]:
    """Return a function of a path that returns whether the rules ``text`` of a ``.dockerignore`` exclude a path."""
    rules = []
    for line in text.splitlines():
        pattern = line.strip()
        is_negated, pattern = pattern.startswith("!"), pattern.removeprefix("!").strip()
        if pattern and not pattern.startswith("#"):
            rules.append((re.compile(_pattern(posixpath.normpath(pattern).lstrip("/")) + "(?:/.*)?"), not is_negated))

    def leaves_out(path: str) -> bool:
        """Return whether the last matching rule excludes ``path``; ``False`` if none matches."""
        return next((out for rule, out in reversed(rules) if rule.fullmatch(path)), False)

    return leaves_out


def _pattern(pattern: str) -> str:
    """Return a pattern of ``.dockerignore`` as the text of a regular expression."""
    if pattern == ".":
        return ".*"
    pieces = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern)
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        known.get(piece) or (piece if len(piece) > 1 and piece[0] == "[" else re.escape(piece)) for piece in pieces
    )


def _members_below(
    folder: Path, target: str, root: Path, leaves_out: Callable[[str], bool]
) -> Iterator[tuple[Path, str]]:
    """Yield the folder and all files and folders below it, without the excluded ones, each with its path in the
    session."""
    for parent, folders, names in os.walk(folder, followlinks=False, onerror=_raise_error):
        place = Path(parent)
        if place == folder or not leaves_out(place.relative_to(root).as_posix()):
            yield place, posixpath.join(target, place.relative_to(folder).as_posix())
        for path in (place / name for name in sorted(names + folders)):
            if leaves_out(path.relative_to(root).as_posix()) or (path.is_dir() and not path.is_symlink()):
                continue
            if path.is_symlink():
                _refuse_leading_outside(path, root)
            yield path, posixpath.join(target, path.relative_to(folder).as_posix())


def _raise_error(error: OSError) -> None:
    """Raise ``error``; ``os.walk`` calls this for a folder that cannot be listed."""
    raise error


def _refuse_leading_outside(link: Path, root: Path) -> None:
    """Raise :class:`RefusedFile` for a link whose relative path leads out of the folder ``root``."""
    target = os.readlink(link)
    resolved = posixpath.normpath(posixpath.join(link.parent.relative_to(root).as_posix(), target))
    if not target.startswith("/") and (resolved == ".." or resolved.startswith("../")):
        raise RefusedFile(f"the link {link} leads to {target!r}, which lies outside {root}")


def _add(archive: tarfile.TarFile, path: Path, name: str, mode: int | None) -> None:
    """Add a file, a folder or a link to an archive as ``name``. ``mode`` replaces the mode of a file."""
    member = tarfile.TarInfo(posixpath.normpath(name).strip("/"))
    if path.is_symlink():
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(member)
    elif path.is_dir():
        member.type, member.mode = tarfile.DIRTYPE, (stat.S_IMODE(path.stat().st_mode) & 0o777) | 0o700
        if member.name not in ("", "."):
            archive.addfile(member)
    else:
        content, own_mode = _read_content(path)
        member.size, member.mode = len(content), own_mode if mode is None else mode
        archive.addfile(member, io.BytesIO(content))


def _read_content(path: Path) -> tuple[bytes, int]:
    """Return the content and the permission bits of a file. Raises :class:`RefusedFile` if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(f"{path} is no plain file")
        return file.read(), stat.S_IMODE(status.st_mode) & 0o777
