"""The contract of sandboxes: sessions in which an agent works with files and a shell, and drivers that start sessions.

    driver.start(spec) ──▶ session ── run, read, write ──▶ stop, or the end of its lifetime (life_s)
                              │ snapshot: files, directory, variables
                              ▼
                           snapshot ── driver.fork ──▶ another session that continues from there
                              └── release

A driver starts sessions of one kind: the jail of Headrace, bubblewrap, containers. Each command runs in a new shell,
which receives the directory and the exported variables of the shell before it. So a fork needs only a snapshot of
files, directory and variables. Background processes are not part of a snapshot.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import posixpath
import sys
import tarfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.rollout.scoring.sandbox import Finished, Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.rollout.scoring.sandbox.run import ENVIRONMENT

LIMITS = SandboxLimits(
    wall_s=60.0, cpu_s=60, file_bytes=64 * MIB, disk_bytes=256 * MIB, processes=64, open_files=256, output_bytes=1 * MIB
)
"""The default limits of a session. ``wall_s`` and ``cpu_s`` apply to each command."""
MIN_OPEN_FILES = 128
"""The smallest allowed limit of open files, because a shell needs file descriptors up to this number itself."""
MAX_WORD_BYTES = 131_072
"""The kernel's limit of the size of one argument or one environment variable of a program, in bytes."""
MAX_LIFE_S = 1e9
"""The upper bound of a session's lifetime (``SandboxSpec.life_s``), in seconds; it is excluded."""
MAX_COMMAND_BYTES = 100_000
"""The maximum length of a command in bytes of UTF-8. The kernel's limit of one argument is 128 KiB."""
PROGRAMS = {
    name: next((path for path in (f"/usr/bin/{name}", f"/bin/{name}") if os.path.exists(path)), f"/bin/{name}")
    for name in ("bash", "cat", "mkdir", "tar")
}
"""The paths of the programs that a session needs, by name. /usr/bin comes first, because /bin may be a link to it that
a session could remove."""
_SHELL_SCRIPT = r"""
__headrace_tell() {
  {
    builtin set +aeux
    builtin pwd -P && builtin printf '\0'
    /usr/bin/env -0 || {
      for __headrace_name in $(__headrace_long); do
        builtin export -n "$__headrace_name"
        builtin printf '%s\0' "$__headrace_name"
      done
      /usr/bin/env -0
    } && builtin printf '.\0'
  } 2> /dev/null >&99
  builtin exec 99>&-
  builtin return "$__headrace_status"
}
__headrace_long() {
  LC_ALL=C IFS=$'\n'
  for __headrace_name in $(builtin compgen -e); do
    __headrace_value=${!__headrace_name}
    ((${#__headrace_name} + ${#__headrace_value} < 131071)) || builtin echo "$__headrace_name"
  done
}
trap() {
  { local -; builtin set +x; } 2> /dev/null
  builtin trap "$@" || builtin return
  [[ $BASHPID == "$$" && $# != 0 && $1 != -[lp]* ]] && __headrace_trap
  builtin return 0
}
__headrace_trap() {
  { local -; builtin set +x; } 2> /dev/null
  local __headrace_word
  __headrace_word=$(builtin trap -p EXIT)
  [[ $__headrace_word == *__headrace_tell* ]] && builtin return
  builtin eval "set -- $__headrace_word"
  builtin trap "$__headrace_end"$'\n'"$3" EXIT
}
__headrace_end='{ __headrace_status=$?; builtin trap - ERR DEBUG; } 2> /dev/null; __headrace_tell'
builtin trap "$__headrace_end" EXIT
builtin eval "$1"
"""
"""Run the command ``$1``, then write to the state pipe: the shell's directory and its exported variables, each followed
by a zero byte; the names of variables that are too long to pass to a program; a dot. An EXIT trap of the command runs
after that."""
_OWN_VARIABLES = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
"""Variables that every shell sets itself."""


_WRITE_SCRIPT = r"""
tar=$1 kept=()
shift
while (($#)); do
  [[ -f $2 && ! -L $2 ]] && kept+=("$(stat -c %a -- "$2")$1" "$2")
  shift 2
done
"$tar" -m --no-overwrite-dir -xf - -C / || exit
for ((i = 0; i < ${#kept[@]}; i += 2)); do
  chmod -- "${kept[i]%x}" "${kept[i + 1]}"
  [[ ${kept[i]} != *x ]] || chmod -- +x "${kept[i + 1]}"
done
"""
"""Unpack a tar archive from the standard input. A file that existed before keeps its mode. Arguments: the path of tar,
then for each file a flag (``x``: make it executable; or empty) and its path."""
FILES_AT_ONCE = 200
"""The largest number of files that one program writes: their paths are its arguments."""


class SessionEnded(EpisodeError):
    """The error of a call to a session that has ended, for whatever reason."""


class DriverLost(EnvError):
    """The error of a driver that cannot start sessions any more, because its host process has ended: open it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The description of a session: its limits, its lifetime, its image, and the state of its first shell."""

    limits: SandboxLimits = LIMITS
    """The limits. ``wall_s`` and ``output_bytes`` apply to each command, ``cpu_s`` and ``memory_bytes`` to each
    process. Memory, files and processes are also limited in total."""
    life_s: float = 3600.0
    """The lifetime of the session in seconds. The session then ends, even while a command runs."""
    directory: str = "/workspace"
    """The directory in which the first command begins; it is made at the start."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set in addition to the base variables: ``PATH``, ``HOME`` and ``LANG``, or the variables
    of the image."""
    image: str = ""
    """The name of the image whose files the session starts with, for kinds with images; empty: the image in the
    driver's settings."""
    loopback: bool = False
    """Whether programs in the session can reach each other by TCP and UDP over 127.0.0.1."""
    forwards: Mapping[int, str] = field(default_factory=dict)
    """TCP forwards: the address outside (``HOST:PORT``) by the port of 127.0.0.1 in the session that leads to it. The
    session can reach no other address. Forwards need ``loopback``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of one program in a session, as :meth:`SandboxSession.execute` returns it."""

    reason: Reason
    """Why the program ended: by itself, or by a limit."""
    stdout: bytes
    """The standard output, up to the limit."""
    stderr: bytes
    """The standard error, up to the same limit."""
    status: int | None = None
    """The exit code; a negative number: the number of the signal that ended the program, negated; ``None``: a limit
    ended the program."""
    cpu_s: float = 0.0
    """The processor time of the program itself, in seconds."""
    state: bytes = b""
    """The bytes that the program wrote to the state pipe; see :data:`_SHELL_SCRIPT`."""


@dataclass(kw_only=True)
class SandboxSnapshot:
    """The files of a session at one moment, with the directory and the variables of its shell. Release a snapshot with
    :meth:`SandboxDriver.release` when it will not be forked any more."""

    spec: SandboxSpec
    directory: str
    """The directory of the shell."""
    variables: Mapping[str, str]
    """The exported variables of the shell."""
    files: Any
    """The files, in a form of the driver."""
    released: bool = False
    """Whether the files were released; such a snapshot cannot be forked."""


class SandboxSession(ABC):
    """A sandbox with files and a shell. Calls run one at a time; a second call waits for the first. Cancelling a call
    ends the session."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Describe a session with the limits, directory and variables of ``spec``. A driver starts the session."""
        self.spec = spec
        self.directory = spec.directory
        """The directory in which the next command begins."""
        self.programs: Mapping[str, str] = PROGRAMS
        """The paths of bash, cat, mkdir and tar in the session."""
        self.base_variables: Mapping[str, str] = {**ENVIRONMENT, "PATH": f"{sys.prefix}/bin:{ENVIRONMENT['PATH']}"}
        """The environment variables of every command, without the variables of the spec."""
        self.variables: Mapping[str, str] = self.first_variables()
        """The exported variables with which the next command begins."""
        self.missing: Mapping[str, str] = {}
        """The guards (such as namespaces and limits) that the session lacks, each with the reason."""
        self.ended = ""
        """Why the session has ended; empty while it runs."""
        self._turn = asyncio.Lock()
        """Held during each call, so that calls run one at a time."""

    def first_variables(self) -> dict[str, str]:
        """Return the variables with which the first command of the session begins."""
        return {**self.base_variables, **self.spec.variables}

    @abstractmethod
    async def execute(
        self, argv: Sequence[str], *, stdin: bytes, directory: str, variables: Mapping[str, str], limits: SandboxLimits
    ) -> Execution:
        """Run the program ``argv`` in ``directory`` with ``variables`` and the input ``stdin`` until it ends or exceeds
        one of ``limits``; return its result. Its background processes go on, but a limit ends them with the program.
        Raises :class:`SessionEnded` if the session ends during the call."""

    @abstractmethod
    async def end_background(self) -> int:
        """Kill all processes of the session, and return their number."""

    @abstractmethod
    async def count_background(self) -> int:
        """Return the number of background processes."""

    @abstractmethod
    async def take_files(self) -> Any:
        """Return the present files for a snapshot, in a form of the driver. The caller ensures that no process runs."""

    @abstractmethod
    async def stop(self) -> None:
        """End the session, and remove its processes and files. Do nothing if the session has ended."""

    async def run(self, command: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> Finished:
        """Run a command in a shell with the standard input ``stdin``, and return the result. The next command begins in
        the directory and with the exported variables with which this command ends. ``detail`` of the result says if
        this state was lost, as after ``exec``.

        ``limits``, if given, replace the limits of the spec for this command: time, output, file size, and the limits
        of each process. Raises :class:`~headrace.base.errors.EpisodeError` for a command that is too long or that the
        kernel does not accept as an argument.
        """
        if not _is_clean(command) or len(_encode(command)) > MAX_COMMAND_BYTES:
            raise EpisodeError(
                f"a command of {len(command)} characters cannot be given to a shell",
                remedy=f"keep it under {MAX_COMMAND_BYTES} bytes of UTF-8, without zero bytes and lone surrogates: "
                "write a file and run that",
                reason="session_command",
            )
        argv = self._make_script_arguments(_SHELL_SCRIPT, command)
        async with self._running():
            done = await self._execute(argv, stdin, limits or self.spec.limits)
            lost = self._set_state(done.state)
        return _make_finished(done, lost if done.reason is Reason.EXITED else "")

    async def run_apart(
        self, script: str, *arguments: str, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> Execution:
        """Run a script of bash, and return the result in bytes. The script runs in ``/`` and neither uses nor changes
        the directory and the variables of the session's shell. ``arguments`` are its ``$1``, ``$2``, and so on.
        ``stdin`` is its standard input, and ``limits`` are its limits (``None``: those of the spec)."""
        argv = self._make_script_arguments(script, *arguments)
        used_limits = limits or self.spec.limits
        async with self._running():
            return await self.execute(argv, stdin=stdin, directory="/", variables=ENVIRONMENT, limits=used_limits)

    def _make_script_arguments(self, script: str, *arguments: str) -> list[str]:
        """Return the arguments of a program that runs a script of bash with its ``arguments``."""
        return [self.programs["bash"], "--norc", "--noprofile", "-c", script, "bash", *arguments]

    async def read(self, path: str, most_bytes: int = MIB) -> bytes:
        """Return the content of a file. ``path`` may be relative to the present directory. Raises
        :class:`~headrace.base.errors.EpisodeError` if the file cannot be read or has more than ``most_bytes`` bytes."""
        _refuse_path(path)
        limits = replace(self.spec.limits, output_bytes=most_bytes)
        async with self._running():
            argv = [self.programs["cat"], "--", path]  # the shell's variables may preload a library
            done = await self.execute(argv, stdin=b"", directory=self.directory, variables=ENVIRONMENT, limits=limits)
        if done.status != 0:
            text = done.stderr.decode("utf-8", "replace").strip() if done.reason is Reason.EXITED else done.reason
            raise EpisodeError(
                f"the file {path!r} of a session cannot be read: {text}",
                remedy="look for it first, or read it by a command",
                reason="session_file",
            )
        return done.stdout

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, given as their contents by path; missing folders are made. A file that exists keeps its mode. A
        file whose content begins with ``#!`` becomes executable. Raises :class:`~headrace.base.errors.EpisodeError` if
        a file cannot be written."""
        for path in files:
            _refuse_path(path)
        contents = [
            (posixpath.normpath(posixpath.join(self.directory, path)), _to_bytes(path, files[path])) for path in files
        ]
        async with self._running():
            for start in range(0, len(contents), FILES_AT_ONCE):
                await self._write(contents[start : start + FILES_AT_ONCE])

    async def _write(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write files with one program, given as pairs of full path and content."""
        words = [word for path, data in files for word in ("x" if data.startswith(b"#!") else "", path)]
        argv = self._make_script_arguments(_WRITE_SCRIPT, self.programs["tar"], *words)
        await self._pass_archive(argv, _pack(files))

    async def snapshot(self, *, end_background: bool = False) -> SandboxSnapshot:
        """Return a snapshot of the files and of the shell. A snapshot contains no processes: with ``end_background``,
        all background processes are killed first; without it, :class:`~headrace.base.errors.EpisodeError` is raised if
        there are any. Raises :class:`SessionEnded` if the session has ended.
        """
        async with self._running():
            if end_background:
                await self.end_background()
            elif number := await self.count_background():
                raise EpisodeError(
                    f"a snapshot of a session with {number} processes in the background would be without them",
                    remedy="end them by a command, or snapshot(end_background=True)",
                    reason="session_busy",
                )
            files = await self.take_files()
        return SandboxSnapshot(spec=self.spec, directory=self.directory, variables=dict(self.variables), files=files)

    def refuse_ended(self) -> None:
        """Raise :class:`SessionEnded` if the session has ended."""
        if self.ended:
            raise SessionEnded(
                f"the session has ended: {self.ended}",
                remedy="start another one, or fork a snapshot that was taken before",
                reason="session_ended",
            )

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run the body when all earlier calls have ended. Raises :class:`SessionEnded` if the session has ended."""
        async with self._turn:
            self.refuse_ended()
            yield

    async def _execute(self, argv: Sequence[str], stdin: bytes, limits: SandboxLimits) -> Execution:
        """Run a program in the present directory of the session, with its present variables."""
        return await self.execute(argv, stdin=stdin, directory=self.directory, variables=self.variables, limits=limits)

    async def prepare(self) -> None:
        """Make the directory of a new session. Drivers call this after the start. Raises
        :class:`~headrace.base.errors.ConfigError` if the directory cannot be made."""
        async with self._running():
            argv = [self.programs["mkdir"], "-p", "--", self.directory]
            done = await self.execute(argv, stdin=b"", directory="/", variables=ENVIRONMENT, limits=self.spec.limits)
        if done.status != 0:
            await self.stop()
            raise ConfigError(
                f"the directory {self.directory!r} of a session cannot be made: {done.stderr.decode()[:300]}",
                remedy="choose one that is not of the system, such as /workspace",
            )

    async def unpack(self, archive: bytes, *options: str) -> None:
        """Unpack a tar archive at ``/``, with the modes of its files. ``options`` are further options of GNU tar.
        Raises :class:`~headrace.base.errors.EpisodeError` with tar's error output if that fails."""
        argv = [self.programs["tar"], "--no-overwrite-dir", "-p", *options, "-xf", "-", "-C", "/"]
        async with self._running():
            await self._pass_archive(argv, archive)

    async def _pass_archive(self, argv: Sequence[str], archive: bytes) -> None:
        """Run a program that unpacks ``archive`` from its standard input. Raises
        :class:`~headrace.base.errors.EpisodeError` with the program's error output if it fails."""
        done = await self.execute(argv, stdin=archive, directory="/", variables=ENVIRONMENT, limits=self.spec.limits)
        if done.status != 0:
            raise EpisodeError(
                f"files of a session cannot be written: {done.stderr.decode('utf-8', 'replace')[:300]}{done.reason}",
                remedy="write to folders of the session's own, and stay within limits.disk_bytes",
                reason="session_file",
            )

    def _set_state(self, state: bytes) -> str:
        """Set the directory and the variables of the next command to ``state``, the state pipe's content as
        :data:`_SHELL_SCRIPT` writes it. Return in words which part was lost; empty if nothing was. Other content comes
        from the command itself, and changes nothing."""
        directory, *entries = state.split(b"\0")
        if not (directory.startswith(b"/") and directory.endswith(b"\n")) or entries[-2:] != [b".", b""]:
            return "the next command begins where this one began: its shell was replaced, or could not tell its state"
        pairs = [entry.decode("utf-8", "surrogateescape").partition("=") for entry in entries[:-2]]
        self.directory = directory[:-1].decode("utf-8", "surrogateescape")
        self.variables = remove_own_variables({name: value for name, found, value in pairs if name and found})
        lost = [name for name, found, _ in pairs if not found]
        return f"too long to be given to a program, and lost: {', '.join(lost)}" if lost else ""

    async def __aenter__(self) -> Self:
        """Return the session; the end of ``async with`` stops it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the session."""
        await self.stop()


class SandboxDriver(ABC):
    """The contract of a driver, which starts sessions of one kind, on this machine or elsewhere. The end of ``async
    with`` closes the driver, which ends all its sessions."""

    kind: str
    """The name of the driver, such as ``jail``."""
    serves_forwards: ClassVar[bool] = False
    """Whether sessions of this driver serve the ``forwards`` of a spec; if not, a spec with forwards is refused."""
    missing: Mapping[str, str]
    """The guards that sessions of this driver lack here, each with the reason."""
    closed: bool = False
    """Whether the driver was closed; a closed driver starts no session."""

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> SandboxSession:
        """Start a session as ``spec`` describes it, with the files of its image, or without files. Raises
        :class:`~headrace.base.errors.EpisodeError` if it cannot start."""

    @abstractmethod
    async def fork(self, snapshot: SandboxSnapshot) -> SandboxSession:
        """Start a session that continues from a snapshot. A snapshot can be forked any number of times. The lifetime of
        the new session is ``life_s`` of the snapshot's spec."""

    @abstractmethod
    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Free the files of a snapshot. Sessions that were forked from it keep their files."""

    @abstractmethod
    async def close(self) -> None:
        """End all sessions of this driver. The driver starts no more sessions."""

    def refuse_closed(self) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` if the driver was closed."""
        if self.closed:
            raise EpisodeError(
                f"a session of kind {self.kind!r} cannot start: the driver is closed",
                remedy="start sessions before, or open another driver",
                reason="session_start",
            )

    async def __aenter__(self) -> Self:
        """Return the driver; the end of ``async with`` closes it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the driver."""
        await self.close()


def remove_own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without the variables that every shell, or :data:`_SHELL_SCRIPT`, sets itself."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _OWN_VARIABLES and not name.startswith("__headrace_")
    }


def make_unusable_snapshot_error() -> EpisodeError:
    """Return the error for a fork of a snapshot that was released or belongs to another driver."""
    return EpisodeError(
        "the snapshot has been released, or is one of another driver",
        remedy="fork before releasing it, with the driver of its session",
        reason="session_snapshot",
    )


def refuse_invalid(spec: SandboxSpec) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if no session could run with ``spec``."""
    limits = spec.limits
    limits.refuse_empty()
    if limits.open_files < MIN_OPEN_FILES:
        raise ConfigError(
            f"limits.open_files={limits.open_files} is too few for a shell", remedy=f"set it >= {MIN_OPEN_FILES}"
        )
    if not 0 < spec.life_s < MAX_LIFE_S:  # also refuses NaN
        raise ConfigError(
            f"life_s={spec.life_s} leaves nothing or has no end", remedy=f"set 0 < life_s < {MAX_LIFE_S:g}"
        )
    if not math.isfinite(limits.wall_s):
        raise ConfigError(f"limits.wall_s={limits.wall_s} is no time", remedy="set it to a number of seconds")
    if not spec.directory.startswith("/"):
        raise ConfigError(f"directory={spec.directory!r} is not a full path", remedy="begin it with a slash")
    for port, address in spec.forwards.items():
        host, _, number = address.rpartition(":")
        if not (spec.loopback and 1024 <= port < 1 << 16 and host and number.isdecimal() and 0 < int(number) < 1 << 16):
            raise ConfigError(
                f"forwards={{{port}: {address!r}}} cannot be served",
                remedy="set loopback=True, and write {PORT: 'HOST:PORT'} with ports from 1024 to 65535 in the session",
            )
    for name, value in spec.variables.items():
        _refuse_variable(name, value)


def _refuse_variable(name: str, value: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a variable that cannot be passed to a program."""
    if not (isinstance(name, str) and isinstance(value, str)):
        raise ConfigError(f"variables[{name!r}]={value!r} is no text", remedy="write names and values as texts")
    if not name or "=" in name or not _is_clean(name + value):
        raise ConfigError(
            f"variables[{name!r}] cannot be set", remedy="give names without '=', and texts of UTF-8 without zero bytes"
        )
    if (size := len(_encode(f"{name}={value}"))) >= MAX_WORD_BYTES:
        raise ConfigError(
            f"variables[{name!r}] has {size} bytes, which no program can be given",
            remedy=f"keep it under {MAX_WORD_BYTES} bytes: write a file",
        )


def _is_clean(text: str) -> bool:
    """Return whether the kernel accepts ``text`` as an argument or file name: no zero byte, no lone surrogate."""
    try:
        return b"\0" not in _encode(text)
    except UnicodeEncodeError:
        return False


def _encode(text: str) -> bytes:
    """Return ``text`` as the bytes of an argument, also the bytes that ``surrogateescape`` has read as characters."""
    return text.encode("utf-8", "surrogateescape")


def _refuse_path(path: str) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` for a path that the kernel does not accept."""
    if not _is_clean(path):
        raise EpisodeError(
            f"the path {path!r} is none of a file",
            remedy="give paths of UTF-8 without zero bytes and lone surrogates",
            reason="session_file",
        )


def _to_bytes(path: str, content: str | bytes) -> bytes:
    """Return the content of the file ``path`` as bytes, text as UTF-8. Raises
    :class:`~headrace.base.errors.EpisodeError` for a text with lone surrogates."""
    if isinstance(content, bytes):
        return content
    try:
        return _encode(content)
    except UnicodeEncodeError as error:
        raise EpisodeError(
            f"the text of the file {path!r} cannot be written: {error}",
            remedy="give texts without lone surrogates, or bytes",
            reason="session_file",
        ) from None


def _pack(files: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a tar archive of files, given as pairs of full path and content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _make_finished(done: Execution, lost: str) -> Finished:
    """Return ``done`` as the result of a command, with its outputs as text. ``lost`` says in words which part of the
    shell's state was lost."""
    stdout, stderr = (output.decode("utf-8", "replace") for output in (done.stdout, done.stderr))
    status = done.status
    return Finished(
        reason=done.reason,
        stdout=stdout,
        stderr=stderr,
        exit_code=status if done.reason is Reason.EXITED else None,
        signal=-status if status is not None and status < 0 else None,
        cpu_s=done.cpu_s,
        detail=lost,
    )
