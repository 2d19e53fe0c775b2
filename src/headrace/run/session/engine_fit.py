"""Whether the engine of ``engine.kind`` can do what the rest of a run asks of it; told before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError
from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities, capabilities
from headrace.models.devices import CPU, Devices
from headrace.models.gap import largest_gap
from headrace.models.kernels.build import NO_COMPILER, Unavailable, find_compiler
from headrace.models.load import read_config
from headrace.models.mixtures import is_mixture

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig

NATIVE = "set engine.kind = 'native'"
_CODEC_FORMATS = {"cast_bf16": ("bfloat16",), "cast_fp8": ("float8",)}
"""What the codecs that lose something round weights to."""
_QUANTISING = ("quantization", "kv-cache-dtype", "kv_cache_dtype")
"""Words in ``engine.server.args`` by which a server computes in 8 bits or fewer."""


def refuse_incapable(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for the first thing that this engine cannot do."""
    engine, can = config.engine, config.engine.can
    if engine.kind == "native":
        return
    _refuse_interrupt(config, can)
    lora = config.model.lora
    truncated = engine.top_k > 0 or engine.top_p < 1 or engine.min_p > 0
    asked = {
        "model.deterministic=true": (config.model.deterministic and not can.deterministic, "leave it out"),
        "model.lora, whose adapters alone travel": (lora is not None and not can.adapters, "leave it out"),
        f"room for model.lora.rank={lora.rank if lora else 0}": (
            lora is not None and can.max_rank is not None and lora.rank > can.max_rank,
            f"set it to {can.max_rank} or less",
        ),
        "model.lora.use_dora or experts": (
            lora is not None and (lora.use_dora or lora.experts) and not can.any_adapters,
            "leave them out",
        ),
        "engine.top_k, top_p or min_p": (truncated and not can.truncates, "leave them out"),
        "learner.keep_sampling_mask=true under engine.top_k, top_p or min_p": (
            truncated and config.learner.keep_sampling_mask and not can.kept_sets,
            "set it to false: log π is then that of the whole vocabulary",
        ),
        "entropies (observe.record_entropy, or an advantage that reads them)": (
            (config.observe.record_entropy or "entropies" in config.algo.advantage.reads) and not can.entropies,
            "leave them out",
        ),
        "flow.pivots, whose branches stay under the weights they leave": (
            config.flow.pivots is not None and not can.pins,
            "leave them out",
        ),
    }
    for what, (lacking, instead) in asked.items():
        if lacking:
            raise ConfigError(f"engine.kind={engine.kind!r} has no {what}", remedy=f"{instead}, or {NATIVE}")
    if config.launch.start_timeout_s <= engine.server.wait_s:
        raise ConfigError(
            f"launch.start_timeout_s={config.launch.start_timeout_s:g} ends an engine that may wait "
            f"engine.server.wait_s={engine.server.wait_s:g} for its server",
            remedy=f"set launch.start_timeout_s = {engine.server.wait_s + 30:g}, or a shorter engine.server.wait_s",
        )
    if engine.server.urls and len(engine.server.urls) != engine.count:
        raise ConfigError(
            f"engine.server.urls names {len(engine.server.urls)} servers for engine.count={engine.count}",
            remedy="name one for each engine",
        )


def slower_here(config: RunConfig, devices: Devices) -> list[str]:
    """What this machine lacks that the engine would be faster with, in words; empty where it lacks nothing."""
    engine, model = config.engine, config.model
    wanted = (
        engine.kind == "native" and engine.kernels == "auto" and model.dtype == "float32" and CPU in devices.engines
    )
    if not wanted or config.launch.remote or find_compiler() is not None:
        return []
    return [str(Unavailable(reason=NO_COMPILER))]


def refuse_settled(config: RunConfig, others: Collection[str], devices: Devices) -> None:
    """The same of what only data and machine tell; ``others``, agents and teachers, have weights of their own."""
    engine = config.engine
    if engine.kind == "native":
        return
    if others:
        raise ConfigError(
            f"engine.kind={engine.kind!r} serves the policy alone, and {min(others)!r} has weights of its own",
            remedy=f"leave agents and teachers with weights of their own out, or {NATIVE}",
        )
    for device in devices.engines:
        _refuse_interrupt(config, capabilities(engine.kind, device))


def _refuse_interrupt(config: RunConfig, can: Capabilities) -> None:
    mode = config.sync.interrupt
    if mode in can.interrupts:
        return
    ways = ", ".join(repr(one.value) for one in sorted(can.interrupts))
    whose = "does not say which tokens the old weights sampled"
    why = "gives no memory back there" if mode is Interrupt.SLEEP else whose
    raise ConfigError(
        f"engine.kind={config.engine.kind!r} cannot commit with sync.interrupt={mode.value!r}: it {why}",
        remedy=f"set sync.interrupt to one of {ways}, or {NATIVE}",
    )


def explained_gap(config: RunConfig) -> float:
    """Return the largest mean |log μ − log π| between engine and learner at equal weights that the number formats of
    the run explain; 0 where both compute the same bits."""
    model, engine = config.model, config.engine
    if model.deterministic:
        return 0.0
    formats = [model.dtype, *_CODEC_FORMATS.get(config.sync.codec, ())]
    if any(word in arg for arg in engine.server.args for word in _QUANTISING):
        formats.append("float8")
    rerouted = is_mixture(read_config(model.path)) and not config.learner.keep_routing
    return largest_gap(*formats, rerouted=rerouted, temperature=engine.temperature)
