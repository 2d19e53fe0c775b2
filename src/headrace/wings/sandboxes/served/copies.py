"""Copies of the files that a session has changed, for services that cannot store snapshots (kubernetes.py).

    at the start       list_files: every path of the session's file system, with its times, size and owner
    at the snapshot    take_copy: a second list; archives of the changed and new paths, and the names of deleted paths
    in a fork          put_copy: in a session of the same image, remove the deleted paths, and unpack the archives

``find`` and ``tar`` read and write the files inside sessions, as the session's user. This process stores the archives
in a nameless file, which the kernel frees at the end of this process, and never unpacks them.
"""

from __future__ import annotations

import hashlib
import posixpath
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO

from headrace.base.errors import EpisodeError
from headrace.rollout.scoring.sandbox import Reason
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.rollout.scoring.sandbox.run import ENVIRONMENT
from headrace.wings.sandboxes.base import Execution, SandboxSession, SessionEnded

BATCH_BYTES = 8 * MIB
"""The largest size of one archive in bytes, unless a single file is larger."""
MEMBER_BYTES = 8 * 1024
"""The largest size of the header of one path in an archive, besides its name, in bytes."""
LISTING_BYTES = 48 * MIB
"""The largest size of a list of files in bytes."""
CALL_S = 120.0
"""The longest time of one program that lists, packs or unpacks, in seconds."""
_CHOWN, _FOWNER = 1 << 0, 1 << 3
"""The capabilities to change the owner of files, and to change the modes and times of other users' files."""
_OPEN = "find / -xdev -uid $EUID \\( -type d ! -perm -700 -o -type f ! -perm -400 \\) " \
    "-printf 'M%m %p\\0' -exec chmod u+rwx -- {} \\; 2> /dev/null"  # fmt: skip
_LIST = f"""
command -v find > /dev/null || {{ echo 'there is no find' >&2; exit 9; }}
while read -r word value; do [[ $word == CapEff: ]] && rights=$value; done < /proc/self/status
printf '%s\\0%s\\0' "$EUID" "$rights"
cat /proc/self/mountinfo; printf '\\0'
[[ $1 == open ]] && {_OPEN}
find / -xdev \\( -type d -printf 'Rd 0 %m %U %G %T@ %C@ 0 0 %p\\0' -o \
  -printf 'R%y %s %m %U %G %T@ %C@ %i %n %p\\0' \\) 2> /dev/null
printf 'E\\0'
"""
"""Print the user id, the capabilities, the mounts, and a record of each path. With the argument ``open``, first make
files readable that their owner cannot read, and print their modes, because a user without capabilities could not pack
them otherwise."""
_MODES = """
while IFS= read -r -d '' mode && IFS= read -r -d '' path; do chmod "$mode" -- "$path" || exit; done
"""
_REMOVE = """
mapfile -d '' -t paths
for ((i = 0; i < ${#paths[@]}; i += 500)); do rm -rf -- "${paths[@]:i:500}" || exit; done
"""
_PACK = (
    "--format=posix", "--pax-option=delete=atime,delete=ctime", "--numeric-owner", "--sparse", "--no-recursion",
    "--null", "-C", "/", "-T", "-", "-cf", "-",
)  # fmt: skip
_UNPACK = ("--numeric-owner", "--same-owner", "-p", "-C", "/", "-xf", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One path in a list of files."""

    kind: str
    """The letter of the path's type, as ``find`` prints it: f for a file, d for a directory, and so on."""
    size: int
    """The size in bytes; 0 for a directory."""
    mode: int
    """The permission bits."""
    user: int
    """The user id of the owner."""
    inode: str
    """The inode number, which hard links share; empty if the file has one name."""
    path: bytes
    """The full path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileListing:
    """The paths of a session's file system at one moment, compressed, because an image has about a hundred thousand."""

    data: bytes
    """The compressed records, separated by zero bytes."""

    def records(self) -> set[bytes]:
        """Return the set of records."""
        return set(zlib.decompress(self.data).split(b"\0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFiles:
    """The files that a session has changed since its start."""

    image: str
    """The image, by the most exact name of the service; the changes are valid only for this image."""
    removed: bytes
    """The paths that a fork removes first, each followed by a zero byte."""
    opened: bytes
    """Folders of the image that a fork must make writable first, as pairs of mode and path."""
    modes: bytes
    """The modes to restore of paths that their owner cannot read, as pairs of mode and path, innermost first."""
    archives: tuple[tuple[int, str], ...]
    """The size in bytes and the SHA-256 of each archive, in order."""
    store: IO[bytes] = field(repr=False)
    """The archives, one after the other, in a nameless file."""

    def release(self) -> None:
        """Delete the archives."""
        self.store.close()


@dataclass(slots=True, kw_only=True)
class _ListedFiles:
    """The parsed output of :data:`_LIST`: the user id and the capabilities of the session's user, the mount points, the
    original modes of paths that were made readable, and the unparsed records of all paths."""

    user: int
    rights: int
    mounts: set[bytes]
    modes: list[tuple[bytes, bytes]]
    records: list[bytes]


async def list_files(session: SandboxSession) -> FileListing:
    """Return the list of a session's files at its start, for :func:`take_copy`. Raises
    :class:`~headrace.base.errors.EpisodeError` if the files cannot be listed."""
    listed = await _list(session, "")
    return FileListing(data=zlib.compress(b"\0".join(listed.records), 1))


async def take_copy(
    session: SandboxSession, initial_files: FileListing, image: str, *, largest_bytes: int
) -> ChangedFiles:
    """Return a copy of the files that a session has changed since the list ``initial_files``. The caller makes sure
    that no process of the session runs. No file may have more than ``largest_bytes`` bytes. Raises
    :class:`~headrace.base.errors.EpisodeError` if the changes cannot be copied exactly. ``image`` is the exact name of
    the session's image."""
    listed = await _list(session, "open")
    try:
        return await _copy(session, listed, initial_files.records(), image, largest_bytes)
    finally:
        if listed.modes:
            with suppress(SessionEnded):
                await _run_program(
                    session,
                    "restore modes",
                    _make_script_arguments(session, _MODES),
                    _encode_pairs(reversed(listed.modes)),
                )


async def put_copy(session: SandboxSession, files: ChangedFiles) -> None:
    """Apply the changes ``files`` to a new session of the same image. Raises
    :class:`~headrace.base.errors.EpisodeError` if that fails."""
    if files.opened:
        await _run_program(session, "open folders", _make_script_arguments(session, _MODES), files.opened)
    if files.removed:
        await _run_program(session, "remove files", _make_script_arguments(session, _REMOVE), files.removed)
    files.store.seek(0)
    data = [files.store.read(size) for size, _ in files.archives]
    for archive, (_, digest) in zip(data, files.archives, strict=True):
        if hashlib.sha256(archive).hexdigest() != digest:
            raise _make_refusal("the file in which its archives are kept has changed", "look at this machine's disk")
        await _run_program(session, "unpack", [session.programs["tar"], *_UNPACK], archive)
    if files.modes:
        await _run_program(session, "set modes", _make_script_arguments(session, _MODES), files.modes)


async def _copy(
    session: SandboxSession, listed: _ListedFiles, old: set[bytes], image: str, largest_bytes: int
) -> ChangedFiles:
    """Pack the paths of ``session`` that differ between the records ``old`` and the present list ``listed``, and return
    them as a copy for sessions of ``image``. No file may have more than ``largest_bytes`` bytes."""
    before, after = (
        _index_by_path(old.difference(listed.records), listed.mounts),
        _index_by_path(listed.records, listed.mounts),
    )
    changed = {record.path: record for record in _index_by_path(set(listed.records) - old, listed.mounts).values()}
    removed = [path for path, record in before.items() if path not in after or after[path].kind != record.kind]
    touched = [*(path for path in changed if changed[path].kind != "d"), *removed]
    for path in [*touched, *changed]:  # unpacking a path changes the times of its folder
        above = posixpath.dirname(path)
        if above in after:
            changed[above] = after[above]
    changed = {path: record for path, record in changed.items() if _is_writable(record, listed)}
    batches = _batches(changed.values(), largest_bytes)
    store, archives, total = tempfile.TemporaryFile(), [], 0  # noqa: SIM115 - it lives as long as the snapshot
    try:
        for paths, most in batches:
            names = b"".join((path.lstrip(b"/") or b".") + b"\0" for path in paths)
            done = await _run_program(session, "pack", [session.programs["tar"], *_PACK], names, most)
            archives.append((store.write(done.stdout), hashlib.sha256(done.stdout).hexdigest()))
            total += len(done.stdout)
            if total > 2 * session.spec.limits.disk_bytes:
                raise _make_refusal("its archives have more than twice limits.disk_bytes", "raise disk_bytes")
    except BaseException:
        store.close()
        raise
    first = {record.path: record for record in map(_parse_record, filter(None, old)) if record.kind == "d"}
    parents = {posixpath.dirname(path) for path in [*touched, *changed]}
    opened = [(b"u+rwx", path) for path in sorted(parents) if path in first and first[path].mode & 0o300 != 0o300]
    return ChangedFiles(
        image=image, removed=b"".join(path + b"\0" for path in _outermost(removed)), opened=_encode_pairs(opened),
        modes=_encode_pairs(reversed(listed.modes)), archives=tuple(archives), store=store,
    )  # fmt: skip


async def _list(session: SandboxSession, mode: str) -> _ListedFiles:
    """Return the present files of a session. ``mode`` is the argument of :data:`_LIST`: ``open`` or empty."""
    done = await _run_program(
        session, "list files", [*_make_script_arguments(session, _LIST), mode], b"", LISTING_BYTES
    )
    parts = done.stdout.split(b"\0")
    try:
        if parts[-2] != b"E":
            raise ValueError("its list has no end")
        user, rights = int(parts[0]), int(parts[1], 16)
        mounts = {_unescape(line.split()[4]) for line in parts[2].splitlines()} - {b"/"}
        modes = [(mode, path) for mode, _, path in (part[1:].partition(b" ") for part in parts if part[:1] == b"M")]
    except (ValueError, IndexError) as error:
        raise _make_refusal(f"its files cannot be listed: {error}", "keep its find and bash as they were") from None
    records = [part[1:] for part in parts[3:-2] if part[:1] == b"R"]
    return _ListedFiles(user=user, rights=rights, mounts=mounts, modes=modes, records=records)


def _parse_record(record: bytes) -> FileRecord:
    """Return one parsed record. Raises :class:`~headrace.base.errors.EpisodeError` if it has another format."""
    try:
        kind, size, mode, user, _, _, _, inode, links, path = record.split(b" ", 9)
        shared = inode.decode() if int(links) > 1 else ""
        return FileRecord(
            kind=kind.decode(), size=int(size), mode=int(mode, 8), user=int(user), inode=shared, path=path
        )
    except ValueError:
        raise _make_refusal(f"its list has {record[:80]!r}", "keep its find and bash as they were") from None


def _index_by_path(records: Iterable[bytes], mounts: set[bytes]) -> dict[bytes, FileRecord]:
    """Return the parsed records by path, without mount points, which belong to the service, and without sockets, which
    are useless without their process."""
    found = {record.path: record for record in map(_parse_record, filter(None, records))}
    return {path: record for path, record in found.items() if path not in mounts and record.kind != "s"}


def _is_writable(record: FileRecord, listed: _ListedFiles) -> bool:
    """Return whether a fork can write this path. A folder of another user is skipped, and keeps its times. Raises
    :class:`~headrace.base.errors.EpisodeError` for a file of another user."""
    if record.user == listed.user or listed.rights & (_CHOWN | _FOWNER) == _CHOWN | _FOWNER:
        return True
    if record.kind != "d":
        raise _make_refusal(
            f"{record.path.decode('utf-8', 'replace')!r} belongs to user {record.user}, and the session to user "
            f"{listed.user}, who cannot give it away",
            "give the driver the capabilities CHOWN and FOWNER",
        )
    return False


def _batches(records: Iterable[FileRecord], largest_bytes: int) -> list[tuple[list[bytes], int]]:
    """Return the paths of each archive of the files ``records``, none of which may exceed ``largest_bytes`` bytes, with
    an upper bound of its size in bytes. Hard links to the same file are in one archive. Folders come last, inner
    folders before outer folders, because unpacking files changes the times of their folders."""
    units: dict[str | bytes, list[FileRecord]] = {}
    ordered = sorted(records, key=lambda record: record.path)
    for record in ordered:
        if record.kind != "d":
            units.setdefault(record.inode or record.path, []).append(record)
    for record in reversed(ordered):
        if record.kind == "d":
            units[record.path] = [record]
    batches: list[tuple[list[bytes], int]] = []
    for unit in units.values():
        size = unit[0].size + sum(MEMBER_BYTES + 4 * len(record.path) for record in unit)
        if unit[0].size > largest_bytes:
            raise _make_refusal(
                f"{unit[0].path.decode('utf-8', 'replace')!r} has {unit[0].size} bytes, and no file of a copy may have "
                f"more than {largest_bytes}",
                "raise limits.file_bytes, or remove it before",
            )
        if not batches or batches[-1][1] + size > BATCH_BYTES:
            batches.append(([], 2 * 10240))
        paths, before = batches[-1]
        paths.extend(record.path for record in unit)
        batches[-1] = (paths, before + size)
    return batches


def _outermost(paths: Sequence[bytes]) -> list[bytes]:
    """Return the paths that are not inside another one of ``paths``."""
    every = set(paths)
    return [path for path in sorted(paths) if not any(above in every for above in _parents(path))]


def _parents(path: bytes) -> Iterable[bytes]:
    """Yield the folders above a path, innermost first, without the root."""
    while (path := posixpath.dirname(path)) not in (b"/", b""):
        yield path


def _encode_pairs(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return pairs in the format that the scripts read: each string followed by a zero byte."""
    return b"".join(first + b"\0" + second + b"\0" for first, second in pairs)


def _unescape(path: bytes) -> bytes:
    """Return a path of the kernel's mount list unescaped; the kernel writes spaces, tabs and line ends as octal
    numbers."""
    for name in (b" ", b"\t", b"\n", b"\\"):
        path = path.replace(b"\\%03o" % ord(name), name)
    return path


def _make_script_arguments(session: SandboxSession, text: str) -> list[str]:
    """Return the arguments that run the script ``text`` with bash."""
    return [session.programs["bash"], "--norc", "--noprofile", "-c", text, "copy"]


async def _run_program(
    session: SandboxSession, what: str, argv: Sequence[str], stdin: bytes = b"", output_bytes: int = MIB
) -> Execution:
    """Run a program in the session, and return its result. Raises :class:`~headrace.base.errors.EpisodeError` with its
    error output if it fails; ``what`` describes the program's task."""
    spec = session.spec.limits
    limits = replace(
        spec, wall_s=CALL_S, cpu_s=int(CALL_S), output_bytes=output_bytes, file_bytes=2 * spec.disk_bytes
    )  # fmt: skip
    done = await session.execute(argv, stdin=stdin, directory="/", variables=ENVIRONMENT, limits=limits)
    if done.reason is not Reason.EXITED or done.status != 0:
        words = done.stderr.decode("utf-8", "replace").strip()[-300:] or done.reason
        raise _make_refusal(
            f"its session could not {what}: {words}", "keep find and tar in the image, and room on the disk"
        )
    return done


def _make_refusal(problem: str, remedy: str) -> EpisodeError:
    """Return the error for a copy that cannot be made because of ``problem``."""
    return EpisodeError(f"a snapshot cannot be copied: {problem}", remedy=remedy, reason="session_snapshot")
