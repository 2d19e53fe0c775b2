"""The common part of the fake vLLM and SGLang servers: an engine, the state that requests change, and handlers that
both protocols share.

A *handler* responds to the HTTP requests for one path of a server's protocol. Both protocols identify weights by a
*label*, which is a text; the engine identifies them by a version number.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.requests import Request
from starlette.responses import StreamingResponse
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import RequestError
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt, WeightUpdate
from headrace.engine.native.checks import sampling_problem
from headrace.launch.inprocess import LocalEngine
from headrace.models.lora import load_adapter
from headrace.models.weights import DEFAULT, is_adapted
from headrace.wings.servers.vllm.inside.headrace_receiver import VersionReceiver

REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}
"""The names of stop reasons in both protocols."""


class FileReceiver:
    """The weight receiver of the engine in a fake server. At a commit it loads weights from files into the model, like
    the real servers, instead of receiving tensors from a learner."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Create the receiver. ``model`` is the model of the engine, into which weights are loaded."""
        self._model = model
        self.path = Path()
        """Path of the checkpoint file that the next commit loads."""
        self.adapters: dict[str, Path] = {}
        """The directory from which the next commit loads each adapter, by the name of the adapter."""

    def stage(self, update: WeightUpdate) -> None:
        """Raise ``AssertionError``, because no learner sends weights to this receiver."""
        raise AssertionError("weights come from files")

    def staged_tensors(self) -> dict[str, Tensor]:
        """Return an empty dictionary, because weights are loaded from files and never staged."""
        return {}

    @torch.no_grad()
    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Load the adapters in :attr:`adapters` or, for a model without adapters, the checkpoint in :attr:`path` into
        the model. Version 0 keeps the model's weights. Everything is loaded at once, so the returned iterator is empty
        and ``parts`` is not used."""
        for name, path in self.adapters.items():
            load_adapter(self._model, path, name)
        if version and not is_adapted(self._model):
            self._model.load_state_dict(self._checkpoint().state_dict())
        return iter(())

    def _checkpoint(self) -> PreTrainedModel:
        """Return a model with the tensors of the checkpoint file :attr:`path`. It is loaded by transformers, which
        supports every layout of such a file."""
        with tempfile.TemporaryDirectory() as directory:
            self._model.config.save_pretrained(directory)
            (Path(directory) / self.path.name).symlink_to(self.path)
            model: PreTrainedModel = type(self._model).from_pretrained(directory)
        return model


@dataclass(slots=True)
class FakeServer:
    """The state of a fake server of either kind: an engine, the labels of its weights, and settings that requests
    change."""

    model_dir: Path
    """Directory of the served model, which the server reports."""
    engine: LocalEngine
    """The embedded engine, which generates the answers."""
    files: FileReceiver
    """The weight receiver of the engine, which has the paths of the files that the next commit loads."""
    max_context: int
    """Greatest number of tokens of prompt and answer."""
    labels: dict[int, str] = field(default_factory=lambda: {0: "default"})
    """The label of each version of the weights."""
    recomputes_cache: bool = False
    """Whether a commit computes the KV caches of running sequences again, as the last request for a pause or an update
    said."""
    calls: list[str] = field(default_factory=list)
    """Paths of the requests so far, without those that generate an answer."""
    records_kept: bool = False
    """Whether the server returns the kept-set of each token."""
    records_routing: bool = False
    """Whether the server returns the experts of each token."""
    is_asleep: bool = False
    """Whether the server is asleep: it has released its memory, and generates nothing until it is woken up."""
    worker: VersionReceiver = field(default_factory=lambda: VersionReceiver(torch.device("cpu")))
    """The receiver of weights that are sent over the network. The workers of a real server use the same class."""
    seeds: Iterator[int] = field(default_factory=itertools.count)
    """The seeds of the next answers. Requests contain no seed, so each answer gets the next number."""

    @property
    def label(self) -> str:
        """The label of the weights in use, which the server reports."""
        return self.labels[max(self.labels)]

    async def load(self, path: Path, label: str) -> None:
        """Load the checkpoint file ``path`` and use its weights from now on, under the label ``label``."""
        self.files.path = path
        await self.commit(label)

    async def commit(self, label: str) -> None:
        """Load the files that the receiver names and use their weights as the next version, under the label ``label``.
        Running sequences continue; their KV cache is computed again if :attr:`recomputes_cache` is true."""
        version = max(self.labels) + 1
        await self.engine.commit(version, Interrupt.INFLIGHT_RECOMPUTE if self.recomputes_cache else Interrupt.INFLIGHT)
        self.labels[version] = label

    async def abort(self) -> None:
        """Abort all running answers, which end with the tokens sampled so far, and pause generation until it is
        resumed."""
        self.engine.withdraw_all()
        await self.engine.pause()

    def answer(self, ids: list[int], sampling: Sampling, adapter: str = "") -> AsyncIterator[TokenChunk]:
        """Return an iterator over the chunks of an answer to the token ids ``ids``. ``adapter`` is the name of the LoRA
        adapter to use; empty or the default name: the policy's adapter."""
        agent = "" if adapter == DEFAULT else adapter
        return self.engine.generate(np.array(ids, np.int32), sampling, RequestOptions(agent=agent))

    async def scores(self, ids: list[int], top_k: int) -> tuple[list[float], list[dict[int, float]]]:
        """Return the logprob of each token of ``ids`` and, for each position, the logprobs of the ``top_k`` most likely
        tokens by id; empty dictionaries if ``top_k`` is 0."""
        top = await self.engine.top_scores(Tokens.observed(ids), max(1, top_k))
        rows = [
            dict(zip(row.tolist(), logs.tolist(), strict=True)) if top_k else {}
            for row, logs in zip(top.ids_TK, top.logs_TK, strict=True)
        ]
        return top.logprobs_T.tolist(), rows


Handler = Callable[[FakeServer, Request], Any]
"""A coroutine function that handles a request. It returns an object to encode as JSON, or a response."""


def stream_events(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Return a response that streams ``events`` as server-sent events, one line of JSON for each event and ``[DONE]``
    at the end, as in both protocols."""

    async def lines() -> AsyncIterator[str]:
        """Yield the server-sent events as text."""
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def handle_wake(server: FakeServer, request: Request) -> Any:
    """Handle a request to wake up after :func:`handle_sleep`: allocate the memory again, and resume generation."""
    server.is_asleep = False
    return await handle_resume(server, request)


async def handle_resume(server: FakeServer, request: Request) -> Any:
    """Handle a request to resume generation after a pause. Raises :class:`~headrace.base.errors.RequestError` while the
    server is asleep."""
    if server.is_asleep:
        raise RequestError("the server is asleep", remedy="wake it")
    await server.engine.resume()
    return {"status": "resumed"}


async def handle_sleep(server: FakeServer, request: Request) -> Any:
    """Handle a request to sleep: pause generation and release the memory of the KV cache, until :func:`handle_wake`."""
    await server.engine.pause(release=True)
    server.is_asleep = True
    return {"status": "sleeping"}


async def handle_weight_label(server: FakeServer, request: Request) -> Any:
    """Handle ``/update_weight_version``: commit the adapters that were named before, then set the label of the newest
    weights."""
    label = (await request.json())["new_version"]
    if server.files.adapters:
        await server.commit(label)
    server.labels[max(server.labels)] = label
    return {"success": True, "new_version": server.label}


def make_handler(make_response: Callable[[FakeServer], Any]) -> Handler:
    """Return a handler that responds to every request with the result of ``make_response``, which depends only on the
    server's state."""

    async def handler(server: FakeServer, request: Request) -> Any:
        """Return the result of ``make_response``; the content of the request is not used."""
        return make_response(server)

    return handler


def read_sampling(server: FakeServer, parameters: Mapping[str, Any], *, length_key: str, stop_ids_key: str) -> Sampling:
    """Return the sampling parameters in ``parameters``, the part of a request that contains them. ``length_key`` and
    ``stop_ids_key`` are the protocol's names for the length limit and the stop ids. The seed is the next seed of the
    server. Raises :class:`~headrace.base.errors.RequestError` for invalid parameters."""
    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    bias = {int(token): value for token, value in (parameters.get("logit_bias") or {}).items()}
    sampling = Sampling(
        max_new_tokens=parameters[length_key],
        stop_ids=tuple(parameters[stop_ids_key]),
        logit_bias=bias,
        seed=next(server.seeds),
        **{name: parameters[name] for name in same if name in parameters},
    )
    if problem := sampling_problem(sampling, vocab_size=2**31 - 1):
        # raised here, because the status cannot change after the stream has begun
        raise RequestError(problem, remedy="correct it")
    return sampling
