"""A program as an episode: any command that speaks OpenAI's or Anthropic's protocol.

directory of its own ── task.json        HEADRACE_TASK names it
  command ── OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys: the session of this episode
    stdout ── its last line may be {"reward": 1.0}, or {"agent_rewards": {"first": 1.0, "second": -1.0}}
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
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

KEPT_BYTES = 64 * 2**10
"""How much of the end of its output is looked at; what came before is thrown away as it comes."""
CLOSING_S = 2.0
"""How long, after its end, what it has written may be on the way."""
QUOTED = 600
"""Characters of its last words."""


class Program:
    """Runs a command once for every episode; it and all that it has started end with the episode."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = (find_program(command), *command[1:])

    async def run(self, row: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        """One episode over a task's ``row``, with these environment variables; what the program says of it at its end,
        nothing where it does not. :class:`~headrace.base.errors.EpisodeError` where it fails."""
        async with _task_file(row) as task, _pipe() as (out, said), _pipe() as (err, cried):
            told = program_environment({**variables, "HEADRACE_TASK": str(task)})
            async with self._running(task.parent, told, (out, err)) as process:
                code = await process.wait()
            await _closed(said, cried)
        if code != 0:
            raise _failed(f"it {_exit_words(code)}{_last_words(cried)}", "mend the program")
        return _last_said(said.text())

    @asynccontextmanager
    async def _running(
        self, directory: Path, variables: Mapping[str, str], outputs: tuple[IO[bytes], IO[bytes]]
    ) -> AsyncIterator[Process]:
        """The process; nothing of its group is left afterwards, nor after the death of this process."""
        theirs, ours = os.pipe()
        with os.fdopen(theirs) as lifeline, os.fdopen(ours, "wb"):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=directory, env=dict(variables), stdin=DEVNULL, stdout=outputs[0],
                    stderr=outputs[1], pass_fds=(theirs,), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise _failed(f"it cannot be started: {error}", "mend env.command") from None
            finally:
                for output in outputs:
                    output.close()
            _end_with(lifeline.fileno(), process.pid)
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@asynccontextmanager
async def _task_file(row: Mapping[str, Any]) -> AsyncIterator[Path]:
    """A file with ``row``, alone in a directory; whatever is left there is removed, and nobody waits for the disk."""

    def make() -> Path:
        task = Path(tempfile.mkdtemp(prefix="headrace-program-"), "task.json")
        task.write_bytes(msgspec.json.encode(row))
        return task

    task = await asyncio.to_thread(make)
    try:
        yield task
    finally:
        await asyncio.to_thread(shutil.rmtree, task.parent, ignore_errors=True)


class _Tail(asyncio.Protocol):
    """The end of what is written to a pipe."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """More was written."""
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody can write any more."""
        self.closed.set()

    def text(self) -> str:
        """What was kept of it."""
        return self._kept.decode("utf-8", "replace")


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[IO[bytes], _Tail]]:
    """Where to write, and what keeps the end of it. A program's children may hold it open for longer than it lives:
    whoever waits for the program must not wait for them."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as output, contextlib.ExitStack() as on_error:
        source = on_error.enter_context(os.fdopen(reading, "rb"))
        transport, tail = await asyncio.get_running_loop().connect_read_pipe(_Tail, source)
        on_error.pop_all()  # the transport closes it
        try:
            yield output, tail
        finally:
            transport.close()


async def _closed(*tails: _Tail) -> None:
    """Until all has been read, or somebody holds a pipe open without need."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            for tail in tails:
                await tail.closed.wait()


def find_program(command: Sequence[str]) -> str:
    """The path of the program that ``command`` begins with; :class:`~headrace.base.errors.EnvError` where there is
    none."""
    found = shutil.which(command[0], path=program_environment({})["PATH"])
    if found is None:
        raise EnvError(
            f"env.command: there is no program {visible(command[0], 200)!r}",
            remedy="name one that is on the PATH, or give its path, and make it executable",
        )
    return found


def with_absolute_files(command: Sequence[str], directory: Path) -> list[str]:
    """Return ``command`` with the full path of every file of ``directory`` that it names. A program runs in a directory
    of its own, where relative paths lead nowhere. A first word without a slash is looked up on the PATH instead."""
    return [
        str(directory / part) if os.path.isfile(directory / part) and (place or "/" in part) else part
        for place, part in enumerate(command)
    ]


def _end_with(lifeline: int, group: int) -> None:
    """Kill process group ``group`` when the other end of the pipe ``lifeline``, which it has inherited, is closed."""
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _last_said(text: str) -> Mapping[str, Any]:
    """What the last line says, if it is an object."""
    last = text.rstrip().rpartition("\n")[2]
    try:
        told = json.loads(last)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _last_words(cried: _Tail) -> str:
    text = cried.text().strip()
    return f": …{visible(text[-QUOTED:])}" if len(text) > QUOTED else f": {visible(text)}" if text else ""


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.strsignal(-code) or f'signal {-code}'}"


def _failed(words: str, remedy: str) -> EpisodeError:
    return EpisodeError(f"the program of env.command failed: {words}", remedy=remedy, reason="program_failed")
