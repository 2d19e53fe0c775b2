"""Checks, made before any process is started, that the chosen kind of engine supports the models, devices and settings
of a run."""

from __future__ import annotations

from collections.abc import Collection

from headrace.base.errors import ConfigError
from headrace.engine.config import ENGINES
from headrace.models.devices import CPU, Devices
from headrace.models.gap import largest_gap
from headrace.models.kernels.build import NO_COMPILER, Unavailable, find_compiler
from headrace.models.mixtures import is_mixture
from headrace.models.settings import read_config
from headrace.run.session.config import NATIVE, RunConfig, refuse_interrupt

_CODEC_FORMATS = {"cast_bf16": ("bfloat16",), "cast_fp8": ("float8",)}
"""The number formats to which lossy codecs of the weight sync round the weights, by the name of the codec."""


def find_slowdowns(config: RunConfig, devices: Devices) -> list[str]:
    """Return warnings for the user about what makes the engine slower on this machine than it could be; an empty list
    if nothing does. The only such warning is a missing C++ compiler for the kernels of an engine on the CPU."""
    engine, model = config.engine, config.model
    compiles = engine.can_fuse and model.dtype == "float32" and CPU in devices.engines
    if not compiles or config.launch.remote or find_compiler() is not None:
        return []
    return [str(Unavailable(reason=NO_COMPILER))]


def refuse_unsupported(config: RunConfig, other_models: Collection[str], devices: Devices) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the engine cannot serve the models and devices of a run.

    ``other_models`` are the names of the agents and teachers with weights of their own; ``devices`` are those of the
    engines and the learner. Unlike the checks of ``load_config``, these checks depend on files and on the machine.
    """
    engine = config.engine
    if other_models and not engine.can.other_models:
        raise ConfigError(
            f"engine.kind={engine.kind!r} serves the policy alone, and {min(other_models)!r} has weights of its own",
            remedy=f"leave agents and teachers with weights of their own out, or {NATIVE}",
        )
    engine.server.refuse_start()
    _refuse_uneven(config)
    for device in devices.engines:
        refuse_interrupt(config, ENGINES.load(engine.kind).capabilities.on(device))


def _refuse_uneven(config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the attention heads of the model cannot be divided evenly
    over ``engine.tensor`` devices (tensor parallelism)."""
    if config.engine.tensor == 1:
        return
    shape = read_config(config.model.path).to_dict()
    heads = shape.get("num_attention_heads")
    if isinstance(heads, int):
        refuse_uneven_heads(config.engine.tensor, heads, shape.get("num_key_value_heads") or heads)


def refuse_uneven_heads(tensor: int, heads: int, kv_heads: int) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``heads`` attention heads, with ``kv_heads`` heads of keys
    and values, cannot be divided evenly over ``tensor`` devices. There may be more devices than heads of keys and
    values, if their number is a multiple of ``kv_heads``."""

    def fits(num_devices: int) -> bool:
        """Return whether the heads can be divided evenly over ``num_devices`` devices."""
        # if there are fewer key-value heads than devices, each of these heads is repeated on several devices
        return not (
            heads % num_devices or (kv_heads % num_devices if kv_heads > num_devices else num_devices % kv_heads)
        )

    if not fits(tensor):
        possible = [str(number) for number in range(1, heads + 1) if fits(number)]
        raise ConfigError(
            f"engine.tensor={tensor} divides every layer into as many parts, and the model has {heads} attention heads "
            f"({kv_heads} of keys and values)",
            remedy=f"set engine.tensor to one of {', '.join(possible)}",
        )


def compute_explained_gap(config: RunConfig) -> float:
    """Return the largest mean |log μ − log π| between engine and learner, at equal weights, that the number formats in
    ``config`` can cause; 0 if engine and learner compute the same bits. A larger gap means an error."""
    model, engine = config.model, config.engine
    if model.deterministic:
        return 0.0
    formats = [model.dtype, *_CODEC_FORMATS.get(config.sync.codec, ())]
    if engine.server.quantises:
        formats.append("float8")
    rerouted = is_mixture(read_config(model.path)) and not config.learner.keep_routing
    return largest_gap(*formats, rerouted=rerouted, temperature=engine.temperature)
