"""Servers in processes of their own, and the requests that are sent to them over TCP: modified bodies with the token,
and modified whole requests with and without it."""

from __future__ import annotations

import asyncio
import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from headrace.base.environ import program_environment
from headrace.base.errors import ComponentDied
from headrace.flow.ledger.base import Submit
from headrace.flow.ledger.sqlite import SqliteLedger
from headrace.models.tiny import TinySpec, make_tiny
from lab.fuzz.change import mutate, mutate_json
from lab.fuzz.hosts import TEMPLATE, TOKEN, UPLOAD_BYTES

CONNECTIONS = 8
ANSWER_S = 60.0
"""Seconds without an answer after which a server counts as hanging."""
START_S = 120.0
PER_KEY = 60
"""Number of consecutive requests in one session, whose conversation grows meanwhile."""
_PROGRAM = "from headrace.run.cli import main; main()"
Tree = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Host:
    """A running server."""

    name: str
    process: subprocess.Popen[str]
    url: str
    keys: Sequence[str]
    log: Path
    """File with its standard error."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def problem(self) -> str:
        """Return a description of a crash; empty if there was none."""
        if self.process.poll() is not None:
            return f"{self.name} has ended with exit code {self.process.returncode}"
        said = self.log.read_text(encoding="utf-8", errors="replace")
        return f"{self.name} has printed: {said[said.index('Traceback') :][:2000]}" if "Traceback" in said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFormat:
    """A kind of request that is sent to a server."""

    name: str
    share: float
    """Fraction of all inputs that are of this kind."""
    host: Host
    seeds: Sequence[bytes]
    """Valid bodies, or valid whole requests."""
    path: str = ""
    """Path to which bodies are posted, with a key; empty: the seeds are whole requests."""
    has_token: bool = False
    """Whether whole requests carry the token; if not, only status 401 is right, or 400 for an invalid request."""


@dataclass(slots=True, kw_only=True)
class InputCounts:
    """Counts of the ``inputs`` of one format: ``accepted``, ``refused`` with an expected error, ``crashes`` of the
    reader, and ``forged`` inputs that were accepted."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    forged: int = 0
    problems: list[str] = field(default_factory=list)
    """Descriptions of the first crashes and forgeries."""

    def add_problem(self, description: str, data: bytes) -> None:
        """Add the ``description`` of what happened with the input ``data``, if there are fewer than three."""
        if len(self.problems) < 3:
            self.problems.append(f"{description[:600]} <- {data[:400]!r}")


@contextmanager
def run_hosts(scratch: Path) -> Iterator[dict[str, Host]]:
    """Start all servers, with their files in ``scratch``, and yield them by name; end them after the body."""
    model = make_tiny(
        scratch / "model",
        TinySpec(vocab=string.printable, max_positions=256, hidden_size=32, chat_template=TEMPLATE),
    )
    (scratch / "run").mkdir()
    ledger = SqliteLedger(scratch / "run" / "ledger.sqlite", group_size=2, groups_per_step=1)
    ledger.apply(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    ledger.close()
    limits = ("serve.max_tokens=4", "serve.max_n=2", "serve.max_prompts=4", "serve.body_timeout_s=5")
    own = [sys.executable, str(Path(__file__).with_name("hosts.py"))]
    program = [sys.executable, "-c", _PROGRAM]
    settings = [word for limit in limits for word in ("--set", limit)]
    commands = {
        "serve": [*program, "serve", str(model), "--port", "0", "--device", "cpu", *settings],
        "view": [*program, "view", str(scratch / "run"), "--port", "0", "--no-browser"],
        "sessions": [*own, "sessions"],
        "uploads": [*own, "uploads"],
    }
    started: dict[str, Host] = {}
    try:
        for name, command in commands.items():
            started[name] = _start(name, command, scratch / f"{name}.log")
        yield started
    finally:
        for host in started.values():
            host.process.kill()
            host.process.communicate()


def _start(name: str, command: Sequence[str], log: Path) -> Host:
    variables = {"HEADRACE_SERVE_TOKEN": TOKEN, "HEADRACE_VIEW_TOKEN": TOKEN, "COLUMNS": "300"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=program_environment(variables),
        )  # fmt: skip
    assert process.stdout is not None
    url, keys = _read_address(process.stdout)
    if not url:
        process.kill()
        process.communicate()
        raise ComponentDied(f"{name} did not start: {log.read_text()[-500:]}", remedy="start it by hand")
    return Host(name=name, process=process, url=url, keys=keys or [TOKEN], log=log)


def _read_address(output: IO[str]) -> tuple[str, list[str]]:
    """Return URL and keys from the ``output`` of a server, once it serves; empty if it ends before."""
    url = ""
    for line in output:
        if line.startswith("{"):
            access = json.loads(line)
            return access["url"], access["keys"]
        words = line.split()
        if words[:1] in (["listening"], ["open"]):
            url = next(word for word in words if word.startswith("http")).rstrip(";").partition("/?")[0]
        if words[:1] == ["end"]:
            return url, []
    return "", []


def live_formats(served: dict[str, Host]) -> list[LiveFormat]:
    """Return the kinds of requests for the servers ``served``."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    again = [*messages, {"role": "assistant", "content": "x", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "c", "content": "4"}]  # fmt: skip
    chats: list[Tree] = [
        {"model": "m", "messages": again, "tools": [tool], "n": 2, "stream": True, "temperature": 1.0, "logprobs": True,
         "stop": ["a"], "stream_options": {"include_usage": True}},
        {"messages": messages, "max_tokens": 3},
    ]  # fmt: skip
    completions: list[Tree] = [
        {"prompt": "hello", "max_tokens": 3, "n": 2, "logit_bias": {"3": 5.0}, "stop": ["a"], "seed": 1},
        {"prompt": [[3, 4], [5]], "max_tokens": 2, "stream": True, "top_k": 2, "kept_sizes": True, "logprobs": 0},
    ]
    responses: list[Tree] = [
        {"model": "m", "input": [{"role": "user", "content": "hi"}], "instructions": "Be brief.", "stream": True,
         "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}], "store": True},
    ]  # fmt: skip
    claude: Tree = {
        "model": "m", "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }  # fmt: skip
    plain: list[Tree] = [{"messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 0}]
    serve, sessions = served["serve"], served["sessions"]

    def bodies(host: Host, path: str, share: float, trees: Sequence[Tree]) -> LiveFormat:
        seeds = [json.dumps(tree).encode() for tree in trees]
        return LiveFormat(name=f"{host.name} {path}", share=share, host=host, seeds=seeds, path=path)

    return [
        bodies(serve, "/v1/completions", 0.012, completions),
        bodies(serve, "/v1/chat/completions", 0.012, plain),
        bodies(sessions, "/v1/chat/completions", 0.012, chats),
        bodies(sessions, "/v1/responses", 0.008, responses),
        bodies(sessions, "/v1/messages", 0.008, [{**claude, "max_tokens": 9, "stream": True}]),
        bodies(sessions, "/v1/messages/count_tokens", 0.004, [claude]),
        *_requests(served),
    ]


def _requests(served: dict[str, Host]) -> Iterator[LiveFormat]:
    """Yield whole requests with and without the token to the servers ``served``."""
    paths = {
        "serve": ("/health", "/metrics", "/v1/models", "/v1/models/model", "/nowhere"),
        "sessions": ("/v1/models", "/v1/chat/completions", "/messages/count_tokens"),
        "view": ("/", "/api/runs", "/api/runs/0/episodes?order=oldest&limit=5", "/api/runs/0/search?words=a&before=0.0",
                 "/api/runs/0/timeline?from=0&to=9&bins=9", "/api/runs/0/episodes/0.0/turns/0/0", "/static/js/main.js"),
        "uploads": (),
    }  # fmt: skip
    wrong = ("", "Authorization: Bearer wrong\r\n", "x-api-key: sk-headrace-0-00\r\n", f"Cookie: {'a' * 64}\r\n")
    for name, host in served.items():
        texts = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n" for path in paths[name] for head in wrong]
        texts += [_put("Authorization: Bearer x\r\n"), "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
                  "Content-Type: application/json\r\nContent-Length: 2\r\nUpgrade: websocket\r\n\r\n{}"]  # fmt: skip
        yield LiveFormat(name=f"strangers at {name}", share=0.004, host=host, seeds=[text.encode() for text in texts])
    right = f"Authorization: Bearer {TOKEN}\r\n"
    texts = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{right}\r\n" for path in paths["view"]]
    yield LiveFormat(
        name="requests to view",
        share=0.004,
        host=served["view"],
        seeds=[text.encode() for text in texts],
        has_token=True,
    )
    puts = [_put(right), _put(right, start=10, total=20)]
    yield LiveFormat(
        name="requests to uploads",
        share=0.004,
        host=served["uploads"],
        seeds=[text.encode() for text in puts],
        has_token=True,
    )


def _put(head: str, start: int = 0, total: int = UPLOAD_BYTES // 16) -> str:
    body = "x" * (total - start)
    return (
        f"PUT /weights/1-0123456789abcdef HTTP/1.1\r\nHost: h\r\n{head}Upload-Offset: {start}\r\n"
        f"Upload-Length: {total}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )


async def send_all(request_format: LiveFormat, count: int, seed: str) -> InputCounts:
    """Send ``count`` inputs of the format over several concurrent connections, and count the results. ``seed``
    determines the inputs."""
    counts = InputCounts()
    async with asyncio.TaskGroup() as group:
        for index in range(CONNECTIONS):
            share = count // CONNECTIONS + (index < count % CONNECTIONS)
            rng = random.Random(f"{seed}/{index}")
            send = _send if request_format.path else _send_raw
            group.create_task(send(request_format, share, rng, counts))
    return counts


async def _send(request_format: LiveFormat, count: int, rng: random.Random, counts: InputCounts) -> None:
    """Send ``count`` bodies to one path, one after another, the valid ones first and then bodies that ``rng`` modifies;
    add the results to ``counts``."""
    host, seeds = request_format.host, request_format.seeds
    connection = _Connection(host)
    first = rng.randrange(len(host.keys))
    for number in range(count):
        is_valid = number < len(seeds)
        body = seeds[number] if is_valid else mutate_json(rng, rng.choice(seeds), seeds)
        key = host.keys[(first + number // PER_KEY) % len(host.keys)]
        head = (
            f"POST {request_format.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        status = await connection.request(head.encode() + body)
        counts.inputs += 1
        if status == 200:
            counts.accepted += 1
        elif is_valid or status in (500, -1):
            counts.crashes += 1
            counts.add_problem(f"{request_format.name}: {'no answer' if status < 0 else f'status {status}'}", body)
        else:
            counts.refused += 1
    connection.close()


async def _send_raw(request_format: LiveFormat, count: int, rng: random.Random, counts: InputCounts) -> None:
    """Send ``count`` whole requests that ``rng`` modifies, each over its own connection; add the results to
    ``counts``."""
    for _ in range(count):
        data = mutate(rng, rng.choice(request_format.seeds), request_format.seeds)
        connection = _Connection(request_format.host)
        status = await connection.request(data, last=True)
        connection.close()
        counts.inputs += 1
        if status in (-1, 500):
            counts.crashes += 1
            counts.add_problem(f"status {status}", data)
        elif request_format.has_token or status in (0, 400, 401):
            counts.accepted += 200 <= status < 400
            counts.refused += not 200 <= status < 400
        else:
            counts.forged += 1
            counts.add_problem(f"status {status} without the token", data)


class _Connection:
    """A connection that is opened again after it was closed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        """The two directions of the connection; None while it is closed."""

    async def request(self, data: bytes, *, last: bool = False) -> int:
        """Send the request ``data`` and return the status of the answer; 0: the connection was closed, −1: no answer.
        ``last`` closes the sending side."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._exchange(data, last=last)
        except TimeoutError:
            self.close()
            return -1
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            self.close()
            return 0

    async def _exchange(self, data: bytes, *, last: bool) -> int:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._host.address)
        reader, writer = self._streams
        writer.write(data)
        if last:
            writer.write_eof()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1][:3])
        await _skip_body(reader, head)
        if b"connection: close" in head:
            self.close()
        return status

    def close(self) -> None:
        if self._streams is not None:
            with suppress(OSError):
                self._streams[1].close()
            self._streams = None


async def _skip_body(reader: asyncio.StreamReader, head: bytes) -> None:
    if b"transfer-encoding: chunked" in head:
        while size := int((await reader.readline()).strip() or b"0", 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    elif b"content-length:" in head:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
