"""Memory sizing for ``headrace plan``: whether engines and learner fit into the memory of a cluster's accelerators, and
how many accelerators each of them needs at least.

Engines and learner either have separate accelerators, or alternate on the same accelerators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from headrace.base.errors import ConfigError
from headrace.engine.config import FleetConfig
from headrace.flow import FlowConfig
from headrace.learner import LearnerConfig
from headrace.learner.footprint import Footprint, LearnerSizes, levers
from headrace.learner.parallel.config import ParallelConfig
from headrace.models.config import LoraConfig, ModelConfig
from headrace.models.shape import ModelShape
from headrace.sync import SyncConfig
from headrace.sync.estimate import NUMBER_BYTES
from headrace.wings.plan.catalogue import models
from headrace.wings.plan.cluster import Cluster

USABLE = 0.9
"""Fraction of an accelerator's memory that is available for weights, caches and activations; libraries and temporary
buffers occupy the rest."""
COPIES = 2
"""Number of copies of the weights in an engine: the weights in use, and the staged weights."""
SEQUENCES = 4
"""Number of full-length sequences that an engine's cache should have room for; an engine gets more accelerators to
reach this number."""
GB = 1e9
"""Number of bytes in the unit in which memory is given."""
MOST_RANKS = 1 << 16
"""The largest number of ranks of a learner that is considered."""


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
        """Return the number of parameters of all low-rank adapters: the policy's adapter, and one for each agent in
        ``model.lora.agents``; 0 without adapters."""
        lora = self.model.lora
        if lora is None:
            return 0.0
        return self.shape.adapter_params(lora.rank, experts=lora.experts) * (1 + len(lora.agents))

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
    pass_bytes: float
    """Bytes that each rank of the learner needs during a pass in addition to its part of ``learner_bytes``."""
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
            f"({self.learner_bytes / GB:,.1f} GB, and {self.pass_bytes / GB:,.1f} GB for a pass on each)"
        )


def fit(request: SizingRequest, cluster: Cluster, longest: float) -> Fit:
    """Return the smallest engine and the smallest learner of ``request`` that fit into ``cluster`` on separate
    accelerators, for episodes of up to ``longest`` tokens. If they do not fit, return the division in which both
    alternate on all accelerators.

    Raises :class:`~headrace.base.errors.ConfigError` if the cluster is too small, with the missing memory and what
    would fit.
    """
    division = _find_fit(request, cluster, longest)
    if division is None:
        raise _make_too_small_error(request, cluster, longest)
    return division


def learner_sizes(request: SizingRequest, longest: float) -> LearnerSizes:
    """Return the sizes and settings of ``request`` that determine the memory of a learner's ranks, for samples of up to
    ``longest`` tokens."""
    return LearnerSizes(
        shape=request.shape,
        config=request.learner,
        itemsize=request.bytes_per_number,
        longest=longest,
        adapter_params=request.adapter_params,
        adapts_experts=request.model.lora is not None and request.model.lora.experts,
    )


def describe_memory(sizes: LearnerSizes, usable: float) -> str:
    """Return in words what a rank of a learner with ``sizes`` needs at its peak, what it leaves of ``usable`` bytes,
    and how much each setting would free."""
    needed = sizes.footprint().total_bytes
    left = usable - needed
    room = f"{left / GB:,.1f} GB are left" if left >= 0 else f"{-left / GB:,.1f} GB too little"
    return (
        f"A rank of the learner needs {needed / GB:,.1f} GB at its peak, and {usable / GB:,.1f} GB of its "
        f"accelerator can be used: {room}{describe_levers(sizes)}"
    )


def describe_levers(sizes: LearnerSizes) -> str:
    """Return in words how much each setting would free on a rank of a learner with ``sizes``; empty if no setting frees
    a tenth of a GB."""
    named = [
        f"{name}: {freed / GB:,.1f} GB"
        for name, freed in sorted(levers(sizes).items(), key=lambda each: -each[1])
        if freed >= 0.05 * GB
    ]
    return f". What would free memory on each rank: {'; '.join(named)}" if named else ""


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
    least = _find_least_ranks(request, cluster, longest)
    ways, cache_tokens = _smallest_engine(request, cluster, cluster.count - least, longest)
    return Fit(
        ways=ways,
        cache_tokens=cache_tokens,
        engine_bytes=engine_bytes(request),
        learner_bytes=learner_bytes(request),
        pass_bytes=_pass_bytes(spread_sizes(request, longest, least or MOST_RANKS)),
        least_learner=least,
    )


def _find_least_ranks(request: SizingRequest, cluster: Cluster, longest: float) -> int:
    """Return the smallest number of ranks of the learner of ``request`` that fit into the accelerators of ``cluster``,
    for samples of up to ``longest`` tokens; 0 if no number fits. Only the number of data-parallel ranks is chosen."""
    usable, step = usable_bytes(cluster), compute_rank_step(request)
    fewest, most = 2, max(2, MOST_RANKS // step)

    def fits(ranks: int) -> bool:
        """Return whether a rank of the learner on ``ranks`` ranks fits into an accelerator."""
        return spread_sizes(request, longest, ranks).footprint().total_bytes <= usable

    if fits(step):
        return step
    if not fits(most * step):
        return 0
    while fewest < most:  # more ranks never need more memory each, from two on
        middle = (fewest + most) // 2
        if fits(middle * step):
            most = middle
        else:
            fewest = middle + 1
    return most * step


def compute_rank_step(request: SizingRequest) -> int:
    """Return the number whose multiples are the possible numbers of ranks of the learner of ``request``: with the run's
    replicas, its context and tensor ranks, and its expert ranks, which divide the ranks of a replica."""
    ways = request.learner.parallel
    return ways.replicate * math.lcm(ways.context * ways.tensor, ways.expert)


def spread_sizes(request: SizingRequest, longest: float, ranks: int) -> LearnerSizes:
    """Return the sizes of the learner of ``request`` on ``ranks`` ranks, for samples of up to ``longest`` tokens, or on
    as many of them as its other dimensions of parallelism divide. Only the number of data-parallel ranks is changed."""
    sizes, step = learner_sizes(request, longest), compute_rank_step(request)
    ways = sizes.config.parallel
    num_ranks = max(1, ranks // step) * step
    parallel = ways.model_copy(update={"data": num_ranks // (ways.replicate * ways.context * ways.tensor)})
    optimizer = sizes.config.optimizer
    if num_ranks > 1 and optimizer.kind == "adamw8bit":  # moments of 8 bits are for one rank
        optimizer = optimizer.model_copy(update={"kind": "adamw"})
    return replace(sizes, config=sizes.config.model_copy(update={"parallel": parallel, "optimizer": optimizer}))


def _pass_bytes(sizes: LearnerSizes) -> float:
    """Return the bytes that a rank needs only during a pass: activations, the head, gathered layers, and the gradients
    of a micro-batch."""
    return sizes.footprint().total_bytes - sizes.resident().total_bytes


def _is_complete(division: Fit, cluster: Cluster) -> bool:
    """Return whether a division has room for an engine and a learner on separate accelerators of the cluster."""
    return bool(division.ways and division.least_learner) and division.ways + division.least_learner <= cluster.count


def _shared_tokens(request: SizingRequest, cluster: Cluster, ways: int, longest: float) -> float:
    """Return the capacity in tokens of the cache of an engine on ``ways`` accelerators, each of which also stores its
    share of the learner. Return 0 if the capacity is below ``longest`` tokens, or if the memory does not suffice for a
    pass of the learner while the engine sleeps, or if the learner needs more ranks."""
    if cluster.count < compute_rank_step(request):
        return 0.0
    rank = spread_sizes(request, longest, cluster.count)
    free_bytes = (usable_bytes(cluster) - rank.resident().total_bytes) * ways - engine_bytes(request)
    tokens = free_bytes / (request.shape.kv_numbers * request.bytes_per_number)
    return tokens if tokens >= longest and free_bytes >= _pass_bytes(rank) * ways else 0.0


def usable_bytes(cluster: Cluster) -> float:
    """Return the bytes of one accelerator of ``cluster`` that can be used for weights, caches and activations."""
    return USABLE * cluster.device.memory_gb * GB


def engine_bytes(request: SizingRequest) -> float:
    """Return the bytes of weights in one engine of ``request``: :data:`COPIES` copies of the model or, if adapters are
    trained, one copy and the adapters in float32."""
    copies = 1 if request.model.lora is not None else COPIES
    return copies * request.weight_bytes + request.adapter_params * 4


def _smallest_engine(request: SizingRequest, cluster: Cluster, limit: int, longest: float) -> tuple[int, float]:
    """Return the smallest number of accelerators of ``cluster`` for an engine of ``request``, at most ``limit`` and
    within one machine, and the capacity of its cache in tokens. The cache has room for :data:`SEQUENCES` sequences of
    ``longest`` tokens if possible, otherwise for at least one. Return (0, 0) if no engine fits."""
    token_bytes = float(request.shape.kv_numbers * request.bytes_per_number)
    smallest = (0, 0.0)
    ways = 1
    while ways <= min(cluster.per_node, limit):
        tokens = (usable_bytes(cluster) * ways - engine_bytes(request)) / token_bytes
        if tokens >= longest and not smallest[0]:
            smallest = (ways, tokens)
        if tokens >= SEQUENCES * longest:
            return ways, tokens
        ways *= 2
    return smallest


def learner_bytes(request: SizingRequest) -> float:
    """Return the bytes of weights, gradients, optimizer state and kept copies over all ranks of the learner of
    ``request``, without those of a micro-batch."""
    return _over_all_ranks(request, learner_sizes(request, 0.0)).total_bytes


def update_bytes(request: SizingRequest) -> float:
    """Return the bytes of weights, gradients and optimizer state over all ranks of the learner of ``request`` that an
    update reads and writes, wherever they are kept."""
    sizes = learner_sizes(request, 0.0)
    memory = sizes.config.memory.model_copy(update={"offload_optimizer": False})
    whole = _over_all_ranks(request, replace(sizes, config=sizes.config.model_copy(update={"memory": memory})))
    return whole.total_bytes - whole.copies_bytes


def _over_all_ranks(request: SizingRequest, sizes: LearnerSizes) -> Footprint:
    """Return what all ranks together need between two updates: what a single rank would need, for each replica."""
    alone = replace(sizes, config=sizes.config.model_copy(update={"parallel": ParallelConfig()})).resident()
    num_replicas = request.learner.parallel.replicate
    return Footprint(**{field.name: num_replicas * getattr(alone, field.name) for field in fields(Footprint)})


def _make_too_small_error(request: SizingRequest, cluster: Cluster, longest: float) -> ConfigError:
    """Return the error for a cluster that is too small for ``request`` with episodes of ``longest`` tokens. It says how
    much memory is missing, and which changes would fit."""
    division = _separate_division(request, cluster, longest)
    if not division.least_learner:
        recomputing = _with_recompute(request)
        if request.learner.memory.recompute or not _find_least_ranks(recomputing, cluster, longest):
            return _make_pass_error(request, cluster, longest)
        if _find_fit(recomputing, cluster, longest) is not None:
            return _make_pass_error(request, cluster, longest, "set learner.memory.recompute = true, or ")
        return _make_cluster_error(
            recomputing,
            cluster,
            _separate_division(recomputing, cluster, longest),
            longest,
            ", even with learner.memory.recompute = true",
        )
    return _make_cluster_error(request, cluster, division, longest)


def _with_recompute(request: SizingRequest) -> SizingRequest:
    """Return the request with ``learner.memory.recompute`` set, which saves activations."""
    learner = request.learner
    return replace(
        request,
        learner=learner.model_copy(update={"memory": learner.memory.model_copy(update={"recompute": True})}),
    )


def _make_pass_error(request: SizingRequest, cluster: Cluster, longest: float, instead: str = "") -> ConfigError:
    """Return the error for a micro-batch of ``request`` that does not fit into one accelerator of ``cluster``, with
    samples of up to ``longest`` tokens, on any number of ranks. ``instead`` is a preferred remedy, which precedes the
    remedy of a smaller micro-batch."""
    rank = spread_sizes(request, longest, MOST_RANKS)
    if rank.score_bytes():
        instead = "leave learner.attention = 'padded' out, " + (instead or "or ")
    usable, needed, tokens = (
        usable_bytes(cluster),
        rank.footprint().total_bytes,
        request.learner.tokens_per_microbatch,
    )
    fitting = _find_most_tokens(rank, usable)
    smaller = f"lower learner.tokens_per_microbatch to {fitting:,} or less" if fitting else (
        "take accelerators with more memory"
    )  # fmt: skip
    return ConfigError(
        f"one pass of {tokens} tokens of {request.shape.name} needs {needed / GB:,.1f} GB on each of any number of "
        f"ranks, the rank's part of weights, gradients and optimizer included, and of one {cluster.device.name} "
        f"{usable / GB:,.1f} GB can be used: {(needed - usable) / GB:,.1f} GB too little",
        remedy=f"{instead}{smaller}{describe_levers(rank)}",
    )


def _find_most_tokens(rank: LearnerSizes, usable: float) -> int:
    """Return the largest micro-batch, in tokens, with which a rank fits into ``usable`` bytes; 0 if none fits."""
    fitting, beyond = 0, rank.config.tokens_per_microbatch
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        config = rank.config.model_copy(update={"tokens_per_microbatch": middle})
        if replace(rank, config=config).footprint().total_bytes <= usable:
            fitting = middle
        else:
            beyond = middle
    return fitting


def _make_cluster_error(
    request: SizingRequest, cluster: Cluster, division: Fit, longest: float, also: str = ""
) -> ConfigError:
    """Return the error for a cluster whose memory is too small for the model of ``request`` with episodes of up to
    ``longest`` tokens; ``division`` is the incomplete division. Its remedies are the smallest cluster that would fit,
    the largest model of the catalogue that would fit, and adapters if they would fit. ``also`` is added to the
    description of the problem."""
    name, usable = cluster.device.name, usable_bytes(cluster)
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
    recomputes = request.learner.memory.recompute or not _fits(_with_recompute(request), cluster, longest)
    remedies = [] if recomputes else ["set learner.memory.recompute = true"]
    remedies.append(f"{'or ' * bool(remedies)}take {max(total, cluster.count)} × {name}{machines}")
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
        f"{division.learner_bytes / GB:,.0f} GB, and {division.pass_bytes / GB:,.1f} GB for a pass on each, "
        f"on {division.least_learner}: {' and '.join(missing)}",
        remedy="; ".join(remedies),
    )


def _fits(request: SizingRequest, cluster: Cluster, longest: float) -> bool:
    """Return whether engines and learner fit on the cluster, on separate accelerators or alternating."""
    return _find_fit(request, cluster, longest) is not None
