"""The JSON bodies of requests, as the client writes them. A field that is not here is refused by name: it belongs to a
protocol of another version, and ignoring it would change what the caller gets."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from headrace.base.errors import DataError

S = TypeVar("S", bound="TinkerBody")
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""The number that a client gives to what it makes in a session."""
MOST_STOPS = 4096
"""The most stop strings and stop tokens of one request."""
_MODEL, _SEQ = re.compile(r'"model_id"\s*:\s*"([^"]*)"'), re.compile(r'"seq_id"\s*:\s*(\d{1,15})')


class TinkerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request."""


def parse(body: bytes, kind: type[S]) -> S:
    """Return ``body`` as a record. Raises :class:`~headrace.base.errors.DataError`, which names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"the body is no {kind.__name__}: {error}", remedy="use the client that docs/tinker.md names"
        ) from None


def place_of(beginning: bytes) -> tuple[str, int]:
    """Return the model and the place of a request of which only the beginning was read. Raises
    :class:`~headrace.base.errors.DataError` where the beginning does not hold them."""
    text = beginning.decode(errors="replace")
    model, seq = _MODEL.search(text), _SEQ.search(text)
    if model is None or seq is None:
        raise DataError("the body does not begin with model_id and seq_id", remedy="send less in each request")
    return model[1], int(seq[1])


class ModelRequest(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """What all requests of a model have: whose they are, and their place among those of the model."""

    model_id: str
    seq_id: int
    """Its place, from 1."""


class NewModel(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """What a request that makes a model has: its session, and the model's place in it; ``None`` where there is a
    model already."""

    session_id: str | None = None
    model_seq_id: Place | None = None


class ClientConfigBody(TinkerBody, frozen=True):
    """The body of client/config and client/dynamic_config."""

    sdk_version: str
    type: str = ""


class CreateSessionBody(TinkerBody, frozen=True):
    """The body of create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = "create_session"


class SessionBody(TinkerBody, frozen=True):
    """The body of session_heartbeat."""

    session_id: str
    type: str = ""


class LoraBody(TinkerBody, frozen=True):
    """The adapter that create_model asks for."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody, frozen=True):
    """The optimizer that create_model asks for."""

    type: str = "adamw"
    version: int | None = None


class CreateModelBody(TinkerBody, frozen=True):
    """The body of create_model."""

    session_id: str
    model_seq_id: Place
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    type: str = "create_model"


class ModelBody(TinkerBody, frozen=True):
    """The body of get_info."""

    model_id: str
    type: str = ""


class AdamBody(TinkerBody, frozen=True):
    """The settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(TinkerBody, frozen=True):
    """The body of optim_step."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


class SaveWeightsBody(TinkerBody, frozen=True):
    """The body of save_weights."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights"


class SaveForSamplerBody(TinkerBody, frozen=True):
    """The body of save_weights_for_sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: Place | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights_for_sampler"


class SaveExternalBody(TinkerBody, frozen=True):
    """The body of save_weights_external."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = "save_weights_external"


class LoadWeightsBody(TinkerBody, frozen=True):
    """The body of load_weights."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Place | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    type: str = "load_weights"


class CreateSamplingSessionBody(TinkerBody, frozen=True):
    """The body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None
    type: str = "create_sampling_session"


class ChunkBody(TinkerBody, frozen=True):
    """A chunk of a prompt; only text is served."""

    type: str
    tokens: list[int] = []
    data: str | None = None
    format: str | None = None
    expected_tokens: int | None = None
    location: str | None = None
    dmel: str | None = None
    override_dimensions: dict[str, int] | None = None


class PromptBody(TinkerBody, frozen=True):
    """A prompt."""

    chunks: list[ChunkBody]


class SamplingBody(TinkerBody, frozen=True):
    """The sampling parameters; min-p and the penalties are Headrace's own."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str | int], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class TensorBody(TinkerBody, frozen=True):
    """A tensor as JSON."""

    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody, frozen=True):
    """The body of asample."""

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


class RetrieveBody(TinkerBody, frozen=True):
    """The body of retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class CancelBody(TinkerBody, frozen=True):
    """The body of cancel_future."""

    request_id: str


class PathBody(TinkerBody, frozen=True):
    """The body of weights_info."""

    tinker_path: str


class TtlBody(TinkerBody, frozen=True):
    """The body of a request that sets how long a checkpoint is kept: ``ttl_seconds`` from now, or for ever if it is
    ``None``."""

    ttl_seconds: int | None = None
