"""Episodes that are run by a program: any command that uses OpenAI's or Anthropic's protocol.

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
"""The number of last bytes of its output that are kept."""
CLOSING_S = 2.0
"""How long, after the end of the program, its last output may take to arrive."""
TRY_S = 30.0
"""How long the attempt to enter a namespace may take; it needs some hundredths of a second."""
QUOTED = 600
"""The number of characters of its last output that an error message quotes."""
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*|bash|sh|zsh|node|ruby|perl")
"""The programs whose first argument but flags, if it ends as one of :data:`_SCRIPTS`, is the file to run."""
_FLAGS = ("-u", "-B")
"""Options that take no value, whichever of these programs has them."""
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".rb", ".pl")
_APART = (sys.executable, "-I", "-S", "-B", user_namespace.__file__) if sys.platform == "linux" else ()
"""The command that becomes the program in a namespace in which it cannot read the keys of other episodes."""


class Program:
    """A command that is run once for every episode. It ends with the episode, with all processes that it has started.

    With ``own_namespace``, other programs of its user cannot read its key, where the system has user namespaces.
    """

    def __init__(self, command: Sequence[str], *, own_namespace: bool = True) -> None:
        """Find the program that ``command`` begins with; its other words are arguments. Raises
        :class:`~headrace.base.errors.EnvError` if there is none."""
        self._command = (*(_APART if own_namespace else ()), find_program(command), *command[1:])

    async def run(self, row: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        """Run the program for a task's ``row``, with these environment variables, and return the JSON object of its
        last output line, if there is one. Raises :class:`~headrace.base.errors.EpisodeError` if the program fails."""
        async with _task_file(row) as task, _pipe() as (out, out_tail), _pipe() as (err, err_tail):
            environment = program_environment({**variables, "HEADRACE_TASK": str(task)})
            async with self._running(task.parent, environment, (out, err)) as process:
                code = await process.wait()
            await _wait_closed(out_tail, err_tail)
        if code != 0:
            raise _failed(f"it {_exit_text(code)}{_quoted_output(err_tail)}", "fix the program")
        return _last_json(out_tail.text())

    @asynccontextmanager
    async def _running(
        self, directory: Path, variables: Mapping[str, str], outputs: tuple[IO[bytes], IO[bytes]]
    ) -> AsyncIterator[Process]:
        """Start the program in ``directory``, with its standard output and error written to ``outputs``, and kill its
        process group after the body. The pipe that it inherits is closed when this process dies, which kills the group
        too."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end) as lifeline, os.fdopen(write_end, "wb"):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=directory, env=dict(variables), stdin=DEVNULL, stdout=outputs[0],
                    stderr=outputs[1], pass_fds=(read_end,), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise _failed(f"it cannot be started: {error}", "fix env.command") from None
            finally:
                for output in outputs:
                    output.close()
            _end_with(lifeline.fileno(), process.pid)
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@asynccontextmanager
async def _task_file(row: Mapping[str, Any]) -> AsyncIterator[Path]:
    """Create a file with ``row`` in a directory of its own, which is removed at the end; file operations run in a
    thread."""

    def make() -> Path:
        """Write the file, and return its path."""
        task = Path(tempfile.mkdtemp(prefix="headrace-program-"), "task.json")
        task.write_bytes(msgspec.json.encode(row))
        return task

    task = await asyncio.to_thread(make)
    try:
        yield task
    finally:
        await asyncio.to_thread(shutil.rmtree, task.parent, ignore_errors=True)


class _Tail(asyncio.Protocol):
    """The reader of a pipe that keeps only the end of the data written to it, such as a program's output."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Append data that were written to the pipe, and drop all but the last :data:`KEPT_BYTES`; asyncio calls it."""
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that no process can write to the pipe any more; asyncio calls it."""
        self.closed.set()

    def text(self) -> str:
        """Return the end of what was written to the pipe, as text."""
        return self._kept.decode("utf-8", "replace")


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[IO[bytes], _Tail]]:
    """Yield a file to write to, and the end of what is written to it. A program's children may hold the pipe open for
    longer than the program lives, so the wait for the program must not be a wait for them."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as output, contextlib.ExitStack() as on_error:
        source = on_error.enter_context(os.fdopen(reading, "rb"))
        transport, tail = await asyncio.get_running_loop().connect_read_pipe(_Tail, source)
        on_error.pop_all()  # the transport closes it
        try:
            yield output, tail
        finally:
            transport.close()


async def _wait_closed(*tails: _Tail) -> None:
    """Wait until all output has been read, or for ``CLOSING_S`` if a process holds a pipe open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            for tail in tails:
                await tail.closed.wait()


def find_program(command: Sequence[str]) -> str:
    """Return the path of the program that ``command`` begins with. Raises :class:`~headrace.base.errors.EnvError` if
    there is none."""
    found = shutil.which(command[0], path=program_environment({})["PATH"])
    if found is None:
        raise EnvError(
            f"env.command: there is no program {visible(command[0], 200)!r}",
            remedy="name one that is on the PATH, or give its path, and make it executable",
        )
    return found


def refuse_missing_script(command: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.EnvError` where ``command`` gives an interpreter a script that does not
    exist.

    A script behind an option is looked for only behind :data:`_FLAGS`: what follows another one may be its value, such
    as the commands of ``bash -c``.
    """
    script = next((word for word in command[1:] if word not in _FLAGS), "-")
    if script.startswith("-") or not script.endswith(_SCRIPTS) or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return
    path = program_environment({})["PATH"]  # where a shell looks for a script that is not in its directory
    if not Path(script).exists() and shutil.which(script, os.F_OK, path) is None:
        raise EnvError(
            f"env.command: there is no file {visible(script, 200)!r} for {visible(command[0], 200)} to run",
            remedy="correct its path: it is looked for from the directory of the run file, or, by headrace check env, "
            "from the working directory",
        )


def exposed_here(*, own_namespace: bool = True) -> list[str]:
    """Return a warning if programs cannot have user namespaces of their own on this machine, though they should."""
    if not own_namespace:
        return []
    if _APART:
        tried = subprocess.run(_APART, capture_output=True, text=True, check=False, timeout=TRY_S)
        refusal = tried.stdout.strip() or tried.stderr.strip().rpartition("\n")[2]
    else:
        refusal = f"{sys.platform} has none"
    if not refusal:
        return []
    return [
        f"programs of env.command get no user namespaces of their own here ({visible(refusal, 200)}): one can read the "
        "key of an episode that runs beside it (allow user namespaces, or set env.own_namespace = false to accept this)"
    ]


def with_absolute_files(command: Sequence[str], directory: Path) -> list[str]:
    """Return ``command`` with the full path of every file of ``directory`` that it names, since a program runs in a
    directory of its own. A first word without a slash is looked up on the PATH instead."""
    return [
        str(directory / part) if os.path.isfile(directory / part) and (place or "/" in part) else part
        for place, part in enumerate(command)
    ]


def _end_with(lifeline: int, group: int) -> None:
    """Kill process group ``group`` when the other end of the inherited pipe ``lifeline`` is closed."""
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _last_json(text: str) -> Mapping[str, Any]:
    """Return the JSON object on the last line of a program's output; empty if there is none."""
    last = text.rstrip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def _quoted_output(err_tail: _Tail) -> str:
    """Return the end of a program's error output, to be appended to an error message; empty if it wrote nothing."""
    text = err_tail.text().strip()
    return f": …{visible(text[-QUOTED:])}" if len(text) > QUOTED else f": {visible(text)}" if text else ""


def _exit_text(code: int) -> str:
    """Return in words how a program ended, by its exit ``code``; a negative one is the number of the signal that killed
    it."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.strsignal(-code) or f'signal {-code}'}"


def _failed(text: str, remedy: str) -> EpisodeError:
    """Return the error that fails an episode whose program failed, with the problem in ``text``."""
    return EpisodeError(f"the program of env.command failed: {text}", remedy=remedy, reason="program_failed")
