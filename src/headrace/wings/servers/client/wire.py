"""The connections to one server, in an event loop of a thread of its own: the step loop that owns the engine is a plain
one, and a server is asked many things at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from headrace.base.config.addresses import is_loopback
from headrace.base.errors import ComponentDied

if TYPE_CHECKING:
    import httpx

A = TypeVar("A")
CONNECT_S = 20.0
"""Longest that a connection may take; how long an answer takes, whoever waits for it says."""
END_S = 5.0
"""Longest that the tasks of a loop that is over may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is."""

    url: str
    """Without a path."""
    socket: str = ""
    """Unix socket that it listens at instead; empty: none."""
    token: str = field(default="", repr=False)
    """Sent as ``Authorization: Bearer TOKEN``; empty: none is."""
    key_file: str = ""
    """Where a server that we start finds the token, among its options; empty: it wants none, or runs already."""

    @property
    def host(self) -> str:
        """Of the URL."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Of the URL."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    def __str__(self) -> str:
        return self.socket or self.url


class Wire:
    """Use it in a ``with`` statement. What runs in its loop may raise: it is over then, and :attr:`failure` says
    why."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"wire to {address}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.post(self._main.cancel)
        self._thread.join()

    @property
    def client(self) -> httpx.AsyncClient:
        """For use in the loop."""
        return self._client

    def call(self, work: Coroutine[Any, Any, A], within_s: float) -> A:
        """What ``work`` returns or raises in the loop. :class:`~headrace.base.errors.ComponentDied` if it takes longer,
        or
        the loop is over."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise self.over() from None
        try:
            return future.result(within_s)
        except CancelledError:
            raise self.over() from None
        except TookTooLong:
            future.cancel()
            raise ComponentDied(
                f"the server at {self.address} has not answered for {within_s:g} s", remedy="look at its log"
            ) from None

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Have it called in the loop; where that has ended, nothing happens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the loop, which has to be the one that asks."""
        return self._group.create_task(work)

    def over(self) -> ComponentDied:
        """Why nothing can be asked any more."""
        self._thread.join(END_S)  # it knows when the last of its tasks has ended
        failure = self.failure
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, ComponentDied):
            return type(failure)(failure.problem, remedy=failure.remedy)
        words = "has ended" if failure is None else f"broke: {type(failure).__name__}: {failure}"
        return ComponentDied(f"the connection to the server at {self.address} {words}", remedy="look at its log")

    def _run(self) -> None:
        try:
            asyncio.run(self._open())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: whoever owns the wire asks for it
            self.failure = error
        finally:
            self._ready.set()

    async def _open(self) -> None:
        import httpx

        task = asyncio.current_task()
        assert task is not None
        self._main, self._loop = task, asyncio.get_running_loop()
        address = self.address
        local = bool(address.socket) or is_loopback(address.host)  # a proxy of the environment is not meant for it
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
            ) as self._client,
            asyncio.TaskGroup() as self._group,
        ):
            self._ready.set()
            await asyncio.Event().wait()  # until it is cancelled, or a task of the group has failed
