"""A deterministic model for a learner: batch-invariant kernels compute the forward pass, torch the backward pass.

The engine decodes one token at a time, in batches that change with every step. The learner computes whole sequences,
packed. The kernels compute the same bits for a token in both cases, so that log π of the learner equals log μ of the
engine at equal weights. Gradients are those of the same formulas in torch, which are computed again in the backward
pass.

Shape legend: N tokens, H query heads, K key-value heads, E head size, R rows, V vocabulary, T tokens of all sequences
(N, unless some share rows), S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.base.errors import ModelError
from headrace.models.attention import PLAN, PackedPlan, Rule, forward
from headrace.models.indexed import is_indexed
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.fuse import FuseReport, fuse
from headrace.models.kernels.fused import Fused, FusedAttention, rotate_halves
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.kernels.panels import PackedProduct
from headrace.models.paged.base import BLOCK, Geometry, LayerShape, PagedCache
from headrace.models.paged.compiled import CompiledAttention
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.predicting import PredictionHead
from headrace.models.recurrent import recurrent_layers
from headrace.models.routing import find_routing
from headrace.models.routing.find import is_router

_CPU = torch.device("cpu")
_PROBE = (19, 2, 33)
"""The lengths of the sequences that are computed in both ways before a model is called deterministic."""

_VECTOR = 64
"""A multiple of the numbers that torch computes with one instruction or two, on any processor."""
_CALL = 1 << 14
"""A number of elements, in whole vectors, of which torch computes an elementwise function in one thread."""

Tensors = tuple[Tensor, ...]


class _Recomputed(torch.autograd.Function):
    """An autograd function whose forward pass is ``compiled``, and whose backward pass differentiates ``plain``, the
    same formula in torch."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Callable[..., Tensors], plain: Callable[..., Tensors], num_inputs: int, *tensors: Tensor
    ) -> Tensors:
        """Return ``compiled`` of the first ``num_inputs`` tensors. The other tensors are parameters that the formula
        uses."""
        ctx.plain, ctx.num_inputs = plain, num_inputs
        ctx.save_for_backward(*tensors)
        return compiled(*tensors[:num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute ``plain`` again, with gradients, and return its derivative, since the kernels have no backward
        pass."""
        wanted = ctx.needs_input_grad[3:]
        parameters = ctx.saved_tensors[ctx.num_inputs :]
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[: ctx.num_inputs]]
            outputs = ctx.plain(*inputs)
            chosen = [tensor for tensor, want in zip((*inputs, *parameters), wanted, strict=True) if want]
            found = iter(torch.autograd.grad(outputs, chosen, gradients))
        return None, None, None, *(next(found) if want else None for want in wanted)


def _recomputed(
    compiled: Callable[..., Tensors], plain: Callable[..., Tensors], inputs: Tensors, parameters: Tensors
) -> Tensors:
    """Return ``compiled`` of the ``inputs``. The gradients of the inputs and of ``parameters`` are those of ``plain``,
    the same formula in torch, which uses the parameters."""
    out: Tensors = _Recomputed.apply(compiled, plain, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return out


def invariant_log_softmax(logits_RV: Tensor) -> Tensor:
    """Return ``log softmax`` of each row of float32 logits, with gradients. The bits of a row do not depend on the
    other rows. Entries of −∞ are excluded. The compiled kernels must be available.

    Both log π and log μ are computed with this function, from logits that are divided by the temperature and are −∞
    outside a kept-set.
    """
    loaded = kernels()
    assert isinstance(loaded, Kernels)
    return _recomputed(
        lambda logits: (loaded.log_softmax(logits),), lambda logits: (logits.log_softmax(-1),), (logits_RV,), ()
    )[0]


class InvariantPlan(PackedPlan):
    """A plan for packed sequences whose attention has the same bits as decoding over a paged cache."""

    def __init__(
        self,
        lengths_S: Sequence[int] | np.ndarray[Any, Any],
        device: torch.device | str = "cpu",
        rows_T: Sequence[int] | np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Arrange sequences of ``lengths_S`` tokens on ``device`` as :class:`PackedPlan` does, and as the rows of a
        cache that contains only this pass. ``rows_T`` is the index in the pass of each token of each sequence; ``None``
        if the sequences are concatenated."""
        super().__init__(lengths_S, device, rows_T)
        counts_R = np.asarray(lengths_S, np.int64)
        counts_R = counts_R[counts_R > 0]
        # every row has its own consecutive blocks of the cache, from first_R on
        blocks_R = -(-counts_R // BLOCK)
        first_R = np.cumsum(blocks_R) - blocks_R
        self._num_blocks = int(blocks_R.sum())
        """The number of blocks of the cache that contains only this pass."""
        self._geometry = Geometry(
            tables_RB=(first_R[:, None] + np.arange(blocks_R.max(initial=1))).astype(np.int32),
            starts_R=np.zeros_like(counts_R),
            counts_R=counts_R,
            num_decode=0,
        )
        """The layout of the pass over that cache."""
        self._shared_rows: tuple[Tensor, Tensor] | None = None
        """Two index tensors: for each token of the sequences, its row in the pass; and for each row of the pass, one
        token of the sequences. ``None`` if the two are the same."""
        if rows_T is not None:
            rows = np.asarray(rows_T, np.int64)
            self._shared_rows = torch.from_numpy(rows), torch.from_numpy(np.unique(rows, return_index=True)[1])

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the forward pass with the engine's attention kernel, with the same bits as the engine, and the
        backward pass with torch."""
        loaded = kernels()
        assert isinstance(loaded, Kernels)
        attention = CompiledAttention(loaded, self._geometry, _CPU)
        shape = LayerShape.from_tensors(key_NKD, value_NKD)
        plain = super().attend

        def compiled(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
            """Compute the attention with the kernel, over a cache that contains only this pass. Tokens that several
            sequences share are copied for each sequence."""
            pool = PagedCache([shape], self._num_blocks, dtype=torch.float32, device=_CPU)
            if self._shared_rows is None:
                return (attention.attend((query, key, value), pool.layers[0], rule),)
            rows_T, tokens_N = self._shared_rows
            query, key, value = (tensor.index_select(0, rows_T) for tensor in (query, key, value))
            return (attention.attend((query, key, value), pool.layers[0], rule).index_select(0, tokens_N),)

        sinks = () if rule.sinks_H is None else (rule.sinks_H,)
        return _recomputed(compiled, lambda q, k, v: (plain(q, k, v, rule),), (query_NHD, key_NKD, value_NKD), sinks)[0]


class _FusedForward:
    """The forward method of a fused module in a deterministic model: the kernel, with torch's backward pass if
    gradients are enabled."""

    def __init__(self, fused: Fused) -> None:
        """Wrap ``fused``, the module's forward method on kernels."""
        self.fused = fused

    def __call__(self, x: Tensor) -> Tensor:
        """Return the module's output for ``x``."""
        if not torch.is_grad_enabled():
            out: Tensor = self.fused.compute(x)
            return out
        fused, parameters = self.fused, tuple(self.fused.module.parameters())
        return _recomputed(lambda t: (fused.compute(t),), lambda t: (fused.original(t),), (x,), parameters)[0]


class _AttentionForward:
    """The forward method of a fused attention module in a deterministic model, with gradients."""

    def __init__(self, fused: FusedAttention) -> None:
        """Wrap ``fused``, the attention module's forward method on kernels."""
        self.fused = fused

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the output of the attention block, as transformers' attention modules do. The keyword arguments
        contain the plan."""
        fused, turn = self.fused, position_embeddings
        if not torch.is_grad_enabled():
            return fused.compute(hidden_states, position_embeddings, **kwargs)
        qkv = _recomputed(
            lambda x: tuple(part.contiguous() for part in fused.qkv(x, turn)),
            lambda x: self._plain(x, turn),
            (hidden_states,),
            self._parameters(),
        )
        mixed = kwargs[PLAN].attend(*qkv, fused.rule)
        out: Tensor = fused.out.linear(mixed.flatten(1)[None])
        return out, None

    def _parameters(self) -> Tensors:
        """Return the parameters that queries, keys and values depend on. They need gradients."""
        linears = [part.linear for part in self.fused.parts]
        linear = [tensor for part in linears for tensor in (part.weight, part.bias) if tensor is not None]
        return (*linear, *(norm[0] for norm in self.fused.norms if norm is not None))

    def _plain(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensors:
        """Return query, key and value computed with torch's operations, for the backward pass."""
        shaped = []
        for part, size, norm in zip(self.fused.parts, self.fused.sizes, (*self.fused.norms, None), strict=True):
            tensor = nn.functional.linear(x[0], part.linear.weight, part.linear.bias).unflatten(-1, size)
            if norm is not None:
                weight, eps, plus = norm
                tensor = tensor * torch.rsqrt(tensor.square().mean(-1, keepdim=True) + eps) * (weight + plus)
            shaped.append(tensor)
        query, key, value = shaped
        return rotate_halves(query, turn), rotate_halves(key, turn), value


class _InvariantSigmoid(TorchFunctionMode):
    """A context in which ``sigmoid`` is batch-invariant, including calls in a module's own code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute ``sigmoid`` in whole vectors, and every other function of torch as usual. Torch calls this method for
        each function inside the context."""
        if func not in (torch.sigmoid, Tensor.sigmoid):
            return func(*args, **(kwargs or {}))
        return _recomputed(lambda x: (_sigmoid(x),), lambda x: (x.sigmoid(),), args, ())[0]


class _InvariantProducts(_InvariantSigmoid):
    """A context in which ``F.linear`` and ``sigmoid`` are batch-invariant, including calls in a module's own code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute ``F.linear`` with the compiled kernel, and ``sigmoid`` in whole vectors."""
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        return _linear(*args, **(kwargs or {}))


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each number, with bits that depend on that number alone. Torch computes the numbers behind
    the last whole vector of a call, or of a thread's part of it, by another formula."""
    padded = nn.functional.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
    return torch.cat([part.sigmoid() for part in padded.split(_CALL)])[: x.numel()].view(x.shape)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear`` of the arguments, computed with the compiled kernel; torch computes its gradients."""
    loaded = kernels()
    assert isinstance(loaded, Kernels)

    def compiled(*tensors: Tensor) -> Tensors:
        """Compute the linear layer with the kernel, from contiguous copies of input, weight and bias."""
        x, w, *b = (tensor.contiguous() for tensor in tensors)
        return (loaded.linear(x, PackedProduct(w, b[0] if b else None)),)

    given = (input, weight) if bias is None else (input, weight, bias)
    return _recomputed(compiled, lambda *tensors: (nn.functional.linear(*tensors),), given, ())[0]


class _InvariantForward:
    """The original forward method of a part of a mixture of experts, in a context with batch-invariant functions."""

    def __init__(self, module: nn.Module, context: Callable[[], TorchFunctionMode]) -> None:
        """Replace the forward method of ``module``; it is called in ``context``. The caller assigns this object to
        it."""
        self.original, self.context = module.forward, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward method with batch-invariant functions."""
        with self.context():
            return self.original(*args, **kwargs)


def make_deterministic(model: nn.Module) -> FuseReport:
    """Replace the forward methods of a float32 model on a CPU by batch-invariant kernels, with gradients.

    The model must then be called with an :class:`InvariantPlan`. Raises :class:`~headrace.base.errors.ModelError` if
    packed tokens and decoded tokens do not have the same bits, as in architectures with operations that no kernel
    covers.
    """
    loaded = kernels()
    if isinstance(loaded, Unavailable):
        raise ModelError(
            f"there are no kernels that could make it deterministic: {loaded.reason}",
            remedy="install a C++ compiler (Debian, Ubuntu: apt install g++), or leave model.deterministic out",
        )
    if layers := recurrent_layers(model):
        raise ModelError(
            f"no kernel computes the recurrences of layers {layers} alike in batches and alone",
            remedy="leave model.deterministic out, or use a model whose layers only attend",
        )
    if is_indexed(model):
        raise ModelError(
            "no kernel computes the choices of its indexers alike in batches and alone",
            remedy="leave model.deterministic out, or use a model that attends to all tokens",
        )
    report = fuse(model, loaded, layers=False)
    remedy = "leave model.deterministic out, or use an architecture whose layers the kernels cover: qwen3, llama, ..."
    if "model" in report.kept:
        raise ModelError(f"the model cannot be made deterministic: {report.kept['model']}", remedy=remedy)
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if isinstance(fused, FusedAttention) and fused.gated:
            del module.forward  # the module's own forward, whose products are kernels, has gradients
    _make_mixtures_invariant(model)
    if not _is_invariant(model):
        raise ModelError(f"the model's logits still depend on the batch ({report})", remedy=remedy)
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if isinstance(fused, FusedAttention):
            module.forward = _AttentionForward(fused)
        elif isinstance(fused, Fused):
            module.forward = _FusedForward(fused)
    return report


def make_head_deterministic(head: PredictionHead) -> None:
    """Replace the forward methods of the prediction head of a deterministic model by batch-invariant kernels, so that
    drafts do not depend on the batch. Raises the same errors as :func:`make_deterministic`."""
    make_deterministic(head.layer)
    head.projection.forward = _InvariantForward(head.projection, _InvariantProducts)  # type: ignore[method-assign]


def _make_mixtures_invariant(model: nn.Module) -> None:
    """Make the functions of ``model`` batch-invariant in the parts of a mixture of experts that no kernel covers:
    matrix products in parts with parameters of their own, and the sigmoid also in the modules around them, which gate
    shared experts."""
    routed = find_routing(model)
    if routed is None:
        return
    model.set_experts_implementation("eager")  # type: ignore[operator]
    for module in model.modules():
        own = next(module.parameters(recurse=False), None)
        if "forward" in module.__dict__ or type(module) is nn.Embedding:
            continue
        if own is not None and own.dim() > 1:
            module.forward = _InvariantForward(module, _InvariantProducts)
        elif any(is_router(child) for child in module.children()):
            module.forward = _InvariantForward(module, _InvariantSigmoid)


def is_deterministic(model: nn.Module) -> bool:
    """Return whether :func:`make_deterministic` has been applied to the model."""
    return any(
        isinstance(module.__dict__.get("forward"), _FusedForward | _AttentionForward) for module in model.modules()
    )


@torch.inference_mode()
def _is_invariant(model: nn.Module) -> bool:
    """Return whether the model's logits of packed sequences are bitwise equal to those of the same sequences, decoded
    token by token over a paged cache. The lengths of the sequences are :data:`_PROBE`."""
    loaded = kernels()
    assert isinstance(loaded, Kernels)
    plan = InvariantPlan(_PROBE)
    ids_N = torch.arange(sum(_PROBE)) * 7 % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    packed_NV = forward(model, ids_N, plan)
    tables_RB, begins_R = plan._geometry.tables_RB, np.cumsum(_PROBE) - _PROBE
    cache = PagedCache(cache_shapes(model), plan._num_blocks, dtype=torch.float32, device=_CPU)
    for step in range(max(_PROBE)):
        rows = np.flatnonzero(np.asarray(_PROBE) > step)
        geometry = Geometry(
            tables_RB=tables_RB[rows],
            starts_R=np.full(len(rows), step, np.int64),
            counts_R=np.ones(len(rows), np.int64),
            num_decode=len(rows),
        )
        paged = PagedPlan(cache, geometry, lambda g, d: CompiledAttention(loaded, g, d), _CPU)
        places = torch.from_numpy(begins_R[rows] + step)
        if not torch.equal(forward(model, ids_N[places], paged), packed_NV[places]):
            return False
    return True
