"""The HTTP protocol of vLLM, with responses as recorded from version 0.32 (``tests/wings/servers/recorded``), for the
fake server in tests.

A *handler* responds to the HTTP requests for one path; ``server`` is the state of the fake server, with the engine that
generates. :data:`ROUTES` contains the handler of each path.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.base.errors import RequestError
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

VERSION = "0.32.0"
"""The version of vLLM that the fake server reports."""


async def handle_generate(server: FakeServer, request: Request) -> Any:
    """Handle ``/inference/v1/generate``: return a stream of one generated answer or, if the sampling parameters contain
    ``prompt_logprobs``, the logprobs of given tokens. Like the real server, it refuses an invalid cache salt and, if it
    records kept-sets, sampling at temperature 0 or without top-k."""
    body = await request.json()
    parameters = body["sampling_params"]
    if parameters.get("prompt_logprobs") is not None:
        return await _scores(server, body["token_ids"], parameters["prompt_logprobs"])
    salt = body.get("cache_salt", "-")
    if not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0"):
        raise RequestError("Parameter 'cache_salt' must be at most 128 characters", remedy="give another")
    sampling = read_sampling(server, parameters, length_key="max_tokens", stop_ids_key="stop_token_ids")
    if server.records_kept and (sampling.temperature <= 0 or sampling.top_k <= 0):
        raise RequestError("sampling distribution replay requires top_k > 0", remedy="give one")
    sampling = msgspec.structs.replace(sampling, record_kept=server.records_kept, record_routing=server.records_routing)
    chunks = server.answer(body["token_ids"], sampling, body.get("model", ""))
    return stream_events(_events(server, chunks, certain=sampling.temperature == 0))


async def _events(
    server: FakeServer, chunks: AsyncIterator[TokenChunk], *, certain: bool
) -> AsyncIterator[dict[str, Any]]:
    """Yield an event in vLLM's format for each chunk of an answer: its new tokens with their logprobs and kept-sets
    and, in the last event, the versions and the experts of all tokens. ``certain`` says that the temperature is 0; vLLM
    then reports the logprobs of temperature 1, for which a constant is used here."""
    versions: list[int] = []
    routed: list[Routing | None] = []
    async for chunk in chunks:
        tokens = chunk.tokens
        routed += [chunk.prompt_routing, tokens.routing]
        versions += tokens.versions_T.tolist()
        reason = None if chunk.stop_reason is None else REASONS[chunk.stop_reason]
        logprobs = [-0.25] * len(tokens) if certain else tokens.logprobs_T.tolist()  # like vLLM, not the logprob 0
        token_logprobs = [
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
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens.ids_T.tolist(),
            "routed_experts": _encode_experts(routed) if reason and server.records_routing else None,
            "sampling_mask": [span.tolist() for span in tokens.kept.spans()] if tokens.kept else None,
            "weight_versions": _version_spans(server, versions) if reason else None,
            "logprobs": {"content": token_logprobs},
        }
        yield {"request_id": "generate-tokens-1", "usage": None, "output_mode": "tokens", "choices": [choice]}


def _encode_experts(parts: list[Routing | None]) -> str:
    """Return the experts of all tokens of an answer in vLLM's encoding: a numpy array file in base64. ``parts`` are the
    experts of consecutive tokens; ``None`` for a part without experts."""
    experts_NLK = np.concatenate([part.experts_RLK for part in parts if part is not None])
    file = io.BytesIO()
    np.save(file, experts_NLK)
    return base64.b64encode(file.getvalue()).decode()


def _version_spans(server: FakeServer, versions: list[int]) -> list[dict[str, Any]]:
    """Return the labels of the weights that sampled an answer in vLLM's format: a list of spans of tokens, each with
    its label, the index of its first token and the index after its last token. ``versions`` contains the version of
    each token."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        label = server.labels[version]
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans


async def _scores(server: FakeServer, ids: list[int], top_k: int) -> dict[str, Any]:
    """Return the logprobs of the tokens ``ids`` and of the ``top_k`` most likely entries at each position, in vLLM's
    format; the first token has no logprobs."""
    logprobs, rows = await server.scores(ids, top_k)
    token_logprobs: list[dict[str, Any] | None] = [None]
    for at in range(1, len(ids)):
        row = {**rows[at], ids[at]: logprobs[at]}
        token_logprobs.append(
            {str(token): {"logprob": value, "rank": 1, "decoded_token": None} for token, value in row.items()}
        )
    return {"request_id": "generate-tokens-1", "choices": [], "prompt_logprobs": token_logprobs}


async def _pause(server: FakeServer, request: Request) -> Any:
    """Handle ``/pause``: abort all requests or, in another mode than ``abort``, only pause generation. Store whether
    the KV caches of running sequences have to be computed again after the update."""
    server.recomputes_cache = request.query_params.get("clear_cache", "true") == "true"
    if request.query_params.get("mode", "abort") == "abort":
        await server.abort()
    else:
        await server.engine.pause()
    return {"status": "paused"}


async def _update(server: FakeServer, request: Request) -> Any:
    """Handle ``/update_weights``: store the path of the checkpoint file, which is loaded at the end of the update."""
    server.files.path = Path((await request.json())["update_info"]["path"])
    return {"message": "Weights updated"}


async def _finish(server: FakeServer, request: Request) -> Any:
    """Handle ``/finish_weight_update``: load the stored checkpoint file, and use its weights under the label in the
    request."""
    await server.load(server.files.path, (await request.json())["weight_version"])
    return {"message": "Weight update finished"}


async def _load_adapter(server: FakeServer, request: Request) -> Any:
    """Handle ``/v1/load_lora_adapter``: store the directory of an adapter, which the next commit loads."""
    order = await request.json()
    server.files.adapters[order["lora_name"]] = Path(order["lora_path"])
    return PlainTextResponse(f"Success: LoRA adapter '{order['lora_name']}' added successfully.")


async def _call_workers(server: FakeServer, request: Request) -> Any:
    """Handle ``/collective_rpc``, which calls a method of Headrace's worker extension in every worker of vLLM. The fake
    server has one worker, so the response contains one result: ``None`` for a method that returns nothing.

    ``replace_adapter`` stores the directory of an adapter. ``other_source`` returns the address of another run that
    sends weights to this machine; the other methods start, report and stop the reception of a version of the weights.
    """
    order = await request.json()
    worker, arguments = server.worker, order["args"]
    match order["method"]:
        case "replace_adapter":
            name, path = arguments
            server.files.adapters[name] = Path(path)
        case "other_source":
            return {"results": [worker.other_source(*arguments)]}
        case "start_receiving":
            worker.start_receiving(*arguments)
        case "receive_status":
            return {"results": [worker.receive_status()]}
        case "stop_receiving":
            worker.stop_receiving()
    return {"results": [None]}


def _models(server: FakeServer) -> dict[str, Any]:
    """Return the response to ``/v1/models``: the served model with its context length, and the loaded adapters."""
    model = {"id": "m", "root": str(server.model_dir), "max_model_len": server.max_context}
    return {"object": "list", "data": [model, *({"id": name} for name in server.files.adapters)]}


ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/health"): make_handler(lambda server: Response()),
    ("GET", "/version"): make_handler(lambda server: {"version": VERSION}),
    ("GET", "/v1/models"): make_handler(_models),
    ("GET", "/weight_info"): make_handler(lambda server: {"weight_version": server.label}),
    ("POST", "/inference/v1/generate"): handle_generate,
    ("POST", "/pause"): _pause,
    ("POST", "/resume"): handle_resume,
    ("POST", "/sleep"): handle_sleep,
    ("POST", "/wake_up"): handle_wake,
    ("POST", "/start_weight_update"): make_handler(lambda server: {"message": "Weight update started"}),
    ("POST", "/update_weights"): _update,
    ("POST", "/finish_weight_update"): _finish,
    ("POST", "/update_weight_version"): handle_weight_label,
    ("POST", "/v1/load_lora_adapter"): _load_adapter,
    ("POST", "/collective_rpc"): _call_workers,
}
