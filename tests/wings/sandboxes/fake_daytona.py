"""A stand-in for Daytona: its REST interface, and the toolbox of each sandbox, as far as the driver uses them.

The client package reaches it over HTTP and WebSockets on this machine. As in the service, a command of a process
session has named pipes for its streams, and its output is a log with a mark before each line, which is sent as it grows
in messages of at most 1 KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import uuid
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.wings.sandboxes.fake_machines import Machine, ServiceThread

KEY = "dtn_0123"
MARKS = {"out": r"\001\001\001", "err": r"\002\002\002"}
LABEL = """
(while IFS= read -r line || [[ $line ]]; do printf '{mark}%s\\n' "$line"; done < {at}/{stream}) >> {at}/log &
labels+=($!)
"""
COMMAND = """
labels=(); mkfifo {at}/in {at}/out {at}/err
{labels}
(while :; do sleep 3600; done) > {at}/in &
holder=$!
{{ . {at}/command; }} < {at}/in > {at}/out 2> {at}/err
code=$?
kill "$holder"; wait "${{labels[@]}}"; echo "$code" > {at}/code
"""


@dataclass(kw_only=True)
class Sandbox:
    """What the service knows of one sandbox, its machine, and the shells of its process sessions."""

    wanted: dict[str, Any]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "creating"
    error: str = ""
    machine: Machine | None = None
    shells: dict[str, Process] = field(default_factory=dict)
    echoes: set[str] = field(default_factory=set)
    """The commands whose input appears in their log."""

    def path(self, inside: str) -> Path:
        assert self.machine is not None
        return Path(f"/proc/{self.machine.pid}/root{inside}")


class FakeDaytona(ServiceThread):
    """The service. ``environment`` is what the client package reads to reach it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, Any]] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        """The status and the words with which calls of a kind are refused."""
        self.cut_after: int | None = None
        """After how many bytes of a log its connection is cut, once; ``None``: never."""
        self.slow = asyncio.Event()
        """Sandboxes are made only while it is set."""
        self.slow.set()
        self.minute_s = 60.0
        self.piece_bytes = 1024
        """The size of the messages of logs."""
        self.padded = False
        """Whether messages are filled up with zeros, as those of older services are."""
        self.forgetful = False
        """Whether snapshots fail without a word."""
        self.sandboxes: dict[str, Sandbox] = {}
        self.ids: dict[str, str] = {}
        """The ids of snapshots by the names of their images."""
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self.environment = {"DAYTONA_API_KEY": KEY, "DAYTONA_API_URL": f"{self.url}/api"}
        self._runner = web.AppRunner(self._application(), shutdown_timeout=0.1)
        self(self._listen(bound))

    async def _listen(self, bound: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, bound).start()

    def stop(self) -> None:
        if not self.loop.is_closed():
            self(self._runner.cleanup())
            super().stop()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._check], client_max_size=1 << 30)
        inside = "/toolbox/{id}/process/session"
        app.add_routes(
            [
                web.post("/api/sandbox", self.create),
                web.get("/api/sandbox", self.list),
                web.get("/api/sandbox/{id}", self.get),
                web.delete("/api/sandbox/{id}", self.end),
                web.post("/api/sandbox/{id}/snapshot", self.snapshot),
                web.get("/api/snapshots", self.snapshots),
                web.get("/api/snapshots/{id}", self.kept),
                web.delete("/api/snapshots/{id}", self.remove),
                web.post(inside, self.session),
                web.post(inside + "/{session}/exec", self.execute),
                web.post(inside + "/{session}/command/{command}/input", self.send),
                web.get(inside + "/{session}/command/{command}/logs", self.logs),
            ]
        )
        return app

    @staticmethod
    @web.middleware
    async def _check(request: web.Request, handler: Any) -> Any:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _error(401, "Unauthorized: invalid credentials")
        return await handler(request)

    def _refused(self, kind: str) -> web.Response | None:
        return _error(*self.refuse[kind]) if kind in self.refuse else None

    def _sandbox(self, request: web.Request) -> Sandbox:
        """The sandbox of a request, by its id or name. Raises ``HTTPNotFound`` if it has ended."""
        wanted = request.match_info["id"]
        for each in list(self.sandboxes.values()):
            if each.machine is not None and each.machine.name not in self.machines.alive:
                del self.sandboxes[each.id]
            elif wanted in (each.id, each.wanted["name"]):
                return each
        raise web.HTTPNotFound(
            text=json.dumps({"message": f"Sandbox {wanted} not found"}), content_type="application/json"
        )

    def _told(self, sandbox: Sandbox) -> dict[str, Any]:
        wanted = sandbox.wanted
        return {
            "id": sandbox.id, "organizationId": "o", "name": wanted["name"], "user": wanted["user"], "env": {},
            "labels": wanted["labels"], "public": False, "networkBlockAll": wanted["networkBlockAll"], "kvm": False,
            "target": wanted.get("target") or "eu", "cpu": 1, "gpu": 0, "memory": 1, "disk": 3,
            "state": sandbox.state, "errorReason": sandbox.error or None, "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("create", body))
        if (refused := self._refused("create")) is not None:
            return refused
        image = body.get("snapshot") or body["buildInfo"]["dockerfileContent"].split()[1]
        found = [each for each, names in self.machines.images.items() if image == each or image in names]
        if "snapshot" in body and not found:
            return _error(404, f"Snapshot {image} not found. Did you add it through the Daytona Dashboard?")
        sandbox = Sandbox(wanted=body)
        self.sandboxes[sandbox.id] = sandbox
        if not found:
            sandbox.state, sandbox.error = "build_failed", f"manifest for {image} not found"
            return web.json_response(self._told(sandbox))
        making = self.loop.create_task(self._make(sandbox, found[0]))
        await asyncio.wait([making], timeout=5.0 if self.slow.is_set() else 0.0)
        return web.json_response(self._told(sandbox))

    async def _make(self, sandbox: Sandbox, image: str) -> None:
        await self.slow.wait()
        wanted = sandbox.wanted
        sandbox.machine = await self.machines.start(
            image,
            wanted["labels"],
            life_s=wanted["ttlMinutes"] * self.minute_s,
            network=not wanted["networkBlockAll"],
        )
        sandbox.state = "started"
        if sandbox.id not in self.sandboxes:
            await self.machines.end(sandbox.machine.name)

    async def list(self, request: web.Request) -> web.Response:
        labels = json.loads(request.query.get("labels", "{}"))
        items = [
            self._told(each)
            for each in self.sandboxes.values()
            if all(each.wanted["labels"].get(name) == value for name, value in labels.items())
            and (each.machine is None or each.machine.name in self.machines.alive)
        ]
        return web.json_response({"items": items, "nextCursor": None})

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self._told(self._sandbox(request)))

    async def end(self, request: web.Request) -> web.Response:
        sandbox = self._sandbox(request)
        del self.sandboxes[sandbox.id]
        if sandbox.machine is not None:
            await self.machines.end(sandbox.machine.name)
        sandbox.state = "destroyed"
        return web.json_response(self._told(sandbox))

    async def snapshot(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("snapshot", body))
        if (refused := self._refused("snapshot")) is not None:
            return refused
        sandbox = self._sandbox(request)
        if not self.forgetful:
            assert sandbox.machine is not None
            image = await self.machines.keep(sandbox.machine.name, body["name"])
            self.ids[image] = str(uuid.uuid4())
        return web.json_response(self._told(sandbox))

    def _kept(self) -> list[dict[str, Any]]:
        now = "2026-01-01T00:00:00.000Z"
        return [
            {
                "id": self.ids[image], "general": False, "name": names[0], "state": "active", "size": 1, "cpu": 1,
                "gpu": 0, "mem": 1, "disk": 3, "entrypoint": None, "errorReason": None, "createdAt": now,
                "updatedAt": now, "lastUsedAt": now, "sourceSandboxId": None,
            }
            for image, names in self.machines.images.items()
            if names
        ]  # fmt: skip

    async def snapshots(self, request: web.Request) -> web.Response:
        kept, page, limit = self._kept(), int(request.query["page"]), int(request.query["limit"])
        return web.json_response(
            {
                "items": kept[(page - 1) * limit : page * limit],
                "total": len(kept), "page": page, "totalPages": -(-len(kept) // limit),
            }
        )  # fmt: skip

    async def kept(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        for each in self._kept():
            if wanted in (each["id"], each["name"]):
                return web.json_response(each)
        return _error(404, f"Snapshot {wanted} not found")

    async def remove(self, request: web.Request) -> web.Response:
        for image, name in list(self.ids.items()):
            if name == request.match_info["id"] and await self.machines.remove(image):
                del self.ids[image]
                return web.json_response({})
        return _error(404, "Snapshot not found")

    async def session(self, request: web.Request) -> web.Response:
        sandbox, name = self._sandbox(request), (await request.json())["sessionId"]
        assert sandbox.machine is not None
        if name in sandbox.shells:
            return _error(409, "session already exists")
        sandbox.shells[name] = sandbox.machine.programs[name] = await sandbox.machine.start("bash")
        return web.Response(status=201)

    async def execute(self, request: web.Request) -> web.Response:
        sandbox, session, body = self._sandbox(request), request.match_info["session"], await request.json()
        self.calls.append(("execute", body))
        name = str(uuid.uuid4())
        at = f"/root/.daytona/sessions/{session}/{name}"
        sandbox.path(at).mkdir(parents=True)
        sandbox.path(f"{at}/log").touch()
        sandbox.path(f"{at}/command").write_text(body["command"])
        if not body.get("suppressInputEcho"):
            sandbox.echoes.add(name)
        labels = "".join(LABEL.format(at=at, stream=stream, mark=mark) for stream, mark in MARKS.items())
        stdin = sandbox.shells[session].stdin
        assert stdin is not None
        stdin.write(COMMAND.format(at=at, labels=labels).encode())
        await stdin.drain()
        assert body["runAsync"]
        return web.json_response({"cmdId": name}, status=202)

    async def send(self, request: web.Request) -> web.Response:
        sandbox, name = self._sandbox(request), request.match_info["command"]
        data: str = (await request.json())["data"]
        data += "" if data.endswith("\n") else "\n"
        at = f"/root/.daytona/sessions/{request.match_info['session']}/{name}"
        try:
            await asyncio.to_thread(_write, sandbox.path(f"{at}/in"), data.encode())
        except OSError as error:
            return _error(500, f"failed to write to input pipe: {error}")
        if name in sandbox.echoes:
            with sandbox.path(f"{at}/log").open("ab") as log:
                log.write(b"\1\1\1" + data.encode())
        return web.Response(status=204)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        assert sandbox.machine is not None
        at = f"/root/.daytona/sessions/{request.match_info['session']}/{request.match_info['command']}"
        messages = web.WebSocketResponse()
        await messages.prepare(request)
        listening = self.loop.create_task(_listen(messages))
        sent = 0
        with contextlib.suppress(OSError), sandbox.path(f"{at}/log").open("rb", buffering=0) as log:
            ended = sandbox.path(f"{at}/code")
            while not messages.closed:
                over = ended.exists()
                if data := log.read(self.piece_bytes):
                    await messages.send_bytes(data.ljust(1024, b"\0") if self.padded else data)
                    sent += len(data)
                elif sandbox.machine.name not in self.machines.alive:
                    break
                elif over:
                    await messages.close()
                else:
                    await asyncio.sleep(0.02)
                if self.cut_after is not None and sent > self.cut_after:
                    self.cut_after = None
                    break
        listening.cancel()
        if not messages.closed and request.transport is not None:
            request.transport.abort()
        return messages


async def _listen(messages: web.WebSocketResponse) -> None:
    """Answer the client's pings, and notice that it has gone."""
    async for _ in messages:
        pass


def _write(path: Path, data: bytes) -> None:
    """Write to a named pipe that somebody reads. Raises ``OSError`` if nobody does."""
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(pipe, True)
        while data:
            data = data[os.write(pipe, data) :]
    finally:
        os.close(pipe)


def _error(status: int, words: str) -> web.Response:
    return web.json_response({"statusCode": status, "message": words, "error": "refused"}, status=status)


SERVICE = FakeDaytona
