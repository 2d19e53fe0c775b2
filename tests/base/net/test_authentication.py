"""A server answers every request without its token with 401 and nothing else: for every route of its own router, every
method, and paths that are no route."""

from __future__ import annotations

import ast
import asyncio
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from headrace.base.clock import RealClock
from headrace.base.net.shell import HttpServer, ShellLimits
from headrace.run.observe import RunFacts
from headrace.run.observe.writers.prometheus import TOKEN_FILE, Prometheus
from headrace.sync.http import HttpInbox
from headrace.wings.agents.app import EndpointDispatcher
from headrace.wings.agents.app import make_app as make_endpoint
from headrace.wings.agents.base import SessionLimits
from headrace.wings.agents.sessions import Sessions
from headrace.wings.serve.app import ServerState
from headrace.wings.serve.app import make_app as make_server
from headrace.wings.tinker.app import ServerHolder
from headrace.wings.tinker.app import make_app as make_tinker
from headrace.wings.tinker.records import ServerRecords
from headrace.wings.view.app import make_app as make_view
from headrace.wings.view.run import OpenRun
from headrace.wings.view.serving import ViewConfig
from headrace.wings.view.serving import make_server as view_server
from headrace.wings.view.tenants import make_tenants_app
from tests.wings.view.synthetic import write_run

SOURCE = Path(__file__).parents[3] / "src" / "headrace"
TOKEN = "right horse battery staple"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
NOWHERE = ("/", "/nowhere", "/v1", "/.env", "/v1/models/../../x", "/weights/1-0123456789abcdef", "//", "/%00")
WRONG = (
    {},
    {"authorization": "Bearer "},
    {"authorization": f"Bearer {TOKEN[:-1]}"},
    {"authorization": f"Bearer {TOKEN}x"},
    {"authorization": f"Basic {TOKEN}"},
    {"authorization": TOKEN},
    {"x-api-key": "sk-headrace-0-0000"},
    {"cookie": f"headrace_view={TOKEN}; token={TOKEN}"},
)
SERVERS = {
    "wings/bench/slow_judge.py": "a judge that only waits, of a benchmark's own, on loopback",
    "wings/bridges/atropos.py": "the application of wings/serve/app.py, with a token of its own",
    "wings/serve/app.py": "tested here",
    "wings/serve/run.py": "the application of wings/serve/app.py",
    "base/net/shell.py": "the server of all ASGI applications; it answers nothing itself",
    "run/observe/writers/prometheus.py": "tested here",
    "wings/agents/app.py": "tested here",
    "wings/agents/serving.py": "the application of wings/agents/app.py",
    "sync/http.py": "tested here",
    "testing/servers/__init__.py": "fakes of vLLM and SGLang on loopback, for tests alone",
    "wings/sandboxes/local/forwards.py": "on the loopback interface of a session; what is behind it asks for a key",
    "wings/tinker/app.py": "tested here",
    "wings/tinker/run.py": "the application of wings/tinker/app.py",
    "wings/view/app.py": "tested here",
    "wings/view/serving.py": "the applications of wings/view/app.py and wings/view/tenants.py",
}
"""All modules of the library that listen to HTTP, and where their authentication is tested."""


def paths_of(app: Any) -> Iterator[str]:
    """One path of every route of an application, out of its router."""
    router = app._app
    assert isinstance(router, Starlette)
    for route in router.routes:
        if isinstance(route, Mount):
            yield from (route.path, f"{route.path}/js/main.js")
        else:
            assert isinstance(route, Route)
            yield re.sub(r"\{(\w+):number\}", "0", re.sub(r"\{(\w+)(:path)?\}", "x", route.path))


def application(kind: str, directory: Path) -> Any:
    if kind == "serve":
        return make_server(ServerState(), TOKEN)
    if kind == "view":
        runs = [OpenRun(write_run(directory / "run", steps=1), RealClock())]
        return make_view(runs, clock=RealClock(), token=TOKEN, ending=lambda: True)
    if kind == "tenants":
        records = ServerRecords(directory)
        return make_tenants_app(records, clock=RealClock(), token=TOKEN, secure=False, ending=lambda: True)
    if kind == "tinker":
        return make_tinker(ServerHolder(), TOKEN, max_body_bytes=1000, clock=RealClock())
    limits = SessionLimits(delay_s=0.0)
    return make_endpoint(
        EndpointDispatcher(
            sessions=Sessions(limits), limits=limits, clock=RealClock(), on_ignored=lambda name, value: None
        )
    )


@pytest.mark.parametrize("kind", ["serve", "sessions", "view", "tenants"])
def test_every_route_and_every_other_path_answers_401_and_nothing_else(kind: str, tmp_path: Path) -> None:
    app = application(kind, tmp_path)
    paths = list(paths_of(app))
    assert len(paths) > 5

    questions = [
        (method, path, headers)
        for number, path in enumerate((*paths, *NOWHERE))
        for method in METHODS
        for headers in (WRONG if number == 0 else (WRONG[number % len(WRONG)],))
    ]

    async def ask() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for method, path, headers in questions:
                answer = await client.request(method, path, headers=headers, content=b'{"a": 1}')
                assert answer.status_code == 401, (method, path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                asks = kind in ("view", "tenants") and answer.url.path == "/"
                assert asks or answer.content == b"", (method, path)

    asyncio.run(ask())


def test_a_tinker_server_answers_401_in_the_client_s_form_to_whatever_lacks_its_key(tmp_path: Path) -> None:
    app = application("tinker", tmp_path)
    paths = [path for path in paths_of(app) if not path.endswith("/healthz")]
    assert len(paths) > 5

    async def ask() -> set[tuple[int, bytes]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            answers = [
                await client.request(method, path, headers=WRONG[number % len(WRONG)], content=b'{"a": 1}')
                for number, path in enumerate((*paths, *NOWHERE))
                for method in METHODS
            ]
        return {(answer.status_code, b"" if answer.request.method == "HEAD" else answer.content) for answer in answers}

    said = asyncio.run(ask())
    assert {status for status, _ in said} == {401}
    assert len({content for _, content in said} - {b""}) == 1, "the answer says nothing of what was asked"


def test_with_the_token_the_same_paths_are_there(tmp_path: Path) -> None:
    for kind in ("serve", "view"):
        app = application(kind, tmp_path / kind)

        async def ask(app: Any = app) -> list[int]:
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                return [(await client.get(path, headers=headers)).status_code for path in paths_of(app)]

        assert 401 not in asyncio.run(ask())


def raw(url: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=False, skip_accept_encoding=True)
        for name, value in {**headers, "content-length": "0"}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


@contextmanager
def opened(kind: str, directory: Path) -> Iterator[str]:
    """The servers that are no application of this process's own, on their ports."""
    if kind == "uploads":
        inbox = HttpInbox(TOKEN, 1000, 10.0)
        yield inbox.address
        inbox.close()
        return
    (directory / TOKEN_FILE).write_text(TOKEN)
    writer = Prometheus(port=19465).open(RunFacts(run_dir=directory, config={}))
    yield "http://127.0.0.1:19465"
    writer.close()


@pytest.fixture(params=["uploads", "prometheus"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with opened(request.param, tmp_path) as url:
        yield url


def test_other_servers_answer_401_to_every_method_and_path(listening: str) -> None:
    for path in ("/metrics", *NOWHERE[1:5]):
        for method in METHODS:
            for headers in WRONG[:3]:
                status, body, told = raw(listening, method, path, headers)
                assert (status, body) == (401, b""), (method, path)
                assert told["www-authenticate"] == "Bearer"
                assert "Headrace" not in str(told)


def trees(words: str) -> Iterator[tuple[Path, list[ast.AST]]]:
    """The files of the library in which ``words`` are found."""
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(words, text):
            yield file, list(ast.walk(ast.parse(text)))


def test_every_server_of_the_library_is_named_here() -> None:
    serves = {"Starlette", "HttpServer", "uvicorn.Config", "make_server", "start_http_server", "asyncio.start_server"}
    handles = {"BaseHTTPRequestHandler", "ThreadingHTTPServer", "HTTPServer", "WSGIServer", "HttpServer"}
    found = set()
    for file, nodes in trees("|".join(serves | handles)):
        calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        bases = {ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
        if calls & serves or bases & handles:
            found.add(str(file.relative_to(SOURCE)))
    assert found == SERVERS.keys()


def test_tokens_are_compared_in_constant_time_alone() -> None:
    """No ``==`` or ``!=`` with a token, key or secret on either side."""
    secret = re.compile(r"(?i)(^|[._])(token|api_key|secret|bearer|given_key)$")
    for file, nodes in trees(r"(?i)(token|api_key|secret|bearer)\s*[!=]=|[!=]=.*(token|api_key|secret|bearer)\b"):
        for node in nodes:
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                assert not any(secret.search(side) for side in sides), f"{file}:{node.lineno}: {sides}"


@contextmanager
def running(kind: str, directory: Path) -> Iterator[str]:
    """A server as the library starts it, by its URL."""
    if kind in ("uploads", "prometheus"):
        with opened(kind, directory) as url:
            yield url
        return
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        if kind == "view":
            run = OpenRun(write_run(directory / "run", steps=1), RealClock())
            server = view_server(partial(make_view, [run], clock=RealClock()), ViewConfig(token=TOKEN))
        else:
            server = HttpServer(application(kind, directory), ShellLimits())
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


BEGINNINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\nX-",
    b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1",
)


@pytest.mark.parametrize("kind", ["serve", "view", "prometheus", "uploads"])
def test_hundreds_of_silent_strangers_do_not_lock_out_who_has_the_token(kind: str, tmp_path: Path) -> None:
    headers, method, path, right = {"authorization": f"Bearer {TOKEN}"}, "GET", "/metrics", 200
    if kind == "uploads":
        headers |= {"upload-offset": "0", "upload-length": "0"}
        method, path, right = "PUT", "/weights/1-0123456789abcdef", 204
    with running(kind, tmp_path) as url, ExitStack() as strangers:
        place = urlsplit(url)
        for number in range(300):
            silent = strangers.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
            silent.sendall(BEGINNINGS[number % 3])
        for _ in range(3):
            assert raw(url, method, "/api/runs" if kind == "view" else path, headers)[0] == right


def test_an_upload_whose_length_is_ambiguous_is_refused(tmp_path: Path) -> None:
    with opened("uploads", tmp_path) as url:
        headers = {"authorization": f"Bearer {TOKEN}", "upload-offset": "0", "upload-length": "0"}
        status, words, _ = raw(
            url, "PUT", "/weights/1-0123456789abcdef", headers | {"transfer-encoding": "chunked"}
        )  # fmt: skip
        assert (status, b"Transfer-Encoding" in words) == (400, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.9.1", "[::1]", "[::1]:8000")),
        *((host, 403) for host in ("[::1].evil.com", "[::1]evil.com:80", "localhost:80@evil.com", "localhost:80:90")),
        *((host, 403) for host in ("localhost:", "localhost:99999", "localhost:x", "[::1", "::1", "[127.0.0.1]")),
        *((host, 403) for host in ("127.0.0.1.evil.com", "evil.com", "localhost.evil.com", "user@localhost", "")),
    ],
)
def test_without_a_token_only_exact_names_of_this_machine_are_answered(host: str, status: int) -> None:
    async def ask() -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(make_server(ServerState(), "")), base_url="http://x"
        ) as client:
            return (await client.get("/metrics", headers={"host": host})).status_code

    assert asyncio.run(ask()) == status
