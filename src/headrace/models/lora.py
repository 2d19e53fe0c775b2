"""LoRA adapters of a frozen model, through peft: adding, loading, saving and switching them.

    load_model ──▶ add_adapter: peft wraps layers in place; the class of the model and its tree of modules stay
               ──▶ A from its own seed, B = 0, or both from files ──▶ only they require gradients
               ──▶ one more for each agent that trains its own: all are trained, one at a time is active (Switch)
    weight_tensors(model) ──▶ the trained tensors, which optimizer, publication and snapshot use exclusively

This is the only module that imports peft.
"""

# gate: getattr - peft notes its adapters on a foreign model

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError, ModelError
from headrace.models.config import AGENTS, LoraConfig
from headrace.models.hub import pinned_path, short_model_name
from headrace.models.routing.find import is_router
from headrace.models.settings import BUILDING
from headrace.models.text_part import prefixes_in_base, replace_prefix
from headrace.models.weights import (
    DEFAULT,
    belongs_to_adapter,
    format_first,
    not_finite,
    parse_adapter_name,
    remove_adapter_name,
    weight_tensors,
)

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""The file names of an adapter in peft's format."""

_PREFIX = "base_model.model."
"""The prefix of the tensors' names in peft's files."""
_PREFIXES = "headrace_prefixes_in_base"
"""The attribute of an adapted model that maps the prefixes of its tensors' names to those in the base that peft loads.
They differ if the base is a multimodal checkpoint."""

_MAMBAS = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""The types of models in which peft does not adapt ``out_proj``, because kernels of the Mamba package read its
weight."""
_CONV1D = "Conv1D"
"""The class of linear layers with a transposed weight (gpt2)."""

_KEYS = {"r": "rank", "lora_alpha": "alpha", "use_dora": "use_dora"}
"""The settings that affect the result of the same tensors: their keys in peft's files, mapped to those of
:class:`LoraConfig`."""

_IGNORED = frozenset(
    {"auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode"}
    | {"init_lora_weights", "lora_dropout", "peft_type", "peft_version", "revision", "target_modules"}
    | {"target_parameters", "task_type", "layers_pattern", *_KEYS}
)
"""The keys of peft's files that are checked in another way, or do not affect the result of an adapter."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, base: str) -> None:
    """Add the policy's adapter to ``model``, in place, and an adapter for each of ``config.agents``. All of them are
    trained; the policy's adapter is active until a :class:`Switch` activates another. ``base`` is the directory of the
    model. Errors are those of :func:`add_adapter`."""
    add_adapter(model, config, base)
    for agent in config.agents:
        start = None if config.adapter is None else str(get_adapter_directory(Path(config.adapter), agent))
        add_adapter(model, config.model_copy(update={"adapter": start}), base, agent)
    if config.agents:
        _select(model, DEFAULT)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(belongs_to_adapter(name))


def get_adapter_directory(snapshot: Path, agent: str) -> Path:
    """Return the directory of the adapter of ``agent`` (empty for the policy's adapter) in ``snapshot``. If the
    snapshot has only one adapter, its directory is returned for every agent."""
    return snapshot / AGENTS / agent if agent and (snapshot / AGENTS).is_dir() else snapshot


class Switch:
    """A switch between the adapters of ``model``. It changes which adapter the layers use, but neither trainable
    parameters nor accumulated gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the trained adapters of ``model``. Without several adapters, switching has no effect."""
        names = [
            name for name, parameter in model.named_parameters() if belongs_to_adapter(name) and parameter.requires_grad
        ]
        trained = dict.fromkeys(map(parse_adapter_name, names))
        self._layers: list[Any] = [module for module in model.modules() if _is_adapted(module)]
        """The layers that have adapters."""
        self.agents = tuple("" if name == DEFAULT else name for name in trained) if len(trained) > 1 else ("",)
        """The agents whose adapters are trained, the policy (empty name) included; only the policy if there are not
        several adapters."""

    @contextmanager
    def on(self, agent: str) -> Iterator[None]:
        """A context in which the adapter of ``agent`` (empty for the policy's adapter) is active, for forward passes
        and for backward passes that recompute. The previous adapter is active again afterwards. Raises
        :class:`~headrace.base.errors.ModelError` for an agent without a trained adapter."""
        if agent not in self.agents:
            raise ModelError(f"agent {agent!r} trains no adapter", remedy=f"choose one of {', '.join(self.agents[1:])}")
        if len(self.agents) == 1:
            yield
            return
        before = self._layers[0].active_adapters
        self._activate([agent or DEFAULT])
        try:
            yield
        finally:
            self._activate(before)

    def _activate(self, names: list[str]) -> None:
        """Activate the adapters with these names in every adapted layer."""
        for layer in self._layers:
            layer._active_adapter = names  # peft's set_adapter would freeze the others


def add_adapter(model: PreTrainedModel, config: LoraConfig, base: str, name: str = DEFAULT) -> None:
    """Add the adapter ``name`` to ``model``, in place, and activate it; all other parameters are frozen.

    The same configuration and base give the same numbers, and torch's random generators are not changed. ``base`` is
    the directory of the model. Raises :class:`~headrace.base.errors.ModelError` for layers that do not exist and for an
    adapter that does not fit, and :class:`~headrace.base.errors.ConfigError` if peft is not installed.
    """
    peft = _peft()
    setattr(model, _PREFIXES, prefixes_in_base(base, model))
    peft_config = _peft_config(peft, model, config, base)
    with BUILDING, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # about adapters that exist already
        torch.manual_seed(config.seed)  # noqa: TID251 - peft initialises from the global generator
        try:
            peft.inject_adapter_in_model(peft_config, model, adapter_name=name)
        except ValueError as error:
            raise ModelError(
                f"the adapter {name!r} cannot stand beside {', '.join(adapters(model))}: {error}",
                remedy="give all adapters of a model the same experts",
            ) from error
    peft.functional.cast_adapter_dtype(model, name)
    _select(model, name)
    if config.adapter is not None:
        load_adapter(model, Path(config.adapter))


def adapters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters in ``model``; empty for a model that is trained as a whole."""
    return tuple(getattr(model, "peft_config", ()))


@contextmanager
def active(model: PreTrainedModel, name: str) -> Iterator[None]:
    """A context in which the adapter ``name`` is the only active and trainable adapter of ``model``. The previous
    adapter is restored afterwards.

    Gradients of other adapters are not changed.
    """
    if name not in adapters(model):
        raise ModelError(
            f"the model has no adapter {name!r}", remedy=f"choose one of {', '.join(adapters(model)) or 'none'}"
        )
    before = active_adapter(model)
    _select(model, name)
    try:
        yield
    finally:
        _select(model, before)


def active_adapter(model: nn.Module) -> str:
    """Return the name of the active adapter of ``model``, which must have an adapter."""
    layer: Any = next(module for module in model.modules() if _is_adapted(module))
    (name,) = layer.active_adapters
    return str(name)


def save_adapter(model: PreTrainedModel, directory: Path, name: str = "") -> None:
    """Write the adapter ``name`` of ``model`` (empty for the active adapter) into ``directory``, in the format that
    peft's ``PeftModel.from_pretrained`` reads."""
    name = name or active_adapter(model)
    _write(model, name, _tensors_by_file_name(model, name), directory)


def write_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write ``tensors`` as adapters, each into a folder of ``directory`` with the adapter's name. ``tensors`` has the
    names of :func:`~headrace.models.weights.weight_tensors` of ``model``."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    of_each: dict[str, dict[str, Tensor]] = {name: {} for name in adapters(model)}
    for name, parameter in weight_tensors(model).items():
        whole_name = own[id(parameter)]
        of_each[parse_adapter_name(whole_name)][remove_adapter_name(whole_name)] = tensors[name]
    for name, each in of_each.items():
        (directory / name).mkdir()
        _write(model, name, each, directory / name)


def load_adapter(model: PreTrainedModel, directory: Path, name: str = "") -> None:
    """Copy the adapter in ``directory`` into the adapter ``name`` of ``model`` (empty for the active adapter).

    Raises :class:`~headrace.base.errors.ModelError`, and leaves the model unchanged, for a directory without an
    adapter, for an adapter that was trained on another base or with other settings, and for tensors with other names
    or shapes.
    """
    name = name or active_adapter(model)
    tree, tensors = read_adapter(directory)
    _refuse_other_settings(directory, tree, model.peft_config[name])
    tensors = {_name_in_model(model, key): tensor for key, tensor in tensors.items()}
    own = _tensors_by_file_name(model, name)
    problems = [f"{key} is missing" for key in own if key not in tensors]
    problems += [f"{key} has no place" for key in tensors if key not in own]
    problems += [
        f"{key} is {list(tensors[key].shape)}, expected {list(tensor.shape)}"
        for key, tensor in own.items()
        if key in tensors and tensors[key].shape != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ModelError(
            f"the adapter in {directory} does not fit a {type(model).__name__} with model.lora as configured: "
            f"{'; '.join(problems[:3])}{more}",
            remedy=f"use the base it was trained on ({tree.get('base_model_name_or_path')}), and set "
            f"model.lora.target_modules = {json.dumps(tree.get('target_modules'))}, "
            f"experts = {json.dumps(bool(tree.get('target_parameters')))}",
        )
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(tensors[key])


def read_adapter(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors of an adapter on disk; the names of the tensors are without peft's prefix.

    Raises :class:`~headrace.base.errors.ModelError` for a directory without an adapter, and for tensors with infinite
    values or NaN."""
    try:
        tree = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(directory / WEIGHTS_FILE)
        if not isinstance(tree, dict) or tree.get("peft_type") != "LORA":
            raise ValueError(f"{CONFIG_FILE} is not of a LoRA")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{directory} holds no usable adapter: {error}",
            remedy=f"give a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, as peft and the snapshots here write it",
        ) from None
    if found := not_finite(tensors):
        raise ModelError(
            f"{directory / WEIGHTS_FILE} holds values that are infinite or not a number: {format_first(found)}",
            remedy="copy or fetch the adapter again; if it was written so, take one from before the training that "
            "wrote it diverged",
        )
    return tree, {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}


def read_lora_config(directory: Path) -> LoraConfig:
    """Return the settings with which the adapter in ``directory`` can be loaded together with its base."""
    tree, _ = read_adapter(directory)
    targets = tree.get("target_modules")
    return LoraConfig(
        target_modules=targets if targets == "all-linear" else sorted(targets or ()),
        experts=bool(tree.get("target_parameters")),
        adapter=str(directory),
        **{setting: tree.get(key) for key, setting in _KEYS.items()},
    )


def wrapped_layers(model: nn.Module) -> list[tuple[str, list[Any]]]:
    """Return the layers of ``model`` that peft has wrapped, by name, each with its wrappers from the outermost to the
    innermost."""
    found: list[tuple[str, list[Any]]] = []
    for name, module in model.named_modules():
        if _is_adapted(module) and found and name.startswith(f"{found[-1][0]}."):
            found[-1][1].append(module)
        elif _is_adapted(module):
            found.append((name, [module]))
    return found


def _refuse_other_settings(directory: Path, tree: Mapping[str, Any], in_model: Any) -> None:
    """Raise :class:`ModelError` for an adapter with another base or other settings, although its tensors may fit.
    ``tree`` are the settings in the adapter's ``directory``, and ``in_model`` is peft's configuration of the adapter in
    the model."""
    base, here = tree.get("base_model_name_or_path"), in_model.base_model_name_or_path
    if base and short_model_name(str(base)) != short_model_name(here):
        raise ModelError(
            f"the adapter in {directory} was trained on {base}, and model.path is {here}",
            remedy=f"set model.path to {base}; if that is the same model under another name, "
            f"change base_model_name_or_path in {directory / CONFIG_FILE}",
        )
    wrong = {setting: tree.get(key) for key, setting in _KEYS.items() if tree.get(key) != getattr(in_model, key)}
    if wrong:
        ours = ", ".join(f"{setting}={getattr(in_model, key)}" for key, setting in _KEYS.items() if setting in wrong)
        raise ModelError(
            f"the adapter in {directory} was trained with other settings than model.lora's {ours}",
            remedy=f"set {', '.join(f'model.lora.{name} = {json.dumps(value)}' for name, value in wrong.items())}",
        )
    plain = type(in_model)().to_dict()
    strange = sorted(key for key, value in tree.items() if value and key not in _IGNORED and value != plain.get(key))
    if strange:
        raise ModelError(
            f"the adapter in {directory} uses {', '.join(f'{key}={tree[key]!r}' for key in strange)}, "
            "which would not be computed or trained here",
            remedy="merge it into its base with peft (merge_and_unload) and train from that",
        )


def _peft() -> Any:
    """Import and return the package peft. Raises :class:`~headrace.base.errors.ConfigError` if it is not installed."""
    try:
        import peft
        import peft.functional
    except ImportError:
        raise ConfigError(
            "model.lora needs the package peft, which is not installed", remedy="pip install 'headrace[lora]'"
        ) from None
    return peft


def _peft_config(peft: Any, model: PreTrainedModel, config: LoraConfig, base: str) -> Any:
    """Return peft's configuration for an adapter with the settings ``config`` of this model, which was loaded from
    ``base``."""
    targets, names = config.target_modules, _linear_names(peft, model)
    name, _, commit = (base, "", "") if pinned_path(base) == base else pinned_path(base).partition("@")
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
        revision=commit or None,
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=(
            _remove_routers(model, names) if targets == "all-linear" else _match_names(model, targets, names)
        ),
        target_parameters=_expert_parameters(model) if config.experts else None,
        use_dora=config.use_dora,
        init_lora_weights=True if config.init == "default" else config.init,
        fan_in_fan_out=any(type(module).__name__ == _CONV1D for module in model.modules()),
    )


def _match_names(model: nn.Module, ends: list[str], names: list[str]) -> list[str]:
    """Return the elements of ``names``, the layers that can be adapted, that end with one of ``ends``. Raises
    :class:`ModelError` for an ending without a match."""
    ends = [_name_in_model(model, end) for end in ends]  # the file of an adapter contains the names in its base
    unmatched = [end for end in ends if not any(f".{name}".endswith(f".{end}") for name in names)]
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name in names})
        raise ModelError(
            f"model.lora.target_modules: a {type(model).__name__} has no layer {', '.join(map(repr, unmatched))} that "
            "can be adapted (the head and the embedding cannot; in a mixture, the layers of experts only by "
            "experts=true)",
            remedy=f"choose from {', '.join(known)}",
        )
    return [name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)]


def _linear_names(peft: Any, model: nn.Module) -> list[str]:
    """Return the names of all layers of ``model`` that can have an adapter.

    In some mixtures peft mistakes the names of dense layers and shared experts (``gate_proj``) for the former names of
    parts of the experts, and would adapt the experts instead. Such layers are left out."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    head = model.get_output_embeddings()  # type: ignore[operator]
    names = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if module is not head and (_is_linear(module) or type(module).__name__ == _CONV1D)
        if not belongs_to_adapter(name)
    }
    read = peft.LoraConfig(target_modules={name for name in names if peft_adapts(model, name)})
    convert_peft_config_for_transformers(read, model, None)
    return sorted(set(read.target_modules) & names)


def peft_adapts(model: nn.Module, name: str) -> bool:
    """Return whether peft accepts an adapter for the linear layer ``name`` of ``model``."""
    return str(model.config.model_type) not in _MAMBAS or name.rpartition(".")[2] != "out_proj"  # type: ignore[union-attr]


def _remove_routers(model: nn.Module, names: list[str]) -> list[str]:
    """Return the elements of ``names`` that are not part of a router."""
    return [name for name in names if not is_router(model.get_submodule(name.rpartition(".")[0]))]


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer. Some routers are derived from ``nn.Linear`` and return more than
    a product."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _expert_parameters(model: nn.Module) -> list[str]:
    """Return the suffixes of the parameters that contain all experts of a layer, such as ``mlp.experts.down_proj``."""
    ends = {re.sub(r"^.*\.\d+\.", "", name) for name in _expert_names(model)}
    if not ends:
        raise ModelError(
            f"model.lora.experts=true, and a {type(model).__name__} has no weights of experts",
            remedy="leave model.lora.experts out",
        )
    return sorted(ends)


def _expert_names(model: nn.Module) -> list[str]:
    """Return the names of the weights of experts: parameters with one matrix per expert."""
    return [
        name.replace(".base_layer", "")
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and not belongs_to_adapter(name)
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d)  # of a mixer
    ]


def _select(model: nn.Module, name: str) -> None:
    """Activate the adapter ``name`` in every layer; peft also makes it the only one that requires gradients."""
    for module in model.modules():
        if _is_adapted(module):
            module.set_adapter(name)  # type: ignore[operator]


def _is_adapted(module: nn.Module | None) -> bool:
    """Return whether peft has wrapped ``module``."""
    return module is not None and hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _write(model: PreTrainedModel, name: str, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the adapter ``name`` of ``model`` into ``directory`` in peft's format. Its weights are ``tensors``, by
    their names in the base model."""
    prefixes, config = _get_prefixes(model), copy.copy(model.peft_config[name])
    kept = {f"{_PREFIX}{replace_prefix(key, prefixes)}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file(kept, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    if prefixes:  # endings of names would also match layers of the other parts
        layers = _match_names(model, sorted(config.target_modules), _linear_names(_peft(), model))
        config.target_modules = {replace_prefix(layer, prefixes) for layer in layers}
    config.save_pretrained(str(directory))


def _get_prefixes(model: nn.Module) -> dict[str, str]:
    """Return the prefixes of an adapted model's layers, mapped to their prefixes in its base; empty if they are the
    same."""
    found: dict[str, str] = getattr(model, _PREFIXES, {})
    return found


def _name_in_model(model: nn.Module, name: str) -> str:
    """Return the name in ``model`` of the layer or tensor with the name ``name`` in the base; a name of ``model`` is
    returned unchanged."""
    return replace_prefix(name, {outer: inner for inner, outer in _get_prefixes(model).items()})


def _tensors_by_file_name(model: PreTrainedModel, name: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter (not copies), by their names in peft's files without the prefix.

    peft is used only to compute the names: it would copy tensors, and gather all weights of a sharded model.
    """
    own = [(key, tensor.detach()) for key, tensor in model.named_parameters() if belongs_to_adapter(key)]
    numbered = {key: torch.tensor(number) for number, (key, _) in enumerate(own)}  # indices instead of the tensors
    found: dict[str, Tensor] = _peft().get_peft_model_state_dict(
        model, numbered, adapter_name=name, save_embedding_layers=False
    )
    return {key: own[int(number)][1] for key, number in found.items()}
