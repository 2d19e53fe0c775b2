"""The loading of a model whose parameters are sharded from the start, so that no rank ever has the whole model in
memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from headrace.base.errors import ConfigError, HeadraceError, ModelError
from headrace.learner.parallel.adapt import adapt, measure_norms
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.learner.parallel.split import own_class, reshard
from headrace.models import attention, check, indexed, load, recurrent, routing, settings, weights
from headrace.models.config import ModelConfig
from headrace.models.recompute import carrying
from headrace.models.text_part import trunk_name


def load_on_ranks(config: ModelConfig, ranks: AnyRanks) -> PreTrainedModel:
    """Load and return the model of a learner: whole in one process, sharded over ``ranks`` otherwise."""
    if not isinstance(ranks, Ranks):
        return load.load_model(config, str(ranks.device))
    ranks.config.refuse_settings(config)
    return load_sharded(config, ranks)


def load_sharded(config: ModelConfig, ranks: Ranks) -> PreTrainedModel:
    """Load and return the same model as :func:`headrace.models.load.load_model`, with the same checks, sharded over
    ``ranks``. All ranks must call it together; each reads its own part of the files.

    Raises :class:`~headrace.base.errors.ModelError`, and :class:`~headrace.base.errors.ConfigError` if the model cannot
    be sharded in this way.
    """
    from transformers.utils import logging

    from headrace.models.text_part import causal_class

    logging.disable_progress_bar()
    dtype = getattr(torch, config.dtype)
    with _refusing_together(config, ranks):  # files and libraries may differ between machines
        read = _checked_config(config, ranks.config)
    with _refusing_together(config, ranks):  # each rank reads its own part, so a NaN is found by one rank
        with settings.BUILDING:
            model, info = causal_class(read).from_pretrained(  # type: ignore[union-attr]
                settings.model_directory(config.path),
                config=read,
                dtype=dtype,
                attn_implementation=attention.NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                distributed_config=distributed(ranks.config, read, dtype),
            )
        _compute_buffers(model)
        load.refuse_incomplete(config.path, info)
        load.refuse_superfluous(config.path, model, info)
        weights.refuse_not_finite(model, config.path)
        if parameter := _misplaced_parameter(model):
            words = f"its files hold parts of {parameter}, which transformers joins in a wrong order"
            raise _unshardable(config, model, words)
        if config.lora is not None:
            adapt(model, config.lora, config.path, ranks)
    if config.lora is not None and config.lora.use_dora and config.lora.adapter is None:
        measure_norms(model, [weights.DEFAULT, *config.lora.agents])
    model = load.ready(model)
    if ranks.config.num_averaged > 1:
        _use_all_experts(model)
    _check(model, config, ranks)
    reshard(model)
    return model


def _check(model: PreTrainedModel, config: ModelConfig, ranks: Ranks) -> None:
    """Raise :class:`~headrace.base.errors.HeadraceError` for a model for which short forward passes show that these
    ranks do not compute the same as one process. All ranks must call it together."""
    trunk = model._modules.get(trunk_name(model)) or model
    if ranks.config.num_averaged > 1 and not any(isinstance(each, FSDPModule) for each in trunk.modules()):
        raise _unshardable(config, model, "transformers has no plan that shards its layers")
    if ranks.config.context > 1 and (reason := _whole_sequences_only(model)):
        raise ConfigError(
            f"learner.parallel.context={ranks.config.context} with model.path={config.path!r}, a "
            f"{own_class(model).__name__}: {reason}",
            remedy="set learner.parallel.context = 1",
        )
    # all ranks compute this together with the same result; a rank that fails alone must end, and not wait for others
    calls: list[nn.Module] = []
    handle = trunk.register_forward_hook(lambda trunk, *_: calls.append(trunk))
    try:
        check.check_packing(model, config.path)
        _check_with_gradient(model, config.path)
    except ModelError as error:
        raise ModelError(
            f"on {ranks.config.world} ranks, {error.problem}",
            remedy="run `headrace check model` on it, which computes on one rank; if that works, train it on one rank, "
            "or cut it in another way ([learner.parallel])",
        ) from error
    handle.remove()
    if not calls:
        raise _unshardable(config, model, "its forward pass does not call its trunk as a whole")


def _check_with_gradient(model: PreTrainedModel, path: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for a model whose pass with gradient fails on these ranks,
    because it changes a distributed tensor in place, for example."""
    ids_N = torch.arange(4, device=model.device) % model.config.vocab_size
    try:
        attention.forward(model, ids_N, attention.PackedPlan([4], model.device))
    except RuntimeError as error:
        raise ModelError(f"model.path={path!r}: a pass with a gradient fails: {error}", remedy="") from error


def _misplaced_parameter(model: PreTrainedModel) -> str:
    """Return the name of a parameter of ``model`` that is concatenated by rows from several tensors of the files and
    divided by rows among ranks; empty if there is none. transformers 5.23 divides each of these tensors before it
    concatenates them, so that the ranks get wrong rows."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, WeightConverter

    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    joining = [
        end
        for converter in converters
        if any(isinstance(each, Concatenate) and each.dim == 0 for each in converter.operations)
        for end in converter.target_patterns
    ]
    sharded = (name for name, one in model.named_parameters() if isinstance(one, DTensor) and _is_divided_by_rows(one))
    return next((name for name in sharded if any(re.search(end, name) for end in joining)), "")


def _is_divided_by_rows(tensor: DTensor) -> bool:
    """Return whether the rows (the first axis) of a tensor are divided among ranks."""
    return any(placement.is_shard(0) for placement in tensor.placements)


def _use_all_experts(model: PreTrainedModel) -> None:
    """Make every pass of a model that has experts without weights (LongCat-Flash) compute a gradient for all weights of
    experts. Otherwise, if a pass chooses only experts without weights, ranks would reduce different gradients, and fail
    or wait for each other."""

    def with_weights(experts: nn.Module, args: object, output: Tensor) -> Tensor:
        """Return the output of the experts unchanged, but dependent on all their weights; a forward hook."""
        for weight in experts.parameters():
            output = output + weight[:0].sum()  # zero, with a gradient of zeros
        return output

    for module in model.modules():
        if vars(module).get("zero_expert_num"):
            module.register_forward_hook(with_weights)


def _whole_sequences_only(model: PreTrainedModel) -> str:
    """Return why a sequence of this model cannot be divided among several ranks; empty if it can."""
    if recurrent.recurrent_layers(model):
        return "the state of its recurrent layers cannot be handed from rank to rank"
    if indexed.is_indexed(model):
        return "the keys by which its layers choose the tokens that they attend to are not gathered from other ranks"
    return ""


def _checked_config(config: ModelConfig, parallel: ParallelConfig) -> PreTrainedConfig:
    """Return transformers' configuration of the model, after checking that its files can be read and sharded. Raises
    :class:`ModelError` and :class:`ConfigError`."""
    if parallel.world > 1:
        refuse_libraries()
    directory = settings.model_directory(config.path)
    load.refuse_multimodal(config.path, "several ranks cannot read it without the other parts")
    read = load.supported_config(config.path)
    parallel.refuse_model(config.path, read)
    load.refuse_damaged_weights(directory)
    load.refuse_other_size(config.path, read, read)
    return read


def _unshardable(config: ModelConfig, model: PreTrainedModel, reason: str) -> ConfigError:
    """Return the error for a model that several ranks cannot train, because of ``reason``."""
    kind = own_class(model)
    return ConfigError(
        f"a learner on several ranks with model.path={config.path!r}, which is a {kind.__name__}: {reason}",
        remedy="train it on one rank",
    )


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers of ``model`` that are not in the files. When parameters are sharded while they are read,
    transformers leaves some of these buffers uninitialised, such as the multipliers of FalconH1."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped, import-not-found, unused-ignore]

    with init_empty_weights(include_buffers=False):
        empty = own_class(model)(model.config)
    in_files, computed = model.state_dict().keys(), dict(empty.named_buffers())
    with torch.no_grad():
        for name, one in model.named_buffers():
            if name in in_files:
                continue
            if computed[name].shape != one.shape:  # it would stay uninitialised
                raise ValueError(f"the buffer {name} of {list(one.shape)} is computed as {list(computed[name].shape)}")
            one.copy_(computed[name])


@contextmanager
def _refusing_together(config: ModelConfig, ranks: Ranks) -> Iterator[None]:
    """Return a context after which every rank raises an error if the body has failed on any rank (the error of the
    first of these ranks), so that no rank waits for it. The error becomes a :class:`~headrace.base.errors.ModelError`,
    unless it is a :class:`~headrace.base.errors.ConfigError`. The ranks must not communicate in the body."""
    failed: HeadraceError | None = None
    try:
        yield
    except (ModelError, ConfigError) as error:
        failed = error
    except Exception as error:  # noqa: BLE001 - a foreign architecture or file may fail in any way
        failed = ModelError(
            f"model.path={config.path!r} cannot be loaded on {ranks.config.world} ranks: "
            f"{type(error).__name__}: {error}",
            remedy="load it on one rank to see whether the files or the cut are at fault",
        )
        failed.__cause__ = error
    words = [isinstance(failed, ConfigError), failed.problem, failed.remedy] if failed else []
    reports = [json.loads(each) for each in ranks.gather(json.dumps(words).encode())]
    rank = next((rank for rank, each in enumerate(reports) if each), None)
    if rank is not None:
        of_config, problem, remedy = reports[rank]
        if not all(reports):
            problem = f"on rank {rank} of the learner, {problem}"
        raise (ConfigError if of_config else ModelError)(problem, remedy=remedy) from failed


def distributed(config: ParallelConfig, model: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return transformers' settings for the ranks. Context-parallel ranks count there as ranks with different data,
    because their gradients are also summed."""
    from transformers.distributed import DistributedConfig

    from headrace.models.text_part import causal_class

    # By default the last norm and the head are gathered as one group, whose hooks break if the head runs twice.
    causal = causal_class(model)
    assert causal is not None, "architectures without a causal language model are refused before"
    with torch.device("meta"):
        base = trunk_name(causal(model))
    plan = model.base_model_fsdp_plan or {}
    separate_plan = {
        f"{base}.{name}": "free_full_weight" for name, style in plan.items() if style == "keep_full_weight"
    }
    return DistributedConfig(
        tp_size=config.tensor,
        fsdp_size=config.data * config.context,
        dp_replicate_size=config.replicate,
        ep_size=config.expert,
        fsdp_plan=separate_plan if config.num_averaged > 1 else None,
        fsdp_mixed_precision=dtype == torch.bfloat16,  # gradients are summed over the ranks in float32
    )


def refuse_libraries() -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the installed libraries cannot shard a model."""
    import transformers
    from transformers.distributed import DistributedConfig

    known = {field.name for field in fields(DistributedConfig)}
    if not {"dp_replicate_size", "ep_size", "fsdp_plan"} <= known:
        raise ConfigError(
            f"a learner on several ranks needs transformers >= 5.23, but {transformers.__version__} is installed",
            remedy="pip install -U transformers, or train on one rank",
        )
    if find_spec("accelerate") is None:
        raise ConfigError(
            "a learner on several ranks needs accelerate, with which transformers loads onto devices",
            remedy="pip install 'headrace[parallel]', or train on one rank",
        )


def keep_inputs_only(model: PreTrainedModel) -> None:
    """Make the model keep only each layer's input for the backward pass, which computes the layer again. The model
    stays in evaluation mode: only the layers themselves, not their submodules, are set to training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    newer = getattr(model, "activation_checkpointing_enable", None)  # gate: getattr - renamed in transformers 5.23
    enable = newer or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False, "context_fn": carrying(routing.NOW, recurrent.GIVEN)})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
