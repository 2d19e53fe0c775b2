"""An engine under test, a learner that publishes into it, and what the readers of its answers have been told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.base.clock import RealClock
from headrace.base.errors import HeadraceError
from headrace.base.types.columns import FloatColumn
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.engine import EngineConfig
from headrace.engine.base import EngineCore
from headrace.engine.capabilities import Capabilities
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, load_model
from headrace.models.lora import active
from headrace.models.weights import DEFAULT, is_adapted, weight_tensors
from headrace.sync.config import Route
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher, make_receiver
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.make import served

FLUSH = 8
"""``engine.flush_tokens`` of an engine under test."""
CLOSE = 1e-4
"""How far two float32 passes over the same tokens may be apart, in log-probability."""
PATIENCE_S = 120.0
MAX_CONTEXT = 512
SETTINGS = {"device": "cpu", "flush_tokens": FLUSH, "max_sequences": 8}


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What the reader of one request has been told."""

    prompt: list[int]
    """What it was sampled after."""
    ids: list[int] = field(default_factory=list)
    """Of the answer so far."""
    logprobs: list[float] = field(default_factory=list)
    """Of each."""
    versions: list[int] = field(default_factory=list)
    """Of each."""
    chunks: list[Chunk] = field(default_factory=list)
    """As they came."""
    reason: StopReason | None = None
    """``None`` while it goes on."""
    error: str = ""
    """Empty where there is none."""

    def take(self, chunk: Chunk) -> None:
        """One chunk more."""
        assert not self.ended, "a chunk came after the last"
        self.chunks.append(chunk)
        if chunk.restarted:
            self.ids, self.logprobs, self.versions = [], [], []
        self.ids += chunk.ids_T.tolist()
        self.logprobs += chunk.logprobs_T.tolist()
        self.versions += chunk.versions_T.tolist()
        self.reason, self.error = chunk.stop_reason, chunk.error

    @property
    def ended(self) -> bool:
        """Whether there will be no more."""
        return self.reason is not None or bool(self.error)


@dataclass(slots=True, kw_only=True)
class Rig:
    """An engine, and a learner whose weights it is given."""

    core: EngineCore
    can: Capabilities
    """What it is to keep: a server tells only what it was started to tell."""
    model: PreTrainedModel
    """The learner's, which can be called on its own."""
    publisher: Publisher
    version: int = -1
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Of every version that was published."""
    told: dict[int, RequestOutput] = field(default_factory=dict)
    """By the request's number."""
    requests: int = 0
    """Made so far."""

    def ask(
        self, prompt: Sequence[int], *, fork: ForkRequest | None = None, agent: str = "", **sampling: object
    ) -> int:
        """Add a request; its number."""
        request = self.request(prompt, **sampling)
        self.core.add(msgspec.structs.replace(request, fork=fork, agent=agent))
        return self.follow(request)

    def request(self, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
        """A request that nobody has been asked for yet."""
        self.requests += 1
        wanted = Sampling(**{"max_new_tokens": 12, "seed": self.requests, **sampling})  # type: ignore[arg-type]
        return GenerateRequest(
            request_id=self.requests, prompt_ids_T=np.array(prompt, np.int32), sampling=wanted
        )  # fmt: skip

    def follow(self, request: GenerateRequest) -> int:
        """From now on what it is told is noted."""
        self.told[request.request_id] = RequestOutput(prompt=request.prompt_ids_T.tolist())
        return request.request_id

    def until(self, reached: Callable[[], bool]) -> None:
        """Step until then."""
        clock = RealClock()
        limit_s = clock.now() + PATIENCE_S
        while not reached():
            assert clock.now() < limit_s, "the engine has not come so far in time"
            if self.core.has_work():
                self.note(self.core.step())

    def note(self, chunks: Sequence[Chunk]) -> None:
        """Chunks that came another way."""
        for chunk in chunks:
            self.told[chunk.request_id].take(chunk)

    def finish(self, *numbers: int) -> list[RequestOutput]:
        """What these have been told when they have ended, none of them by an error."""
        self.until(lambda: all(self.told[number].ended for number in numbers))
        for number in numbers:
            assert not self.told[number].error, f"request {number} failed: {self.told[number].error}"
        return [self.told[number] for number in numbers]

    def publish(self, mode: Interrupt) -> SwapReport:
        """Change the learner's weights a little, and commit them."""
        self.stage()
        self.core.commit(self.version, mode)
        return self.swapped()

    @torch.no_grad()
    def stage(self) -> None:
        """The first half."""
        self.version += 1
        for tensor in weight_tensors(self.model).values():
            if self.version:
                tensor.mul_(1.03)
            elif is_adapted(self.model):  # they begin at 0
                tensor.copy_(torch.linspace(-0.3, 0.3, tensor.numel()).sin().reshape(tensor.shape))
        self.weights[self.version] = {name: value.clone() for name, value in self.model.state_dict().items()}
        slot = self.version % 2
        self.publisher.copy(slot)
        self.core.stage(self.publisher.announce(self.version, slot))

    def swapped(self) -> SwapReport:
        """The report of the commit that was asked for."""
        reports: list[SwapReport] = []

        def reported() -> bool:
            reports.extend(self.core.take_swaps())
            return bool(reports)

        self.until(reported)
        return reports[-1]

    @torch.inference_mode()
    def logits(self, version: int, told: RequestOutput, agent: str = "") -> torch.Tensor:
        """From which each token of an answer is drawn under the weights of ``version``, ``[T, V]`` in float64, by one
        pass of transformers itself."""
        self.model.load_state_dict(self.weights[version])
        with active(self.model, agent or DEFAULT) if is_adapted(self.model) else nullcontext():
            logits_TV = self.model(input_ids=torch.tensor([told.prompt + told.ids]), use_cache=False).logits[0]
        self.model.load_state_dict(self.weights[self.version])
        drawn_TV: torch.Tensor = logits_TV[len(told.prompt) - 1 : -1].double()
        return drawn_TV

    def reference(self, version: int, told: RequestOutput, temperature: float = 1.0, agent: str = "") -> FloatColumn:
        """The logprobs of an answer."""
        logprobs_TV = (self.logits(version, told, agent) / temperature).log_softmax(-1)
        column_T: FloatColumn = logprobs_TV.gather(1, torch.tensor(told.ids)[:, None])[:, 0].float().numpy()
        return column_T

    def refuses(self, words: str, **sampling: object) -> None:
        """A request with that sampling is refused, in these words, and nothing else is disturbed."""
        request = self.request([3, 4], **sampling)
        refuse(lambda: self.core.add(request), words)


def refuse(act: Callable[[], object], words: str) -> None:
    """It raises an error of ours that says them."""
    said = ""
    try:
        act()
    except HeadraceError as error:
        said = str(error)
    assert said, f"nothing was refused, though {words!r} cannot be done"
    assert words in said, f"the refusal does not say {words!r}: {said}"


def close(found: Sequence[float] | FloatColumn, expected: Sequence[float] | FloatColumn) -> None:
    """Two columns of logprobs agree."""
    apart = np.abs(np.asarray(found) - np.asarray(expected))
    assert len(apart), "there is nothing to compare"
    assert apart.max() < CLOSE, f"logprobs are {apart.max():.2g} apart"


@contextmanager
def native_rig(wanted: ServeRequirements, scratch: Path) -> Iterator[Rig]:
    """The embedded engine."""
    model = load_model(ModelConfig(path=wanted.path, lora=wanted.lora))
    config = EngineConfig(**SETTINGS)
    receiver = make_receiver(Route(), weight_tensors(model))
    core = NativeEngine(model, config, max_context=wanted.max_context, receiver=receiver, clock=RealClock())
    with _learner(wanted, scratch) as (learner, publisher):
        yield Rig(core=core, can=config.can, model=learner, publisher=publisher)


@contextmanager
def served_rig(kind: str, server: ServerConfig, wanted: ServeRequirements, scratch: Path) -> Iterator[Rig]:
    """An engine that is a server of ``kind``, started or found."""
    device = "cuda" if wanted.sleeps else "cpu"  # the servers' only: one that runs has decided for itself
    settings = {**SETTINGS, "kind": kind, "server": server.model_dump(), "device": device}
    config = EngineConfig.model_validate(settings)
    can = replace(config.can, kept_sets=wanted.record_kept, routing=wanted.record_routing)
    form = ServedForm(wanted)
    receiver = make_receiver(Route(), form.tensors())
    with (
        _learner(wanted, scratch) as (learner, publisher),
        served(config, wanted, Handover(scratch, form), receiver, RealClock()) as core,
    ):
        yield Rig(core=core, can=can, model=learner, publisher=publisher)


@contextmanager
def _learner(wanted: ServeRequirements, scratch: Path) -> Iterator[tuple[PreTrainedModel, Publisher]]:
    model = load_model(ModelConfig(path=wanted.path, lora=wanted.lora))
    model.set_attn_implementation("sdpa")
    with closing(make_publisher(Route(address=str(scratch / "buffer")), weight_tensors(model))) as publisher:
        yield model, publisher
