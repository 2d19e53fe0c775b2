"""The API of SGLang, as far as an engine uses it.

``/generate`` receives token ids and streams token ids. Its events have no version spans, and an event may arrive after
a commit. So every stream is ended at a commit (``/pause_generation`` with ``abort``), and a new stream continues the
answer: each stream has one version. Logprobs are computed after penalties and temperature, and before truncation. A
label is the server's name for the weights in use. The parameter ``client`` is always the HTTP client of the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.base.errors import ComponentDied
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.wings.servers.client.answer import StreamPart, TokenId
from headrace.wings.servers.client.dialect import PauseMode, ServerInfo, StreamRequest, post
from headrace.wings.servers.client.records import numbers

if TYPE_CHECKING:
    import httpx

UNBOUNDED = 2**31 - 1
"""The context length that is assumed for a server without a configured limit; the limit of its model applies then."""


class _Finish(msgspec.Struct):
    """The reason why a stream ended."""

    type: str


class _Meta(msgspec.Struct):
    """The facts of an event: the number of tokens so far, their logprobs (each with the token id), and at the end the
    reason and the chosen experts. ``weight_version`` is the label of the weights in use."""

    completion_tokens: int
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] = []
    finish_reason: _Finish | None = None
    routed_experts: str | None = None
    weight_version: str | None = None


class _SglangEvent(msgspec.Struct):
    """One event of a stream as SGLang sends it, of which only the fields that are read are declared."""

    meta_info: _Meta | None = None
    error: Any = None


class SglangDialect:
    """The API of SGLang, in the form in which an engine uses any server; see
    :class:`~headrace.wings.servers.client.dialect.ServerDialect`."""

    name = "SGLang"
    package = "sglang"
    tested: tuple[str, ...] = ()
    stream_path = "/generate"

    def refusal(self, sampling: Sampling, *, continues: bool) -> str:
        """Return the reason why the server cannot sample with ``sampling``; empty if it can. It refuses truncation,
        which the logprobs ignore, and penalties, because a stream that continues an answer would not count the earlier
        tokens."""
        if sampling.truncated:
            return f"{self.name} tells logprobs from before top_k, top_p and min_p"
        penalised = sampling.presence_penalty or sampling.frequency_penalty
        return f"{self.name} ends streams at a commit, and would count penalties again" * bool(penalised)

    def body(self, request: StreamRequest) -> dict[str, Any]:
        """Return the JSON body of a request for a stream, in SGLang's format."""
        sampling = request.sampling
        wanted = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop),
            "skip_special_tokens": False,  # a stop string may name one
            "ignore_eos": True,  # stop_ids say what ends an answer
        }
        return {
            "input_ids": list(request.ids),
            "sampling_params": wanted,
            "return_logprob": True,
            "return_routed_experts": sampling.record_routing,
            "stream": True,
        }

    def part(self, event: str, num_seen: int) -> StreamPart | None:
        """Decode the JSON text of one event of a stream, of which ``num_seen`` tokens have been read; ``None`` if it
        adds nothing. Raises ``ValueError`` for an error of the server."""
        read = msgspec.json.decode(event, type=_SglangEvent)
        if read.error is not None or read.meta_info is None:
            raise ValueError(str(read.error)[:300])
        meta = read.meta_info
        new = max(0, meta.completion_tokens - num_seen)
        new_tokens = (
            meta.output_token_logprobs[-new:] if new else []
        )  # the list covers the whole stream, or the new tokens only
        if not new_tokens and meta.finish_reason is None:
            return None
        return StreamPart(
            ids=[one[1] for one in new_tokens],
            logprobs=[math.nan if one[0] is None else one[0] for one in new_tokens],
            finish_reason="" if meta.finish_reason is None else meta.finish_reason.type,
            label=meta.weight_version,
            experts=None if meta.routed_experts is None else numbers(meta.routed_experts),
        )

    async def identify(self, client: httpx.AsyncClient) -> ServerInfo:
        """Return SGLang's version, model and context, as it reports them."""
        info = (await client.get("/server_info")).json()
        model = (await client.get("/model_info")).json()["tokenizer_path"]  # model_path changes with each update
        return ServerInfo(version=info["version"], model=model, max_context=info["context_length"] or UNBOUNDED)

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop generating: end all streams with the tokens that they have, or keep them, as ``mode`` says."""
        await post(client, "/pause_generation", {"mode": "abort" if mode.abort else "in_place"})

    async def load(self, client: httpx.AsyncClient, path: Path, label: str, adapters: Sequence[str]) -> None:
        """Make SGLang load the weights in the directory ``path``, and set their label to ``label``. ``adapters`` is not
        used. Raises :class:`~headrace.base.errors.ComponentDied` if SGLang reports a failure."""
        order = {"model_path": str(path), "load_format": "auto", "weight_version": label, "flush_cache": True}
        answer = await post(client, "/update_weights_from_disk", order)
        if not answer["success"]:
            raise ComponentDied(
                f"SGLang did not take version {label}: {answer['message']}", remedy="look at its log"
            )  # fmt: skip

    async def name_weights(self, client: httpx.AsyncClient, label: str) -> None:
        """Set the label of the weights in use to ``label``; running requests continue."""
        await post(client, "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue generating after a pause."""
        await post(client, "/continue_generation", {})

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Release the memory of weights and cache, while the server is paused."""
        await post(client, "/release_memory_occupation", {})

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Allocate the memory of weights and cache again."""
        await post(client, "/resume_memory_occupation", {})

    async def scores(self, client: httpx.AsyncClient, ids: Sequence[int], top_k: int, adapter: str) -> TopScores:
        """Return the logprob of each of the tokens ``ids``, conditioned on the tokens before it, at temperature 1, and
        the ``top_k`` likeliest tokens at each position. The logprob of the first token, which has no tokens before it,
        is 0."""
        wanted = {"max_new_tokens": 1, "temperature": 0.0}
        order = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
        answer = await post(client, "/generate", {"input_ids": list(ids), "sampling_params": wanted, **order})
        meta = answer["meta_info"]
        logprobs_T = np.zeros(len(ids), np.float32)
        ids_TK, logs_TK = np.zeros((len(ids), top_k), np.int32), np.zeros((len(ids), top_k), np.float32)
        for at in range(1, len(ids)):
            logprobs_T[at] = meta["input_token_logprobs"][at][0]
            best = meta["input_top_logprobs"][at] if top_k else []
            ids_TK[at], logs_TK[at] = [one[1] for one in best], [one[0] for one in best]
        return TopScores(logprobs_T=logprobs_T, ids_TK=ids_TK, logs_TK=logs_TK)
