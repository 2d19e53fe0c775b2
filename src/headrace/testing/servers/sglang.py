"""The HTTP protocol of SGLang, according to the source of version 0.5.23, for the fake server in tests.

A *handler* responds to the HTTP requests for one path; ``server`` is the state of the fake server, with the engine that
generates. :data:`ROUTES` contains the handler of each path.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.types.episode import TokenChunk
from headrace.base.types.recorded import Routing
from headrace.testing.servers.base import (
    REASONS,
    FakeServer,
    Handler,
    handle_resume,
    handle_sleep,
    handle_wake,
    handle_weight_label,
    make_handler,
    read_sampling,
    stream_events,
)

VERSION = "0.5.23"
"""The version of SGLang that the fake server reports."""


async def handle_generate(server: FakeServer, request: Request) -> Any:
    """Handle ``/generate``: return a stream of one generated answer or, for a request without ``stream``, the logprobs
    of given tokens."""
    body = await request.json()
    if not body.get("stream"):
        return await _scores(server, body["input_ids"], body["top_logprobs_num"])
    sampling = read_sampling(
        server, body["sampling_params"], length_key="max_new_tokens", stop_ids_key="stop_token_ids"
    )
    sampling = msgspec.structs.replace(
        sampling, record_routing=server.records_routing and body["return_routed_experts"]
    )
    return stream_events(_events(server, server.answer(body["input_ids"], sampling)))


async def _events(server: FakeServer, chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[dict[str, Any]]:
    """Yield an event in SGLang's format for each chunk of an answer: all tokens so far with their logprobs, the label
    of the weights and, in the last event, the experts of all tokens if they were recorded."""
    token_logprobs: list[list[Any]] = []
    routed: list[Routing | None] = []
    async for chunk in chunks:
        tokens = chunk.tokens
        routed += [chunk.prompt_routing, tokens.routing]
        token_logprobs += [
            [logprob, token, None]
            for token, logprob in zip(tokens.ids_T.tolist(), tokens.logprobs_T.tolist(), strict=True)
        ]
        finish = None if chunk.stop_reason is None else {"type": REASONS[chunk.stop_reason]}
        meta = {
            "id": "1",
            "finish_reason": finish,
            "prompt_tokens": 1,
            "completion_tokens": len(token_logprobs),
            "cached_tokens": 0,
            "weight_version": server.label,
            "output_token_logprobs": token_logprobs,
        }
        if finish and (known := [part.experts_RLK for part in routed if part is not None]):
            meta["routed_experts"] = base64.b64encode(np.concatenate(known).astype(np.int32).tobytes()).decode()
        yield {"text": "", "output_ids": [entry[1] for entry in token_logprobs], "meta_info": meta}


async def _scores(server: FakeServer, ids: list[int], top_k: int) -> dict[str, Any]:
    """Return the logprobs of the tokens ``ids`` and of the ``top_k`` most likely entries at each position, in SGLang's
    format; the first token has no logprobs."""
    logprobs, rows = await server.scores(ids, top_k)
    tops: list[list[list[Any]] | None] = [[[value, token, None] for token, value in row.items()] for row in rows]
    meta = {
        "input_token_logprobs": [[None if not at else logprobs[at], ids[at], None] for at in range(len(ids))],
        "input_top_logprobs": [None, *tops[1:]],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


async def _pause(server: FakeServer, request: Request) -> Any:
    """Handle ``/pause_generation``: abort all requests or, in another mode than ``abort``, only pause generation."""
    mode = (await request.json())["mode"]
    if mode == "abort":
        await server.abort()
    else:
        await server.engine.pause()
    return {"message": "Generation paused successfully.", "status": "ok"}


async def _load(server: FakeServer, request: Request) -> Any:
    """Handle ``/update_weights_from_disk``: load the weights in a directory and use them under the label in the
    request."""
    order = await request.json()
    server.recomputes_cache = order["flush_cache"]
    await server.load(Path(order["model_path"]) / "model.safetensors", order["weight_version"])
    return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _info(server: FakeServer) -> dict[str, Any]:
    """Return the response to ``/server_info``: the version and the context length in tokens."""
    return {"version": VERSION, "context_length": server.max_context}


def _model(server: FakeServer) -> dict[str, Any]:
    """Return the response to ``/model_info``: the directory of the model, and the label of its weights."""
    path = str(server.model_dir)
    return {"model_path": path, "tokenizer_path": path, "weight_version": server.label, "is_generation": True}


ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/health"): make_handler(lambda server: Response()),
    ("GET", "/server_info"): make_handler(_info),
    ("GET", "/model_info"): make_handler(_model),
    ("POST", "/generate"): handle_generate,
    ("POST", "/pause_generation"): _pause,
    ("POST", "/continue_generation"): handle_resume,
    ("POST", "/release_memory_occupation"): handle_sleep,
    ("POST", "/resume_memory_occupation"): handle_wake,
    ("POST", "/update_weights_from_disk"): _load,
    ("POST", "/update_weight_version"): handle_weight_label,
}
