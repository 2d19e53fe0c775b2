"""Fake servers with the HTTP protocols of vLLM and SGLang and the embedded engine as their engine. With them, clients
of such servers are tested without the real servers, which take minutes to start or need a GPU.

They generate answers, record kept-sets and experts, pause, and load and label weights like the real servers. They have
no other functions.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.base.clock import RealClock
from headrace.base.errors import RequestError
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.launch.inprocess import LocalEngine
from headrace.models import ModelConfig, load_model
from headrace.models.rope import context_limit
from headrace.testing.servers import sglang, vllm
from headrace.testing.servers.base import FakeServer, FileReceiver, Handler
from headrace.wings.servers.client.launching import ServeRequirements

__all__ = ["FakeServer", "fake_server"]


@contextmanager
def fake_server(kind: str, required: ServeRequirements) -> Iterator[tuple[str, FakeServer]]:
    """Start a fake server of ``kind`` (``vllm`` or ``sglang``) in a thread of this process, which meets the
    requirements ``required``, and yield its URL and its state, which a test may read. The server is stopped at the end
    of the context."""
    routes = {"vllm": vllm.ROUTES, "sglang": sglang.ROUTES}[kind]
    started: list[FakeServer] = []
    ready = threading.Event()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        """Run the engine of the fake server while the HTTP server ``app`` runs, and store the server's state where
        handlers find it."""
        async with _engine(required) as server:
            app.state.server = server
            started.append(server)
            ready.set()
            yield

    app = Starlette(
        routes=[Route(path, _endpoint(path, handler), methods=[method]) for (method, path), handler in routes.items()],
        lifespan=lifespan,
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        uvicorn_server = uvicorn.Server(config)
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        ready.wait(30)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", started[0]
        finally:
            uvicorn_server.should_exit = True
            thread.join(10)


@asynccontextmanager
async def _engine(required: ServeRequirements) -> AsyncIterator[FakeServer]:
    """Run Headrace's embedded engine on the CPU while the context is open, and yield the state of a fake server with
    this engine, which meets the requirements ``required``. Version 0 of its weights is loaded from the files of the
    model."""
    model = load_model(ModelConfig(path=required.path, lora=required.lora))
    files = FileReceiver(model)
    config = EngineConfig(device="cpu", flush_tokens=1, kernels="off", max_sequences=16)
    limit = context_limit(model.config)
    assert limit is not None
    context = limit.length
    core = NativeEngine(model, config, max_context=context, receiver=files, clock=RealClock(), decode=None)
    core.commit(0)
    core.take_swaps()
    async with LocalEngine(core, clock=RealClock()) as engine:
        yield FakeServer(
            Path(required.path),
            engine,
            files,
            context,
            records_kept=required.record_kept,
            records_routing=required.record_routing,
        )


def _endpoint(path: str, handler: Handler) -> Callable[[Request], Any]:
    """Return the HTTP endpoint for ``path``, which calls ``handler``. It records the path of each call, except calls
    that generate, and responds to an invalid request with status 400."""

    async def endpoint(request: Request) -> Response:
        """Respond to one HTTP request with the response or the JSON object that ``handler`` returns, or with status 400
        and the error."""
        server: FakeServer = request.app.state.server
        if handler not in (vllm.handle_generate, sglang.handle_generate):
            server.calls.append(path)
        try:
            answer = await handler(server, request)
        except RequestError as error:
            details = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": details}, status_code=400)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return endpoint
