"""The embedded engine: continuous batching of any Hugging Face causal language model, on CPU and CUDA.

    step():  schedule ─▶ run ─▶ postprocess
             waiting      one forward pass:      sample; append to columns;
             requests     running rows decode,   chunks of rows that ended or are due;
             join         prompts of joiners     rows that ended leave

Rows are dense (see :class:`~headrace.engine.native.rows.Rows`), the model is never copied, and nothing derived from
its weights is kept between steps: a commit changes where parameters point, and the next pass uses them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.clock import Clock
from headrace.engine.config import EngineConfig
from headrace.engine.native.rows import Index, Rows
from headrace.engine.native.sampler import sample, uniforms
from headrace.errors import ConfigError, RequestError
from headrace.models.attention import forward
from headrace.models.cache import CachePlan, KeyValueCache
from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk, EngineStats
from headrace.types.messages.engine import GenerateRequest
from headrace.types.sampling import Sampling
from headrace.types.versions import NOT_SAMPLED
from headrace.types.weights import SwapReport, WeightUpdate


class WeightReceiver(Protocol):
    """Where new weights come from: the receiving side of a transport."""

    def stage(self, update: WeightUpdate) -> None:
        """Verify ``update``, in any thread; raises :class:`~headrace.errors.WeightsError`."""
        ...

    def commit(self, version: int) -> None:
        """Point the model's parameters at the staged version."""
        ...


class NativeEngine:
    """An :class:`~headrace.engine.base.EngineCore` over a model of :func:`headrace.models.load_model`.

    ``max_context`` is the longest prompt plus completion: columns of the key-value cache. Calls with the same requests
    in the same order give the same tokens and logprobs, bit for bit; a draw does not depend on a sequence's neighbours.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        max_context: int,
        receiver: WeightReceiver,
        clock: Clock,
    ) -> None:
        longest = model.config.max_position_embeddings
        if max_context > longest:
            raise ConfigError(
                f"engine.max_context={max_context} is longer than the model's context of {longest} tokens",
                remedy=f"set engine.max_context <= {longest}, or shorten engine.max_new_tokens or the prompts",
            )
        self._model = model
        self._config = config
        self._max_context = max_context
        self._receiver = receiver
        self._clock = clock
        self._device = model.device
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._cache = KeyValueCache(config.max_sequences, max_context)
        self._rows = Rows(config.max_sequences, max_context)
        self._waiting: deque[GenerateRequest] = deque()
        self._known: set[int] = set()
        self._version = NOT_SAMPLED
        self._busy_s = 0.0
        self._steps = 0
        self._generated_tokens = 0
        self._prompt_tokens = 0

    def add(self, request: GenerateRequest) -> None:
        self._refuse_if_unfit(request)
        self._known.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request_ids: Sequence[int]) -> list[Chunk]:
        wanted = set(request_ids) & self._known
        rows = [row for row, request_id in enumerate(self._rows.request_ids) if request_id in wanted]
        chunks = [self._rows.chunk(row, StopReason.ABORTED) for row in rows]
        self._leave(np.array(rows, np.int64))
        unborn = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        self._known -= wanted
        return chunks + [_unborn_chunk(request) for request in unborn]

    def has_work(self) -> bool:
        return bool(self._rows.count or self._waiting)

    def step(self) -> list[Chunk]:
        if not self.has_work():
            return []
        started = self._clock.now()
        num_running = self._rows.count
        joining = self._schedule()
        chunks = self._run(num_running, joining)
        self._steps += 1
        self._busy_s += self._clock.now() - started
        return chunks

    def stage(self, update: WeightUpdate) -> None:
        self._receiver.stage(update)

    def commit(self, version: int) -> SwapReport:
        started = self._clock.now()
        self._receiver.commit(version)
        self._version = version
        gap_s = self._clock.now() - started
        return SwapReport(version=version, gap_s=gap_s, carried_over=self._rows.count, restarted=0)

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self._version,
            busy_s=self._busy_s,
            steps=self._steps,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            running=self._rows.count,
            waiting=len(self._waiting),
        )

    def _schedule(self) -> list[GenerateRequest]:
        """The requests that join now, in order: as many as rows and prompt tokens allow; a long prompt alone."""
        joining: list[GenerateRequest] = []
        budget = self._config.max_prefill_tokens
        while self._waiting and self._rows.count + len(joining) < self._config.max_sequences:
            budget -= len(self._waiting[0].prompt_ids_T)
            if budget < 0 and joining:
                break
            joining.append(self._waiting.popleft())
        self._rows.join(joining)
        self._prompt_tokens += sum(len(request.prompt_ids_T) for request in joining)
        return joining

    @torch.inference_mode()
    def _run(self, num_running: int, joining: Sequence[GenerateRequest]) -> list[Chunk]:
        rows = self._rows
        lengths = [len(request.prompt_ids_T) for request in joining]
        ids = np.concatenate([rows.last_ids_R[:num_running], *(request.prompt_ids_T for request in joining)])
        plan = CachePlan(self._cache, rows.positions_R[:num_running], lengths, self._device)
        keep = plan.last_R if joining else None
        logits = forward(self._model, self._tensor(ids), plan, keep)
        # the sampled token stands one place behind the newest
        draws = uniforms(rows.keys_R[: rows.count], rows.positions_R[: rows.count] + 1)
        draw = sample(logits, self._tensor(rows.temperatures_R[: rows.count]), self._tensor(draws))
        rows.record(draw.ids_R.cpu().numpy(), draw.logprobs_R.cpu().numpy(), self._version)
        self._generated_tokens += rows.count
        return self._postprocess(draw.sound_R.cpu().numpy())

    def _postprocess(self, sound_R: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Chunk]:
        rows = self._rows
        stopped, broken = rows.stopped(), ~sound_R
        ended = stopped | rows.full() | broken
        due = rows.due(self._config.flush_tokens)
        if not (ended | due).any():
            return []
        chunks: list[Chunk] = []
        for row in np.flatnonzero(ended | due).tolist():
            if broken[row]:
                chunks.append(self._broken_chunk(row))
            elif ended[row]:
                chunks.append(rows.chunk(row, StopReason.STOP if stopped[row] else StopReason.LENGTH))
            else:
                chunks.append(rows.chunk(row))
        if broken.any():
            self._cache.clear(np.flatnonzero(broken))
        self._known -= {rows.request_ids[row] for row in np.flatnonzero(ended)}
        self._leave(np.flatnonzero(ended))
        return chunks

    def _broken_chunk(self, row: int) -> Chunk:
        self._rows.forget_last(row)
        self._generated_tokens -= 1
        return self._rows.chunk(
            row,
            error=f"the logits after {self._rows.positions_R[row]} tokens of context hold NaN or infinity "
            f"under the weights of version {self._version}",
        )

    def _leave(self, leaving: Index) -> None:
        if len(leaving):
            moves = self._rows.leave(leaving)
            self._cache.move(moves.sources, moves.targets, moves.length)

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _refuse_if_unfit(self, request: GenerateRequest) -> None:
        name, length, sampling = f"request {request.request_id}", len(request.prompt_ids_T), request.sampling
        if self._version == NOT_SAMPLED:
            raise RequestError(
                f"{name} came before the first weights: its tokens would carry no version",
                remedy="commit a version first: weights are published before the first rollout",
            )
        if request.request_id in self._known:
            raise RequestError(f"{name} is already in the engine", remedy="give every request an id of its own")
        if length == 0:
            raise RequestError(f"{name} has an empty prompt", remedy="give at least one token")
        if length + sampling.max_new_tokens > self._max_context:
            raise RequestError(
                f"{name}: prompt of {length} tokens + max_new_tokens={sampling.max_new_tokens} "
                f"exceed max_context={self._max_context}",
                remedy="shorten the prompt, lower max_new_tokens, or raise engine.max_context",
            )
        self._refuse_sampling(name, sampling)
        self._refuse_ids(f"{name}: prompt", request.prompt_ids_T.tolist())
        self._refuse_ids(f"{name}: stop_ids", sampling.stop_ids)

    def _refuse_sampling(self, name: str, sampling: Sampling) -> None:
        if sampling.max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens={sampling.max_new_tokens}", remedy="ask for at least one token")
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise RequestError(
                f"{name}: temperature={sampling.temperature} is not a number >= 0",
                remedy="set temperature > 0, or 0 for the most likely token",
            )

    def _refuse_ids(self, name: str, ids: Iterable[int]) -> None:
        outside = [token for token in ids if not 0 <= token < self._vocab_size]
        if outside:
            raise RequestError(
                f"{name} holds token {outside[0]}, outside the vocabulary of {self._vocab_size}",
                remedy="encode with the tokenizer of the engine's model",
            )


def _unborn_chunk(request: GenerateRequest) -> Chunk:
    """The last chunk of a request that never joined."""
    return Chunk(
        request_id=request.request_id,
        ids_T=np.zeros(0, np.int32),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=np.zeros(0, np.int32),
        stop_reason=StopReason.ABORTED,
    )
