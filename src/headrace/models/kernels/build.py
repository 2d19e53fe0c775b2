"""The compilation of the kernels: the library is built once, stored in the user's cache, and loaded.

The library's name is a hash of everything that determines its content: sources, flags, processor. The file ends with
its own checksum, so that an incomplete or foreign file is built again. A library is built in a temporary folder and
then renamed, so that a file that another process may have loaded is never written.
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
"""The C++ compilers to try, in this order; the first installed compiler is used."""

NO_COMPILER = "no C++ compiler is installed"
"""The beginning of the reason if there is no compiler."""
INSTALL = "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
"""The remedy if there is no compiler."""

NATIVE = ("-march=native",)
"""The compiler options that select the processor of this machine."""
BFLOAT16 = ("-DBFLOAT16",)
"""The option of the compiler for kernels whose numbers are bfloat16."""

_HERE = Path(__file__).parent
_MAIN = "kernels.cpp"
_SOURCES = {
    name: (_HERE / name).read_bytes()
    for name in (_MAIN, "amx.h", "bfloat16.h", "linear.h", "paged.h", "recurrent.h", "team.h", "vec.h")
}
"""The content of the source files, by name. It is read when this module is imported, at the same time as the Python
functions that call the kernels: files that are replaced later might not match them."""
_FLAGS = ("-std=gnu++17", "-O3", "-ffp-contract=fast", "-fPIC", "-pthread", "-w", "-shared", "-Wl,-z,defs")
_DEADLINE_S = 120.0
"""The time limit of one compilation, in seconds."""
WAIT_S = 45.0
"""The number of seconds for which a process waits for another process that compiles. A compilation takes a few seconds,
or some tens of seconds on a busy machine. ``launch.start_timeout_s`` leaves time for a second compilation after
that."""
_CHECK_INTERVAL_S = 0.1
"""The interval, in seconds, at which a waiting process checks whether the library is complete."""
_build_lock = threading.Lock()
"""The lock that allows only one thread of this process to build the library."""
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The reason why there are no compiled kernels; torch's own operations are used instead."""

    reason: str
    """The reason in words."""

    def __str__(self) -> str:
        """Return a warning for users with the reason, its cost, and the remedy."""
        remedy = f"{INSTALL}, and start again" if self.reason.startswith(NO_COMPILER) else "mend that, and start again"
        return f"the compiled kernels are missing ({self.reason}): sampling takes about twice as long; {remedy}"


class _CannotBuild(Exception):
    """The error that the kernels cannot be built. Its text is the reason."""


def kernel_cache() -> Path:
    """Return the folder for the compiled kernels in the user's cache."""
    return cache_root() / "kernels"


def build_ahead(*options: Sequence[str]) -> None:
    """Start the compilation in a thread, if the library has to be built. A later call of :func:`open_library` waits for
    its end. This is meant for programs that import modules in the meantime. ``options`` are further options of the
    compiler, for one more library each."""

    def build() -> None:
        """Compile the libraries one after the other, since a compilation uses a whole core."""
        for added in ((), *options):
            open_library(kernel_cache(), target=(*NATIVE, *added))

    threading.Thread(target=build, name="kernels").start()


def find_compiler(compilers: Sequence[str] = COMPILERS) -> str | None:
    """Return the path of the first of ``compilers`` that is installed; ``None`` if none of them is."""
    return next(filter(None, map(shutil.which, compilers)), None)


def open_library(
    cache: Path,
    compilers: Sequence[str] = COMPILERS,
    target: Sequence[str] = NATIVE,
    *,
    wait_s: float = WAIT_S,
) -> ctypes.CDLL | Unavailable:
    """Return the compiled kernels from the folder ``cache``, after building them if necessary (a few seconds). If this
    fails, return the reason. Several processes may call this at the same time.

    ``target`` are the compiler options that select the processor. If another process is compiling, this process waits
    for at most ``wait_s`` seconds.
    """
    try:
        compiler = find_compiler(compilers)
        if compiler is None:
            raise _CannotBuild(f"{NO_COMPILER} (looked for {', '.join(compilers)})")
        _refuse_shared_directory(cache)
        command = (compiler, *_FLAGS, *target)
        file = cache / f"{_name(command)}.so"
        with _build_lock:
            _ensure(command, file, wait_s)
        return ctypes.CDLL(str(file))
    except (_CannotBuild, OSError, subprocess.SubprocessError) as error:
        return Unavailable(reason=str(error))


def _ensure(command: Sequence[str], file: Path, wait_s: float) -> None:
    """Build ``file`` with the compiler ``command`` unless the file is complete. Other processes wait for at most
    ``wait_s`` seconds in the meantime."""
    if _is_complete(file):
        return
    with _one_process(file, wait_s):
        if not _is_complete(file):
            _build(command, file)


@contextmanager
def _one_process(file: Path, wait_s: float) -> Iterator[None]:
    """A context in which one process compiles ``file`` while other processes wait for its lock.

    A process waits for at most ``wait_s`` seconds, since the process with the lock may be suspended. It then writes a
    warning to standard error and compiles too, which is safe, because each process compiles in its own folder. On a
    file system without locks, all processes compile.
    """
    descriptor = os.open(file.parent, os.O_RDONLY)
    clock = RealClock()
    ends_s = clock.now() + wait_s
    try:
        while not _has_lock(descriptor) and not _is_complete(file):
            if clock.now() > ends_s:
                sys.stderr.write(f"{_overdue(file.parent, wait_s)}\n")
                break
            threading.Event().wait(_CHECK_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)  # this releases the lock, as the end of the process does


def _has_lock(descriptor: int) -> bool:
    """Try to lock the directory. Return whether this process has the lock, or the directory cannot be locked at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _overdue(directory: Path, wait_s: float) -> str:
    """Return the warning that another process has had the lock of ``directory`` for too long."""
    holders = [f"process {pid} ({_state(pid)})" for pid in _holders(directory)]
    by = " and ".join(holders) or "another process"
    return (
        f"warning: the compiled kernels are not ready: {by} has held the lock of {directory} for over {wait_s:g} s; "
        "this process compiles its own copy"
    )


def _holders(directory: Path) -> list[int]:
    """Return the ids of the processes that have a lock of ``directory``; empty on systems that do not list them (only
    Linux does)."""
    facts = directory.stat()
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    return [int(row[4]) for row in rows if row[1] == "FLOCK" and row[5] == place]


def _state(pid: int) -> str:
    """Return the state of a process in the words of the system, such as ``sleeping``."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "not visible from here"
    found = (line.partition("(")[2].rstrip(")") for line in lines if line.startswith("State:"))
    return next(found, "in an unknown state")


def _refuse_shared_directory(directory: Path) -> None:
    """Create ``directory`` if necessary. Raises :class:`_CannotBuild` if another user could write a library into it,
    since the code of the library is executed in this process."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    resolved = directory.resolve()
    for place in (resolved, *resolved.parents):
        facts = place.stat()
        shared = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = place != resolved and facts.st_mode & stat.S_ISVTX  # users cannot rename entries of others there
        if facts.st_uid not in {os.geteuid(), 0} or (shared and not sticky):
            raise _CannotBuild(f"{place} can be written by other users, so no code is loaded from {directory}")


def _name(command: Sequence[str]) -> str:
    """Return the file name of the library without its extension. It is a hash of the sources, the compiler's command
    and the processor."""
    digest = hashlib.sha256()
    for source in _SOURCES.values():
        digest.update(source)
    digest.update(repr((command, _processor())).encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Return a description of the processor's model and its instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _is_complete(file: Path) -> bool:
    """Return whether the file is complete, which means that its last bytes are the checksum of the others, and belongs
    to this user."""
    if not file.is_file() or file.stat().st_uid != os.geteuid():
        return False
    content = file.read_bytes()
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _build(command: Sequence[str], file: Path) -> None:
    """Compile the kernels into ``file`` with the compiler ``command``, and append a checksum. The file is created only
    when it is complete."""
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        for name, source in _SOURCES.items():
            (Path(scratch) / name).write_bytes(source)
        library = Path(scratch) / file.name
        _run([*command, _MAIN, "-o", file.name], scratch)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        library.replace(file)


def _run(command: list[str], directory: str) -> None:
    """Execute the compiler ``command`` in ``directory``. Raises :class:`_CannotBuild` with the first line of its error
    output if it fails."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        message = (done.stderr.strip() or "nothing").splitlines()[0]
        raise _CannotBuild(f"{command[0]} could not compile the kernels (exit {done.returncode}): {message}")
