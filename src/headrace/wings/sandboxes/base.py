"""The contract of sandboxes: sessions in which an agent works with files and a shell, and the drivers that make them.

    driver.start(spec) ──▶ session ── run, read, write ──▶ stop, or the end of its time
                              │ snapshot: files, directory, variables
                              ▼
                           snapshot ── driver.fork ──▶ another session that continues from there
                              └── release

A driver makes sessions in one way: the jail of Headrace, bubblewrap, containers. A session holds no process that
matters between two commands: its directory and its exported variables are carried from one shell to the next, so that
a snapshot of files, directory and variables is all that a fork needs. Processes in the background are not part of it.
"""

from __future__ import annotations

import asyncio
import enum
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
from types import TracebackType
from typing import Any, ClassVar, Self

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.rollout.scoring.sandbox import Finished, Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.rollout.scoring.sandbox.run import ENVIRONMENT

LIMITS = SandboxLimits(
    wall_s=60.0, cpu_s=60, file_bytes=64 * MIB, disk_bytes=256 * MIB, processes=64, open_files=256, output_bytes=1 * MIB
)
"""The limits of a session, unless it has others. Those of time are limits of each command."""
MIN_OPEN_FILES = 128
"""The smallest limit of open files: shells use numbers below it."""
MAX_WORD_BYTES = 131_072
"""The kernel's limit of one argument or variable of a program."""
MAX_LIFE_S = 1e9
"""The time under which that of a session must stay, in seconds."""
MAX_COMMAND_BYTES = 100_000
"""The longest command. The kernel takes no argument of more than 128 KiB."""
PROGRAMS = {
    name: next((path for path in (f"/usr/bin/{name}", f"/bin/{name}") if os.path.exists(path)), f"/bin/{name}")
    for name in ("bash", "cat", "mkdir", "tar")
}
"""The programs that sessions need, by name: where /bin is a link, in the folder that no session can take away."""
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
"""Run a command, then write to the state pipe: the shell's directory and its exported variables, each with a zero byte
at its end; the names of variables that no program can be given; a dot. A command's own EXIT trap runs after that."""
_OWN_VARIABLES = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
"""Variables that every shell sets by itself."""


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
"""Unpack an archive of files; those that were there keep their modes, and those after ``x`` can be executed, too."""
FILES_AT_ONCE = 200
"""The most files that are written at once: their paths are arguments."""


class SessionEnded(EpisodeError):
    """The error of a call to a session that has ended, whatever ended it."""


class DriverLost(EnvError):
    """The error of a driver that can make no sessions any more, since what makes them has gone: open it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The description of a session: its limits, and where its commands begin."""

    limits: SandboxLimits = LIMITS
    """The limits. ``wall_s`` and ``output_bytes`` are those of one command, ``cpu_s`` and ``memory_bytes`` of each
    process; memory, files and processes are counted together too."""
    life_s: float = 3600.0
    """The time after which the session ends, whatever it does, in seconds."""
    directory: str = "/workspace"
    """The directory in which commands begin; it is made at the start."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides ``PATH``, ``HOME`` and ``LANG``, or those of the image."""
    image: str = ""
    """The image that the files begin as, for kinds that have images; empty: the one of the driver's settings."""
    loopback: bool = False
    """Whether programs in the session can reach each other by TCP and UDP over 127.0.0.1."""
    forwards: Mapping[int, str] = field(default_factory=dict)
    """Ports of 127.0.0.1 in the session that lead to a TCP address outside, each by its port: ``HOST:PORT``. They are
    all that the session can reach, and need ``loopback``."""


class SessionState(enum.StrEnum):
    """The state of a session.

    RUNNING ──▶ ENDED
    """

    RUNNING = "running"
    """It takes commands."""
    ENDED = "ended"
    """It was stopped, its time was over, or its sandbox has gone: its files and processes do not exist any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of one program in a session, as the driver returns it."""

    reason: Reason
    """Why it ended."""
    stdout: bytes
    """The standard output, as far as the limit allows."""
    stderr: bytes
    """The standard error, with the same limit."""
    status: int | None = None
    """The exit code; the number of the signal that ended it, negative; ``None``: a limit ended it."""
    cpu_s: float = 0.0
    """The processor time of the program itself."""
    state: bytes = b""
    """What it wrote to the state pipe."""


@dataclass(kw_only=True)
class SandboxSnapshot:
    """The files of a session at one moment, with the directory and the variables of its shell. Release it when nothing
    will be forked from it any more."""

    spec: SandboxSpec
    directory: str
    """The directory of the shell."""
    variables: Mapping[str, str]
    """The exported variables of the shell."""
    files: Any
    """The files, in a form that the driver knows."""
    released: bool = False
    """Whether the files are given up."""


class SandboxSession(ABC):
    """A sandbox with files and a shell. One call runs at a time; others wait for it. A call that is cancelled ends the
    session."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Describe a session that runs as ``spec`` says."""
        self.spec = spec
        self.directory = spec.directory
        """The directory in which the next command begins."""
        self.programs: Mapping[str, str] = PROGRAMS
        """The paths of bash, cat, mkdir and tar in the session."""
        self.surroundings: Mapping[str, str] = {**ENVIRONMENT, "PATH": f"{sys.prefix}/bin:{ENVIRONMENT['PATH']}"}
        """The variables that the session has by itself."""
        self.variables: Mapping[str, str] = self.first_variables()
        """The exported variables with which the next command begins."""
        self.missing: Mapping[str, str] = {}
        """The guards that the session lacks, each with the cause."""
        self.ended = ""
        """Why the session has ended; empty while it runs."""
        self._turn = asyncio.Lock()

    def first_variables(self) -> dict[str, str]:
        """Return the variables with which the first command of the session begins."""
        return {**self.surroundings, **self.spec.variables}

    @property
    def state(self) -> SessionState:
        """Whether the session takes commands."""
        return SessionState.ENDED if self.ended else SessionState.RUNNING

    @abstractmethod
    async def execute(
        self, argv: Sequence[str], *, stdin: bytes, directory: str, variables: Mapping[str, str], limits: SandboxLimits
    ) -> Execution:
        """Run a program to its end and return the result. Processes that it leaves in the background go on; at a limit
        they end with it. Raises :class:`SessionEnded` if the session does not outlive the call."""

    @abstractmethod
    async def end_background(self) -> int:
        """Kill all processes of the session, and return how many there were."""

    @abstractmethod
    async def count_background(self) -> int:
        """Return how many processes run in the background."""

    @abstractmethod
    async def take_files(self) -> Any:
        """Return the files as they are, for a snapshot; no process runs."""

    @abstractmethod
    async def stop(self) -> None:
        """End the session with its processes and files; a second time, do nothing."""

    async def run(self, command: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> Finished:
        """Run a command in a shell, and return the result. The next command begins in its directory, with its exported
        variables; where these could not be carried, as after ``exec``, ``detail`` of the result says so.

        ``limits``, if given, are those of this command: time, output, size of a file, and those of each process.
        """
        if not _is_clean(command) or len(_encoded(command)) > MAX_COMMAND_BYTES:
            raise EpisodeError(
                f"a command of {len(command)} characters cannot be given to a shell",
                remedy=f"keep it under {MAX_COMMAND_BYTES} bytes of UTF-8, without zero bytes and lone surrogates: "
                "write a file and run that",
                reason="session_command",
            )
        argv = [self.programs["bash"], "--norc", "--noprofile", "-c", _SHELL_SCRIPT, "bash", command]
        async with self._running():
            done = await self._execute(argv, stdin, limits or self.spec.limits)
            lost = self._take_state(done.state)
        return _finished(done, lost if done.reason is Reason.EXITED else "")

    async def run_apart(
        self, script: str, *arguments: str, stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> Execution:
        """Run a script of bash apart from the shell, whose directory and variables it neither sees nor changes, and
        return the result in bytes. It begins in ``/``; ``arguments`` are its ``$1``, ``$2``, and so on."""
        argv = [self.programs["bash"], "--norc", "--noprofile", "-c", script, "bash", *arguments]
        given = limits or self.spec.limits
        async with self._running():
            return await self.execute(argv, stdin=stdin, directory="/", variables=ENVIRONMENT, limits=given)

    async def read(self, path: str, most_bytes: int = MIB) -> bytes:
        """Return the content of a file, whose path may be relative to the directory. Raises
        :class:`~headrace.base.errors.EpisodeError` if it cannot be read or has more than ``most_bytes`` bytes."""
        _refuse_path(path)
        limits = replace(self.spec.limits, output_bytes=most_bytes)
        async with self._running():
            argv = [self.programs["cat"], "--", path]  # without the shell's variables, which may preload a library
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
        """Write files, by their paths; folders are made. A file that is there keeps its mode, and one that begins with
        ``#!`` can be executed. Raises
        :class:`~headrace.base.errors.EpisodeError` if one cannot be written."""
        for path in files:
            _refuse_path(path)
        contents = [
            (posixpath.normpath(posixpath.join(self.directory, path)), _content(path, files[path])) for path in files
        ]
        async with self._running():
            for start in range(0, len(contents), FILES_AT_ONCE):
                await self._write(contents[start : start + FILES_AT_ONCE])

    async def _write(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write files by their full paths."""
        words = [word for path, data in files for word in ("x" if data.startswith(b"#!") else "", path)]
        argv = [
            self.programs["bash"],
            "--norc",
            "--noprofile",
            "-c",
            _WRITE_SCRIPT,
            "bash",
            self.programs["tar"],
            *words,
        ]
        await self._pass_archive(argv, _packed(files))

    async def snapshot(self, *, end_background: bool = False) -> SandboxSnapshot:
        """Return a snapshot of the files and of the shell. Processes in the background are not part of it: the call is
        refused while there are any, unless ``end_background`` ends them first.

        Raises :class:`SessionEnded` for a session that has ended.
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
        """Wait for the calls before, and refuse the body if the session has ended."""
        async with self._turn:
            self.refuse_ended()
            yield

    async def _execute(self, argv: Sequence[str], stdin: bytes, limits: SandboxLimits) -> Execution:
        """Run a program in the directory and with the variables of the session."""
        return await self.execute(argv, stdin=stdin, directory=self.directory, variables=self.variables, limits=limits)

    async def prepare(self) -> None:
        """Make the directory of a new session."""
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
        """Write the files of a tar archive, with their modes; ``options`` are more of GNU tar. Raises
        :class:`~headrace.base.errors.EpisodeError` if that fails, with the words of tar."""
        argv = [self.programs["tar"], "--no-overwrite-dir", "-p", *options, "-xf", "-", "-C", "/"]
        async with self._running():
            await self._pass_archive(argv, archive)

    async def _pass_archive(self, argv: Sequence[str], archive: bytes) -> None:
        """Run a program that unpacks an archive. Raises :class:`~headrace.base.errors.EpisodeError` with its words if
        it fails."""
        done = await self.execute(argv, stdin=archive, directory="/", variables=ENVIRONMENT, limits=self.spec.limits)
        if done.status != 0:
            raise EpisodeError(
                f"files of a session cannot be written: {done.stderr.decode('utf-8', 'replace')[:300]}{done.reason}",
                remedy="write to folders of the session's own, and stay within limits.disk_bytes",
                reason="session_file",
            )

    def _take_state(self, state: bytes) -> str:
        """Take over the directory and the variables that a shell has left, and return what of them is lost; empty if
        nothing is. Bytes that no shell of ours would write change nothing: they come from the commands."""
        directory, *entries = state.split(b"\0")
        if not (directory.startswith(b"/") and directory.endswith(b"\n")) or entries[-2:] != [b".", b""]:
            return "the next command begins where this one began: its shell was replaced, or could not tell its state"
        pairs = [entry.decode("utf-8", "surrogateescape").partition("=") for entry in entries[:-2]]
        self.directory = directory[:-1].decode("utf-8", "surrogateescape")
        self.variables = without_own({name: value for name, found, value in pairs if name and found})
        lost = [name for name, found, _ in pairs if not found]
        return f"too long to be given to a program, and lost: {', '.join(lost)}" if lost else ""

    async def __aenter__(self) -> Self:
        """Use the session in the body of ``async with``."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        await self.stop()


class SandboxDriver(ABC):
    """One way to make sessions on this machine or elsewhere; ``async with`` closes it, which ends all of them."""

    kind: str
    """The name of the driver, such as ``jail``."""
    serves_forwards: ClassVar[bool] = False
    """Whether its sessions serve the ``forwards`` of a spec; if not, they refuse such a spec."""
    missing: Mapping[str, str]
    """The guards that sessions lack here, each with the cause."""
    closed: bool = False
    """Whether it was closed: then it starts nothing any more."""

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> SandboxSession:
        """Start a session without files of its own. Raises :class:`~headrace.base.errors.EpisodeError` if it cannot
        be."""

    @abstractmethod
    async def fork(self, snapshot: SandboxSnapshot) -> SandboxSession:
        """Start a session that continues from a snapshot; any number of them may. It has the whole time of its spec."""

    @abstractmethod
    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Give up the files of a snapshot; sessions that were forked from it keep theirs."""

    @abstractmethod
    async def close(self) -> None:
        """End all sessions of this driver."""

    def refuse_closed(self) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` if the driver was closed."""
        if self.closed:
            raise EpisodeError(
                f"a session of kind {self.kind!r} cannot start: the driver is closed",
                remedy="start sessions before, or open another driver",
                reason="session_start",
            )

    async def __aenter__(self) -> Self:
        """Use the driver in the body of ``async with``."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the driver."""
        await self.close()


def without_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those that every shell sets by itself."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _OWN_VARIABLES and not name.startswith("__headrace_")
    }


def unusable_snapshot() -> EpisodeError:
    """Return the error for a fork of a snapshot that its driver does not have, or not any more."""
    return EpisodeError(
        "the snapshot has been released, or is one of another driver",
        remedy="fork before releasing it, with the driver of its session",
        reason="session_snapshot",
    )


def refuse_invalid(spec: SandboxSpec) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a description of a session that cannot work."""
    limits = spec.limits
    limits.refuse_empty()
    if limits.open_files < MIN_OPEN_FILES:
        raise ConfigError(
            f"limits.open_files={limits.open_files} is too few for a shell", remedy=f"set it >= {MIN_OPEN_FILES}"
        )
    if not 0 < spec.life_s < MAX_LIFE_S:  # also where it is no number
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
    """Raise :class:`~headrace.base.errors.ConfigError` for a variable that no program can be given."""
    if not (isinstance(name, str) and isinstance(value, str)):
        raise ConfigError(f"variables[{name!r}]={value!r} is no text", remedy="write names and values as texts")
    if not name or "=" in name or not _is_clean(name + value):
        raise ConfigError(
            f"variables[{name!r}] cannot be set", remedy="give names without '=', and texts of UTF-8 without zero bytes"
        )
    if (size := len(_encoded(f"{name}={value}"))) >= MAX_WORD_BYTES:
        raise ConfigError(
            f"variables[{name!r}] has {size} bytes, which no program can be given",
            remedy=f"keep it under {MAX_WORD_BYTES} bytes: write a file",
        )


def _is_clean(text: str) -> bool:
    """Return whether the kernel takes a text as a name or an argument: without zero bytes and lone surrogates."""
    try:
        return b"\0" not in _encoded(text)
    except UnicodeEncodeError:
        return False


def _encoded(text: str) -> bytes:
    """Return a text as the bytes of an argument; bytes that are not UTF-8 stand in it as Python's ``surrogateescape``
    has them."""
    return text.encode("utf-8", "surrogateescape")


def _refuse_path(path: str) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` for a path that no file can have."""
    if not _is_clean(path):
        raise EpisodeError(
            f"the path {path!r} is none of a file",
            remedy="give paths of UTF-8 without zero bytes and lone surrogates",
            reason="session_file",
        )


def _content(path: str, content: str | bytes) -> bytes:
    """Return the content of the file ``path`` as bytes."""
    if isinstance(content, bytes):
        return content
    try:
        return _encoded(content)
    except UnicodeEncodeError as error:
        raise EpisodeError(
            f"the text of the file {path!r} cannot be written: {error}",
            remedy="give texts without lone surrogates, or bytes",
            reason="session_file",
        ) from None


def _packed(files: Sequence[tuple[str, bytes]]) -> bytes:
    """Return files by their full paths as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _finished(done: Execution, lost: str) -> Finished:
    """Return the result of a command with its outputs as text, and what its shell has ``lost``."""
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
