"""The JSON bodies of requests, as the client writes them: a class for each endpoint. A field that is not here is
refused by name: it belongs to a protocol of another version, and ignoring it would change what the caller gets.

``seq_id`` is the place of a request among those of its model, from 1. ``..._seq_id`` is the number that a client gives
to a model or a sampler which it makes in its session. ``type`` repeats the name of the endpoint and is not read.
"""

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
    """The body of a request, or a part of one; unknown fields are refused."""


def parse(body: bytes, kind: type[S]) -> S:
    """Return the JSON ``body`` as a record of the class ``kind``. Raises :class:`~headrace.base.errors.DataError`,
    which names the wrong field, if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            f"the body is no {kind.__name__}: {error}", remedy="use the client that docs/tinker.md names"
        ) from None


def place_of(beginning: bytes) -> tuple[str, int]:
    """Return the id of the model and the ``seq_id`` of a request from the ``beginning`` of its body, whose rest was too
    long to read. Raises :class:`~headrace.base.errors.DataError` where the beginning does not hold them."""
    text = beginning.decode(errors="replace")
    model, seq = _MODEL.search(text), _SEQ.search(text)
    if model is None or seq is None:
        raise DataError("the body does not begin with model_id and seq_id", remedy="send less in each request")
    return model[1], int(seq[1])


class ModelRequest(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """The part that the bodies of all requests of a model have in common; other fields are ignored here."""

    model_id: str
    seq_id: int
    """The place of the request among those of its model, from 1."""


class NewModel(TinkerBody, frozen=True, forbid_unknown_fields=False):
    """The part of a ``load_weights`` body that says whether a new model is made: its session and its number there. Both
    are ``None`` if the weights are loaded into an existing model. Other fields are ignored here."""

    session_id: str | None = None
    model_seq_id: Place | None = None


class ClientConfigBody(TinkerBody, frozen=True):
    """The body of client/config and client/dynamic_config, with which a client asks how to behave."""

    sdk_version: str
    type: str = ""


class CreateSessionBody(TinkerBody, frozen=True):
    """The body of create_session, which begins the work of one client program. The server keeps the name, the project
    and the metadata for lists of sessions."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = "create_session"


class SessionBody(TinkerBody, frozen=True):
    """The body of session_heartbeat, by which a client says that it still lives."""

    session_id: str
    type: str = ""


class LoraBody(TinkerBody, frozen=True):
    """The adapter that create_model asks for. ``seed`` is that of its first weights (``None``: the server chooses), and
    the flags say which parts of the model have adapters: the head, the feed-forward and the attention layers."""

    rank: int
    """The rank of the two matrices of each adapted layer."""
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody, frozen=True):
    """The optimizer that create_model asks for; only ``adamw`` is served."""

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
    """The body of get_info, which asks for the facts of a model."""

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
    """The body of optim_step: a step of AdamW on the gradients that have added up. ``optimizer_params`` are those of
    other optimizers, which are not served."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = "optim_step"


class SaveWeightsBody(TinkerBody, frozen=True):
    """The body of save_weights: a checkpoint from which training can continue. ``path`` is its name (``None``: one made
    from the model's version), and ``ttl_seconds`` says after how long it is deleted (``None``: never)."""

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
    weights, and ``inflight`` for a session that follows later saves."""

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
    """The body of load_weights: the weights of the checkpoint ``path``, and with ``optimizer`` the state of its
    optimizer, replace those of ``model_id``, or become a new model of ``session_id``."""

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
    """A chunk of a prompt. Only chunks of type ``encoded_text`` are served, which hold token ids; the other fields are
    those of images and sound."""

    type: str
    tokens: list[int] = []
    data: str | None = None
    format: str | None = None
    expected_tokens: int | None = None
    location: str | None = None
    dmel: str | None = None
    override_dimensions: dict[str, int] | None = None


class PromptBody(TinkerBody, frozen=True):
    """A prompt: the tokens of its chunks, one after the other."""

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
    """A tensor as JSON: its values in ``data``, all of them, or those of a sparse matrix whose compressed row starts
    and column indices are given too."""

    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody, frozen=True):
    """The body of asample: ``num_samples`` answers of a sampling session to a prompt. The fields with ``logprobs`` ask
    for log-probabilities: of the prompt's tokens (or its last N), of the K likeliest tokens at positions of the prompt
    or the samples, and of target tokens in the places of the prompt's."""

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
    """The body of retrieve_future, which asks for the result of the request ``request_id``."""

    request_id: str
    allow_metadata_only: bool = False


class CancelBody(TinkerBody, frozen=True):
    """The body of cancel_future, which ends the sampling request ``request_id``."""

    request_id: str


class PathBody(TinkerBody, frozen=True):
    """The body of weights_info, which asks for the facts of the checkpoint at ``tinker_path``."""

    tinker_path: str


class TtlBody(TinkerBody, frozen=True):
    """The body of a request that sets when a checkpoint is deleted: ``ttl_seconds`` from now, or never if they are
    ``None``."""

    ttl_seconds: int | None = None
