"""Weights uploaded over HTTP, with the run's token, to engines that the learner can connect to.

    learner                                             engine, one thread beside the step loop
    PUT /weights/KEY   Upload-Offset, Upload-Length ──▶ 401 without the token · 400 nonsense · 413 larger than the model
        one bucket after the other                      204 the bucket is in its place
    announce: path = KEY ─────────────────────────────▶ stage: whole? then it is read where it lies

The standard library's server reads each bucket straight into its place; no larger request than a bucket is answered,
and nothing is stored before token and sizes are known to be right. Whoever has not shown the token within the deadline
is cut off, earlier where others ask for its place: there are few. With a certificate all of it travels under TLS.
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

from headrace.base.config.addresses import LOOPBACK
from headrace.base.config.tls import only, server_context
from headrace.base.errors import ConfigError, NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, WeightUpdate
from headrace.sync.base import Parcel, Sent
from headrace.sync.config import Route
from headrace.sync.manifest import private_memory

MAX_CONNECTIONS = 8
MOST_UPLOADS = 16
"""Engines that are served at once."""
KNOCK_S = 2.0
"""Longest that an engine which was not reached may take to show that it can be."""
_PATH = re.compile(r"/weights/(\d{1,18}-[0-9a-f]{16})")
_NUMBER = re.compile(r"\d{1,18}")


class HttpOutbox:
    """Uploads to all receivers at once: a slow one, or a silent one, does not delay what the others get. One that was
    missed where others were reached is knocked at, beside everything else, and sent nothing until it has answered."""

    def __init__(self, token: str, deadline_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._token, self._deadline_s, self._tls = token, deadline_s, tls
        self._missed: dict[str, WeightsError] = {}
        self._knocks: dict[str, Future[bool]] = {}
        self._knocking = ThreadPoolExecutor(max_workers=MOST_UPLOADS, thread_name_prefix="knock")

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, parcel: Parcel) -> Sent:
        key = f"{parcel.version}-{secrets.token_hex(8)}"
        due = [url for url in parcel.to if self._answers(url)] or parcel.to
        with ThreadPoolExecutor(max_workers=MOST_UPLOADS, thread_name_prefix="upload") as uploads:
            begun = {url: uploads.submit(self._upload, url, key, parcel) for url in due}
        missed = {url: self._missed[url] for url in parcel.to if url not in begun}
        for url, upload in begun.items():
            try:
                upload.result()
            except WeightsError as error:
                missed[url] = error
        if parcel.to and len(missed) == len(parcel.to):
            raise missed[due[0]]
        for url in begun:
            self._missed.pop(url, None)
            self._knocks.pop(url, None)
        self._missed |= missed
        return Sent(path=key, missed={url: error.problem for url, error in missed.items()})

    def close(self) -> None:
        """No connection is kept."""
        self._knocking.shutdown(wait=False, cancel_futures=True)

    def _answers(self, url: str) -> bool:
        """Whether it was reached the last time, or has answered a knock since; else somebody knocks."""
        if url not in self._missed:
            return True
        knock = self._knocks.get(url)
        if knock is not None and knock.done() and knock.result():
            return True
        if knock is None or knock.done():
            self._knocks[url] = self._knocking.submit(self._knock, url)
        return False

    def _knock(self, url: str) -> bool:
        connection = self._connection(url, min(KNOCK_S, self._deadline_s))
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return True

    def _upload(self, url: str, key: str, parcel: Parcel) -> None:
        try:
            self._put(url, key, parcel)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsError(
                f"version {parcel.version} could not be uploaded to {url}, which may be silent for at most "
                f"{self._deadline_s:g} s: {type(error).__name__}: {error}",
                remedy="look at the engine's log; raise sync.deadline_s on a slow network",
            ) from None

    def _put(self, url: str, key: str, parcel: Parcel) -> None:
        connection = self._connection(url, self._deadline_s)
        try:
            for start in range(0, max(len(parcel.payload), 1), BUCKET_BYTES):
                headers = {
                    "Authorization": f"Bearer {self._token}",
                    "Upload-Offset": str(start),
                    "Upload-Length": str(len(parcel.payload)),
                }
                connection.request("PUT", f"/weights/{key}", parcel.payload[start : start + BUCKET_BYTES], headers)
                answer = connection.getresponse()
                words = answer.read(1000).decode("utf-8", "replace") or answer.reason
                if answer.status != 204:
                    raise WeightsError(
                        f"{url} refused version {parcel.version} at byte {start} of {len(parcel.payload)}: "
                        f"{answer.status} {words}",
                        remedy="give learner and engine the same run token and the same model",
                    )
        finally:
            connection.close()

    def _connection(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        place = urlsplit(url)
        host = place.hostname or ""
        if self._tls is None:
            return http.client.HTTPConnection(host, place.port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, place.port, timeout=timeout_s, context=self._tls)


@dataclass(slots=True, kw_only=True)
class _Upload:
    key: str
    room: memoryview
    received: int = 0
    busy: bool = False
    """A bucket is being read."""


class HttpInbox:
    """A small server at ``host``. It holds one upload, of at most ``limit_bytes``."""

    lasting = False

    def __init__(
        self, token: str, limit_bytes: int, deadline_s: float, host: str = LOOPBACK, tls: ssl.SSLContext | None = None
    ) -> None:
        if not token:
            raise ConfigError(
                f"the http transport has no token, and would take anybody's weights at {host}",
                remedy="give learner and engine the run's token",
            )
        self.token, self.limit_bytes, self.deadline_s, self.tls = token, limit_bytes, deadline_s, tls
        self._upload: _Upload | None = None
        self._changed = threading.Condition()
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

    def lend(self, update: WeightUpdate) -> memoryview:
        """Waits until the upload is whole."""
        with self._changed:
            whole = self._changed.wait_for(lambda: self._whole(update), self.deadline_s)
            upload, self._upload = self._upload, None
        if whole and upload is not None:
            return upload.room
        words = "nothing is here" if upload is None else f"here are {upload.received} bytes of upload {upload.key}"
        raise NeedsFull(
            f"version {update.version} was announced as upload {update.path} of {update.num_bytes} bytes; after "
            f"{self.deadline_s:g} s {words}",
            remedy="look at the learner's log; raise sync.deadline_s on a slow network",
        )

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        raise AssertionError("uploads are read where they lie")

    def skip(self, update: WeightUpdate) -> None:
        with self._changed:
            if self._upload is not None and self._upload.key == update.path:
                self._upload = None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(self.deadline_s)

    def begin(self, key: str, start: int, total: int) -> _Upload | str:
        """Where the next bucket belongs, or why it does not."""
        with self._changed:
            if start == 0:  # whoever still fills an earlier one fills memory that nobody will read
                self._upload = _Upload(key=key, room=private_memory(total))
            upload = self._upload
            if upload is None or upload.key != key or upload.busy or upload.received != start:
                words = "no upload" if upload is None else f"upload {upload.key}, at byte {upload.received}"
                return f"this bucket begins at byte {start} of {key}; here is {words}"
            upload.busy = True
            return upload

    def end(self, upload: _Upload, count: int) -> None:
        """So much of the bucket has come."""
        with self._changed:
            upload.busy = False
            upload.received += count
            self._changed.notify_all()

    def _whole(self, update: WeightUpdate) -> bool:
        upload = self._upload
        return (
            upload is not None
            and upload.key == update.path
            and upload.received == len(upload.room) == update.num_bytes
        )  # fmt: skip


class _UploadServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # connections that were made and not accepted yet; beyond, clients wait for seconds

    def __init__(self, address: tuple[str, int], inbox: HttpInbox) -> None:
        self.inbox = inbox
        self._changing = threading.Lock()
        self._strangers: dict[Any, socket.socket] = {}
        """Connections that have not shown the token, by their client's address, the oldest first."""
        self._num_entitled = 0
        super().__init__(address, _UploadHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection. Where all places are taken, it gets that of the oldest one without the token."""
        with self._changing:
            if len(self._strangers) + self._num_entitled >= MAX_CONNECTIONS:
                if not self._strangers:
                    self.shutdown_request(request)
                    return
                _cut(self._strangers.pop(next(iter(self._strangers))))
            self._strangers[client_address] = request
        super().process_request(request, client_address)

    def wrapped(self, client_address: Any, request: socket.socket) -> bool:
        """Record the socket that a connection uses from now on; ``False`` where its place was given away."""
        with self._changing:
            if client_address not in self._strangers:
                return False
            self._strangers[client_address] = request
            return True

    def entitle(self, client_address: Any) -> bool:
        """Keep a connection, which has shown the token, until it ends; ``False`` where its place was given away."""
        with self._changing:
            is_here = self._strangers.pop(client_address, None) is not None
            self._num_entitled += is_here
            return is_here

    def left(self, client_address: Any, *, entitled: bool) -> None:
        """Free the place of a connection that ends."""
        with self._changing:
            self._num_entitled -= entitled
            if not entitled:
                self._strangers.pop(client_address, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off: whoever waits for its upload will say so."""


class _UploadHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _UploadServer
    _entitled = False

    def setup(self) -> None:
        inbox = self.server.inbox
        self.request.settimeout(inbox.deadline_s)
        self._stranger = threading.Timer(inbox.deadline_s, lambda: _cut(self.request))
        self._stranger.daemon = True
        self._stranger.start()
        try:
            if inbox.tls is not None:  # in the thread of this connection: others do not wait for its handshake
                self.request = inbox.tls.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)
                if not self.server.wrapped(self.client_address, self.request):
                    raise ConnectionAbortedError
                self.request.do_handshake()
            super().setup()
        except BaseException:
            self._leave()
            raise

    def finish(self) -> None:
        super().finish()
        self._leave()

    def _leave(self) -> None:
        self._stranger.cancel()
        self.server.left(self.client_address, entitled=self._entitled)
        self.request.close()

    def do_PUT(self) -> None:
        inbox = self.server.inbox
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {inbox.token}".encode()):
            return self._answer(401, "")
        self._stranger.cancel()
        self._entitled = self._entitled or self.server.entitle(self.client_address)
        if not self._entitled:
            self.close_connection = True
            return None
        if "Transfer-Encoding" in self.headers or len(self.headers.get_all("Content-Length", ())) > 1:
            return self._answer(400, "the length of a bucket is told by one Content-Length, without Transfer-Encoding")
        path = _PATH.fullmatch(self.path)
        sizes = [self.headers.get(name, "") for name in ("Upload-Offset", "Upload-Length", "Content-Length")]
        if path is None or not all(_NUMBER.fullmatch(size) for size in sizes):
            return self._answer(400, "PUT /weights/KEY with Upload-Offset, Upload-Length and Content-Length")
        start, total, count = map(int, sizes)
        if total > inbox.limit_bytes:
            return self._answer(413, f"an update of this model has at most {inbox.limit_bytes} bytes, not {total}")
        if count != min(BUCKET_BYTES, total - start):
            return self._answer(400, f"a bucket of {count} bytes at byte {start} of {total}")
        upload = inbox.begin(path[1], start, total)
        if isinstance(upload, str):
            return self._answer(409, upload)
        arrived = 0
        try:
            arrived = self.rfile.readinto(upload.room[start : start + count])
        finally:
            inbox.end(upload, arrived)
        if arrived < count:
            self.close_connection = True  # it broke off: there is nobody to answer
            return None
        return self._answer(204, "")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class would say of other methods, and of what is no request: the same as to any stranger."""
        self.request_version = self.protocol_version
        self._answer(401, "")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the answers say it."""

    def _answer(self, status: int, words: str) -> None:
        body = words.encode()
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
            self._hear_out()

    def _hear_out(self) -> None:
        """What is still on its way, a bucket at most: if the connection were closed now, its sender would see that it
        was reset, and not the answer."""
        left = BUCKET_BYTES
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)
            while left > 0 and (heard := len(self.request.recv(1 << 16))):
                left -= heard


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def open_outbox(route: Route, token: str) -> HttpOutbox:
    """It sends to the addresses it is told with each version."""
    return HttpOutbox(token, route.deadline_s, only(route.tls_certificate) if route.tls_certificate else None)


def open_inbox(route: Route, token: str, limit_bytes: int) -> HttpInbox:
    """It listens on a free port of ``route.host``."""
    tls = server_context(route.tls_certificate, route.tls_key) if route.tls_certificate else None
    return HttpInbox(token, limit_bytes, route.deadline_s, route.host, tls)
