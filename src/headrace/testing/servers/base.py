"""The common part of the fake vLLM and SGLang servers of tests: an engine, and the state that requests change.

A *handler* answers the HTTP requests to one path of a server's protocol. Both servers name their weights by a *label*,
a text; the engine behind them counts versions.
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
"""The reasons why an answer ended, in the words of both protocols."""


class FileReceiver:
    """The engine's side of the weight sync in a fake server: at a commit it loads weights from files into the model, as
    the real servers do, instead of tensors that a learner sends."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Load weights into ``model``, the model of the engine."""
        self._model = model
        self.path = Path()
        """Path of a checkpoint."""
        self.adapters: dict[str, Path] = {}
        """Directory of the next version of each adapter, by name."""

    def stage(self, update: WeightUpdate) -> None:
        """Fail: no learner sends weights to this receiver."""
        raise AssertionError("weights come from files")

    def staged(self) -> dict[str, Tensor]:
        """Return an empty dictionary: no weights are staged, they come from files."""
        return {}

    @torch.no_grad()
    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Load the adapters in :attr:`adapters`, or else the checkpoint in :attr:`path`, into the model, at once
        instead of in ``parts`` changes. Version 0 keeps the weights that the model has. The returned iterator is
        empty."""
        for name, path in self.adapters.items():
            load_adapter(self._model, path, name)
        if version and not is_adapted(self._model):
            self._model.load_state_dict(self._checkpoint().state_dict())
        return iter(())

    def _checkpoint(self) -> PreTrainedModel:
        """Return a model with the tensors of the checkpoint file :attr:`path`, loaded by transformers, which reads
        every layout of such a file."""
        with tempfile.TemporaryDirectory() as directory:
            self._model.config.save_pretrained(directory)
            (Path(directory) / self.path.name).symlink_to(self.path)
            model: PreTrainedModel = type(self._model).from_pretrained(directory)
        return model


@dataclass(slots=True)
class FakeServer:
    """The common part of both servers: an engine, the labels of its weights, and the state that requests change."""

    model_dir: Path
    """Directory of the served model, which the server reports."""
    engine: LocalEngine
    """The native engine, in this process, that generates the answers."""
    files: FileReceiver
    """The receiver of the engine's weights: it has the paths of the files that the next commit loads."""
    max_context: int
    """Greatest number of tokens of prompt and answer."""
    labels: dict[int, str] = field(default_factory=lambda: {0: "default"})
    """Label of the weights, by the version that the engine counts."""
    recompute: bool = False
    """Whether a commit computes the caches of running sequences again, as the last request for a pause or an update
    asked."""
    calls: list[str] = field(default_factory=list)
    """Paths of the requests so far, without those that generate an answer."""
    masks: bool = False
    """Whether the server returns the kept-set of each token."""
    routing: bool = False
    """Whether the server returns the experts of each token."""
    asleep: bool = False
    """Whether the server has freed its memory. It then does nothing until it is woken."""
    worker: VersionReceiver = field(default_factory=lambda: VersionReceiver(torch.device("cpu")))
    """The receiver of weights that are sent to the server's machine over the network. A worker of a real server runs
    the same class."""
    seeds: Iterator[int] = field(default_factory=itertools.count)
    """The seeds of the next answers. Requests contain no seed, so each answer takes the next number."""

    @property
    def label(self) -> str:
        """The label of the weights in use, as the server reports it."""
        return self.labels[max(self.labels)]

    async def load(self, path: Path, label: str) -> None:
        """Use the weights in the checkpoint file ``path`` from now on, under the label ``label``."""
        self.files.path = path
        await self.commit(label)

    async def commit(self, label: str) -> None:
        """Use the weights that the files of the receiver contain now as the next version, under the label ``label``.
        Running sequences continue; their KV cache is computed again if :attr:`recompute` is true."""
        version = max(self.labels) + 1
        await self.engine.commit(version, Interrupt.INFLIGHT_RECOMPUTE if self.recompute else Interrupt.INFLIGHT)
        self.labels[version] = label

    async def abort(self) -> None:
        """Abort all running answers, which keep the tokens they have, and begin no others until generation is
        resumed."""
        self.engine.withdraw_all()
        await self.engine.pause()

    def answer(self, ids: list[int], sampling: Sampling, adapter: str = "") -> AsyncIterator[TokenChunk]:
        """Yield an answer to the token ids ``ids`` in chunks. ``adapter`` names the LoRA adapter to answer with; empty
        or the default name: the policy's."""
        agent = "" if adapter == DEFAULT else adapter
        return self.engine.generate(np.array(ids, np.int32), sampling, RequestOptions(agent=agent))

    async def scores(self, ids: list[int], top_k: int) -> tuple[list[float], list[dict[int, float]]]:
        """Return the logprob of each token of ``ids``, and for each position the ``top_k`` likeliest token ids with
        their logprobs; empty dictionaries where ``top_k`` is 0."""
        top = await self.engine.top_scores(Tokens.observed(ids), max(1, top_k))
        rows = [
            dict(zip(row.tolist(), logs.tolist(), strict=True)) if top_k else {}
            for row, logs in zip(top.ids_TK, top.logs_TK, strict=True)
        ]
        return top.logprobs_T.tolist(), rows


Handler = Callable[[FakeServer, Request], Any]
"""A coroutine function that answers a request: with an object that becomes JSON, or with a response."""


def stream(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Return a response that sends ``events`` as server-sent events, one line of JSON each, with ``[DONE]`` at the end,
    as both protocols have it."""

    async def lines() -> AsyncIterator[str]:
        """Yield the lines of the response."""
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def wake(server: FakeServer, request: Request) -> Any:
    """Answer a request to wake up after :func:`sleep`: take the memory again, and resume generation."""
    server.asleep = False
    return await resume(server, request)


async def resume(server: FakeServer, request: Request) -> Any:
    """Answer a request to resume generation after a pause. Refused while the server sleeps."""
    if server.asleep:
        raise RequestError("the server is asleep", remedy="wake it")
    await server.engine.resume()
    return {"status": "resumed"}


async def sleep(server: FakeServer, request: Request) -> Any:
    """Answer a request to sleep: pause generation, and free the memory of the KV cache, until :func:`wake`."""
    await server.engine.pause(release=True)
    server.asleep = True
    return {"status": "sleeping"}


async def name_weights(server: FakeServer, request: Request) -> Any:
    """Answer ``/update_weight_version``: commit the adapters that are staged, then label the newest weights."""
    label = (await request.json())["new_version"]
    if server.files.adapters:
        await server.commit(label)
    server.labels[max(server.labels)] = label
    return {"success": True, "new_version": server.label}


def says(tell: Callable[[FakeServer], Any]) -> Handler:
    """Return a handler that answers every request with the result of ``tell``, which depends on the server's state
    alone."""

    async def handler(server: FakeServer, request: Request) -> Any:
        """Answer a request without reading it."""
        return tell(server)

    return handler


def sampling_of(server: FakeServer, wanted: Mapping[str, Any], *, most: str, stop_ids: str) -> Sampling:
    """Return the sampling parameters in ``wanted``, the part of a request that has them. ``most`` and ``stop_ids`` are
    the protocol's names for the length limit and the stop ids. The seed is the server's next. Raises
    :class:`~headrace.base.errors.RequestError` for parameters that are not allowed."""
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
