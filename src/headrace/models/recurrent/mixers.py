"""Replacement of the forward methods of a model's mixers, so that they compute flattened tokens of many sequences.

A mixer of transformers calls a few functions of its module that use more than one token: a convolution, the scan of a
state space, the delta rule. In a call with a plan, the same code is executed with other functions under these names,
which pass their arguments to the plan as a recurrence. transformers itself replaces functions by kernels under these
names, so that the names are the same in all families. A mixer that uses several tokens in another way is detected by
:mod:`headrace.models.check`, which compares packed sequences with single sequences.

Shape legend: N tokens, C channels, H heads, W weights of a channel.
"""

# gate: getattr - the mixers of transformers differ from family to family

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from headrace.base.errors import ModelError
from headrace.models.attention import PLAN
from headrace.models.recurrent.base import Recurrence, Tensors
from headrace.models.recurrent.convolution import Convolution
from headrace.models.recurrent.delta_rule import DeltaRule
from headrace.models.recurrent.selective import Selective
from headrace.models.recurrent.state_space import StateSpace
from headrace.models.shape import RECURRENT_LAYERS

Function = Callable[..., Any]
"""A function of a mixer's module."""


GIVEN: ContextVar[Any] = ContextVar("plan of the layer", default=None)
"""The plan of the layer that is being computed, since some layers do not pass it to their mixer."""


class RecurrentForward:
    """A replacement for the forward method of a mixer. In a call with a plan, it computes recurrences with the plan;
    any other call executes the mixer's own forward method."""

    def __init__(self, module: nn.Module) -> None:
        """Prepare the replacement of the forward method of ``module``, a mixer. The caller assigns it to the module."""
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self._own = module.forward
        """The module's own forward method."""
        self._plan: Any = None
        """The plan of the call that is being computed; ``None`` outside a call with a plan."""
        self._count = 0
        """The number of recurrences that the mixer has computed in this call."""
        self._module = module
        self._packed = self._bind()
        """The module's forward method with recurrences that the plan computes."""

    def _bind(self) -> Function:
        """Return the code of the module's own forward method with other global names: in place of transformers'
        functions, it calls functions that compute their recurrences with :meth:`recur`."""
        plain = inspect.unwrap(type(self._module).forward)
        replaced = {
            name: make(self.recur, inspect.unwrap(plain.__globals__[name]))
            for name, make in FUNCTIONS.items()
            if name in plain.__code__.co_names
        }
        code = FunctionType(
            plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
        )
        code.__kwdefaults__ = plain.__kwdefaults__
        bound: Function = code.__get__(self._module)
        return bound

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentForward:
        """Return the replacement for the copy of the module, with its own calls."""
        replacement = memo[id(self)] = object.__new__(RecurrentForward)
        replacement.layer, replacement._plan = self.layer, None
        replacement._module, replacement._own = copy.deepcopy(self._module, memo), copy.deepcopy(self._own, memo)
        replacement._packed = replacement._bind()
        return replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the mixer. If the call, or its layer, has a plan, packed sequences are computed; otherwise the
        mixer's own forward method is called."""
        plan = kwargs.get(PLAN, GIVEN.get())
        GIVEN.set(None)
        if plan is None:
            return self._own(*args, **kwargs)
        self._plan, self._count = plan, 0
        try:
            return self._packed(*args, **kwargs)
        finally:
            self._plan = None

    def follow(self, layer: nn.Module) -> None:
        """Read the plan from the arguments of ``layer``, which contains the mixer, before the layer runs, since some
        layers do not pass it to their mixer."""
        layer.register_forward_pre_hook(self._store_plan, with_kwargs=True)

    def _store_plan(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the plan of the layer's call for its mixer; a forward pre-hook of the layer."""
        GIVEN.set(kwargs.get(PLAN))

    def recur(self, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence over the tokens of the present call with its plan, and return its outputs. The state is
        identified by the layer and by the number of earlier recurrences."""
        assert self._plan is not None
        key = self.layer, self._count
        self._count += 1
        found: Tensor = self._plan.recur(key, recurrence, inputs_N)
        return found


Recur = Callable[[Recurrence, Tensors], Tensor]
"""A function that computes a recurrence in the present call of a mixer."""


def _convolve(recur: Recur, reference: Function) -> Function:
    """Return a replacement for transformers' ``causal_conv1d_fn`` that keeps sequences separate: it computes its input
    with ``recur``. The original function, ``reference``, is not used."""

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        """Convolve ``[1, C, N]``. Further arguments, such as the sequence number of each token, are ignored, since the
        plan contains the sequences."""
        return recur(Convolution(weight, bias, activation), (hidden_states[0].T,)).T[None]

    return convolve


def _delta_rule(recur: Recur, reference: Function) -> Function:
    """Return a replacement for transformers' ``torch_chunk_gated_delta_rule`` that keeps sequences separate: it
    computes its inputs with ``recur``. ``reference`` is the original function, which computes whole sequences of one
    length."""

    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, chunk_size: int = 64,
        use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Compute the gated delta rule for ``[1, N, heads, size]`` with :class:`DeltaRule`. The second result would be
        a state; it is ``None``, since the plan stores the state."""
        rule = DeltaRule(reference, chunk_size, normed=use_qk_l2norm_in_kernel)
        return recur(rule, tuple(each[0] for each in (query, key, value, g, beta)))[None], None

    return delta_rule


def _scan(recur: Recur, reference: Function) -> Function:
    """Return a replacement for the scan function of a Mamba-2 layer that keeps sequences separate: it computes its
    inputs with ``recur``. ``reference`` is the original function."""

    def scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the state space with :class:`StateSpace`, after computing the step sizes from these arguments."""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*dt_limit)
        inputs = hidden_states[0], dt[0], B[0], C[0]
        return recur(StateSpace(reference, chunk_size, rate_H=A, skip_H=D), inputs)[None].contiguous()

    return scan


def _select(recur: Recur, reference: Function) -> Function:
    """Return a replacement for the scan function of a Mamba layer that keeps sequences separate: it computes its inputs
    with ``recur``. The original function, ``reference``, is not used."""

    def select(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the selective scan with :class:`Selective`, after computing the step sizes from these arguments."""
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = F.softplus(dt)
        out = recur(Selective(A), tuple(each[0].T for each in (hidden_states, dt, B, C))).T[None]
        if D is not None:
            out = out + hidden_states * D[None, :, None]
        return out if z is None else out * F.silu(z)

    return select


def _no_combined_kernel(recur: Recur, reference: Function) -> Function:
    """Return a replacement for a kernel that computes the whole mixer at once. It reports that there is no such kernel,
    so that the mixer calls the functions that can be replaced."""

    def combined(*args: Any, **kwargs: Any) -> None:
        """Return ``None``, which means that there is no kernel for the whole mixer: it would ignore the sequences."""

    return combined


FUNCTIONS: dict[str, Callable[[Recur, Function], Function]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba_selective_scan": _select,
    "mamba2_split_conv1d_scan_combined": _no_combined_kernel,
    "mamba_inner_fn": _no_combined_kernel,
}
"""For each function name in a mixer's module, the factory of its replacement. The factory receives the function that
computes a recurrence in the present call, and the original function."""
OTHERS = ("chunk_kimi_delta_attention",)
"""Functions of mixers that use more than one token, and for which there is no recurrence."""


class _PlanBridge:
    """Hooks that pass the plan of a call from a model to its trunk, since the models of some families drop it."""

    def __init__(self, model: nn.Module, trunk: nn.Module) -> None:
        """Register the hooks of ``model`` and of ``trunk``, the part of the model that computes hidden states."""
        self._plan: Any = None
        """The plan of the call of the model that is being computed."""
        model.register_forward_pre_hook(self._store, with_kwargs=True)
        trunk.register_forward_pre_hook(self._pass_on, with_kwargs=True)

    def _store(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the plan of the model's call; a forward pre-hook of the model."""
        self._plan = kwargs.get(PLAN)

    def _pass_on(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the plan to the keyword arguments of the trunk's call if it is missing; a forward pre-hook of the trunk.
        Return the changed arguments, or ``None`` for no change."""
        plan, self._plan = self._plan, None
        return None if plan is None or PLAN in kwargs else (args, {**kwargs, PLAN: plan})


def install(model: PreTrainedModel) -> None:
    """Replace the forward method of every mixer of a model by one that keeps sequences separate.

    Raises :class:`~headrace.base.errors.ModelError` for a mixer without the index of its layer.
    """
    mixers = {
        name: module
        for name, module in model.named_modules()
        if not FUNCTIONS.keys().isdisjoint(_names(type(module).forward))
    }
    for name, module in mixers.items():
        if not isinstance(getattr(module, "layer_idx", None), int):
            raise ModelError(
                f"a {type(module).__name__} does not say the index of its layer",
                remedy="use a model whose mixers have layer_idx",
            )
        module.forward = replacement = RecurrentForward(module)
        replacement.follow(model.get_submodule(name.rpartition(".")[0]))
    if mixers:
        _PlanBridge(model, model.base_model)


def recurrent_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers of ``model`` whose mixers have a state."""
    found = (module.__dict__.get("forward") for module in model.modules())
    return sorted({each.layer for each in found if isinstance(each, RecurrentForward)})


def foreign_mixer(config: PreTrainedConfig) -> str:
    """Return the name of the function that computes the recurrent layers of a model with this configuration, if their
    state cannot be stored; empty if it can, or if there are no such layers. The model's class is imported, but no
    weights are loaded."""
    if RECURRENT_LAYERS.isdisjoint(getattr(config, "layer_types", None) or []):
        return ""
    known = vars(importlib.import_module(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__))
    others = [name for name in OTHERS if name in known]
    if not others and not FUNCTIONS.keys().isdisjoint(known):
        return ""
    return ", ".join(others) or "a mixer of their own"


def _names(forward: Function) -> tuple[str, ...]:
    """Return the names of the functions and attributes that the code of a forward method uses."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return () if code is None else code.co_names
