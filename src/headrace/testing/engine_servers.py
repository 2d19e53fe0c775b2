"""Servers that speak the protocols of vLLM and SGLang, with the embedded engine behind them: for tests of whatever
talks to such servers, where the real ones take minutes to start or need a GPU.

What they say has the shapes that vLLM 0.32 was recorded to say (``tests/engine/recorded``); of SGLang, those of the
source of 0.5.23. They sample, pause, load and label as those do, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.clock import RealClock
from headrace.engine import EngineConfig
from headrace.engine.base import TokenChunk
from headrace.engine.local import LocalEngine
from headrace.engine.native import NativeEngine
from headrace.engine.native.checks import sampling_problem
from headrace.errors import RequestError
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.types.episode import StopReason
from headrace.types.sampling import Sampling
from headrace.types.tokens import Tokens
from headrace.types.weights import Interrupt, WeightUpdate

VLLM_VERSION, SGLANG_VERSION = "0.32.0", "0.5.23"
_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}


class _File:
    """Takes weights from a file, when it is told to."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = weight_tensors(model)
        self.path = Path()

    def stage(self, update: WeightUpdate) -> None:
        raise AssertionError("weights come from files")

    @torch.no_grad()
    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        if version:
            for name, tensor in load_file(self.path).items():
                self._tensors[name].copy_(tensor)
        return iter(())


@dataclass(slots=True)
class FakeServer:
    """What both kinds are made of: an engine, the labels of its weights, and what it was told to do."""

    model_dir: Path
    engine: LocalEngine
    file: _File
    max_context: int
    """Tokens of prompt and answer."""
    labels: dict[int, str] = field(default_factory=lambda: {0: "default"})
    """By the versions that the engine counts by itself."""
    recompute: bool = False
    calls: list[str] = field(default_factory=list)
    """The paths that were asked for, streams aside."""
    seeds: Iterator[int] = field(default_factory=itertools.count)
    """Of the next answers: requests come without one."""

    @property
    def label(self) -> str:
        """Of the weights in use."""
        return self.labels[max(self.labels)]

    async def load(self, path: Path, label: str) -> None:
        """Use the weights in the file ``path``."""
        self.file.path = path
        version = max(self.labels) + 1
        await self.engine.commit(version, Interrupt.INFLIGHT_RECOMPUTE if self.recompute else Interrupt.INFLIGHT)
        self.labels[version] = label

    async def abort(self) -> None:
        """End every answer, and begin none."""
        self.engine.withdraw_all()
        await self.engine.pause()

    def answer(self, ids: list[int], sampling: Sampling) -> AsyncIterator[TokenChunk]:
        """One answer; draws differ from request to request."""
        return self.engine.generate(np.array(ids, np.int32), sampling)

    async def scores(self, ids: list[int], top_k: int) -> tuple[list[float], list[dict[int, float]]]:
        """The logprob of each token, and of the likeliest entries."""
        top = await self.engine.top_scores(Tokens.observed(ids), max(1, top_k))
        rows = [
            dict(zip(row.tolist(), logs.tolist(), strict=True)) if top_k else {}
            for row, logs in zip(top.ids_TK, top.logs_TK, strict=True)
        ]
        return top.logprobs_T.tolist(), rows


Handler = Callable[[FakeServer, Request], Any]


@contextmanager
def fake_server(kind: str, model_dir: Path) -> Iterator[tuple[str, FakeServer]]:
    """The URL of a server of ``kind`` that serves the model in ``model_dir``, and the server."""
    routes = {"vllm": _VLLM, "sglang": _SGLANG}[kind]
    started: list[FakeServer] = []
    ready = threading.Event()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with _engine(model_dir) as server:
            app.state.server = server
            started.append(server)
            ready.set()
            yield

    app = Starlette(
        routes=[Route(path, _called(path, handler), methods=[method]) for (method, path), handler in routes.items()],
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
async def _engine(model_dir: Path) -> AsyncIterator[FakeServer]:
    model = load_model(ModelConfig(path=str(model_dir)))
    file = _File(model)
    config = EngineConfig(device="cpu", flush_tokens=1, kernels="off", max_sequences=16)
    context = model.config.max_position_embeddings
    core = NativeEngine(model, config, max_context=context, receiver=file, clock=RealClock(), decode=None)
    core.commit(0)
    core.take_swaps()
    async with LocalEngine(core, clock=RealClock()) as engine:
        yield FakeServer(model_dir, engine, file, context)


def _called(path: str, handler: Handler) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        server: FakeServer = request.app.state.server
        if handler not in (_vllm_generate, _sglang_generate):
            server.calls.append(path)
        try:
            answer = await handler(server, request)
        except RequestError as error:
            told = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": told}, status_code=400)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return endpoint


def _stream(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


# -- vLLM -----------------------------------------------------------------------------------------------------------


async def _vllm_generate(server: FakeServer, request: Request) -> Any:
    body = await request.json()
    wanted = body["sampling_params"]
    if wanted.get("prompt_logprobs") is not None:
        return await _vllm_scores(server, body["token_ids"], wanted["prompt_logprobs"])
    sampling = _sampling(server, wanted, most="max_tokens", stop_ids="stop_token_ids")
    chunks = server.answer(body["token_ids"], sampling)
    return _stream(_vllm_events(server, chunks, certain=sampling.temperature == 0))


async def _vllm_events(
    server: FakeServer, chunks: AsyncIterator[TokenChunk], *, certain: bool
) -> AsyncIterator[dict[str, Any]]:
    versions: list[int] = []
    async for chunk in chunks:
        tokens = chunk.tokens
        versions += tokens.versions_T.tolist()
        ended = None if chunk.stop_reason is None else _REASONS[chunk.stop_reason]
        logprobs = [-0.25] * len(tokens) if certain else tokens.logprobs_T.tolist()  # vLLM tells those of temperature 1
        told = [
            {
                "token_id": token,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 1}],
            }
            for token, logprob in zip(tokens.ids_T.tolist(), logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": ended,
            "stop_reason": None,
            "token_ids": tokens.ids_T.tolist(),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": _spans(server, versions) if ended else None,
            "logprobs": {"content": told},
        }
        yield {"request_id": "generate-tokens-1", "usage": None, "output_mode": "tokens", "choices": [choice]}


def _spans(server: FakeServer, versions: list[int]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        label = server.labels[version]
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans


async def _vllm_scores(server: FakeServer, ids: list[int], top_k: int) -> dict[str, Any]:
    logprobs, rows = await server.scores(ids, top_k)
    told: list[dict[str, Any] | None] = [None]
    for at in range(1, len(ids)):
        row = {**rows[at], ids[at]: logprobs[at]}
        told.append({str(token): {"logprob": value, "rank": 1, "decoded_token": None} for token, value in row.items()})
    return {"request_id": "generate-tokens-1", "choices": [], "prompt_logprobs": told}


async def _vllm_pause(server: FakeServer, request: Request) -> Any:
    server.recompute = request.query_params.get("clear_cache", "true") == "true"
    if request.query_params.get("mode", "abort") == "abort":
        await server.abort()
    else:
        await server.engine.pause()
    return {"status": "paused"}


async def _resume(server: FakeServer, request: Request) -> Any:
    await server.engine.resume()
    return {"status": "resumed"}


async def _vllm_update(server: FakeServer, request: Request) -> Any:
    server.file.path = Path((await request.json())["update_info"]["path"])
    return {"message": "Weights updated"}


async def _vllm_finish(server: FakeServer, request: Request) -> Any:
    await server.load(server.file.path, (await request.json())["weight_version"])
    return {"message": "Weight update finished"}


async def _name_weights(server: FakeServer, request: Request) -> Any:
    server.labels[max(server.labels)] = (await request.json())["new_version"]
    return {"success": True, "new_version": server.label}


def _vllm_models(server: FakeServer) -> dict[str, Any]:
    model = {"id": "m", "root": str(server.model_dir), "max_model_len": server.max_context}
    return {"object": "list", "data": [model]}


def _says(tell: Callable[[FakeServer], Any]) -> Handler:
    async def handler(server: FakeServer, request: Request) -> Any:
        return tell(server)

    return handler


_VLLM: Mapping[tuple[str, str], Handler] = {
    ("GET", "/health"): _says(lambda server: Response()),
    ("GET", "/version"): _says(lambda server: {"version": VLLM_VERSION}),
    ("GET", "/v1/models"): _says(_vllm_models),
    ("GET", "/weight_info"): _says(lambda server: {"weight_version": server.label}),
    ("POST", "/inference/v1/generate"): _vllm_generate,
    ("POST", "/pause"): _vllm_pause,
    ("POST", "/resume"): _resume,
    ("POST", "/start_weight_update"): _says(lambda server: {"message": "Weight update started"}),
    ("POST", "/update_weights"): _vllm_update,
    ("POST", "/finish_weight_update"): _vllm_finish,
    ("POST", "/update_weight_version"): _name_weights,
}


# -- SGLang ---------------------------------------------------------------------------------------------------------


async def _sglang_generate(server: FakeServer, request: Request) -> Any:
    body = await request.json()
    if not body.get("stream"):
        return await _sglang_scores(server, body["input_ids"], body["top_logprobs_num"])
    sampling = _sampling(server, body["sampling_params"], most="max_new_tokens", stop_ids="stop_token_ids")
    return _stream(_sglang_events(server, server.answer(body["input_ids"], sampling)))


async def _sglang_events(server: FakeServer, chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[dict[str, Any]]:
    told: list[list[Any]] = []
    async for chunk in chunks:
        tokens = chunk.tokens
        told += [
            [logprob, token, None]
            for token, logprob in zip(tokens.ids_T.tolist(), tokens.logprobs_T.tolist(), strict=True)
        ]
        finish = None if chunk.stop_reason is None else {"type": _REASONS[chunk.stop_reason]}
        meta = {
            "id": "1",
            "finish_reason": finish,
            "prompt_tokens": 1,
            "completion_tokens": len(told),
            "cached_tokens": 0,
            "weight_version": server.label,
            "output_token_logprobs": told,
        }
        yield {"text": "", "output_ids": [one[1] for one in told], "meta_info": meta}


async def _sglang_scores(server: FakeServer, ids: list[int], top_k: int) -> dict[str, Any]:
    logprobs, rows = await server.scores(ids, top_k)
    tops: list[list[list[Any]] | None] = [[[value, token, None] for token, value in row.items()] for row in rows]
    meta = {
        "input_token_logprobs": [[None if not at else logprobs[at], ids[at], None] for at in range(len(ids))],
        "input_top_logprobs": [None, *tops[1:]],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


async def _sglang_pause(server: FakeServer, request: Request) -> Any:
    mode = (await request.json())["mode"]
    if mode == "abort":
        await server.abort()
    else:
        await server.engine.pause()
    return {"message": "Generation paused successfully.", "status": "ok"}


async def _sglang_load(server: FakeServer, request: Request) -> Any:
    order = await request.json()
    server.recompute = order["flush_cache"]
    await server.load(Path(order["model_path"]) / "model.safetensors", order["weight_version"])
    return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _sglang_info(server: FakeServer) -> dict[str, Any]:
    return {"version": SGLANG_VERSION, "context_length": server.max_context}


def _sglang_model(server: FakeServer) -> dict[str, Any]:
    path = str(server.model_dir)
    return {"model_path": path, "tokenizer_path": path, "weight_version": server.label, "is_generation": True}


_SGLANG: Mapping[tuple[str, str], Handler] = {
    ("GET", "/health"): _says(lambda server: Response()),
    ("GET", "/server_info"): _says(_sglang_info),
    ("GET", "/model_info"): _says(_sglang_model),
    ("POST", "/generate"): _sglang_generate,
    ("POST", "/pause_generation"): _sglang_pause,
    ("POST", "/continue_generation"): _resume,
    ("POST", "/update_weights_from_disk"): _sglang_load,
    ("POST", "/update_weight_version"): _name_weights,
}


def _sampling(server: FakeServer, wanted: Mapping[str, Any], *, most: str, stop_ids: str) -> Sampling:
    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    bias = {int(token): value for token, value in (wanted.get("logit_bias") or {}).items()}
    sampling = Sampling(
        max_new_tokens=wanted[most],
        stop_ids=tuple(wanted[stop_ids]),
        logit_bias=bias,
        seed=next(server.seeds),
        **{name: wanted[name] for name in same if name in wanted},
    )
    if problem := sampling_problem(sampling, vocab_size=2**31 - 1):
        raise RequestError(problem, remedy="correct it")  # before the stream begins
    return sampling
