"""Memory sizing for ``headrace plan``: whether engines and learner fit into the memory of a cluster's accelerators, and
how many accelerators each of them needs at least.

Engines and learner either have separate accelerators, or alternate on the same accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.base.errors import ConfigError
from headrace.engine.config import FleetConfig
from headrace.flow import FlowConfig
from headrace.learner import LearnerConfig
from headrace.models.config import LoraConfig, ModelConfig
from headrace.sync import SyncConfig
from headrace.sync.estimate import NUMBER_BYTES
from headrace.wings.plan.catalogue import models
from headrace.wings.plan.catalogue.shape import ModelShape
from headrace.wings.plan.cluster import Cluster

USABLE = 0.9
"""Fraction of an accelerator's memory that is available for weights, caches and activations; libraries and temporary
buffers occupy the rest."""
COPIES = 2
"""Number of copies of the weights in an engine: the weights in use, and the staged weights."""
SEQUENCES = 4
"""Number of full-length sequences that an engine's cache should have room for; an engine gets more accelerators to
reach this number."""
ACTIVATION_BYTES = 34
"""Bytes of activations per token, layer and hidden element in 16 bits (Korthikanti et al. 2022)."""
GB = 1e9
"""Number of bytes in the unit in which memory is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """The model's sizes and the settings of a run file that determine memory and speed: the input of a plan."""

    shape: ModelShape
    """The sizes of the model."""
    model: ModelConfig
    engine: FleetConfig
    flow: FlowConfig
    sync: SyncConfig
    learner: LearnerConfig
    passes: int = 0
    """Number of passes over a batch that only compute log π: for a reference policy, for kept weights or for a
    teacher."""

    @property
    def bytes_per_number(self) -> int:
        """Return the number of bytes of one number in the model's dtype: a weight, or a number in the key-value
        cache."""
        return 4 if self.model.dtype == "float32" else 2

    @property
    def weight_bytes(self) -> float:
        """Return the number of bytes of one copy of the weights."""
        return float(self.shape.params * self.bytes_per_number)

    @property
    def adapter_params(self) -> float:
        """Return the approximate number of parameters of all low-rank adapters: the policy's adapter, and one for each
        agent in ``model.lora.agents``; 0 without adapters. An adapter has two matrices of ``hidden`` times ``rank``
        numbers for each of the seven weight matrices of a layer."""
        lora = self.model.lora
        if lora is None:
            return 0.0
        return float(14 * lora.rank * self.shape.layers * self.shape.hidden) * (1 + len(lora.agents))

    @property
    def version_bytes(self) -> float:
        """Return the number of bytes of one whole version of the weights in the codec's number format. A codec that
        sends differences sends fewer bytes."""
        if self.model.lora is not None:
            return self.adapter_params * 4
        sent = NUMBER_BYTES.get(self.sync.codec, self.bytes_per_number)
        return self.weight_bytes * min(1.0, sent / self.bytes_per_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A division of the cluster's accelerators between engines and learner, with the bytes that each needs. ``str``
    describes it in words."""

    ways: int
    """Number of accelerators of one engine (tensor-parallel ways)."""
    cache_tokens: float
    """Capacity in tokens of one engine's cache if engines and learner have separate accelerators; 0 if they do not fit
    on separate accelerators."""
    engine_bytes: float
    """Bytes of weights in one engine."""
    learner_bytes: float
    """Bytes of weights, gradients and optimizer state over all ranks of the learner."""
    activation_bytes: float
    """Bytes of activations on each rank of the learner."""
    least_learner: int
    """Smallest number of accelerators for the learner."""
    shared_tokens: float = 0.0
    """Capacity in tokens of one engine's cache if engines and learner alternate on the same accelerators; 0 if they do
    not fit together."""

    @property
    def beside(self) -> bool:
        """Return whether engines and learner fit on separate accelerators."""
        return self.cache_tokens > 0

    def __str__(self) -> str:
        """Return the division as text, which the plan prints."""
        if not self.beside:
            return (
                f"engines and learner do not fit side by side and take turns: on each accelerator weights, gradients "
                f"and optimizer share with an engine of {self.ways} ({self.engine_bytes / GB:,.1f} GB of weights), "
                f"which has room for {self.shared_tokens:,.0f} tokens while it generates"
            )
        return (
            f"an engine takes {self.ways} accelerator{'s' if self.ways > 1 else ''} ({self.engine_bytes / GB:,.1f} GB "
            f"of weights, a cache of {self.cache_tokens:,.0f} tokens), the learner at least {self.least_learner} "
            f"({self.learner_bytes / GB:,.1f} GB, and {self.activation_bytes / GB:,.1f} GB of activations on each)"
        )


def fit(request: SizingRequest, cluster: Cluster, longest: float) -> Fit:
    """Return the smallest engine and the smallest learner that fit on separate accelerators, for episodes of up to
    ``longest`` tokens. If they do not fit, return the division in which both alternate on all accelerators.

    Raises :class:`~headrace.base.errors.ConfigError` if the cluster is too small, with the missing memory and what
    would fit.
    """
    division = _find_fit(request, cluster, longest)
    if division is None:
        raise _too_small(request, cluster, longest)
    return division


def _find_fit(request: SizingRequest, cluster: Cluster, longest: float) -> Fit | None:
    """Return a division of the cluster in which engines and learner fit, for episodes of up to ``longest`` tokens: on
    separate accelerators if possible, otherwise alternating on the same accelerators. ``None`` if neither fits."""
    division = _separate_division(request, cluster, longest)
    if _is_complete(division, cluster):
        return replace(division, shared_tokens=_shared_tokens(request, cluster, division.ways, longest))
    ways = 1
    while ways <= min(cluster.per_node, cluster.count):
        tokens = _shared_tokens(request, cluster, ways, longest)
        if tokens:
            return replace(division, ways=ways, cache_tokens=0.0, shared_tokens=tokens, least_learner=cluster.count)
        ways *= 2
    return None


def _separate_division(request: SizingRequest, cluster: Cluster, longest: float) -> Fit:
    """Return the division in which engines and learner have separate accelerators. It may be incomplete: ``ways`` is 0
    if no engine fits beside the learner, and ``least_learner`` is 0 if no learner fits."""
    learner, activations = learner_bytes(request), activation_bytes(request, longest)
    free_bytes = _usable_bytes(cluster) - activations
    least = max(1, -(-int(learner) // int(free_bytes))) if free_bytes >= 1 else 0
    ways, cache_tokens = _smallest_engine(request, cluster, cluster.count - least, longest)
    return Fit(
        ways=ways,
        cache_tokens=cache_tokens,
        engine_bytes=engine_bytes(request),
        learner_bytes=learner,
        activation_bytes=activations,
        least_learner=least,
    )


def _is_complete(division: Fit, cluster: Cluster) -> bool:
    """Return whether a division has room for an engine and a learner on separate accelerators of the cluster."""
    return bool(division.ways and division.least_learner) and division.ways + division.least_learner <= cluster.count


def _shared_tokens(request: SizingRequest, cluster: Cluster, ways: int, longest: float) -> float:
    """Return the capacity in tokens of the cache of an engine on ``ways`` accelerators, each of which also stores its
    share of the learner. Return 0 if the capacity is below ``longest`` tokens, or if the memory does not suffice for a
    pass of the learner while the engine sleeps."""
    free_bytes = (_usable_bytes(cluster) - learner_bytes(request) / cluster.count) * ways - engine_bytes(request)
    tokens = free_bytes / (request.shape.kv_numbers * request.bytes_per_number)
    return tokens if tokens >= longest and free_bytes >= activation_bytes(request, longest) * ways else 0.0


def _usable_bytes(cluster: Cluster) -> float:
    """Return the bytes of one accelerator that can be used for weights, caches and activations."""
    return USABLE * cluster.device.memory_gb * GB


def engine_bytes(request: SizingRequest) -> float:
    """Return the bytes of weights in one engine: :data:`COPIES` copies of the model or, if adapters are trained, one
    copy and the adapters in float32."""
    copies = 1 if request.model.lora is not None else COPIES
    return copies * request.weight_bytes + request.adapter_params * 4


def _smallest_engine(request: SizingRequest, cluster: Cluster, most: int, longest: float) -> tuple[int, float]:
    """Return the smallest number of accelerators for an engine, at most ``most`` and within one machine, and the
    capacity of its cache in tokens. The cache has room for :data:`SEQUENCES` sequences of ``longest`` tokens if
    possible, otherwise for at least one. Return (0, 0) if no engine fits."""
    token_bytes = float(request.shape.kv_numbers * request.bytes_per_number)
    smallest = (0, 0.0)
    ways = 1
    while ways <= min(cluster.per_node, most):
        tokens = (_usable_bytes(cluster) * ways - engine_bytes(request)) / token_bytes
        if tokens >= longest and not smallest[0]:
            smallest = (ways, tokens)
        if tokens >= SEQUENCES * longest:
            return ways, tokens
        ways *= 2
    return smallest


def learner_bytes(request: SizingRequest) -> float:
    """Return the bytes of weights, gradients and AdamW's state over all ranks of the learner."""
    return sum(learner_parts(request).values())


def learner_parts(request: SizingRequest) -> dict[str, float]:
    """Return the bytes that the learner stores over all ranks, by kind: weights, gradients and optimizer. Each
    parameter has 4 bytes for the weight, 4 for the gradient and 8 for AdamW's moments in float32; 2, 2 and 8 in
    bfloat16, and 4 more for master weights. With adapters, the adapters have all three kinds in float32, and the base
    model has only weights."""
    weight = request.bytes_per_number
    if request.model.lora is not None:
        trained = request.adapter_params
        return {"weights": request.weight_bytes + 4 * trained, "gradients": 4 * trained, "optimizer": 8 * trained}
    params = request.shape.params
    masters = 4.0 if weight < 4 and request.learner.memory.masters else 0.0
    return {"weights": params * float(weight), "gradients": params * float(weight), "optimizer": params * (8 + masters)}


def activation_bytes(request: SizingRequest, longest: float) -> float:
    """Return the bytes of activations that each rank of the learner stores for the backward pass of one micro-batch:
    ``learner.tokens_per_microbatch`` tokens of samples of up to ``longest`` tokens."""
    shape, memory = request.shape, request.learner.memory
    # recomputation stores only the input of each layer; ACTIVATION_BYTES is for numbers of two bytes
    kept = request.bytes_per_number if memory.recompute else ACTIVATION_BYTES * request.bytes_per_number / 2
    layers = 1 if memory.offload_activations else shape.layers
    linear = request.learner.tokens_per_microbatch * shape.hidden * layers * kept
    return float(linear) + score_bytes(request, longest)


def score_bytes(request: SizingRequest, longest: float) -> float:
    """Return the bytes of attention scores that each rank of the learner stores in one pass over samples of up to
    ``longest`` tokens. Only ``learner.attention = "padded"`` stores scores; return 0 for flex attention."""
    learner, shape = request.learner, request.shape
    if learner.attention != "padded":
        return 0.0
    layers = shape.layers if shape.grouped and learner.share_prefixes is not False else shape.score_layers
    if learner.memory.recompute or learner.memory.offload_activations:
        layers = min(layers, 1)
    weight_bytes = 4 if request.bytes_per_number == 4 else 4 + request.bytes_per_number
    tokens = learner.tokens_per_microbatch
    return float(layers * shape.heads * weight_bytes * tokens * min(longest, tokens))


def _too_small(request: SizingRequest, cluster: Cluster, longest: float) -> ConfigError:
    """Return the error for a cluster that is too small for episodes of ``longest`` tokens. It says how much memory is
    missing, and which changes would fit."""
    division = _separate_division(request, cluster, longest)
    if not division.least_learner:
        recomputing = _with_recompute(request)
        if request.learner.memory.recompute or activation_bytes(recomputing, longest) >= _usable_bytes(cluster):
            return _pass_too_large(request, cluster, longest)
        if _find_fit(recomputing, cluster, longest) is not None:
            return _pass_too_large(request, cluster, longest, "set learner.memory.recompute = true, or ")
        return _cluster_too_small(
            recomputing,
            cluster,
            _separate_division(recomputing, cluster, longest),
            longest,
            ", even with learner.memory.recompute = true",
        )
    return _cluster_too_small(request, cluster, division, longest)


def _with_recompute(request: SizingRequest) -> SizingRequest:
    """Return the request with ``learner.memory.recompute`` set, which saves activations."""
    learner = request.learner
    return replace(
        request,
        learner=learner.model_copy(update={"memory": learner.memory.model_copy(update={"recompute": True})}),
    )


def _pass_too_large(request: SizingRequest, cluster: Cluster, longest: float, instead: str = "") -> ConfigError:
    """Return the error for a micro-batch whose activations, with samples of up to ``longest`` tokens, do not fit into
    one accelerator. ``instead`` is a preferred remedy, which precedes the remedy of a smaller micro-batch."""
    if score_bytes(request, longest):
        instead = "leave learner.attention = 'padded' out, " + (instead or "or ")
    usable, kept, tokens = (
        _usable_bytes(cluster),
        activation_bytes(request, longest),
        request.learner.tokens_per_microbatch,
    )
    return ConfigError(
        f"one pass of {tokens} tokens of {request.shape.name} keeps {kept / GB:,.1f} GB of activations, and of one "
        f"{cluster.device.name} {usable / GB:,.1f} GB can be used: {(kept - usable) / GB:,.1f} GB too little",
        remedy=f"{instead}lower learner.tokens_per_microbatch below {max(1, int(tokens * usable / kept)):,}",
    )


def _cluster_too_small(
    request: SizingRequest, cluster: Cluster, division: Fit, longest: float, also: str = ""
) -> ConfigError:
    """Return the error for a cluster whose memory is too small for the model. Its remedies are the smallest cluster
    that would fit, the largest model of the catalogue that would fit, and adapters if they would fit. ``also`` is added
    to the description of the problem."""
    name, usable = cluster.device.name, _usable_bytes(cluster)
    engine = division.engine_bytes + request.shape.kv_numbers * request.bytes_per_number * longest
    ways = 1
    while usable * ways < engine:
        ways *= 2
    total = ways + division.least_learner
    larger = cluster.model_copy(update={"per_node": max(ways, cluster.per_node)})
    total = next(  # alternating may need fewer accelerators
        count for count in range(1, total + 1)
        if count == total or _find_fit(request, larger.model_copy(update={"count": count}), longest) is not None
    )  # fmt: skip
    missing = []
    if total > cluster.count:
        missing.append(f"{usable * (total - cluster.count) / GB:,.0f} GB too little")
    if ways > cluster.per_node:
        missing.append(f"{(engine - usable * cluster.per_node) / GB:,.0f} GB too little in one machine")
    machines = f" in machines of {ways} (cluster.per_node)" if ways > cluster.per_node else ""
    remedies = [f"take {max(total, cluster.count)} × {name}{machines}"]
    others = [each for each in models().values() if _fits(replace(request, shape=each), cluster, longest)]
    if others:
        largest = max(others, key=lambda each: each.params)
        remedies.append(f"or a smaller model: {largest.name} would fit")
    lora = replace(request, model=request.model.model_copy(update={"lora": LoraConfig()}))
    if request.model.lora is None and _fits(lora, cluster, longest):
        remedies.append("or set model.lora, which keeps no optimizer for the base")
    return ConfigError(
        f"{cluster} cannot hold {request.shape.name}{also}: of each {usable / GB:,.0f} GB can be used; "
        f"one engine needs {engine / GB:,.0f} GB (with a sequence of {longest:,.0f} tokens) on {ways} of them, "
        f"the learner "
        f"{division.learner_bytes / GB:,.0f} GB, and {division.activation_bytes / GB:,.1f} GB of activations on each, "
        f"on {division.least_learner}: {' and '.join(missing)}",
        remedy="; ".join(remedies),
    )


def _fits(request: SizingRequest, cluster: Cluster, longest: float) -> bool:
    """Return whether engines and learner fit on the cluster, on separate accelerators or alternating."""
    return _find_fit(request, cluster, longest) is not None
