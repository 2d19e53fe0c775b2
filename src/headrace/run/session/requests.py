"""The requests that a run receives from its user while it continues. ``headrace engines`` sends them.

    headrace engines ──a request, one line of JSON──▶ the run      at a Unix socket, in a directory of the user alone
                     ◀──news, then the last answer──

``status.json`` names the socket. A change that has begun continues if the program that requested it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.types.messages.program import (
    AddEngines,
    ChangeDone,
    ChangeProgress,
    ChangeRefused,
    ProgramAnswer,
    ProgramRequest,
    RemoveEngines,
)
from headrace.launch.order import EngineChanges

SOCKET = "requests"
"""The name of the socket in the private directory of a run."""
MAX_LINE_BYTES = 1 << 20
"""The maximum size of a line, in bytes. An answer contains the status of every engine."""
REQUEST_S = 10.0
"""The maximum time to wait for the request of a program that has connected, in seconds."""


@asynccontextmanager
async def serve_requests(directory: Path, engines: EngineChanges) -> AsyncIterator[str]:
    """Answer the requests that arrive at a socket in ``directory`` while the body runs; they change ``engines``. Yield
    the path of the socket, which is empty if no socket can be created there. At the end of the body, changes that are
    not complete are cancelled."""
    async with asyncio.TaskGroup() as group:
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Serve a program that has connected, in a new task."""
            connection = group.create_task(_serve(reader, writer, engines))
            connections.add(connection)
            connection.add_done_callback(connections.discard)

        path = directory / SOCKET
        server = None
        with suppress(OSError):  # the path is too long, for example
            server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES)
        try:
            yield "" if server is None else str(path)
        finally:
            if server is not None:
                server.close()
            for connection in connections:
                connection.cancel()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, engines: EngineChanges) -> None:
    """Receive the request of one program from ``reader``, execute it on ``engines``, and answer with ``writer``."""
    send = partial(_send, writer)
    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readline()
        request = msgspec.json.decode(line, type=ProgramRequest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        problem = f"the run does not understand the request: {error}"
        send(ChangeRefused(problem=problem, remedy="use the same version of headrace as the run"))
    except (OSError, TimeoutError):
        pass  # the program has ended, or sends nothing
    else:
        send(await _answer(request, engines, send))
    finally:
        with suppress(OSError):
            writer.close()


async def _answer(
    request: ProgramRequest, engines: EngineChanges, send: Callable[[ProgramAnswer], None]
) -> ProgramAnswer:
    """Execute ``request`` on ``engines``, and return the last answer; ``send`` sends those before it. Every error is an
    answer: a change that fails does not end the run."""
    try:
        return await _execute(request, engines, send)
    except HeadraceError as error:
        return ChangeRefused(problem=error.problem, remedy=error.remedy)
    except Exception as error:  # noqa: BLE001 - the boundary of a request
        problem = f"the change failed: {type(error).__name__}: {error}"
        return ChangeRefused(problem=problem, remedy="look at the engines (headrace engines RUN); the run goes on")


async def _execute(
    request: ProgramRequest, engines: EngineChanges, send: Callable[[ProgramAnswer], None]
) -> ChangeDone:
    """Execute ``request`` on ``engines``, send messages about its progress with ``send``, and return the last
    answer."""

    def report(text: str) -> None:
        """Send a message about the progress of the change."""
        send(ChangeProgress(text=text))

    changed: tuple[str, ...] = ()
    match request:
        case AddEngines(count=count):
            if count < 1:
                raise ConfigError(f"{count} engines cannot be added", remedy="add 1 or more")
            changed = await engines.add(count, report)
        case RemoveEngines(name=name, count=count, drain_s=drain_s):
            if count < 1 or drain_s < 0:
                raise ConfigError(
                    f"{count} engines cannot be removed, with {drain_s:g} s for their sequences",
                    remedy="remove 1 or more, with 0 s or more",
                )
            changed = await engines.remove(name, count, drain_s, report)
    return ChangeDone(changed=changed, engines=engines.status())


def _send(writer: asyncio.StreamWriter, answer: ProgramAnswer) -> None:
    """Send ``answer`` with ``writer``. The answer is dropped if the program has ended."""
    with suppress(OSError):
        writer.write(msgspec.json.encode(answer) + b"\n")
