"""A stand-in for Modal: its control plane and the router of its machines, by gRPC, as far as the driver uses them.

The client package reaches it over HTTP/2 on this machine. What is refused, is refused as the service does it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import modal.client
from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.wings.sandboxes.fake_machines import Machine, ServiceThread

SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS


class FakeModal(ServiceThread):
    """The service. ``environment`` is what the client package reads to reach it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, Any]] = []
        self.refuse: dict[str, tuple[Status, str]] = {}
        """The status and the words with which calls of a kind are refused."""
        self.cut_after: int | None = None
        """After how many bytes of output all connections are cut, once; ``None``: never."""
        self.slow = asyncio.Event()
        """Sandboxes are made only while it is set."""
        self.slow.set()
        self.connections: set[Any] = set()
        modal.client._Client._set_env_client(None)  # the one of the process may know another service
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.environment = {
            "MODAL_SERVER_URL": self.url, "MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1",
            "MODAL_CONFIG_PATH": str(folder / "modal.toml"),
        }  # fmt: skip
        self._server: Any = None
        self(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        self._server = Server([_only(ModalClientBase, Control(self)), _only(TaskCommandRouterBase, Router(self))])
        make = self._server._protocol_factory

        def made() -> Any:
            protocol = make()
            begin = protocol.connection_made
            protocol.connection_made = lambda transport: (self.connections.add(transport), begin(transport))
            return protocol

        self._server._protocol_factory = made
        await self._server.start(sock=listening)

    def stop(self) -> None:
        if self.loop.is_closed():
            return

        async def close() -> None:
            self.cut()
            self._server.close()

        self(close())
        super().stop()
        modal.client._Client._set_env_client(None)

    def cut(self) -> None:
        """Cut all connections."""
        for transport in self.connections:
            transport.abort()
        self.connections.clear()


def _only(base: type, calls: Any) -> Any:
    """A service of gRPC with the calls that are there; others are refused as unknown."""

    async def unknown(self: Any, stream: Any) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, "the stand-in does not have this call")

    def known(name: str) -> Any:
        async def call(self: Any, stream: Any) -> None:
            request = await stream.recv_message()
            calls.check(name, stream, request)
            await getattr(calls, name)(stream, request)

        return call

    names = base.__abstractmethods__  # type: ignore[attr-defined]
    methods = {name: known(name) if hasattr(calls, name) else unknown for name in names}
    return type(f"Only{base.__name__}", (base,), methods)()


class Control:
    """The control plane."""

    def __init__(self, service: FakeModal) -> None:
        self.service = service
        self.machines = service.machines

    def check(self, name: str, stream: Any, request: Any) -> None:
        if stream.metadata.get("x-modal-token-secret") != "as-1":
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID or secret is wrong")
        if name.endswith("V2") and stream.metadata.get("x-modal-auth-token") != _token():
            raise GRPCError(Status.UNAUTHENTICATED, "no auth token")
        self.service.calls.append((name, request))
        if name in self.service.refuse:
            raise GRPCError(*self.service.refuse[name])

    async def ClientHello(self, stream: Any, request: Any) -> None:
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any, request: Any) -> None:
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=_token()))

    async def EnvironmentGetOrCreate(self, stream: Any, request: Any) -> None:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def AppGetOrCreate(self, stream: Any, request: Any) -> None:
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}"))

    async def ImageGetOrCreate(self, stream: Any, request: Any) -> None:
        name = request.image.dockerfile_commands[0].removeprefix("FROM ")
        result = api_pb2.GenericResult(status=SUCCESS)
        if name not in self.machines.images:
            words = f"Skipped: manifest for {name} not found: manifest unknown"
            result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception=words)
        image = f"im-{name.replace(':', '+')}"
        await stream.send_message(
            api_pb2.ImageGetOrCreateResponse(image_id=image, result=result, metadata=api_pb2.ImageMetadata())
        )

    async def ImageFromId(self, stream: Any, request: Any) -> None:
        if _image(request.image_id) not in self.machines.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        await stream.send_message(api_pb2.ImageFromIdResponse(image_id=request.image_id))

    async def ImageDelete(self, stream: Any, request: Any) -> None:
        if not await self.machines.remove(_image(request.image_id)):
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        await stream.send_message(empty_pb2.Empty())

    async def SandboxCreateV2(self, stream: Any, request: Any) -> None:
        await self.service.slow.wait()
        wanted = request.definition
        blocked = wanted.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        machine = await self.machines.start(
            _image(wanted.image_id),
            {tag.tag_name: tag.tag_value for tag in request.tags},
            life_s=wanted.timeout_secs,
            network=not blocked,
        )
        access = api_pb2.CommandRouterAccess(url=self.service.url, jwt=_token())
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=f"sb-{machine.name}", task_id=f"ta-{machine.name}V", command_router_access=access
            )
        )

    async def SandboxListV2(self, stream: Any, request: Any) -> None:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        listed = [
            api_pb2.SandboxInfo(id=f"sb-{machine.name}", created_at=float(machine.name[1:]))
            for machine in reversed(self.machines.alive.values())
            if wanted.items() <= machine.tags.items()
            and (not request.before_timestamp or float(machine.name[1:]) < request.before_timestamp)
        ]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=listed[:2]))

    async def SandboxTagsGetV2(self, stream: Any, request: Any) -> None:
        tags = self.machines.alive[request.sandbox_id.removeprefix("sb-")].tags
        made = [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=made))

    async def SandboxTerminateV2(self, stream: Any, request: Any) -> None:
        await self.machines.end(request.sandbox_id.removeprefix("sb-"))
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    async def SandboxGetCommandRouterAccess(self, stream: Any, request: Any) -> None:
        await stream.send_message(api_pb2.SandboxGetCommandRouterAccessResponse(url=self.service.url, jwt=_token()))


class Router:
    """What runs commands on machines. Outputs are kept, so that a stream can be resumed at any byte."""

    def __init__(self, service: FakeModal) -> None:
        self.service = service
        self._kept: dict[str, bytearray] = defaultdict(bytearray)
        self._written: dict[str, int] = defaultdict(int)
        self._more: dict[str, asyncio.Condition] = defaultdict(asyncio.Condition)
        self._over: set[str] = set()
        self._tasks: set[Any] = set()

    def check(self, name: str, stream: Any, request: Any) -> None:
        if stream.metadata.get("authorization") != f"Bearer {_token()}":
            raise GRPCError(Status.UNAUTHENTICATED, "no token")
        self.service.calls.append((name, request))
        if name in self.service.refuse:
            raise GRPCError(*self.service.refuse[name])
        if request.task_id.removeprefix("ta-").removesuffix("V") not in self.service.machines.alive:
            raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} has terminated")

    def _machine(self, request: Any) -> Machine:
        return self.service.machines.alive[request.task_id.removeprefix("ta-").removesuffix("V")]

    async def TaskExecStart(self, stream: Any, request: Any) -> None:
        machine = self._machine(request)
        program = await machine.start(*request.command_args)
        machine.programs[request.exec_id] = program
        task = asyncio.ensure_future(self._keep(request.exec_id, program))
        self._tasks.add(task)
        await stream.send_message(task_command_router_pb2.TaskExecStartResponse())

    async def _keep(self, name: str, program: Any) -> None:
        while data := await program.stdout.read(65536):
            async with self._more[name]:
                self._kept[name] += data
                self._more[name].notify_all()
        async with self._more[name]:
            self._over.add(name)
            self._more[name].notify_all()

    async def TaskExecStdioRead(self, stream: Any, request: Any) -> None:
        name, at = request.exec_id, request.offset
        while True:
            async with self._more[name]:
                while len(self._kept[name]) <= at and name not in self._over:
                    await self._more[name].wait()
            data = bytes(self._kept[name][at : at + 65536])
            if not data:
                break
            await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=data))
            at += len(data)
            if self.service.cut_after is not None and at > self.service.cut_after:
                self.service.cut_after = None
                self.service.cut()
        if request.task_id.removeprefix("ta-").removesuffix("V") not in self.service.machines.alive:
            raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} has terminated")

    async def TaskExecStdinWrite(self, stream: Any, request: Any) -> None:
        stdin = self._machine(request).programs[request.exec_id].stdin
        assert stdin is not None
        fresh = request.data[max(0, self._written[request.exec_id] - request.offset) :]
        self._written[request.exec_id] += len(fresh)
        with contextlib.suppress(ConnectionError):
            stdin.write(fresh)
            await stdin.drain()
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteResponse())

    async def TaskSnapshotFilesystem(self, stream: Any, request: Any) -> None:
        image = await self.service.machines.keep(self._machine(request).name, "")
        await stream.send_message(
            task_command_router_pb2.TaskSnapshotFilesystemResponse(image_id=f"im-{image.replace(':', '+')}")
        )


def _image(identifier: str) -> str:
    return identifier.removeprefix("im-").replace("+", ":")


def _token() -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": 4_000_000_000}).encode())
    return f"head.{body.decode().rstrip('=')}.sign"


SERVICE = FakeModal
