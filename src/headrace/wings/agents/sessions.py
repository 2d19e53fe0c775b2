"""The sessions of the endpoint. Each running episode has one session, with an API key that its programs send with every
request."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from starlette.datastructures import Headers

from headrace.base.net.refusal import Refusal
from headrace.base.types.chat import Message
from headrace.rollout.environments.base import OpenEpisode
from headrace.wings.agents.base import Access, SessionLimits

_PREFIX = "sk-headrace-"


class EpisodeSession:
    """The session of one episode, used in an ``async with`` statement, which yields the address and the key. After the
    block the key is refused, and no request of the session is running."""

    def __init__(self, episode: OpenEpisode, access: Access, limits: SessionLimits) -> None:
        """Create the session of ``episode``. Its programs use the address and the key in ``access``, within the
        ``limits``."""
        self.episode = episode
        self.access = access
        self.histories: dict[str, tuple[Message, ...]] = {}
        """The conversation up to each response of the session, by the response's id."""
        self.failure: BaseException | None = None
        """An error that is not the program's fault; it is raised at the end of the ``async with`` block."""
        self._limits = limits
        self._open: set[asyncio.Timeout] = set()
        """The time limits of the open requests, by which the end of the session ends them."""
        self._all_left = asyncio.Event()
        """Set when no request is open any more after the end of the session."""
        self._ended = False
        """Whether the episode has ended, so that its key is refused."""
        self._num_refused = 0
        """Number of requests that were refused."""

    async def __aenter__(self) -> Access:
        """Return the address and the key for the programs of the episode."""
        return self.access

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session: refuse its key, end its open requests, and wait until no request runs. Raises
        :attr:`failure` if it is set, unless the block was cancelled."""
        self._ended = True
        # each request ends with TimeoutError, which becomes a refusal that its client can read
        for scope in self._open:
            scope.reschedule(asyncio.get_running_loop().time())
        if self._open:
            await self._all_left.wait()
        if self.failure is not None and not isinstance(error, asyncio.CancelledError):
            raise self.failure from error

    def count_refusal(self, problem: str) -> int:
        """Record that a request was refused because of ``problem``, and return how many requests of this
        episode's session have been refused so far."""
        self.access.last_refusal = problem
        self._num_refused += 1
        return self._num_refused

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Return a context in which one request counts as open. Raises :class:`Refusal` if too many requests are open,
        and if the episode has ended or ends meanwhile."""
        if self._ended:
            raise make_ended_refusal()
        if len(self._open) >= self._limits.max_open:
            raise Refusal(
                f"{len(self._open)} requests of this episode are open, and no more are allowed",
                remedy="wait for their answers",
                status=429,
                code="too_many_requests",
            )
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise make_ended_refusal() from None
        finally:
            self._open.discard(scope)
            if self._ended and not self._open:
                self._all_left.set()


class Sessions:
    """The open sessions, by key. A key consists of a serial number and an HMAC of that number, so that the key of an
    ended session is recognised although it is not stored."""

    def __init__(self, limits: SessionLimits) -> None:
        """Create an empty collection with a new secret for its keys. ``limits`` are the limits of each session."""
        self._limits = limits
        self._secret = secrets.token_bytes(32)
        """The key of the HMAC in every session's key."""
        self._num_given = 0
        """Number of keys that were given out, and the serial number of the next one."""
        self._sessions: dict[int, EpisodeSession] = {}
        """The open sessions by serial number."""

    @asynccontextmanager
    async def open(self, episode: OpenEpisode, base_url: str) -> AsyncIterator[Access]:
        """Return a context in which a new session for ``episode`` is open; it yields the address ``base_url`` and a new
        key."""
        serial = self._num_given
        self._num_given += 1
        session = EpisodeSession(episode, Access(base_url=base_url, api_key=self._key(serial)), self._limits)
        self._sessions[serial] = session
        try:
            async with session as access:
                yield access
        finally:
            del self._sessions[serial]

    def find(self, headers: Headers) -> EpisodeSession:
        """Return the session whose key is in the ``headers`` of a request. Raises :class:`Refusal`: with status 401 for
        a missing or wrong key, and with status 403 for the key of an episode that has ended."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        keys = [headers.get("x-api-key", ""), bearer.strip() if kind.lower() == "bearer" else ""]
        for key in filter(None, keys):
            serial = self._serial(key)
            if serial is not None:
                if serial not in self._sessions:
                    raise make_ended_refusal()
                return self._sessions[serial]
        raise Refusal(
            "the request does not carry the key of an episode",
            remedy="send the key of the episode, as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
            status=401,
            code="invalid_api_key",
        )

    def _key(self, serial: int) -> str:
        """Return the key of the session with this serial number."""
        proof = hmac.digest(self._secret, str(serial).encode(), "sha256").hex()
        return f"{_PREFIX}{serial}-{proof}"

    def _serial(self, key: str) -> int | None:
        """Return the serial number in ``key``; ``None`` if this process did not create the key."""
        number = key.removeprefix(_PREFIX).partition("-")[0]
        if not (number.isascii() and number.isdecimal() and len(number) <= 18):
            return None
        serial = int(number)
        is_right = hmac.compare_digest(key.encode("latin-1", "replace"), self._key(serial).encode())
        return serial if is_right else None


def make_ended_refusal() -> Refusal:
    """Return the refusal for requests of an episode that has ended."""
    return Refusal(
        "the episode of this key has ended",
        remedy="send no more requests for it; a new episode has a key of its own",
        status=403,
        code="episode_ended",
    )
