"""A test rig for an engine: the engine, a learner that publishes weights to it, and the collected answers.

A *request* is for one answer, which the engine returns in chunks of tokens as it is stepped. *Staging* loads a version
of the weights next to the model of the engine, and a *commit* makes the engine use it. Shape legend: T tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.base.clock import RealClock
from headrace.base.errors import HeadraceError
from headrace.base.types.columns import FloatColumn
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import GenerateRequest, RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.engine import EngineConfig
from headrace.engine.base import EngineCore
from headrace.engine.capabilities import Capabilities
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, load_model
from headrace.models.devices import use_device
from headrace.models.lora import active
from headrace.models.weights import DEFAULT, is_adapted, weight_tensors
from headrace.sync.config import Route
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher, make_receiver
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.make import open_served_engine

FLUSH = 8
"""The value of ``engine.flush_tokens`` for an engine under test."""
CLOSE = 1e-4
"""Greatest allowed difference between two computations of a log-probability in float32."""
PATIENCE_S = 120.0
"""Timeout of every wait for an engine, in seconds."""
MAX_CONTEXT = 512
"""Greatest number of tokens of prompt and answer together."""
SETTINGS = {"device": "cpu", "flush_tokens": FLUSH, "max_sequences": 8}
"""Settings of an engine under test, as keys of the section ``[engine]``."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The output of one request to the engine under test, collected from its chunks."""

    prompt: list[int]
    """Ids of the prompt."""
    ids: list[int] = field(default_factory=list)
    """Ids of the answer so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token."""
    versions: list[int] = field(default_factory=list)
    """Version of each token."""
    chunks: list[TokenChunk] = field(default_factory=list)
    """All chunks, in order of arrival."""
    reason: StopReason | None = None
    """Why the answer ended; ``None`` while it continues."""
    error: str = ""
    """Error of the request; empty if there is none."""

    def append(self, chunk: TokenChunk) -> None:
        """Append the next chunk of the answer. If the chunk says that the sequence was lost and restarted, remove all
        earlier tokens first."""
        assert not self.ended, "a chunk came after the last"
        self.chunks.append(chunk)
        if chunk.lost:
            self.ids, self.logprobs, self.versions = [], [], []
        self.ids += chunk.tokens.ids_T.tolist()
        self.logprobs += chunk.tokens.logprobs_T.tolist()
        self.versions += chunk.tokens.versions_T.tolist()
        self.reason, self.error = chunk.stop_reason, chunk.error

    @property
    def ended(self) -> bool:
        """Whether the answer has ended, with a stop reason or with an error."""
        return self.reason is not None or bool(self.error)


@dataclass(slots=True, kw_only=True)
class Rig:
    """An engine under test, a learner that publishes weights to it, and the collected answers. Checks add requests,
    publish versions, and compare the answers with logprobs that transformers computes."""

    core: EngineCore
    """The engine under test."""
    capabilities: Capabilities
    """The capabilities of the engine. A server has only the capabilities for which it was started."""
    model: PreTrainedModel
    """The model of the learner, which tests can also call directly."""
    publisher: Publisher
    """The learner's side of the weight sync, which sends versions to the engine."""
    version: int = -1
    """The version that was staged last; −1 before the first version."""
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights of every published version."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """The outputs, by the number of the request."""
    num_requests: int = 0
    """Number of requests made so far."""

    def add(self, prompt: Sequence[int], **settings: Any) -> int:
        """Add a request for an answer to the token ids ``prompt`` to the engine, and return the number of the request,
        which is the key of its output in :attr:`outputs`. ``settings`` are those of :meth:`request`."""
        request = self.request(prompt, **settings)
        self.core.add(request)
        self.outputs[request.request_id] = RequestOutput(prompt=request.prompt_ids_T.tolist())
        return request.request_id

    def request(self, prompt: Sequence[int], **settings: Any) -> GenerateRequest:
        """Return a new request for an answer to the token ids ``prompt``, without adding it to the engine. ``settings``
        are options of the request and fields of the sampling parameters; by default, an answer has at most 12 tokens,
        and every request has a different seed."""
        self.num_requests += 1
        options = {name: settings.pop(name) for name in RequestOptions.__struct_fields__ if name in settings}
        sampling = Sampling(**{"max_new_tokens": 12, "seed": self.num_requests, **settings})
        prompt_ids_T = np.array(prompt, np.int32)
        return GenerateRequest(request_id=self.num_requests, prompt_ids_T=prompt_ids_T, sampling=sampling, **options)

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Step the engine and collect its chunks until ``reached()`` is true. Raises ``AssertionError`` after
        :data:`PATIENCE_S` seconds."""
        clock = RealClock()
        limit_s = clock.now() + PATIENCE_S
        while not reached():
            assert clock.now() < limit_s, "the engine did not reach the expected state in time"
            if self.core.has_work():
                self.add_chunks(self.core.step())

    def add_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        """Add chunks that the engine returned to the outputs of their requests."""
        for chunk in chunks:
            self.outputs[chunk.request_id].append(chunk)

    def finish(self, *numbers: int) -> list[RequestOutput]:
        """Step the engine until the requests ``numbers`` have ended, check that no request failed, and return their
        outputs in the order of ``numbers``."""
        self.run_until(lambda: all(self.outputs[number].ended for number in numbers))
        for number in numbers:
            assert not self.outputs[number].error, f"request {number} failed: {self.outputs[number].error}"
        return [self.outputs[number] for number in numbers]

    def publish(self, mode: Interrupt) -> SwapReport:
        """Change the learner's weights a little, stage them as the next version, commit this version with the interrupt
        mode ``mode`` (what happens to running sequences), and return the engine's report on the commit."""
        self.stage()
        self.core.commit(self.version, mode)
        return self.wait_for_swap()

    @torch.no_grad()
    def stage(self) -> None:
        """Change the learner's weights a little, store a copy of them, and stage them as the next version, without a
        commit. The first version has the weights of the loaded model, except that adapters, whose weights are 0 at
        first, are filled with other values."""
        self.version += 1
        for tensor in weight_tensors(self.model).values():
            if self.version:
                tensor.mul_(1.03)
            elif is_adapted(self.model):  # adapters are 0 at first
                tensor.copy_(torch.linspace(-0.3, 0.3, tensor.numel()).sin().reshape(tensor.shape))
        self.weights[self.version] = {name: value.clone() for name, value in self.model.state_dict().items()}
        slot = self.version % 2
        self.publisher.copy(slot)
        self.core.stage(self.publisher.announce(self.version, slot))

    def wait_for_swap(self) -> SwapReport:
        """Step the engine until the commit that was ordered is complete, and return its report."""
        reports: list[SwapReport] = []

        def reported() -> bool:
            """Collect the reports of completed commits, and return whether there is one."""
            reports.extend(self.core.take_swaps())
            return bool(reports)

        self.run_until(reported)
        return reports[-1]

    @torch.inference_mode()
    def logits(self, version: int, output: RequestOutput, agent: str = "") -> torch.Tensor:
        """Return the logits for each token of the answer ``output`` under the weights of ``version``, ``[T, V]`` in
        float64, computed by one forward pass of transformers. ``agent`` selects an agent's adapter (empty: the
        policy's)."""
        self.model.load_state_dict(self.weights[version])
        with active(self.model, agent or DEFAULT) if is_adapted(self.model) else nullcontext():
            logits_TV = self.model(input_ids=torch.tensor([output.prompt + output.ids]), use_cache=False).logits[0]
        self.model.load_state_dict(self.weights[self.version])
        drawn_TV: torch.Tensor = logits_TV[len(output.prompt) - 1 : -1].double()
        return drawn_TV

    def reference_logprobs(
        self, version: int, output: RequestOutput, temperature: float = 1.0, agent: str = ""
    ) -> FloatColumn:
        """Return the logprobs that the tokens of the answer ``output`` must have under the weights of ``version`` and
        at ``temperature``, ``[T]``, computed by transformers. ``agent`` selects an agent's adapter (empty: the
        policy's)."""
        logprobs_TV = (self.logits(version, output, agent) / temperature).log_softmax(-1)
        column_T: FloatColumn = logprobs_TV.gather(1, torch.tensor(output.ids)[:, None])[:, 0].float().numpy()
        return column_T

    def assert_request_refused(self, words: str, **settings: Any) -> None:
        """Assert that a request with the ``settings`` of :meth:`request` is refused with an error that contains
        ``words``."""
        request = self.request([3, 4], **settings)
        assert_refused(lambda: self.core.add(request), words)


def assert_refused(act: Callable[[], object], words: str) -> None:
    """Assert that ``act``, a call of the engine, raises a :class:`~headrace.base.errors.HeadraceError` whose text
    contains ``words``."""
    message = ""
    try:
        act()
    except HeadraceError as error:
        message = str(error)
    assert message, f"nothing was refused, though {words!r} cannot be done"
    assert words in message, f"the refusal does not say {words!r}: {message}"


def assert_close(actual: Sequence[float] | FloatColumn, expected: Sequence[float] | FloatColumn) -> None:
    """Assert that two columns of logprobs, one number for each token, are not empty and differ by less than
    :data:`CLOSE` for every token."""
    apart = np.abs(np.asarray(actual) - np.asarray(expected))
    assert len(apart), "there is nothing to compare"
    assert apart.max() < CLOSE, f"logprobs are {apart.max():.2g} apart"


@contextmanager
def native_rig(required: ServeRequirements, scratch: Path, device: str = "cpu") -> Iterator[Rig]:
    """Yield a rig with Headrace's embedded engine on ``device``, which serves the model of ``required``. The learner's
    model is on the CPU; ``scratch`` is a directory for the weights that the learner publishes."""
    config = EngineConfig.model_validate({**SETTINGS, "device": device})
    model = load_model(ModelConfig(path=required.path, lora=required.lora), str(use_device("engine.device", device)))
    receiver = make_receiver(Route(), weight_tensors(model))
    core = NativeEngine(model, config, max_context=required.max_context, receiver=receiver, clock=RealClock())
    with _learner(required, scratch) as (learner, publisher):
        yield Rig(core=core, capabilities=config.can, model=learner, publisher=publisher)


@contextmanager
def served_rig(kind: str, server: ServerConfig, required: ServeRequirements, scratch: Path) -> Iterator[Rig]:
    """Yield a rig with an engine that is a server of ``kind`` (``vllm`` or ``sglang``), started here or already
    running, as the settings ``server`` say. It serves the model of ``required``; ``scratch`` is a directory for
    weights."""
    device = "cuda" if required.sleeps else "cpu"  # for starting a server; a running server already has its device
    settings = {**SETTINGS, "kind": kind, "server": server.model_dump(), "device": device}
    config = EngineConfig.model_validate(settings)
    can = replace(config.can, kept_sets=required.record_kept, routing=required.record_routing)
    form = ServedForm(required)
    receiver = make_receiver(Route(), form.tensors())
    with (
        _learner(required, scratch) as (learner, publisher),
        open_served_engine(config, required, Handover(scratch, form), receiver, RealClock()) as core,
    ):
        yield Rig(core=core, capabilities=can, model=learner, publisher=publisher)


@contextmanager
def _learner(required: ServeRequirements, scratch: Path) -> Iterator[tuple[PreTrainedModel, Publisher]]:
    """Yield the learner's side of a rig: the model of ``required`` in transformers, and a publisher that writes its
    weights to files in ``scratch``."""
    model = load_model(ModelConfig(path=required.path, lora=required.lora))
    model.set_attn_implementation("sdpa")
    with closing(make_publisher(Route(address=str(scratch / "buffer")), weight_tensors(model))) as publisher:
        yield model, publisher
