"""The API of vLLM, as far as an engine uses it.

``/inference/v1/generate`` (``--enable-scale-out``) receives token ids and streams token ids. Each token has its logprob
under the distribution from which it was drawn (``--logprobs-mode processed_logprobs``), and the end of a stream has the
spans of its weight versions. Weights are loaded and the server is paused through the RL routes of vLLM's development
mode (``VLLM_SERVER_DEV_MODE=1``).

``seed`` is never sent. A request with a seed has a separate random generator. If its prompt is prefilled in chunks,
vLLM 0.32 reverts the draw of each chunk except the last (``gpu_model_runner.py``: ``gen.set_offset(gen.get_offset() -
4)``). A CPU generator has no offset: it raises "CPU Generator does not use offset", and the engine dies. A seed would
also not make an answer reproducible that another engine continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.wings.servers.client.answer import StreamPart, TokenId, VersionSpan
from headrace.wings.servers.client.dialect import PauseMode, ServerInfo, StreamRequest, post
from headrace.wings.servers.client.forms import FILE
from headrace.wings.servers.client.records import decode_array

if TYPE_CHECKING:
    import httpx

NOT_FINITE = -9998.0
"""Logprobs below this are not finite: vLLM writes −9999 for NaN and −∞."""
UNBOUNDED = 2**31 - 1
"""A top-k that keeps any vocabulary whole."""


class _Logprob(msgspec.Struct):
    """The logprob of one sampled token."""

    logprob: float


class _Logprobs(msgspec.Struct):
    """The logprobs of the new tokens of an event, in order."""

    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    """The new tokens of an event with their logprobs, kept-sets (``sampling_mask``) and, at the end, the reason, the
    experts of all tokens and the spans of the weight versions."""

    sampling_mask: list[list[TokenId]] | None = None
    routed_experts: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _VllmEvent(msgspec.Struct):
    """One event of a stream as vLLM sends it, of which only the fields that are read are declared."""

    choices: list[_Choice] = []
    error: Any = None


class VllmDialect:
    """The API of vLLM, in the form in which an engine uses any server; see
    :class:`~headrace.wings.servers.client.dialect.ServerDialect`. ``client`` is always the HTTP client of the
    server."""

    name = "vLLM"
    package = "vllm"
    tested: tuple[str, ...] = ("0.32",)
    stream_path = "/inference/v1/generate"

    def refusal(self, sampling: Sampling, *, continues: bool) -> str:
        """Return the reason why the server cannot sample with ``sampling``; empty if it can. With ``continues``,
        another engine has begun the answer. Penalties count only the tokens of an answer, but vLLM would treat the
        earlier tokens of a continued answer as its prompt."""
        penalised = sampling.presence_penalty or sampling.frequency_penalty
        return f"{self.name} cannot continue an answer under presence or frequency penalties" * bool(
            penalised and continues
        )

    def body(self, request: StreamRequest) -> dict[str, Any]:
        """Return the JSON body of a request for a stream, in vLLM's format."""
        sampling = request.sampling
        wanted = {
            "max_tokens": request.max_new_tokens,
            **_drawn(sampling, record_kept=request.record_kept),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop),
            "skip_special_tokens": False,  # a stop string may name one
            "detokenize": bool(sampling.stop),
            "ignore_eos": True,  # stop_ids say what ends an answer
            "logprobs": 0,
        }
        return {
            "token_ids": list(request.ids),
            "sampling_params": wanted,
            "stream": True,
            "cache_salt": request.label,  # the prefix cache is keyed by version
            **_model_field(request.adapter),
        }

    def part(self, event: str, num_seen: int) -> StreamPart | None:
        """Decode the JSON text of one event of a stream, of which ``num_seen`` tokens have been read; ``None`` if it
        has no tokens. Raises ``ValueError`` for an error of the server, and for an answer that ends without
        versions."""
        event_data = msgspec.json.decode(event, type=_VllmEvent)
        if event_data.error is not None:
            raise ValueError(str(event_data.error)[:300])
        if not event_data.choices:
            return None
        choice = event_data.choices[0]
        ids, spans, finish_reason = choice.token_ids or [], choice.weight_versions, choice.finish_reason or ""
        content = choice.logprobs.content if choice.logprobs is not None else None
        logprobs = [math.nan if one.logprob < NOT_FINITE else one.logprob for one in content or ()]
        if finish_reason and spans is None and num_seen + len(ids):
            raise ValueError("no versions of the weights came with the end of an answer")
        return StreamPart(
            ids=ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            spans=tuple(spans) if spans else None,
            kept=choice.sampling_mask,
            experts=None if choice.routed_experts is None else decode_array(choice.routed_experts),
        )

    async def identify(self, client: httpx.AsyncClient) -> ServerInfo:
        """Return vLLM's version, model and context. Raises :class:`~headrace.base.errors.ConfigError` if it was started
        without its routes for weights."""
        version = (await client.get("/version")).json()["version"]
        listed = (await client.get("/v1/models")).json()["data"][0]
        answer = await client.get("/weight_info")
        if answer.status_code != 200:
            raise ConfigError(
                f"vLLM at {client.base_url} has no routes for weights (/weight_info: {answer.status_code})",
                remedy="start it with VLLM_SERVER_DEV_MODE=1",
            )
        return ServerInfo(
            version=version, model=listed.get("root") or listed["id"], max_context=listed["max_model_len"]
        )

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop generating: end all answers with the tokens that they have, or keep them with or without their cache, as
        ``mode`` says."""
        running, clear = ("abort", True) if mode.abort else ("keep", mode.recompute)
        await post(client, f"/pause?mode={running}&clear_cache={str(clear).lower()}")

    async def load(self, client: httpx.AsyncClient, path: Path, label: str, adapters: Sequence[str]) -> None:
        """Make vLLM load the weights in the directory ``path``, and set their label to ``label``. If there are
        ``adapters``, load each of them from the folder with its name; otherwise load the whole model."""
        if not adapters:
            await post(client, "/start_weight_update")
            await post(client, "/update_weights", {"update_info": {"path": str(path / FILE)}})
            await post(client, "/finish_weight_update", {"weight_version": label})
            return
        served = {model["id"] for model in (await client.get("/v1/models")).json()["data"]}
        # vLLM's route loads an adapter once, under a number of vLLM's choice. The workers remember that number, and
        # replace the adapter in place from then on: a second load through the route would be repeated in every step.
        for name in adapters:
            if name in served:
                await call_workers(client, "replace_adapter", name, str(path / name))
            else:
                await post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path / name)})
                await call_workers(client, "register_adapter", name)
        await self.name_weights(client, label)

    async def name_weights(self, client: httpx.AsyncClient, label: str) -> None:
        """Set the label of the weights in use to ``label``."""
        await post(client, "/update_weight_version", {"new_version": label})

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue generating after a pause."""
        await post(client, "/resume")

    async def sleep(self, client: httpx.AsyncClient) -> None:
        """Release the accelerator memory of weights and cache; the weights are kept in the memory of the machine."""
        await post(client, "/sleep?level=1&mode=abort")

    async def wake(self, client: httpx.AsyncClient) -> None:
        """Allocate the memory of weights and cache again."""
        await post(client, "/wake_up")

    async def scores(self, client: httpx.AsyncClient, ids: Sequence[int], top_k: int, adapter: str) -> TopScores:
        """Return the logprob of each of the tokens ``ids``, conditioned on the tokens before it, at temperature 1, and
        the ``top_k`` likeliest tokens at each position. ``adapter`` is the name of the adapter to compute with; empty
        for the model itself. The logprob of the first token, which has no tokens before it, is 0."""
        wanted = {"max_tokens": 1, "prompt_logprobs": top_k, "top_k": 1, "detokenize": False}
        order = {"token_ids": list(ids), "sampling_params": wanted, **_model_field(adapter)}
        answer = await post(client, self.stream_path, order)
        rows = answer["prompt_logprobs"]
        logprobs_T = np.zeros(len(ids), np.float32)
        ids_TK, logs_TK = np.zeros((len(ids), top_k), np.int32), np.zeros((len(ids), top_k), np.float32)
        for at in range(1, len(ids)):
            row = {int(token): entry["logprob"] for token, entry in rows[at].items()}
            best = sorted(row, key=lambda token: -row[token])[:top_k]
            logprobs_T[at] = row[ids[at]]
            ids_TK[at], logs_TK[at] = best, [row[token] for token in best]
        return TopScores(logprobs_T=logprobs_T, ids_TK=ids_TK, logs_TK=logs_TK)


def _drawn(sampling: Sampling, *, record_kept: bool) -> dict[str, float]:
    """Return temperature and top-k in vLLM's format. With ``record_kept`` vLLM needs a bound on the kept-sets and
    refuses temperature 0, so top-k 1 replaces it."""
    if not record_kept:
        return {"temperature": sampling.temperature, "top_k": sampling.top_k}
    if sampling.temperature == 0:
        return {"temperature": 1.0, "top_k": 1}
    return {"temperature": sampling.temperature, "top_k": sampling.top_k or UNBOUNDED}


def _model_field(adapter: str) -> dict[str, str]:
    """Return the field of a request that selects an adapter; an empty dictionary for the model itself."""
    return {"model": adapter} if adapter else {}


async def call_workers(client: httpx.AsyncClient, method: str, *arguments: str) -> list[Any]:
    """Call ``method`` of ``headrace_in_vllm.Extension`` in every worker of the server, and return the result of each
    worker."""
    results: list[Any] = (await post(client, "/collective_rpc", {"method": method, "args": arguments}))["results"]
    return results
