"""Episodes that are run by a program of the user: any command that uses OpenAI's or Anthropic's protocol.

directory of its own ── task.json        HEADRACE_TASK is its path
  command ── OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys: the session of this episode
    stdout ── its last line may be {"reward": 1.0}, or {"agent_rewards": {"first": 1.0, "second": -1.0}}
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from headrace.base.environ import program_environment
from headrace.base.errors import EnvError, EpisodeError, visible
from headrace.rollout.scoring.sandbox import user_namespace

KEPT_BYTES = 64 * 2**10
"""The number of bytes at the end of a program's output that are kept."""
CLOSING_S = 2.0
"""How long to wait for the last output after the program has ended, in seconds."""
TRY_S = 30.0
"""The time limit for the attempt to enter a user namespace, in seconds. The attempt usually takes some hundredths of a
second."""
QUOTED = 600
"""The number of characters at the end of a program's error output that an error message quotes."""
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|bash|sh|zsh|node|ruby|perl")
"""The names of interpreters. Their first argument that is not one of :data:`_FLAGS` is the file to run, if it has one
of the endings :data:`_SCRIPTS`."""
_FLAGS = ("-u", "-B")
"""Options of these interpreters that are not followed by a value."""
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".rb", ".pl")
"""The file name endings of scripts."""
_NAMESPACE_COMMAND = (sys.executable, "-I", "-S", "-B", user_namespace.__file__) if sys.platform == "linux" else ()
"""The command that enters a user namespace and then executes the program, so that the program cannot read the keys of
other episodes. Empty on systems without user namespaces."""


class Program:
    """A command that is run once for every episode. At the end of the episode all processes that it has started are
    killed.

    With ``own_namespace``, each program runs in its own user namespace, if the system supports them. Other programs of
    the same user then cannot read the program's key.
    """

    def __init__(self, command: Sequence[str], *, own_namespace: bool = True) -> None:
        """Find the executable that the first word of ``command`` names; the other words are its arguments. Raises
        :class:`~headrace.base.errors.EnvError` if there is no such executable."""
        self._command = (*(_NAMESPACE_COMMAND if own_namespace else ()), find_program(command), *command[1:])

    async def run(self, row: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        """Run the program for the task ``row`` with the environment variables ``variables``. Return the JSON object on
        the last line of its output; empty if there is none. Raises :class:`~headrace.base.errors.EpisodeError` if the
        program fails."""
        async with _task_file(row) as task, _pipe() as (out, out_tail), _pipe() as (err, err_tail):
            environment = program_environment({**variables, "HEADRACE_TASK": str(task)})
            async with self._start(task.parent, environment, (out, err)) as process:
                code = await process.wait()
            await _wait_closed(out_tail, err_tail)
        if code != 0:
            raise _program_error(f"it {_exit_text(code)}{_quoted_output(err_tail)}", "fix the program")
        return _last_json(out_tail.text())

    @asynccontextmanager
    async def _start(
        self, directory: Path, variables: Mapping[str, str], outputs: tuple[IO[bytes], IO[bytes]]
    ) -> AsyncIterator[Process]:
        """Start the program in ``directory``, with its standard output and error written to ``outputs``, and yield its
        process. The process group is killed after the body. The program also inherits one end of a pipe: if this
        process dies, the pipe is closed and the kernel kills the group."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end) as lifeline, os.fdopen(write_end, "wb"):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=directory, env=dict(variables), stdin=DEVNULL, stdout=outputs[0],
                    stderr=outputs[1], pass_fds=(read_end,), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise _program_error(f"it cannot be started: {error}", "fix env.command") from None
            finally:
                for output in outputs:
                    output.close()
            _kill_group_on_close(lifeline.fileno(), process.pid)
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@asynccontextmanager
async def _task_file(row: Mapping[str, Any]) -> AsyncIterator[Path]:
    """Create a temporary directory with a file that contains ``row``, and yield the path of the file. The directory is
    removed afterwards. File operations run in a thread."""

    def write() -> Path:
        """Write the file and return its path."""
        task = Path(tempfile.mkdtemp(prefix="headrace-program-"), "task.json")
        task.write_bytes(msgspec.json.encode(row))
        return task

    task = await asyncio.to_thread(write)
    try:
        yield task
    finally:
        await asyncio.to_thread(shutil.rmtree, task.parent, ignore_errors=True)


class _OutputTail(asyncio.Protocol):
    """An asyncio protocol that reads a pipe and keeps only the end of the data, such as the end of a program's
    output."""

    def __init__(self) -> None:
        """Create a reader without data. ``closed`` is set when no process can write to the pipe any more."""
        self._kept = bytearray()
        """The last bytes that were read, at most :data:`KEPT_BYTES`."""
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Append ``data`` and drop all but the last :data:`KEPT_BYTES` bytes. asyncio calls this method when data
        arrives."""
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        """Set ``closed``. asyncio calls this method when no process can write to the pipe any more."""
        self.closed.set()

    def text(self) -> str:
        """Return the last output as text."""
        return self._kept.decode("utf-8", "replace")


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[IO[bytes], _OutputTail]]:
    """Create a pipe. Yield a file to write to and a reader that keeps the end of the written data. Children of a
    program may keep the pipe open after the program has ended, so the end of the program is never detected by the end
    of its output."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "wb") as output, contextlib.ExitStack() as on_error:
        source = on_error.enter_context(os.fdopen(read_fd, "rb"))
        transport, tail = await asyncio.get_running_loop().connect_read_pipe(_OutputTail, source)
        on_error.pop_all()  # from here on the transport closes the source
        try:
            yield output, tail
        finally:
            transport.close()


async def _wait_closed(*tails: _OutputTail) -> None:
    """Wait until all output has been read, at most ``CLOSING_S`` seconds, because another process may keep a pipe
    open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            for tail in tails:
                await tail.closed.wait()


def find_program(command: Sequence[str]) -> str:
    """Return the path of the executable that the first word of ``command`` names. Raises
    :class:`~headrace.base.errors.EnvError` if there is none."""
    path = shutil.which(command[0], path=program_environment({})["PATH"])
    if path is None:
        raise EnvError(
            f"env.command: there is no program {visible(command[0], 200)!r}",
            remedy="name one that is on the PATH, or give its path, and make it executable",
        )
    return path


def refuse_missing_script(command: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.EnvError` if ``command`` runs a script with an interpreter and the script
    does not exist.

    Only the options in :data:`_FLAGS` are skipped to find the script. The word after any other option may be the value
    of that option, such as the commands of ``bash -c``.
    """
    script = next((word for word in command[1:] if word not in _FLAGS), "-")
    if script.startswith("-") or not script.endswith(_SCRIPTS) or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return
    path = program_environment({})["PATH"]  # a shell searches the PATH for a script that is not in its directory
    if not Path(script).exists() and shutil.which(script, os.F_OK, path) is None:
        raise EnvError(
            f"env.command: there is no file {visible(script, 200)!r} for {visible(command[0], 200)} to run",
            remedy="correct its path: it is looked for from the directory of the run file, or, by headrace check env, "
            "from the working directory",
        )


def find_namespace_warnings(*, own_namespace: bool = True) -> list[str]:
    """Return a list with one warning if programs should run in user namespaces of their own (``own_namespace``) but
    cannot on this machine; otherwise an empty list."""
    if not own_namespace:
        return []
    if _NAMESPACE_COMMAND:
        completed = subprocess.run(_NAMESPACE_COMMAND, capture_output=True, text=True, check=False, timeout=TRY_S)
        refusal = completed.stdout.strip() or completed.stderr.strip().rpartition("\n")[2]
    else:
        refusal = f"{sys.platform} has none"
    if not refusal:
        return []
    return [
        f"programs of env.command get no user namespaces of their own here ({visible(refusal, 200)}): one can read the "
        "key of an episode that runs beside it (allow user namespaces, or set env.own_namespace = false to accept this)"
    ]


def with_absolute_files(command: Sequence[str], directory: Path) -> list[str]:
    """Return ``command`` in which every word that names a file in ``directory`` is replaced by the file's full path,
    because a program runs in a temporary directory. The first word is replaced only if it contains a slash; otherwise
    it is searched for on the PATH."""
    return [
        str(directory / word) if os.path.isfile(directory / word) and (index or "/" in word) else word
        for index, word in enumerate(command)
    ]


def _kill_group_on_close(lifeline: int, group: int) -> None:
    """Kill process group ``group`` when the other end of the inherited pipe ``lifeline`` is closed. On Linux the kernel
    sends the signal; on other systems this function does nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):  # the group has already ended
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _last_json(text: str) -> Mapping[str, Any]:
    """Return the JSON object on the last line of ``text``, a program's output; empty if there is none."""
    last = text.rstrip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _quoted_output(err_tail: _OutputTail) -> str:
    """Return the end of a program's error output as a suffix for an error message; empty if the program wrote
    nothing."""
    text = err_tail.text().strip()
    return f": …{visible(text[-QUOTED:])}" if len(text) > QUOTED else f": {visible(text)}" if text else ""


def _exit_text(code: int) -> str:
    """Return how a program ended, in words. ``code`` is its exit code; a negative code is the number of the signal that
    killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.strsignal(-code) or f'signal {-code}'}"


def _program_error(text: str, remedy: str) -> EpisodeError:
    """Return the error for an episode whose program failed. ``text`` is the problem."""
    return EpisodeError(f"the program of env.command failed: {text}", remedy=remedy, reason="program_failed")
