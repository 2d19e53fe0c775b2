"""A test rig for an engine: the engine, a learner that publishes weights to it, and the collected answers.

A *request* asks the engine for one answer, which comes in chunks of tokens as the engine is stepped. *Staging* brings a
version of the weights next to the engine, and a *commit* makes the engine use it. Shapes: T tokens, V vocabulary.
"""

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
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.engine import EngineConfig
from headrace.engine.base import EngineCore
from headrace.engine.capabilities import Capabilities
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig, load_model
from headrace.models.devices import use
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
"""The ``engine.flush_tokens`` of an engine under test."""
CLOSE = 1e-4
"""Greatest difference between the log-probabilities of two float32 passes over the same tokens."""
PATIENCE_S = 120.0
"""The longest time, in seconds, for which a rig waits for an engine."""
MAX_CONTEXT = 512
"""Greatest number of tokens of prompt and answer together."""
SETTINGS = {"device": "cpu", "flush_tokens": FLUSH, "max_sequences": 8}
"""The settings of an engine under test, in the section ``[engine]``."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The output of one request to the engine under test, collected over all its chunks."""

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
        """Add the next chunk of the answer. A chunk that says that the sequence was lost and begun again first removes
        the tokens that came before."""
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
        """Return whether the answer has ended, with a reason or with an error, so that no more chunks will come."""
        return self.reason is not None or bool(self.error)


@dataclass(slots=True, kw_only=True)
class Rig:
    """An engine under test, a learner whose weights it gets, and the collected answers. Checks add requests, publish
    versions, and compare the answers with logprobs that transformers computes."""

    core: EngineCore
    """The engine under test."""
    can: Capabilities
    """Capabilities that the engine must have. A server returns only the data for which it was started."""
    model: PreTrainedModel
    """The model of the learner, which tests can also call directly."""
    publisher: Publisher
    """The learner's side of the weight sync, which sends versions to the engine."""
    version: int = -1
    """The version that was staged last; −1 before the first."""
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights of every published version."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """Output by the number of the request."""
    requests: int = 0
    """Number of requests made so far."""

    def add(
        self, prompt: Sequence[int], *, fork: ForkRequest | None = None, agent: str = "", **sampling: object
    ) -> int:
        """Send the engine a request for an answer to the token ids ``prompt``, and return its number, under which
        :attr:`outputs` collects the answer. ``fork`` continues an earlier answer, ``agent`` chooses an agent's adapter
        (empty: the policy), and ``sampling`` has fields of the sampling parameters."""
        request = self.request(prompt, **sampling)
        self.core.add(msgspec.structs.replace(request, fork=fork, agent=agent))
        return self.collect(request)

    def request(self, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
        """Return a new request for an answer to the token ids ``prompt``, without sending it to the engine.
        ``sampling`` has fields of the sampling parameters; by default there are at most 12 new tokens, and every
        request has another seed."""
        self.requests += 1
        wanted = Sampling(**{"max_new_tokens": 12, "seed": self.requests, **sampling})  # type: ignore[arg-type]
        return GenerateRequest(
            request_id=self.requests, prompt_ids_T=np.array(prompt, np.int32), sampling=wanted
        )  # fmt: skip

    def collect(self, request: GenerateRequest) -> int:
        """Prepare to collect the output of ``request``, which was sent to the engine, and return its number."""
        self.outputs[request.request_id] = RequestOutput(prompt=request.prompt_ids_T.tolist())
        return request.request_id

    def until(self, reached: Callable[[], bool]) -> None:
        """Step the engine, and collect its chunks, until ``reached`` returns true. Raises ``AssertionError`` after
        :data:`PATIENCE_S`."""
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
        """Step the engine until the requests ``numbers`` have ended, check that none failed, and return their outputs,
        in the order of ``numbers``."""
        self.until(lambda: all(self.outputs[number].ended for number in numbers))
        for number in numbers:
            assert not self.outputs[number].error, f"request {number} failed: {self.outputs[number].error}"
        return [self.outputs[number] for number in numbers]

    def publish(self, mode: Interrupt) -> SwapReport:
        """Change the learner's weights a little, stage them as the next version, commit it with the interrupt mode
        ``mode`` (what happens to running sequences), and return the engine's report of the commit."""
        self.stage()
        self.core.commit(self.version, mode)
        return self.swapped()

    @torch.no_grad()
    def stage(self) -> None:
        """Change the learner's weights a little, remember them, and stage them as the next version, without a commit.
        The first version has the weights of the model as it was loaded; adapters get numbers other than 0."""
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
        """Step the engine until the ordered commit is complete, and return the report of it."""
        reports: list[SwapReport] = []

        def reported() -> bool:
            """Take the reports of completed commits, and return whether there is one."""
            reports.extend(self.core.take_swaps())
            return bool(reports)

        self.until(reported)
        return reports[-1]

    @torch.inference_mode()
    def logits(self, version: int, output: RequestOutput, agent: str = "") -> torch.Tensor:
        """Return the logits from which each token of the answer ``output`` is drawn under the weights of ``version``,
        ``[T, V]`` in float64, computed by one pass of transformers itself. ``agent`` chooses an agent's adapter (empty:
        the policy's)."""
        self.model.load_state_dict(self.weights[version])
        with active(self.model, agent or DEFAULT) if is_adapted(self.model) else nullcontext():
            logits_TV = self.model(input_ids=torch.tensor([output.prompt + output.ids]), use_cache=False).logits[0]
        self.model.load_state_dict(self.weights[self.version])
        drawn_TV: torch.Tensor = logits_TV[len(output.prompt) - 1 : -1].double()
        return drawn_TV

    def reference(self, version: int, output: RequestOutput, temperature: float = 1.0, agent: str = "") -> FloatColumn:
        """Return the logprobs that the tokens of the answer ``output`` must have under the weights of ``version`` and
        at ``temperature``, ``[T]``, computed by transformers. ``agent`` is that of :meth:`logits`."""
        logprobs_TV = (self.logits(version, output, agent) / temperature).log_softmax(-1)
        column_T: FloatColumn = logprobs_TV.gather(1, torch.tensor(output.ids)[:, None])[:, 0].float().numpy()
        return column_T

    def refuses(self, words: str, **sampling: object) -> None:
        """Check that a request with these sampling settings is refused with an error that contains ``words``."""
        request = self.request([3, 4], **sampling)
        refuse(lambda: self.core.add(request), words)


def refuse(act: Callable[[], object], words: str) -> None:
    """Assert that ``act``, a call of the engine, raises an error of Headrace's own classes whose text contains
    ``words``."""
    said = ""
    try:
        act()
    except HeadraceError as error:
        said = str(error)
    assert said, f"nothing was refused, though {words!r} cannot be done"
    assert words in said, f"the refusal does not say {words!r}: {said}"


def close(found: Sequence[float] | FloatColumn, expected: Sequence[float] | FloatColumn) -> None:
    """Assert that two columns of logprobs, one number for each token, differ by less than :data:`CLOSE` everywhere, and
    are not empty."""
    apart = np.abs(np.asarray(found) - np.asarray(expected))
    assert len(apart), "there is nothing to compare"
    assert apart.max() < CLOSE, f"logprobs are {apart.max():.2g} apart"


@contextmanager
def native_rig(required: ServeRequirements, scratch: Path, device: str = "cpu") -> Iterator[Rig]:
    """Yield a rig with Headrace's embedded engine on ``device``, which serves the model of ``required``. ``scratch`` is
    a directory for the weights that the learner publishes, whose model is on the CPU."""
    config = EngineConfig.model_validate({**SETTINGS, "device": device})
    model = load_model(ModelConfig(path=required.path, lora=required.lora), str(use("engine.device", device)))
    receiver = make_receiver(Route(), weight_tensors(model))
    core = NativeEngine(model, config, max_context=required.max_context, receiver=receiver, clock=RealClock())
    with _learner(required, scratch) as (learner, publisher):
        yield Rig(core=core, can=config.can, model=learner, publisher=publisher)


@contextmanager
def served_rig(kind: str, server: ServerConfig, required: ServeRequirements, scratch: Path) -> Iterator[Rig]:
    """Yield a rig with an engine that is a server of ``kind`` (``vllm`` or ``sglang``), started here or already
    running, as the settings ``server`` say. It serves the model of ``required``; ``scratch`` is a directory for
    weights."""
    device = "cuda" if required.sleeps else "cpu"  # the servers' only: one that runs has decided for itself
    settings = {**SETTINGS, "kind": kind, "server": server.model_dump(), "device": device}
    config = EngineConfig.model_validate(settings)
    can = replace(config.can, kept_sets=required.record_kept, routing=required.record_routing)
    form = ServedForm(required)
    receiver = make_receiver(Route(), form.tensors())
    with (
        _learner(required, scratch) as (learner, publisher),
        served(config, required, Handover(scratch, form), receiver, RealClock()) as core,
    ):
        yield Rig(core=core, can=can, model=learner, publisher=publisher)


@contextmanager
def _learner(required: ServeRequirements, scratch: Path) -> Iterator[tuple[PreTrainedModel, Publisher]]:
    """Open the learner's side of a rig: the model of ``required`` by transformers, and a publisher that writes its
    weights below ``scratch``."""
    model = load_model(ModelConfig(path=required.path, lora=required.lora))
    model.set_attn_implementation("sdpa")
    with closing(make_publisher(Route(address=str(scratch / "buffer")), weight_tensors(model))) as publisher:
        yield model, publisher
