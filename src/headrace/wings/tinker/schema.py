"""The models of the JSON bodies of requests: a class for each endpoint. An unknown field is refused by name. It belongs
to another version of the protocol, and ignoring it would change the result for the client.

``seq_id`` is the number of a request among the requests of its model, from 1. ``..._seq_id`` is the number that a
client assigns to a model or a sampler of its session. ``type`` repeats the name of the endpoint and is not used.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from headrace.base.errors import DataError

S = TypeVar("S", bound="TinkerBody")
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""The number that a client assigns to a model or a sampler of its session."""
MOST_STOPS = 4096
"""The largest number of stop strings and stop tokens of one request."""
_MODEL, _SEQ = re.compile(r'"model_id"\s*:\s*"([^"]*)"'), re.compile(r'"seq_id"\s*:\s*(\d{1,15})')


class TinkerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of bodies and of parts of bodies. Unknown fields are refused."""


def parse(body: bytes, kind: type[S]) -> S:
    """Parse the JSON ``body`` as a record of the class ``kind``. Raises :class:`~headrace.base.errors.DataError`, which
    names the invalid field, if the body does not match the class."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"the body is no {kind.__name__}: {error}", remedy="use the client that docs/tinker.md names"
        ) from None


def read_model_and_seq(beginning: bytes) -> tuple[str, int]:
    """Return the id of the model and the ``seq_id`` of a request from the ``beginning`` of its body, which was too long
    to read. Raises :class:`~headrace.base.errors.DataError` if the beginning does not contain both."""
    text = beginning.decode(errors="replace")
    model, seq = _MODEL.search(text), _SEQ.search(text)
    if model is None or seq is None:
        raise DataError("the body does not begin with model_id and seq_id", remedy="send less in each request")
    return model[1], int(seq[1])


class ModelRequest(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """The common fields of the bodies of all requests of a model; other fields are ignored here."""

    model_id: str
    seq_id: int
    """The number of the request among the requests of its model, from 1."""


class NewModel(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """The fields of a ``load_weights`` body for a new model: its session and its number in the session. Both are
    ``None`` if the weights are loaded into an existing model. Other fields are ignored here."""

    session_id: str | None = None
    model_seq_id: Place | None = None


class ClientConfigBody(TinkerBody, frozen=True):
    """The body of client/config and client/dynamic_config, with which a client requests its settings from the
    server."""

    sdk_version: str
    type: str = ""


class CreateSessionBody(TinkerBody, frozen=True):
    """The body of create_session, which starts the session of one client program. The server stores the name, the
    project and the metadata, and returns them in lists of sessions."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = "create_session"


class SessionBody(TinkerBody, frozen=True):
    """The body of session_heartbeat, which a client sends regularly while it runs."""

    session_id: str
    type: str = ""


class LoraBody(TinkerBody, frozen=True):
    """The settings of the adapter in create_model. ``seed`` is the seed of the initial weights (``None``: the server
    chooses one). The flags select the parts of the model that have adapters: the head, the feed-forward and the
    attention layers."""

    rank: int
    """The rank of the two matrices of each adapted layer."""
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody, frozen=True):
    """The optimizer in create_model; only ``adamw`` is supported."""

    type: str = "adamw"
    version: int | None = None


class CreateModelBody(TinkerBody, frozen=True):
    """The body of create_model: a new model to train on the base ``base_model``, with the adapter ``lora_config``."""

    session_id: str
    model_seq_id: Place
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    type: str = "create_model"


class ModelBody(TinkerBody, frozen=True):
    """The body of get_info, a request for the description of a model."""

    model_id: str
    type: str = ""


class AdamBody(TinkerBody, frozen=True):
    """The settings of one step of AdamW. ``grad_clip_norm`` is the largest norm of the gradient; 0 for no limit."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(TinkerBody, frozen=True):
    """The body of optim_step: one step of AdamW with the accumulated gradients. ``optimizer_params`` are the settings
    of other optimizers, which are not supported."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


class SaveWeightsBody(TinkerBody, frozen=True):
    """The body of save_weights: a checkpoint from which training can continue. ``path`` is the checkpoint's name
    (``None``: the model's version is its name), and ``ttl_seconds`` is its time to live (``None``: it is never
    deleted)."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights"


class SaveForSamplerBody(TinkerBody, frozen=True):
    """The body of save_weights_for_sampler: weights to sample from. They become a checkpoint named ``path`` or, with
    ``sampling_session_seq_id``, the weights of a sampling session without a name. ``kind`` is ``snapshot`` for fixed
    weights, and ``inflight`` for a session whose weights are replaced at later saves."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: Place | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = "save_weights_for_sampler"


class SaveExternalBody(TinkerBody, frozen=True):
    """The body of save_weights_external: a checkpoint named ``path`` with files to download. Encryption for
    ``age_encryption_recipients`` is refused."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = "save_weights_external"


class LoadWeightsBody(TinkerBody, frozen=True):
    """The body of load_weights: load the weights of the checkpoint ``path`` and, with ``optimizer``, the state of its
    optimizer, into the model ``model_id`` or into a new model of the session ``session_id``."""

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
    """The body of create_sampling_session: a sampler of the base ``base_model``, or of the checkpoint
    ``model_path``."""

    session_id: str
    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None
    type: str = "create_sampling_session"


class ChunkBody(TinkerBody, frozen=True):
    """A chunk of a prompt. Only chunks of type ``encoded_text`` are supported, whose ``tokens`` are token ids; the
    other fields belong to images and sound."""

    type: str
    tokens: list[int] = []
    data: str | None = None
    format: str | None = None
    expected_tokens: int | None = None
    location: str | None = None
    dmel: str | None = None
    override_dimensions: dict[str, int] | None = None


class PromptBody(TinkerBody, frozen=True):
    """A prompt, which consists of the tokens of all its chunks in order."""

    chunks: list[ChunkBody]


class SamplingBody(TinkerBody, frozen=True):
    """The sampling settings of a request; ``min_p`` and the penalties are additions of Headrace. ``max_tokens``
    ``None``: up to the end of the context; ``top_k`` −1: all tokens; ``stop`` is one or several strings or token
    ids."""

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
    """A tensor as JSON. ``data`` has all its values or, if compressed row starts and column indices are given, the
    values of a sparse matrix (CSR)."""

    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody, frozen=True):
    """The body of asample: ``num_samples`` answers of a sampling session to a prompt. The fields with ``logprobs``
    request log-probabilities: of the prompt's tokens (or the last N of them), of the K likeliest tokens at positions of
    the prompt or the samples, and of target tokens at the positions of the prompt."""

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
    """The body of retrieve_future, which polls for the result of the request ``request_id``."""

    request_id: str
    allow_metadata_only: bool = False


class CancelBody(TinkerBody, frozen=True):
    """The body of cancel_future, which cancels the sampling request ``request_id``."""

    request_id: str


class PathBody(TinkerBody, frozen=True):
    """The body of weights_info, a request for the description of the checkpoint at ``tinker_path``."""

    tinker_path: str


class TtlBody(TinkerBody, frozen=True):
    """The body of a request that sets the time to live of a checkpoint in seconds from now; ``None``: it is never
    deleted."""

    ttl_seconds: int | None = None
