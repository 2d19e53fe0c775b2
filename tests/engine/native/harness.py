"""An engine over a tiny model, and what transformers itself would have sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from headrace.base.clock import Clock, RealClock
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.sampler import splitmix, uniforms
from headrace.models import ModelConfig, load_model
from headrace.models.heads import wanted_head
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver

MAX_CONTEXT = 96


class Weights:
    """A learner's model and its two shared buffers."""

    def __init__(self, config: ModelConfig, buffer: Path) -> None:
        self.model = load_model(config)
        self._publisher = make_publisher(Route(address=str(buffer)), weight_tensors(self.model))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(factor)

    def stage(self, engine: NativeEngine, version: int) -> None:
        self._publisher.copy(version % 2)
        engine.stage(self._publisher.announce(version, version % 2))

    def send(self, engine: NativeEngine, version: int) -> None:
        self.stage(engine, version)
        engine.commit(version)
        engine.take_swaps()


class ManualClock:
    """Time that a test moves itself."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s


def make_engine(
    config: ModelConfig,
    *,
    clock: Clock | None = None,
    decode: Callable[[list[int]], str] | None = None,
    history: Path | None = None,
    headless: bool = False,
    **settings: object,
) -> NativeEngine:
    """An engine that has seen no weights yet; ``headless``: it is not given the head that its settings ask for."""
    model, engine = load_model(config), EngineConfig(**settings)
    return NativeEngine(
        model,
        engine,
        max_context=MAX_CONTEXT,
        receiver=make_receiver(Route(), weight_tensors(model)),
        clock=clock or RealClock(),
        decode=decode,
        history=history,
        head=None if headless else wanted_head(engine.speculation, config, model),
    )


def ready_engine(directory: Path, buffer: Path, dtype: str = "float32", **settings: object) -> NativeEngine:
    """An engine with version 0 committed."""
    config = ModelConfig(path=str(directory), dtype=dtype)
    engine = make_engine(config, **settings)
    Weights(config, buffer).send(engine, 0)
    return engine


def request(request_id: int, prompt: Iterable[int], **sampling: object) -> GenerateRequest:
    settings = {"max_new_tokens": 10, **sampling}
    return GenerateRequest(
        request_id=request_id, prompt_ids_T=np.array(list(prompt), np.int32), sampling=Sampling(**settings)
    )


def run(engine: NativeEngine, requests: Iterable[GenerateRequest] = ()) -> dict[int, list[TokenChunk]]:
    """Every chunk of every request, by request."""
    for one in requests:
        engine.add(one)
    return collect(engine.step, engine.has_work)


def collect(step: Callable[[], list[TokenChunk]], has_work: Callable[[], bool]) -> dict[int, list[TokenChunk]]:
    chunks: dict[int, list[TokenChunk]] = {}
    while has_work():
        for chunk in step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return chunks


def joined(chunks: list[TokenChunk]) -> Tokens:
    """The tokens of one request; only its last chunk ends it."""
    assert all(chunk.stop_reason is None and not chunk.error for chunk in chunks[:-1])
    return Tokens.concat([chunk.tokens for chunk in chunks])


@torch.inference_mode()
def alone(model: torch.nn.Module, asked: GenerateRequest) -> list[int]:
    """What the request gets from transformers, one whole forward pass per token, with the same draws."""
    sampling, ids = asked.sampling, asked.prompt_ids_T.tolist()
    sampled: list[int] = []
    while len(sampled) < sampling.max_new_tokens and not (sampled and sampled[-1] in sampling.stop_ids):
        logits_V = model(input_ids=torch.tensor([ids + sampled]), use_cache=False).logits[0, -1].double()
        if sampling.temperature == 0:
            sampled.append(int(logits_V.argmax()))
            continue
        cdf_V = (logits_V / sampling.temperature).softmax(-1).cumsum(-1).numpy()
        position = np.array([len(ids) + len(sampled)])
        uniform = uniforms(splitmix(np.array([sampling.seed % 2**64], np.uint64)), position)[0]
        sampled.append(int(np.searchsorted(cdf_V, uniform, side="right")))
    return sampled


@torch.inference_mode()
def logprobs(model: torch.nn.Module, prompt: list[int], sampled: list[int], temperature: float) -> np.ndarray:
    """log-probability of each sampled token in one whole forward pass of transformers."""
    logits_TV = model(input_ids=torch.tensor([prompt + sampled]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy()
