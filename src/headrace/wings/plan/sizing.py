"""What fits where: the memory of engines and learner, and how many accelerators each needs at least."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.base.errors import ConfigError
from headrace.engine.fleet.config import FleetConfig
from headrace.flow import FlowConfig
from headrace.learner import LearnerConfig
from headrace.models.config import LoraConfig, ModelConfig
from headrace.sync import SyncConfig
from headrace.wings.plan.catalogue import models
from headrace.wings.plan.catalogue.shape import ModelShape
from headrace.wings.plan.cluster import Cluster

USABLE = 0.9
"""Of the memory: the rest is for what libraries and passes take."""
COPIES = 2
"""Of the weights in an engine: those in use, and those that are staged."""
SEQUENCES = 4
"""Of full length that the cache of an engine should hold, where more than one accelerator can bring it about."""
ACTIVATION_BYTES = 34
"""Of one token, layer and hidden number between forward and backward pass, in 16 bits (Korthikanti et al. 2022)."""
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """What a run file says, as far as a plan looks at it."""

    shape: ModelShape
    model: ModelConfig
    engine: FleetConfig
    flow: FlowConfig
    sync: SyncConfig
    learner: LearnerConfig
    passes: int = 0
    """Over a batch that only read log π: of a reference, kept weights, a teacher."""

    @property
    def number_bytes(self) -> int:
        """Of one weight."""
        return 4 if self.model.dtype == "float32" else 2

    @property
    def weight_bytes(self) -> float:
        """Of one copy."""
        return float(self.shape.params * self.number_bytes)

    @property
    def adapter_params(self) -> float:
        """Of low-rank adapters, about: two thin matrices beside seven of each layer. 0 without one."""
        lora = self.model.lora
        if lora is None:
            return 0.0
        return float(14 * lora.rank * self.shape.layers * self.shape.hidden) * (1 + len(lora.agents))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model lies on accelerators."""

    ways: int
    """Accelerators of one engine."""
    cache_tokens: float
    """That one engine can keep beside the learner; 0 where they do not fit side by side."""
    engine_bytes: float
    """Of the weights on one engine."""
    learner_bytes: float
    """Weights, gradients and optimizer, all ranks together."""
    activation_bytes: float
    """On each rank of the learner."""
    least_learner: int
    """Accelerators that the learner needs at least."""
    shared_tokens: float = 0.0
    """That one engine can keep where it generates on accelerators that train, too, in turn; 0 where both do not fit."""

    @property
    def beside(self) -> bool:
        """Whether engines and learner can have accelerators of their own."""
        return self.cache_tokens > 0

    def __str__(self) -> str:
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


def fit(asked: SizingRequest, cluster: Cluster, longest: float) -> Fit:
    """Where the smallest engine and the smallest learner lie side by side, for episodes of up to ``longest`` tokens; or
    both on all accelerators, in turn.

    Raises :class:`~headrace.base.errors.ConfigError` where the cluster cannot hold both: by how much, and what would
    fit.
    """
    made = _fit(asked, cluster, longest)
    if made is None:
        raise _too_small(asked, cluster, longest)
    return made


def _fit(asked: SizingRequest, cluster: Cluster, longest: float) -> Fit | None:
    made = _laid(asked, cluster, longest)
    if _holds(made, cluster):
        return replace(made, shared_tokens=_shared_tokens(asked, cluster, made.ways, longest))
    ways = 1
    while ways <= min(cluster.per_node, cluster.count):
        tokens = _shared_tokens(asked, cluster, ways, longest)
        if tokens:
            return replace(made, ways=ways, cache_tokens=0.0, shared_tokens=tokens, least_learner=cluster.count)
        ways *= 2
    return None


def _laid(asked: SizingRequest, cluster: Cluster, longest: float) -> Fit:
    """``ways`` is 0 where no engine fits beside the learner, ``least_learner`` where no learner fits."""
    learner, activations = learner_bytes(asked), activation_bytes(asked)
    room = _usable(cluster) - activations
    least = max(1, -(-int(learner) // int(room))) if room >= 1 else 0
    ways, cache_tokens = _engine(asked, cluster, cluster.count - least, longest)
    return Fit(
        ways=ways,
        cache_tokens=cache_tokens,
        engine_bytes=_engine_bytes(asked),
        learner_bytes=learner,
        activation_bytes=activations,
        least_learner=least,
    )


def _holds(made: Fit, cluster: Cluster) -> bool:
    return bool(made.ways and made.least_learner) and made.ways + made.least_learner <= cluster.count


def _shared_tokens(asked: SizingRequest, cluster: Cluster, ways: int, longest: float) -> float:
    """What an engine of ``ways`` accelerators can keep beside their shares of the learner; 0 where that is less than
    one sequence, or leaves no room for a pass of the learner while the engine sleeps."""
    room = (_usable(cluster) - learner_bytes(asked) / cluster.count) * ways - _engine_bytes(asked)
    tokens = room / (asked.shape.kv_numbers * asked.number_bytes)
    return tokens if tokens >= longest and room >= activation_bytes(asked) * ways else 0.0


def _usable(cluster: Cluster) -> float:
    """Bytes of one accelerator."""
    return USABLE * cluster.device.memory_gb * GB


def _engine_bytes(asked: SizingRequest) -> float:
    copies = 1 if asked.model.lora is not None else COPIES
    return copies * asked.weight_bytes + asked.adapter_params * 4


def _engine(asked: SizingRequest, cluster: Cluster, most: int, longest: float) -> tuple[int, float]:
    """The fewest accelerators of one machine, of ``most``, that hold the weights and some sequences; (0, 0) where none
    do."""
    kv = float(asked.shape.kv_numbers * asked.number_bytes)
    found = (0, 0.0)
    ways = 1
    while ways <= min(cluster.per_node, most):
        tokens = (_usable(cluster) * ways - _engine_bytes(asked)) / kv
        if tokens >= longest and not found[0]:
            found = (ways, tokens)
        if tokens >= SEQUENCES * longest:
            return ways, tokens
        ways *= 2
    return found


def learner_bytes(asked: SizingRequest) -> float:
    """Weights, gradients and what AdamW keeps: in float32 4 + 4 + 8 for each parameter, in bfloat16 2 + 2 + 8, and 4
    for the copy that is updated. Of an adapter all, and of its base the weights alone."""
    whole = 16.0 if asked.number_bytes == 4 or asked.learner.memory.masters else 12.0
    if asked.model.lora is None:
        return asked.shape.params * whole
    return asked.weight_bytes + asked.adapter_params * 16.0


def activation_bytes(asked: SizingRequest) -> float:
    """Of one pass of ``learner.tokens_per_microbatch`` tokens."""
    shape, memory = asked.shape, asked.learner.memory
    kept = asked.number_bytes if memory.recompute else ACTIVATION_BYTES * asked.number_bytes / 2
    layers = 1 if memory.offload_activations else shape.layers
    return float(asked.learner.tokens_per_microbatch * shape.hidden * layers * kept)


def _too_small(asked: SizingRequest, cluster: Cluster, longest: float) -> ConfigError:
    """By how much, and what would fit: whatever is named does."""
    made = _laid(asked, cluster, longest)
    if not made.least_learner:
        thrifty = _recomputing(asked)
        if asked.learner.memory.recompute or activation_bytes(thrifty) >= _usable(cluster):
            return _pass_too_large(asked, cluster)
        if _fit(thrifty, cluster, longest) is not None:
            return _pass_too_large(asked, cluster, "set learner.memory.recompute = true, or ")
        return _cluster_too_small(
            thrifty, cluster, _laid(thrifty, cluster, longest), longest, ", even with learner.memory.recompute = true"
        )
    return _cluster_too_small(asked, cluster, made, longest)


def _recomputing(asked: SizingRequest) -> SizingRequest:
    learner = asked.learner
    return replace(
        asked,
        learner=learner.model_copy(update={"memory": learner.memory.model_copy(update={"recompute": True})}),
    )


def _pass_too_large(asked: SizingRequest, cluster: Cluster, instead: str = "") -> ConfigError:
    usable, kept, tokens = _usable(cluster), activation_bytes(asked), asked.learner.tokens_per_microbatch
    return ConfigError(
        f"one pass of {tokens} tokens of {asked.shape.name} keeps {kept / GB:,.1f} GB of activations, and of one "
        f"{cluster.device.name} {usable / GB:,.1f} GB can be used: {(kept - usable) / GB:,.1f} GB too little",
        remedy=f"{instead}lower learner.tokens_per_microbatch below {max(1, int(tokens * usable / kept)):,}",
    )


def _cluster_too_small(
    asked: SizingRequest, cluster: Cluster, made: Fit, longest: float, also: str = ""
) -> ConfigError:
    name, usable = cluster.device.name, _usable(cluster)
    engine = made.engine_bytes + asked.shape.kv_numbers * asked.number_bytes * longest
    ways = 1
    while usable * ways < engine:
        ways *= 2
    total = ways + made.least_learner
    larger = cluster.model_copy(update={"per_node": max(ways, cluster.per_node)})
    total = next(  # in turn they may need fewer
        count for count in range(1, total + 1)
        if count == total or _fit(asked, larger.model_copy(update={"count": count}), longest) is not None
    )  # fmt: skip
    missing = []
    if total > cluster.count:
        missing.append(f"{usable * (total - cluster.count) / GB:,.0f} GB too little")
    if ways > cluster.per_node:
        missing.append(f"{(engine - usable * cluster.per_node) / GB:,.0f} GB too little in one machine")
    machines = f" in machines of {ways} (cluster.per_node)" if ways > cluster.per_node else ""
    remedies = [f"take {max(total, cluster.count)} × {name}{machines}"]
    others = [each for each in models().values() if _fits(replace(asked, shape=each), cluster, longest)]
    if others:
        largest = max(others, key=lambda each: each.params)
        remedies.append(f"or a smaller model: {largest.name} would fit")
    lora = replace(asked, model=asked.model.model_copy(update={"lora": LoraConfig()}))
    if asked.model.lora is None and _fits(lora, cluster, longest):
        remedies.append("or set model.lora, which keeps no optimizer for the base")
    return ConfigError(
        f"{cluster} cannot hold {asked.shape.name}{also}: of each {usable / GB:,.0f} GB can be used; one engine needs "
        f"{engine / GB:,.0f} GB (with a sequence of {longest:,.0f} tokens) on {ways} of them, the learner "
        f"{made.learner_bytes / GB:,.0f} GB, and {made.activation_bytes / GB:,.1f} GB of activations on each, on "
        f"{made.least_learner}: {' and '.join(missing)}",
        remedy="; ".join(remedies),
    )


def _fits(asked: SizingRequest, cluster: Cluster, longest: float) -> bool:
    return _fit(asked, cluster, longest) is not None
