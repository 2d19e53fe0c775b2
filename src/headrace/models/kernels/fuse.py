"""Replacement of the operations in a loaded model by compiled kernels. Modules, names and parameters stay the same.

    attention    q, k, v as one product, norm and rotation in place, then the plan; out
    gated MLP    gate and up, SiLU and product, down: one call
    RMSNorm      with weight w or 1 + w
    Linear       all others, the head included
    mixers       the gated delta rule of sequences that decode, with its states (:mod:`.mixers`)
    layers       a decoder layer that consists of exactly these: one call for the whole layer (:mod:`.decoder`)

The class of a module does not determine what it computes. So a replacement is accepted only if it computes the same as
the module on a probe of a few tokens, and all replacements are accepted only if the whole model's logits stay the same.
Both comparisons use :func:`telling_weights`: with the present weights, a wrong kernel could compute the right result
until the weights are trained. Parameters are read at every call, so that weights can be exchanged
(``parameter.data = view``), together with their packed copies (:mod:`.panels`).

Shape legend: N tokens, H query heads, K key-value heads, E head size, V vocabulary.
"""

# gate: getattr - foreign modules differ from architecture to architecture

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.attention import PackedPlan, Rule, forward
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.decoder import fuse_layers, fuse_mixers
from headrace.models.kernels.fused import (
    TOLERANCES,
    AttentionSample,
    Fused,
    FusedAttention,
    FusedGated,
    FusedLinear,
    FusedNorm,
    close,
    find_norm,
    restore,
)
from headrace.models.kernels.ops import FORMATS, Kernels, kernels
from headrace.models.rope import context_limit

_PROBE = (3, 9)
"""The lengths of the sequences of the probe. The second sequence ends at the end of the longest context, since the
result of a module may depend on a token's position."""

_SHIFT, _SMALLEST = 0.1, 1e-3
"""The standard deviation by which vectors of parameters are changed for the probe, and the largest absolute value of a
matrix that is replaced by a random matrix."""
_MODEL_TOLERANCES = {torch.float32: TOLERANCES[torch.float32], torch.bfloat16: 0.1}
"""The largest allowed difference of a whole model's logits, relative to the largest logit. In bfloat16 the roundings of
all layers add up; each of its modules has been compared before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseReport:
    """The result of replacing a model's operations by kernels."""

    swapped: Mapping[str, int]
    """The number of modules of each class that are computed by kernels."""
    kept: Mapping[str, str]
    """The reason why a module or class is computed by torch, by its name. The key ``model`` stands for all modules."""
    unit: str = "float32"
    """What multiplies, such as ``AMX`` (:attr:`~headrace.models.kernels.ops.Kernels.unit`)."""

    def __str__(self) -> str:
        """Return in words how many modules of each class are computed by kernels, and why other modules are not."""
        done = ", ".join(f"{count} {name}" for name, count in self.swapped.items()) or "nothing"
        done += "" if self.unit == "float32" or not self.swapped else f", products in bfloat16 by {self.unit}"
        return "; ".join([f"compiled kernels run {done}", *(f"{name}: {why}" for name, why in self.kept.items())])


class _ProbePlan(PackedPlan):
    """The plan of a forward pass over the probe, which consists of a few tokens in two sequences. The second sequence
    is at the end of the longest context."""

    def __init__(self, model: nn.Module) -> None:
        """Arrange the probe for ``model``, whose longest context determines the position of the second sequence."""
        super().__init__(_PROBE)
        limit = context_limit(model.config)
        if limit is not None and limit.length > sum(_PROBE):
            self.positions_N[_PROBE[0] :] += limit.length - _PROBE[1]


class _SampleRecorder(_ProbePlan):
    """The plan of the probe, which also records the inputs of attention in every layer."""

    def __init__(self, model: nn.Module) -> None:
        """Arrange the probe for ``model``, without any recorded call."""
        super().__init__(model)
        self.samples: dict[int, AttentionSample] = {}
        """The recorded call of each layer's attention, by the layer's index."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the layer's rule and its queries, keys and values, then compute attention."""
        self.samples[rule.layer] = AttentionSample(rule, (query_NHD, key_NKD, value_NKD))
        return super().attend(query_NHD, key_NKD, value_NKD, rule)


def fuse(model: nn.Module, ops: Kernels | Unavailable | None = None, *, layers: bool = True) -> FuseReport:
    """Replace every supported operation in a float32 or bfloat16 model on a CPU in evaluation mode, and return a
    report. Other operations are not changed. ``ops`` are the kernels for the model's number format; ``None``: the
    kernels of this process.

    The model must be called with a plan (:func:`headrace.models.attention.forward`). If gradients are enabled, the
    replaced modules compute as before. Without ``layers``, decoder layers are not replaced as a whole.
    """
    ops = kernels(kernel_dtype(model) or torch.float32) if ops is None else ops
    kept: dict[str, str] = {}
    reason = ops.reason if isinstance(ops, Unavailable) else _unfit(model, ops.dtype)
    if reason is not None or isinstance(ops, Unavailable):
        return FuseReport(swapped={}, kept={"model": str(reason)})
    with torch.inference_mode(), telling_weights(model):
        return _fuse(model, ops, kept, layers=layers)


def _fuse(model: nn.Module, ops: Kernels, kept: dict[str, str], *, layers: bool) -> FuseReport:
    """Replace the operations of ``model`` that the kernels ``ops`` can compute under the present parameters, and return
    the report. With ``layers``, whole decoder layers are replaced, too. ``kept`` receives the reasons why other modules
    are not replaced, by the name of the module."""
    before_NV, samples = _record_calls(model)
    swapped: Counter[str] = Counter()
    for name, module in model.named_modules():
        candidate = _find_candidate(module, ops, samples)
        reason = None if candidate is None else _replace_if_equal(candidate, samples.get(id(module)))
        if reason is not None:
            kept[name] = reason
        elif candidate is not None:
            swapped[type(module).__name__] += 1
    try:
        after_NV = forward(model, _ids(model), _ProbePlan(model))
        same = close(after_NV, before_NV, _MODEL_TOLERANCES[ops.dtype])
        wrong = None if same else "the logits are not those of the model on torch"
    except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
        wrong = f"a forward pass fails on kernels: {error}"
    if wrong is not None:
        unfuse(model)
        return FuseReport(swapped={}, kept={**kept, "model": wrong})
    mixers, wrong = fuse_mixers(model, ops) if ops.dtype == torch.float32 else ({}, "")
    if wrong:
        kept[wrong] = "the kernel does not compute what it computes when it decodes"
    whole = fuse_layers(model, ops) if layers else {}
    return FuseReport(swapped={**swapped, **mixers, **whole}, kept=kept, unit=ops.unit)


@contextmanager
def telling_weights(model: nn.Module) -> Iterator[None]:
    """A context in which the modules of ``model`` have parameters that reveal what the modules compute.

    Norms whose weights are all 0 or all 1, biases of 0 and blocks that are initialised as the identity compute the same
    as other functions until they are trained. So random numbers are added to vectors, and matrices that are nearly 0
    become random. The parameters themselves, which a learner of the same process may share, are not changed.
    """
    generator = torch.Generator().manual_seed(0)
    probe_values = {
        parameter: _probe_parameter(parameter, generator)
        for parameter in model.parameters()
        if _is_ambiguous(parameter)
    }
    owners: list[dict[str, Any]] = [module._parameters for module in model.modules()]
    before = [
        (owner, name, own) for owner in owners for name, own in owner.items() if own is not None and own in probe_values
    ]
    try:
        for owner, name, own in before:
            owner[name] = probe_values[own]
        yield
    finally:
        for owner, name, own in before:
            owner[name] = own


def _is_ambiguous(parameter: Tensor) -> bool:
    """Return whether a wrong kernel could compute the right result with this parameter: a vector, which may be all 0 or
    1, or a matrix that is nearly 0."""
    if parameter.ndim < 2:
        return True
    least, most = parameter.aminmax()
    return bool(max(-least, most) < _SMALLEST)


def _probe_parameter(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    """Return a parameter of the same shape that reveals how it is used: ``parameter`` plus random numbers."""
    scale = _SHIFT if parameter.ndim < 2 else 1 / math.sqrt(parameter.shape[-1])
    changed = (parameter + scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return nn.Parameter(changed, requires_grad=False)


def unfuse(model: nn.Module) -> None:
    """Restore the original forward method of every module of ``model``."""
    for module in model.modules():
        module.__dict__.pop("product", None)
        fused = module.__dict__.get("forward")
        if isinstance(fused, Fused):
            restore(fused)


def kernel_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the number format of the kernels that can compute the model: that of its parameters, which are on a CPU.
    Beside parameters in bfloat16, others may be float32, such as adapters. Return ``None`` if there are no such
    kernels."""
    found = {parameter.dtype for parameter in model.parameters()}
    if not found <= set(FORMATS) or any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    return torch.bfloat16 if torch.bfloat16 in found else torch.float32


def _unfit(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernels for ``dtype`` cannot compute ``model``, in words; ``None`` if they can."""
    if kernel_dtype(model) != dtype:
        found = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype != dtype}
        strange = sorted(found | {p.device.type for p in model.parameters()} - {"cpu"})
        known = str(dtype).removeprefix("torch.")
        return f"its parameters are {', '.join(strange)}, and the kernels compute {known} on a CPU"
    return "it is in training mode" if model.training else None


def _record_calls(model: nn.Module) -> tuple[Tensor, dict[int, AttentionSample]]:
    """Return the model's logits on the probe, and the recorded call of each attention module by the module's ``id``."""
    plan = _SampleRecorder(model)
    found: dict[int, AttentionSample] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Complete the recorded sample of the layer with this call of its attention module; a forward hook."""
        sample = plan.samples[module.layer_idx]  # type: ignore[index]
        sample.args, sample.kwargs = args, kwargs
        found[id(module)] = sample

    hooks = [
        module.register_forward_hook(note, with_kwargs=True) for module in model.modules() if _is_attention(module)
    ]
    logits_NV = forward(model, _ids(model), plan)
    for hook in hooks:
        hook.remove()
    return logits_NV, found


def _ids(model: nn.Module) -> Tensor:
    """Return the token ids of the probe, all of which are in the model's vocabulary."""
    return torch.arange(sum(_PROBE)) % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type, no-any-return]


def _find_candidate(module: nn.Module, ops: Kernels, samples: Mapping[int, AttentionSample]) -> Fused | None:
    """Return a fused forward method that may replace the module's own; ``None`` for a module that no kernel computes.
    ``samples`` are the recorded calls of attention modules, by the module's ``id``."""
    if "forward" in module.__dict__:  # another library has replaced this forward
        return None
    if any(parameter.dtype != ops.dtype for parameter in module.parameters()):  # adapters, beside bfloat16
        return None
    if type(module) is nn.Linear:
        return FusedLinear(module, ops)
    if _all_linear(module, "gate_proj", "up_proj", "down_proj") and len(list(module.parameters(recurse=False))) == 0:
        return FusedGated(module, ops)
    if id(module) in samples and samples[id(module)].name_of_sinks(module) is not None:
        return FusedAttention(module, ops, samples[id(module)])
    how = find_norm(module)
    return None if how is None else FusedNorm(module, ops, how)


def _replace_if_equal(fused: Fused, sample: AttentionSample | None) -> str | None:
    """Replace the forward method of ``fused.module`` by ``fused`` if both compute the same, and return ``None``;
    otherwise return the reason why it is not replaced. ``sample`` is the recorded call of an attention module; ``None``
    for other modules, which are compared on random rows."""
    try:
        right = _computes_the_same(fused, sample)
        if right and fused.ops.dtype != torch.float32 and not isinstance(fused, FusedLinear | FusedNorm):
            right = _computes_the_same_in_float32(fused, sample)
    except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
        return f"it is called, or turns positions, in a way that the kernels do not know ({type(error).__name__})"
    if not right:
        return "the kernels do not compute what it computes"
    fused.module.forward = fused
    return None


def _computes_the_same(fused: Fused, sample: AttentionSample | None) -> bool:
    """Return whether ``fused`` computes what its module computes, for the recorded call ``sample`` of an attention
    module, or (``None``) for random rows."""
    if sample is not None and sample.kwargs is not None:
        args, kwargs = _cast((sample.args, dict(sample.kwargs)), fused.ops.dtype)
        expected, actual = fused.original(*args, **kwargs)[0], fused.compute(*args, **kwargs)[0]
    else:
        probe = _probe(fused)
        expected, actual = fused.original(probe), fused.compute(probe)
    return close(actual, expected, TOLERANCES[fused.ops.dtype])


def _computes_the_same_in_float32(fused: Fused, sample: AttentionSample | None) -> bool:
    """Return whether a copy of ``fused`` with parameters in float32, on the kernels for them, computes what its module
    computes. Two functions that differ by less than bfloat16 rounds, such as two activations of small numbers, differ
    in float32. ``sample`` is as in :func:`_computes_the_same`."""
    ops = kernels()
    if isinstance(ops, Unavailable):
        raise RuntimeError(ops.reason)
    twin = copy.deepcopy(fused, {id(fused.ops): ops})
    try:
        twin.module.float()
        return _computes_the_same(twin, sample)
    finally:
        # a product and its layer refer to each other: without this, the copies of all layers would be in memory at once
        for module in twin.module.modules():
            module.__dict__.pop("product", None)
        twin.__dict__.clear()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with all floating-point tensors in ``dtype``, also those in tuples and dictionaries."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    return tuple(_cast(each, dtype) for each in value) if isinstance(value, tuple) else value


def _probe(fused: Fused) -> Tensor:
    """Return an input for ``fused.module``: three rows of very different magnitudes, so that a wrong epsilon changes
    the result."""
    inner = fused.parts[0].linear if isinstance(fused, FusedGated) else fused.module
    width = inner.in_features if isinstance(inner, nn.Linear) else inner.weight.numel()  # type: ignore[operator]
    rows = torch.randn(3, int(width), generator=torch.Generator().manual_seed(0))
    return (rows * torch.tensor([[1.0], [1e-3], [4.0]]))[None].to(fused.ops.dtype)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a kernel may compute ``module`` as attention: it has the four usual projections, the index of its
    layer, and its original forward method."""
    named = _all_linear(module, "q_proj", "k_proj", "v_proj", "o_proj") and "forward" not in module.__dict__
    return named and isinstance(getattr(module, "layer_idx", None), int)


def _all_linear(module: nn.Module, *names: str) -> bool:
    """Return whether the submodules with these names are all plain linear layers."""
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)
