"""A learner's model whose numbers are an engine's, bit for bit: batch-invariant kernels forward, torch backward.

The engine decodes one token at a time, in batches that change with every step; the learner computes whole sequences,
packed. With kernels that give a token the same bits either way, log π of the learner equals log μ of the engine at
equal weights. Gradients are those of the same formulas in torch, computed again in the backward pass.

Shape legend: N tokens, H query heads, K key-value heads, E head size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.models.attention import PLAN, PackedPlan, Rule, forward
from headrace.models.kernels.fuse import Fused, FusedAttention, FuseReport, fuse, turn_halves
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.paged.base import BLOCK, Geometry, LayerShape, PagedCache, PagedPlan
from headrace.models.paged.compiled import CompiledAttention

_CPU = torch.device("cpu")
_PROBE = (19, 2, 33)
"""Lengths of the sequences that are computed both ways before a model is called deterministic."""

Several = tuple[Tensor, ...]


class _Recomputed(torch.autograd.Function):
    """``compiled()`` forward; backward through ``plain``, a function of the tensors that gradients are wanted for."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Callable[..., Several], plain: Callable[..., Several], num_inputs: int, *tensors: Tensor
    ) -> Several:
        """The first ``num_inputs`` tensors are the functions' arguments; the others are parameters that they use."""
        ctx.plain, ctx.num_inputs = plain, num_inputs
        ctx.save_for_backward(*tensors)
        return compiled(*tensors[:num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = ctx.needs_input_grad[3:]
        parameters = ctx.saved_tensors[ctx.num_inputs :]
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[: ctx.num_inputs]]
            outputs = ctx.plain(*inputs)
            chosen = [tensor for tensor, want in zip((*inputs, *parameters), wanted, strict=True) if want]
            found = iter(torch.autograd.grad(outputs, chosen, gradients))
        return None, None, None, *(next(found) if want else None for want in wanted)


def _recomputed(
    compiled: Callable[..., Several], plain: Callable[..., Several], inputs: Several, parameters: Several
) -> Several:
    out: Several = _Recomputed.apply(compiled, plain, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return out


def invariant_log_softmax(logits_RV: Tensor) -> Tensor:
    """``log softmax`` of each row, the same whatever other rows are there; with gradients. Needs :func:`kernels`."""
    loaded = kernels()
    assert isinstance(loaded, Kernels)
    return _recomputed(
        lambda logits: (loaded.log_softmax(logits),), lambda logits: (logits.log_softmax(-1),), (logits_RV,), ()
    )[0]


class InvariantPlan(PackedPlan):
    """Packed sequences whose attention gives the bits that decoding over blocks gives."""

    def __init__(self, lengths_S: Sequence[int] | np.ndarray[Any, Any]) -> None:
        super().__init__(lengths_S)
        counts_R = np.asarray(lengths_S, np.int64)
        counts_R = counts_R[counts_R > 0]
        blocks_R = -(-counts_R // BLOCK)
        first_R = np.cumsum(blocks_R) - blocks_R
        self._num_blocks = int(blocks_R.sum())
        self._geometry = Geometry(
            tables_RB=(first_R[:, None] + np.arange(blocks_R.max(initial=1))).astype(np.int32),
            starts_R=np.zeros_like(counts_R),
            counts_R=counts_R,
            num_decode=0,
        )

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        loaded = kernels()
        assert isinstance(loaded, Kernels)
        attention = CompiledAttention(loaded, self._geometry, _CPU)
        shape = LayerShape(heads=key_NKD.shape[1], key_size=key_NKD.shape[2], value_size=value_NKD.shape[2])
        plain = super().attend

        def compiled(*qkv: Tensor) -> Several:
            pool = PagedCache([shape], self._num_blocks, dtype=torch.float32, device=_CPU)
            return (attention.attend((qkv[0], qkv[1], qkv[2]), pool.layers[0], rule),)

        sinks = () if rule.sinks_H is None else (rule.sinks_H,)
        return _recomputed(compiled, lambda q, k, v: (plain(q, k, v, rule),), (query_NHD, key_NKD, value_NKD), sinks)[0]


class _Module:
    """A fused module's forward, with gradients."""

    def __init__(self, fused: Fused) -> None:
        self.fused = fused

    def __call__(self, x: Tensor) -> Tensor:
        fused, parameters = self.fused, tuple(self.fused.module.parameters())
        return _recomputed(lambda t: (fused.compute(t),), lambda t: (fused.original(t),), (x,), parameters)[0]


class _Attention:
    """A fused attention module's forward, with gradients."""

    def __init__(self, fused: FusedAttention) -> None:
        self.fused = fused

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        fused, turn = self.fused, position_embeddings
        qkv = _recomputed(
            lambda x: tuple(part.contiguous() for part in fused.qkv(x, turn)),
            lambda x: self._plain(x, turn),
            (hidden_states,),
            self._parameters(),
        )
        mixed = kwargs[PLAN].attend(*qkv, fused.rule)
        out: Tensor = fused.out(mixed.flatten(1)[None])
        return out, None

    def _parameters(self) -> Several:
        linear = [tensor for part in self.fused.parts for tensor in (part.weight, part.bias) if tensor is not None]
        return (*linear, *(norm[0] for norm in self.fused.norms if norm is not None))

    def _plain(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Several:
        shaped = []
        for part, size, norm in zip(self.fused.parts, self.fused.sizes, (*self.fused.norms, None), strict=True):
            tensor = nn.functional.linear(x[0], part.weight, part.bias).unflatten(-1, size)
            if norm is not None:
                weight, eps, plus = norm
                tensor = tensor * torch.rsqrt(tensor.square().mean(-1, keepdim=True) + eps) * (weight + plus)
            shaped.append(tensor)
        query, key, value = shaped
        return turn_halves(query, turn), turn_halves(key, turn), value


def make_deterministic(model: nn.Module) -> FuseReport:
    """Let a float32 model on a CPU compute its forward by invariant kernels, with gradients.

    Call it with an :class:`InvariantPlan`. Raises :class:`~headrace.errors.ModelError` where packed and decoded tokens
    do not come out the same, such as in architectures with operations that no kernel covers.
    """
    report = fuse(model)
    remedy = "train without the deterministic mode, or use an architecture whose layers the kernels cover"
    if "model" in report.kept:
        raise ModelError(f"the model cannot be made deterministic: {report.kept['model']}", remedy=remedy)
    if not _same_both_ways(model):
        raise ModelError(f"the model's logits still depend on the batch ({report})", remedy=remedy)
    for module in model.modules():
        fused = module.__dict__.get("forward")
        if isinstance(fused, FusedAttention):
            module.forward = _Attention(fused)
        elif isinstance(fused, Fused):
            module.forward = _Module(fused)
    return report


@torch.inference_mode()
def _same_both_ways(model: nn.Module) -> bool:
    """Whether sequences packed give the bits that they give token by token."""
    loaded = kernels()
    assert isinstance(loaded, Kernels)
    plan = InvariantPlan(_PROBE)
    shapes: dict[int, LayerShape] = {}

    class Watching(InvariantPlan):
        def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
            shapes[rule.layer] = LayerShape(
                heads=key_NKD.shape[1], key_size=key_NKD.shape[2], value_size=value_NKD.shape[2]
            )
            return super().attend(query_NHD, key_NKD, value_NKD, rule)

    ids_N = torch.arange(sum(_PROBE)) * 7 % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    packed_NV = forward(model, ids_N, Watching(_PROBE))
    tables_RB, begins_R = plan._geometry.tables_RB, np.cumsum(_PROBE) - _PROBE
    cache = PagedCache([shapes[i] for i in sorted(shapes)], plan._num_blocks, dtype=torch.float32, device=_CPU)
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
