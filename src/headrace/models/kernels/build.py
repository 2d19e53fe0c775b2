"""Compile the kernels once, keep the library in the user's cache, and load it; or return the reason why not.

The library's name is a hash of all that determines its contents: sources, flags, processor. The file ends with its own
checksum, so that an incomplete or foreign file is built again. A file that a process may have loaded is never written:
a library is built in a temporary folder and renamed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.environ import cache_root

COMPILERS = ("g++", "c++", "clang++")
"""The C++ compilers to try, in this order; the first that is installed is used."""

NO_COMPILER = "no C++ compiler is installed"
INSTALL = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"

NATIVE = ("-march=native",)
"""The compiler options that select the processor of this machine."""

_HERE = Path(__file__).parent
_MAIN = "kernels.cpp"
_SOURCES = {
    name: (_HERE / name).read_bytes() for name in (_MAIN, "linear.h", "paged.h", "recurrent.h", "team.h", "vec.h")
}
"""The sources. They are read when this module is imported, together with the Python functions that call them: files
that are replaced later might not fit."""
_FLAGS = ("-std=gnu++17", "-O3", "-ffp-contract=fast", "-fPIC", "-pthread", "-w", "-shared", "-Wl,-z,defs")
_DEADLINE_S = 120.0
WAIT_S = 45.0
"""Seconds for which a process waits for another one that compiles. A compilation takes a few seconds, on a machine with
much else to do some tens; ``launch.start_timeout_s`` leaves time for another one after that."""
_LOOK_S = 0.1
_building = threading.Lock()
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The reason why there are no compiled kernels; torch's own operations are used instead."""

    reason: str
    """The reason in words."""

    def __str__(self) -> str:
        """Return a warning for users: the reason, its cost, and the remedy."""
        remedy = f"{INSTALL}, and start again" if self.reason.startswith(NO_COMPILER) else "mend that, and start again"
        return f"the compiled kernels are missing ({self.reason}): sampling takes about twice as long; {remedy}"


class _CannotBuild(Exception):
    """The error that the kernels cannot be built. Its text is the reason."""


def kernel_cache() -> Path:
    """Return the folder of the user's cache in which the compiled kernels are kept."""
    return cache_root() / "kernels"


def build_ahead() -> None:
    """Start to compile in a thread, if the library has to be built. A later call of :func:`open_library` waits for
    the rest. It is meant for programs that have modules to import meanwhile."""
    threading.Thread(target=open_library, args=(kernel_cache(),), name="kernels").start()


def find_compiler(compilers: Sequence[str] = COMPILERS) -> str | None:
    """Return the path of the first of ``compilers`` that is installed; ``None`` if none is."""
    return next(filter(None, map(shutil.which, compilers)), None)


def open_library(
    cache: Path,
    compilers: Sequence[str] = COMPILERS,
    target: Sequence[str] = NATIVE,
    *,
    wait_s: float = WAIT_S,
) -> ctypes.CDLL | Unavailable:
    """Return the compiled kernels, from the folder ``cache`` or built into it (a few seconds); otherwise the reason why
    there are none. Many processes may do so at once.

    ``target`` are the compiler options that select the processor. A process that finds another one compiling waits for
    it for at most ``wait_s`` seconds.
    """
    try:
        compiler = find_compiler(compilers)
        if compiler is None:
            raise _CannotBuild(f"{NO_COMPILER} (looked for {', '.join(compilers)})")
        _refuse_shared_directory(cache)
        command = (compiler, *_FLAGS, *target)
        file = cache / f"{_name(command)}.so"
        with _building:
            _ensure(command, file, wait_s)
        return ctypes.CDLL(str(file))
    except (_CannotBuild, OSError, subprocess.SubprocessError) as error:
        return Unavailable(reason=str(error))


def _ensure(command: Sequence[str], file: Path, wait_s: float) -> None:
    """Build ``file`` by the compiler ``command`` unless it is there, while other processes wait up to ``wait_s``
    seconds for it."""
    if _is_complete(file):
        return
    with _one_process(file, wait_s):
        if not _is_complete(file):
            _build(command, file)


@contextmanager
def _one_process(file: Path, wait_s: float) -> Iterator[None]:
    """Let one process compile ``file`` while the others wait for its lock.

    A process waits at most ``wait_s``, since the one that holds the lock may be stopped; then it says so on standard
    error and compiles too, which is safe, because each compiles in a folder of its own. On a file system without locks
    all of them compile.
    """
    descriptor = os.open(file.parent, os.O_RDONLY)
    clock = RealClock()
    ends_s = clock.now() + wait_s
    try:
        while not _has_lock(descriptor) and not _is_complete(file):
            if clock.now() > ends_s:
                sys.stderr.write(f"{_overdue(file.parent, wait_s)}\n")
                break
            threading.Event().wait(_LOOK_S)
        yield
    finally:
        os.close(descriptor)  # which releases the lock, as the end of the process does


def _has_lock(descriptor: int) -> bool:
    """Try to lock the directory. Return whether it is locked by this process, or cannot be locked at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _overdue(directory: Path, wait_s: float) -> str:
    """Return the sentence that says which process has held the lock of ``directory`` for too long."""
    holders = [f"process {pid} ({_state(pid)})" for pid in _holders(directory)]
    by = " and ".join(holders) or "another process"
    return (
        f"warning: the compiled kernels are not ready: {by} has held the lock of {directory} for over {wait_s:g} s; "
        "this process compiles its own copy"
    )


def _holders(directory: Path) -> list[int]:
    """Return the processes that hold a lock of ``directory``, where the system lists them (Linux)."""
    facts = directory.stat()
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    return [int(row[4]) for row in rows if row[1] == "FLOCK" and row[5] == place]


def _state(pid: int) -> str:
    """Return the state of a process in the system's words, such as ``sleeping``."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "not visible from here"
    found = (line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:"))
    return next(found, "in an unknown state")


def _refuse_shared_directory(directory: Path) -> None:
    """Raise :class:`_CannotBuild` for a directory in which another user could put a library: its code would run
    here."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    resolved = directory.resolve()
    for place in (resolved, *resolved.parents):
        facts = place.stat()
        shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = place != resolved and facts.st_mode & stat.S_ISVTX  # where nobody renames others' entries
        if facts.st_uid not in {os.geteuid(), 0} or (shared and not sticky):
            raise _CannotBuild(f"{place} can be written by other users, so no code is loaded from {directory}")


def _name(command: Sequence[str]) -> str:
    """Return the name of the library's file, without its ending, which differs whenever the sources, the compiler's
    command or the processor differ."""
    known = hashlib.sha256()
    for source in _SOURCES.values():
        known.update(source)
    known.update(repr((command, _processor())).encode())
    return known.hexdigest()[:32]


def _processor() -> str:
    """Return a description of the processor's model and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _is_complete(file: Path) -> bool:
    """Return whether the file is complete: its last bytes are the checksum of the others."""
    if not file.is_file() or file.stat().st_uid != os.geteuid():
        return False
    content = file.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _build(command: Sequence[str], file: Path) -> None:
    """Compile the kernels into ``file`` by the compiler ``command``, with a digest of their bytes at its end. The file
    appears only when it is complete."""
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        for name, source in _SOURCES.items():
            (Path(scratch) / name).write_bytes(source)
        library = Path(scratch) / file.name
        _run([*command, _MAIN, "-o", file.name], scratch)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.replace(file)


def _run(command: list[str], directory: str) -> None:
    """Run the compiler ``command`` in ``directory``. Raises :class:`_CannotBuild` with its first message if it
    fails."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[0]
        raise _CannotBuild(f"{command[0]} could not compile the kernels (exit {done.returncode}): {said}")
