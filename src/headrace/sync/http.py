"""A transport over HTTP: the learner uploads weights to the engines, and authenticates with the run's token.

    learner                                             engine, one thread beside the step loop
    PUT /weights/KEY   Upload-Offset, Upload-Length ──▶ 401 without the token · 400 invalid · 413 larger than the model
        one bucket after the other                      204 the bucket is stored
    announce: path = KEY ─────────────────────────────▶ stage: wait for the end of the upload, and use its memory

An *upload* is the payload of one version, sent in *buckets* of limited size. The server of Python's standard library
reads each bucket directly into the memory of the image. No request larger than a bucket is accepted, and no memory is
allocated before the token and the sizes have been checked. A connection without the token is closed after the deadline,
or earlier if the limit of connections is reached and another client connects. With a certificate, all connections use
TLS.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import re
import secrets
import socket
import ssl
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from headrace.base.config.addresses import EVERYWHERE, LOOPBACK
from headrace.base.config.tls import client_context, refuse_incomplete_tls, server_context
from headrace.base.errors import ConfigError, NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, WeightUpdate
from headrace.sync.base import SendRequest, Sent
from headrace.sync.config import Route, SyncConfig, Transport, TransportCost
from headrace.sync.manifest import private_memory

MAX_CONNECTIONS = 8
"""The largest number of connections that an engine has open at the same time."""
MAX_UPLOADS = 16
"""The largest number of engines to which the learner uploads at the same time."""
PROBE_S = 2.0
"""The timeout, in seconds, of a probe of an engine that missed a version."""
_PATH = re.compile(r"/weights/(\d{1,18}-[0-9a-f]{16})")
_NUMBER = re.compile(r"\d{1,18}")


class HttpOutbox:
    """The learner's side of the transport over HTTP. It uploads to all receivers in parallel, so that a slow or silent
    receiver does not delay the others.

    A receiver that missed a version that other receivers got is probed in the background. It gets no further upload
    until it answers a probe.
    """

    def __init__(self, token: str, deadline_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Create the uploader. ``token`` is the run's token; ``deadline_s`` is the timeout of each network operation in
        seconds; ``tls`` is the client's TLS context (``None``: no TLS)."""
        self._token, self._deadline_s, self._tls = token, deadline_s, tls
        self._missed: dict[str, WeightsError] = {}
        """The error with which each engine missed the latest version, by the engine's address."""
        self._probes: dict[str, Future[bool]] = {}
        """The probes that ask engines whether they can be reached, by address."""
        self._probe_pool = ThreadPoolExecutor(max_workers=MAX_UPLOADS, thread_name_prefix="probe")
        """The threads in which probes run."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of this process for the slots."""
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Upload the payload of ``request`` to all of its receivers in parallel. Return the key of the upload, and the
        receivers that missed it. Raises :class:`~headrace.base.errors.WeightsError` if all missed it."""
        key = f"{request.version}-{secrets.token_hex(8)}"
        receivers = [url for url in request.to if self._is_reachable(url)] or request.to
        with ThreadPoolExecutor(max_workers=MAX_UPLOADS, thread_name_prefix="upload") as uploads:
            uploads_by_url = {url: uploads.submit(self._upload, url, key, request) for url in receivers}
        missed = {url: self._missed[url] for url in request.to if url not in uploads_by_url}
        for url, upload in uploads_by_url.items():
            try:
                upload.result()
            except WeightsError as error:
                missed[url] = error
        if request.to and len(missed) == len(request.to):
            raise missed[receivers[0]]
        for url in uploads_by_url:
            self._missed.pop(url, None)
            self._probes.pop(url, None)
        self._missed |= missed
        return Sent(path=key, missed_by={url: error.problem for url, error in missed.items()})

    def close(self) -> None:
        """Stop the probes. There are no open connections between uploads."""
        self._probe_pool.shutdown(wait=False, cancel_futures=True)

    def _is_reachable(self, url: str) -> bool:
        """Return whether the engine at ``url`` should get an upload: its last upload succeeded, or it has answered a
        probe since. Otherwise start a probe, unless one is running."""
        if url not in self._missed:
            return True
        probe = self._probes.get(url)
        if probe is not None and probe.done() and probe.result():
            return True
        if probe is None or probe.done():
            self._probes[url] = self._probe_pool.submit(self._probe, url)
        return False

    def _probe(self, url: str) -> bool:
        """Return whether a server answers at ``url`` within :data:`PROBE_S`, with any status."""
        connection = self._connection(url, min(PROBE_S, self._deadline_s))
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _upload(self, url: str, key: str, request: SendRequest) -> None:
        """Upload the payload of ``request`` to the engine at ``url``, under ``key``. Raises
        :class:`~headrace.base.errors.WeightsError` if the upload fails."""
        try:
            self._put(url, key, request)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsError(
                f"version {request.version} could not be uploaded to {url}, which may be silent for at most "
                f"{self._deadline_s:g} s: {type(error).__name__}: {error}",
                remedy="look at the engine's log; raise sync.deadline_s on a slow network",
            ) from None

    def _put(self, url: str, key: str, request: SendRequest) -> None:
        """Upload the payload under ``key`` to the engine at ``url`` in buckets, one request after the other. Raises
        :class:`~headrace.base.errors.WeightsError` if a request is refused."""
        connection = self._connection(url, self._deadline_s)
        try:
            for start in range(0, max(len(request.payload), 1), BUCKET_BYTES):
                headers = {
                    "Authorization": f"Bearer {self._token}",
                    "Upload-Offset": str(start),
                    "Upload-Length": str(len(request.payload)),
                }
                connection.request("PUT", f"/weights/{key}", request.payload[start : start + BUCKET_BYTES], headers)
                answer = connection.getresponse()
                text = answer.read(1000).decode("utf-8", "replace") or answer.reason
                if answer.status != 204:
                    raise WeightsError(
                        f"{url} refused version {request.version} at byte {start} of {len(request.payload)}: "
                        f"{answer.status} {text}",
                        remedy="give learner and engine the same run token and the same model",
                    )
        finally:
            connection.close()

    def _connection(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        """Return an unopened connection to the engine at ``url``. ``timeout_s`` is the timeout of each network
        operation in seconds."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if self._tls is None:
            return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=self._tls)


@dataclass(slots=True, kw_only=True)
class _Upload:
    """An upload that an engine is receiving."""

    key: str
    """The key of the upload, which the learner has chosen; ``WeightUpdate.path`` of the update."""
    memory: memoryview
    """The memory for all bytes of the upload."""
    received: int = 0
    """The number of bytes that have arrived."""
    busy: bool = False
    """Whether a bucket of this upload is being read."""


class HttpInbox:
    """The engine's side of the transport over HTTP: a server that accepts uploads. It stores one upload at a time."""

    lasting = False

    def __init__(
        self, token: str, limit_bytes: int, deadline_s: float, host: str = LOOPBACK, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen on a free port of ``host`` for uploads of at most ``limit_bytes`` bytes, authenticated by ``token``.
        ``deadline_s`` is the longest time to wait for an announced upload, in seconds. ``tls`` is the server's TLS
        context; ``None``: no TLS. Raises :class:`~headrace.base.errors.ConfigError` without a token, or if ``host`` is
        not an address of this machine."""
        if not token:
            raise ConfigError(
                f"the http transport has no token, and would take anybody's weights at {host}",
                remedy="give learner and engine the run's token",
            )
        self.token, self.limit_bytes, self.deadline_s, self.tls = token, limit_bytes, deadline_s, tls
        self._upload: _Upload | None = None
        """The upload that is being received; ``None`` if there is none."""
        self._changed = threading.Condition()
        """The condition that is notified whenever the upload changes."""
        try:
            self._server = _UploadServer((host, 0), self)
        except OSError as error:
            raise ConfigError(
                f"sync.host={host!r}: the engine cannot listen there: {error}",
                remedy="name an IPv4 address, or a name of one, of the engine's machine",
            ) from None
        self.address = f"{'http' if tls is None else 'https'}://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="weights")
        self._thread.start()

    def view(self, update: WeightUpdate) -> memoryview:
        """Wait until the upload of ``update`` is complete, and return its memory without a copy. Raises
        :class:`~headrace.base.errors.NeedsFull` after the deadline."""
        with self._changed:
            is_complete = self._changed.wait_for(lambda: self._is_complete(update), self.deadline_s)
            upload, self._upload = self._upload, None
        if is_complete and upload is not None:
            return upload.memory
        text = "nothing is here" if upload is None else f"here are {upload.received} bytes of upload {upload.key}"
        raise NeedsFull(
            f"version {update.version} was announced as upload {update.path} of {update.num_bytes} bytes; after "
            f"{self.deadline_s:g} s {text}",
            remedy="look at the learner's log; raise sync.deadline_s on a slow network",
        )

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Raise ``AssertionError``: :meth:`view` always returns the upload, so that nothing has to be fetched."""
        raise AssertionError("uploads are used in place")

    def skip(self, update: WeightUpdate) -> None:
        """Free the memory of the upload of ``update``, if it is stored."""
        with self._changed:
            if self._upload is not None and self._upload.key == update.path:
                self._upload = None

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(self.deadline_s)

    def begin_bucket(self, key: str, start: int, total: int) -> _Upload | str:
        """Return the upload ``key`` into which the bucket at byte ``start`` is to be read, or a text with the reason
        why the bucket is refused. The bucket at byte 0 starts a new upload of ``total`` bytes, which replaces the
        previous one."""
        with self._changed:
            if start == 0:  # a bucket of the replaced upload that still arrives fills unused memory
                self._upload = _Upload(key=key, memory=private_memory(total))
            upload = self._upload
            if upload is None or upload.key != key or upload.busy or upload.received != start:
                text = "no upload" if upload is None else f"upload {upload.key}, at byte {upload.received}"
                return f"this bucket begins at byte {start} of {key}; here is {text}"
            upload.busy = True
            return upload

    def end_bucket(self, upload: _Upload, count: int) -> None:
        """Record that ``count`` bytes of a bucket of ``upload`` have arrived: the whole bucket, or fewer bytes if the
        connection broke."""
        with self._changed:
            upload.busy = False
            upload.received += count
            self._changed.notify_all()

    def _is_complete(self, update: WeightUpdate) -> bool:
        """Return whether the upload of ``update`` has arrived completely."""
        upload = self._upload
        return (
            upload is not None
            and upload.key == update.path
            and upload.received == len(upload.memory) == update.num_bytes
        )  # fmt: skip


class _UploadServer(ThreadingHTTPServer):
    """The HTTP server of an inbox. It limits the number of connections. At the limit, it closes the oldest connection
    that has not sent the token when another client connects."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # the length of the queue of new connections: with a full queue, clients wait for seconds

    def __init__(self, address: tuple[str, int], inbox: HttpInbox) -> None:
        """Listen at ``address``, a host and a port, for uploads to ``inbox``."""
        self.inbox = inbox
        self._changing = threading.Lock()
        """The lock that guards the record of connections."""
        self._unauthenticated: dict[Any, socket.socket] = {}
        """Connections that have not sent the token, by the client's address, the oldest first."""
        self._num_authenticated = 0
        """The number of connections that have shown the token."""
        super().__init__(address, _UploadHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the new connection ``request`` of ``client_address`` in a thread. At the limit of connections, close
        the oldest one that has not sent the token; if all have sent it, refuse the new connection."""
        with self._changing:
            if len(self._unauthenticated) + self._num_authenticated >= MAX_CONNECTIONS:
                if not self._unauthenticated:
                    self.shutdown_request(request)
                    return
                _disconnect(self._unauthenticated.pop(next(iter(self._unauthenticated))))
            self._unauthenticated[client_address] = request
        super().process_request(request, client_address)

    def replace_socket(self, client_address: Any, request: socket.socket) -> bool:
        """Record ``request``, the TLS socket of the connection of ``client_address``, instead of its plain socket.
        Return false if the connection has been closed in favour of another one."""
        with self._changing:
            if client_address not in self._unauthenticated:
                return False
            self._unauthenticated[client_address] = request
            return True

    def authenticate(self, client_address: Any) -> bool:
        """Record that the connection of ``client_address`` has sent the token, so that it stays open until it ends.
        Return false if it has been closed in favour of another one."""
        with self._changing:
            is_open = self._unauthenticated.pop(client_address, None) is not None
            self._num_authenticated += is_open
            return is_open

    def remove(self, client_address: Any, *, authenticated: bool) -> None:
        """Remove the connection of ``client_address``, which ends, from the count; ``authenticated`` says whether it
        had sent the token."""
        with self._changing:
            self._num_authenticated -= authenticated
            if not authenticated:
                self._unauthenticated.pop(client_address, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: if a connection breaks, the engine that waits for its upload reports it."""


class _UploadHandler(BaseHTTPRequestHandler):
    """The handler of one connection to an engine's upload server, in a thread of its own. It checks the token and reads
    buckets."""

    protocol_version = "HTTP/1.1"
    server: _UploadServer
    _authenticated = False

    def setup(self) -> None:
        """Prepare a new connection, with TLS if there is a certificate. A timer closes the connection unless the client
        sends the token within the deadline."""
        inbox = self.server.inbox
        self.request.settimeout(inbox.deadline_s)
        self._token_timer = threading.Timer(inbox.deadline_s, lambda: _disconnect(self.request))
        self._token_timer.daemon = True
        self._token_timer.start()
        try:
            # in this connection's thread, so that no other connection waits for its handshake
            if inbox.tls is not None:
                self.request = inbox.tls.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
                if not self.server.replace_socket(self.client_address, self.request):
                    raise ConnectionAbortedError
                self.request.do_handshake()
            super().setup()
        except BaseException:
            self._release()
            raise

    def finish(self) -> None:
        """End the connection and release its resources."""
        super().finish()
        self._release()

    def _release(self) -> None:
        """Stop the timer of the token, remove the connection from the server's count, and close its socket."""
        self._token_timer.cancel()
        self.server.remove(self.client_address, authenticated=self._authenticated)
        self.request.close()

    def do_PUT(self) -> None:
        """Check the token and the sizes, receive one bucket of an upload and answer with status 204. A refused bucket
        gets another status with the reason."""
        inbox = self.server.inbox
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {inbox.token}".encode()):
            return self._answer(401, "")
        self._token_timer.cancel()
        self._authenticated = self._authenticated or self.server.authenticate(self.client_address)
        if not self._authenticated:
            self.close_connection = True
            return None
        if "Transfer-Encoding" in self.headers or len(self.headers.get_all("Content-Length", ())) > 1:
            return self._answer(
                400, "give the length of a bucket in one Content-Length header, without Transfer-Encoding"
            )
        path = _PATH.fullmatch(self.path)
        sizes = [self.headers.get(name, "") for name in ("Upload-Offset", "Upload-Length", "Content-Length")]
        if path is None or not all(_NUMBER.fullmatch(size) for size in sizes):
            return self._answer(400, "PUT /weights/KEY with Upload-Offset, Upload-Length and Content-Length")
        start, total, count = map(int, sizes)
        if total > inbox.limit_bytes:
            return self._answer(413, f"an update of this model has at most {inbox.limit_bytes} bytes, not {total}")
        if count != min(BUCKET_BYTES, total - start):
            return self._answer(400, f"a bucket of {count} bytes at byte {start} of {total}")
        upload = inbox.begin_bucket(path[1], start, total)
        if isinstance(upload, str):
            return self._answer(409, upload)
        arrived = 0
        try:
            arrived = self.rfile.readinto(upload.memory[start : start + count])
        finally:
            inbox.end_bucket(upload, arrived)
        if arrived < count:
            self.close_connection = True  # the connection broke: no client reads an answer
            return None
        return self._answer(204, "")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer other methods and invalid requests with status 401, like a request without the token, so that the
        answer gives no information to a client without the token."""
        self.request_version = self.protocol_version
        self._answer(401, "")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the client gets every error as an answer."""

    def _answer(self, status: int, text: str) -> None:
        """Send a response with ``status`` and the body ``text``. Any status but 204 is an error, after which the
        connection is closed, because the body of the request was not read."""
        body = text.encode()
        self.send_response_only(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status != 204:
            self.close_connection = True  # its body was not read
            self.send_header("Connection", "close")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if status != 204:
            self._drain_request()

    def _drain_request(self) -> None:
        """Read and discard the rest of the request, at most one bucket. If the connection were closed at once, the
        client would see a connection reset instead of the answer."""
        remaining = BUCKET_BYTES
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)
            while remaining > 0 and (received := len(self.request.recv(1 << 16))):
                remaining -= received


def _disconnect(connection: socket.socket) -> None:
    """Shut down ``connection`` in both directions, so that the thread that reads from it ends."""
    with contextlib.suppress(OSError):  # the connection has just ended
        connection.shutdown(socket.SHUT_RDWR)


def _open_outbox(route: Route, token: str) -> HttpOutbox:
    """Open the learner's side of the transport, which uploads each version to the addresses in its request. ``token``
    is the run's token."""
    return HttpOutbox(
        token,
        route.silence_s or route.deadline_s,
        client_context(route.tls_certificate) if route.tls_certificate else None,
    )


def _open_inbox(route: Route, token: str, limit_bytes: int) -> HttpInbox:
    """Open the engine's side of the transport, which listens on a free port of ``route.host`` for uploads of at most
    ``limit_bytes`` bytes with the run's ``token``."""
    tls = server_context(route.tls_certificate, route.tls_key) if route.tls_certificate else None
    return HttpInbox(token, limit_bytes, route.deadline_s, route.host, tls)


def _check(sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for TLS settings that are incomplete, and for a host to which a
    learner cannot connect."""
    refuse_incomplete_tls("sync", sync.tls_certificate, sync.tls_key)
    if sync.host in EVERYWHERE:
        raise ConfigError(
            f"sync.host={sync.host!r} is not an address that a learner could send to",
            remedy="name the address of one interface of the engine's machine",
        )


HTTP = Transport(
    open_outbox=_open_outbox,
    open_inbox=_open_inbox,
    settings={
        **dict.fromkeys(("host", "tls_certificate", "tls_key"), "takes no uploads"),
        "network_gb_s": "uses no network",
    },
    check=_check,
    cost=TransportCost(gb_s=1.0, fixed_s=0.05),
)
