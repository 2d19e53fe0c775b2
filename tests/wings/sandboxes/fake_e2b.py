"""A stand-in for E2B: the REST interface and the sandboxes' own, by Connect, as far as the driver uses them.

The client package reaches it over HTTP on this machine. What is refused, is refused as the service does it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import socket
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.wings.sandboxes.fake_machines import Machine, ServiceThread

KEY = "e2b_0123"


class FakeE2B(ServiceThread):
    """The service. ``environment`` is what the client package reads to reach it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, Any]] = []
        self.refuse: dict[str, tuple[int, str]] = {}
        """The status and the words with which calls of a kind are refused."""
        self.cut_after: int | None = None
        """After how many bytes of output all connections are cut; ``None``: never."""
        self.slow = asyncio.Event()
        """Sandboxes are made only while it is set."""
        self.slow.set()
        self.with_memory: set[str] = set()
        """Snapshots that have processes."""
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.environment = {
            "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY, "E2B_HTTP_VERSION": "1.1",
            "E2B_DEBUG": "false",
        }  # fmt: skip
        self._server = uvicorn.Server(uvicorn.Config(self._application(), log_level="critical", lifespan="off"))
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), self.loop)

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        self._server.force_exit = self._server.should_exit = True
        self._serving.result(30)
        super().stop()

    def cut(self) -> None:
        """Cut all connections."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    def _application(self) -> Any:
        rest = Starlette(
            routes=[
                Route("/v2/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.sandboxes),
                Route("/sandboxes/{name}", self.end, methods=["DELETE"]),
                Route("/sandboxes/{name}/snapshots", self.snapshot, methods=["POST"]),
                Route("/snapshots", self.snapshots),
                Route("/templates/{name}", self.remove, methods=["DELETE"]),
            ]
        )
        inside = ProcessASGIApplication(Processes(self))

        async def application(scope: Any, receive: Any, send: Any) -> None:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            sandbox = headers.get("e2b-sandbox-id")
            answer: Response | None = None
            if sandbox is not None:
                if sandbox not in self.machines.alive:
                    answer = JSONResponse({"message": f"The sandbox {sandbox} was not found", "code": 502}, 502)
                elif headers.get("x-access-token") != f"token-{sandbox}":
                    answer = JSONResponse({"code": "unauthenticated", "message": "no token"}, 401)
                elif scope["path"] == "/health":
                    answer = Response(status_code=204)
            elif headers.get("x-api-key") != KEY:
                answer = JSONResponse({"code": 401, "message": "Invalid API key"}, 401)
            await (answer or (inside if sandbox is not None else rest))(scope, receive, send)

        return application

    def _refused(self, kind: str) -> Response | None:
        if kind in self.refuse:
            status, words = self.refuse[kind]
            return JSONResponse({"code": status, "message": words}, status, {"Should-Retry": "false"})
        return None

    async def create(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(("create", body))
        if (refused := self._refused("create")) is not None:
            return refused
        image = body["templateID"]
        await self.slow.wait()
        try:
            machine = await self.machines.start(
                image, body["metadata"], life_s=body["timeout"], network=body.get("allow_internet_access", True)
            )
        except KeyError:
            return JSONResponse({"code": 404, "message": f"template '{image}' not found"}, 404)
        if image in self.with_memory:
            machine.programs["old"] = await machine.start("sleep", "4400.5")
        name = machine.name
        made = {"templateID": image, "sandboxID": name, "clientID": "c", "envdVersion": "0.6.5"}
        return JSONResponse({**made, "envdAccessToken": f"token-{name}"}, 201)

    async def sandboxes(self, request: Request) -> Response:
        wanted = urllib.parse.parse_qs(urllib.parse.unquote(request.query_params.get("metadata", "")))
        now = datetime.datetime.now(datetime.UTC).isoformat()
        listed = [
            {
                "templateID": "t", "sandboxID": machine.name, "clientID": "c", "startedAt": now, "endAt": now,
                "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 512, "state": "running", "envdVersion": "0.6.5",
                "metadata": machine.tags,
            }
            for machine in self.machines.alive.values()
            if all(machine.tags.get(name) == value for name, (value,) in wanted.items())
        ]  # fmt: skip
        return JSONResponse(listed)

    async def end(self, request: Request) -> Response:
        found = await self.machines.end(request.path_params["name"])
        return Response(status_code=204) if found else JSONResponse({"code": 404, "message": "not found"}, 404)

    async def snapshot(self, request: Request) -> Response:
        body = await request.json()
        kind = "snapshot" if body.get("memory", True) else "snapshot of files"
        self.calls.append((kind, body))
        if (refused := self._refused(kind)) is not None:
            return refused
        if request.path_params["name"] not in self.machines.alive:
            return JSONResponse({"code": 404, "message": "not found"}, 404)
        image = await self.machines.keep(request.path_params["name"], f"team/{body['name']}:default")
        if kind == "snapshot":
            self.with_memory.add(image)
        return JSONResponse({"snapshotID": image, "names": self.machines.images[image]}, 201)

    async def snapshots(self, request: Request) -> Response:
        kept = [{"snapshotID": image, "names": names} for image, names in self.machines.images.items() if names]
        return JSONResponse(kept)

    async def remove(self, request: Request) -> Response:
        found = await self.machines.remove(request.path_params["name"])
        return Response(status_code=204) if found else JSONResponse({"code": 404, "message": "not found"}, 404)


class Processes:
    """The processes of all sandboxes; a request names its sandbox in a header."""

    def __init__(self, service: FakeE2B) -> None:
        self.service = service

    def _machine(self, ctx: RequestContext[Any, Any]) -> Machine:
        return self.service.machines.alive[ctx.request_headers["e2b-sandbox-id"]]

    def _program(self, ctx: RequestContext[Any, Any], selector: Any) -> Any:
        found = self._machine(ctx).programs.get(selector.selector.value)
        if found is None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {selector.selector.value} not found")
        return found

    async def list(self, request: Any, ctx: RequestContext[Any, Any]) -> Any:
        programs = self._machine(ctx).programs
        if "old" in programs:
            old = programs.pop("old")
            programs[old.pid] = old
        return process_pb.ListResponse(processes=[process_pb.ProcessInfo(pid=pid) for pid in programs])

    async def start(self, request: Any, ctx: RequestContext[Any, Any]) -> AsyncIterator[Any]:
        machine = self._machine(ctx)
        who = base64.b64decode(ctx.request_headers["authorization"].removeprefix("Basic ")).decode().rstrip(":")
        if who not in ("root", "user"):
            raise ConnectError(Code.UNAUTHENTICATED, f"invalid username: '{who}'")
        config = request.process
        program = await machine.start(config.cmd, *config.args, user=0 if who == "root" else 1000)
        machine.programs[program.pid] = program
        yield _event(Oneof("start", process_pb.ProcessEvent.StartEvent(pid=program.pid)))
        sent = 0
        while data := await program.stdout.read(32768):  # type: ignore[union-attr]
            yield _event(Oneof("data", process_pb.ProcessEvent.DataEvent(output=Oneof("stdout", data))))
            sent += len(data)
            if self.service.cut_after is not None and sent > self.service.cut_after:
                self.service.cut()
        code = await program.wait()
        if machine.name not in self.service.machines.alive:
            words = f"the connection to sandbox {machine.name} ended before the stream completed"
            raise ConnectError(Code.UNAVAILABLE, words)
        machine.programs.pop(program.pid, None)
        yield _event(Oneof("end", process_pb.ProcessEvent.EndEvent(exit_code=max(code, 0), exited=True)))

    async def send_input(self, request: Any, ctx: RequestContext[Any, Any]) -> Any:
        stdin = self._program(ctx, request.process).stdin
        with contextlib.suppress(ConnectionError):
            stdin.write(request.input.input.value)
            await stdin.drain()
        return process_pb.SendInputResponse()

    async def send_signal(self, request: Any, ctx: RequestContext[Any, Any]) -> Any:
        program = self._program(ctx, request.process)
        self._machine(ctx).kill(program)
        self._machine(ctx).programs.pop(program.pid)
        return process_pb.SendSignalResponse()

    async def connect(self, request: Any, ctx: RequestContext[Any, Any]) -> Any: ...
    async def update(self, request: Any, ctx: RequestContext[Any, Any]) -> Any: ...
    async def stream_input(self, request: Any, ctx: RequestContext[Any, Any]) -> Any: ...
    async def close_stdin(self, request: Any, ctx: RequestContext[Any, Any]) -> Any: ...
    async def get_result(self, request: Any, ctx: RequestContext[Any, Any]) -> Any: ...


def _event(content: Any) -> Any:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=content))


SERVICE = FakeE2B
