"""The wire: the HTTP connections to one server, in an event loop that runs in its own thread. The engine's step loop is
synchronous, while a server handles many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from headrace.base.config.addresses import is_loopback
from headrace.base.errors import ComponentDied
from headrace.base.tasks import first_error

A = TypeVar("A")
CONNECT_S = 20.0
"""Longest time to open a connection, in seconds. Each caller limits the wait for an answer itself."""
END_S = 5.0
"""Longest time in seconds for the tasks of a loop to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a server, and the secret that its requests must have."""

    url: str
    """The server's URL without a path."""
    socket: str = ""
    """Path of the Unix socket on which the server listens instead; empty for none."""
    token: str = field(default="", repr=False)
    """Token that is sent in the header ``Authorization: Bearer TOKEN``; empty for none."""
    key_file: str = ""
    """Path of the file from which a server that the engine starts reads the token; empty if the server needs no token,
    or was already running."""

    @property
    def host(self) -> str:
        """Return the host of the URL."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Return the port of the URL, by default the standard port of HTTP or HTTPS."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def __str__(self) -> str:
        """Return the path of the Unix socket, or else the URL, for messages."""
        return self.socket or self.url


class Wire:
    """The HTTP client of one server and the event loop in which it runs, used in a ``with`` statement. If a task in the
    loop raises an error, the loop ends, and :attr:`failure` is the error."""

    def __init__(self, address: Address) -> None:
        """Create the wire to the server at ``address``; the ``with`` statement starts it."""
        self.address = address
        self.failure: BaseException | None = None
        """The error with which the event loop has ended; ``None`` while it runs, and after a normal end."""
        self._ready = threading.Event()
        """Set once the client is open or the event loop has failed."""
        self._thread = threading.Thread(target=self._run, name=f"wire to {address}", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread, and wait until its event loop runs or has failed."""
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """End the event loop with all its tasks and connections, and wait for the thread."""
        self.post(self._main.cancel)
        self._thread.join()

    def call(self, coroutine: Coroutine[Any, Any, A], timeout_s: float) -> A:
        """Run ``coroutine`` in the event loop from another thread, and return its result or raise its error. Raises
        :class:`~headrace.base.errors.ComponentDied` if it takes longer than ``timeout_s`` seconds, or if the loop has
        ended."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise self.make_closed_error() from None
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise self.make_closed_error() from None
        except TookTooLong:
            future.cancel()
            raise ComponentDied(
                f"the server at {self.address} has not answered for {timeout_s:g} s", remedy="look at its log"
            ) from None

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a call of ``function`` in the event loop, without waiting for it; do nothing if the loop has
        ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that runs ``coroutine`` in the event loop, and return it. The task is cancelled when the loop
        ends, and an error of the task ends the loop. This method must be called in the event loop."""
        return self._group.create_task(coroutine)

    def make_closed_error(self) -> ComponentDied:
        """Return an error with the reason why the event loop has ended, for callers that still try to use it."""
        self._thread.join(END_S)  # the failure is set when the last task has ended
        failure = None if self.failure is None else first_error(self.failure)
        if isinstance(failure, ComponentDied):
            return type(failure)(failure.problem, remedy=failure.remedy)
        words = "has ended" if failure is None else f"broke: {type(failure).__name__}: {failure}"
        return ComponentDied(f"the connection to the server at {self.address} {words}", remedy="look at its log")

    def _run(self) -> None:
        """Run the event loop, and store the error with which it ends; this is the body of the wire's thread."""
        try:
            asyncio.run(self._open())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the wire's owner reads it
            self.failure = error
        finally:
            self._ready.set()

    async def _open(self) -> None:
        """Open the HTTP client, and keep it open until this task, the main task of the loop, is cancelled."""
        import httpx

        task = asyncio.current_task()
        assert task is not None
        self._main, self._loop = task, asyncio.get_running_loop()
        address = self.address
        local = bool(address.socket) or is_loopback(
            address.host
        )  # the environment's proxy does not apply to this machine
        async with (
            httpx.AsyncClient(
                base_url=address.url,
                headers={"Authorization": f"Bearer {address.token}"} if address.token else {},
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                transport=httpx.AsyncHTTPTransport(uds=address.socket, limits=httpx.Limits(max_connections=None))
                if address.socket
                else None,
                limits=httpx.Limits(max_connections=None),
                trust_env=not local,
            ) as self.client,  # to be used within the event loop
            asyncio.TaskGroup() as self._group,
        ):
            self._ready.set()
            await asyncio.Event().wait()  # until it is cancelled, or a task of the group has failed
