"""A trial of flex attention before a run depends on it: values and gradients beside those of padded rows.

Shape legend: N tokens of the pass, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.models.attention import PackedPlan, Plan, Rule
from headrace.models.packed.flex import Compute, FlexPlan
from headrace.models.packed.kinds import AttentionKind

LENGTHS = ((150, 1, 70), (40, 260, 99))
"""The lengths of the sequences of two passes: of several blocks, with a sequence of one token, and of two sizes, so
that kernels are compiled for passes of any size."""
SHORT = 50
"""The longest window and the largest chunk of a trial, in tokens, so that they are shorter than its sequences."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""The largest difference, by dtype and relative to the largest number of a tensor, that rounding explains. Softmax is
computed in float32 in any case."""


def failure_of(kinds: Sequence[AttentionKind], device: torch.device, compute: Compute) -> str | None:
    """Return why flex attention cannot be used for these kinds on ``device``, because it does not compile, or because
    its results are wrong; ``None`` if it can."""
    for kind in kinds:
        try:
            found = _trial(kind, device, compute)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:  # as compilers raise them
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"it does not compile for {in_words(kind)}: {words}"
        if found is not None:
            return f"a trial of {in_words(kind)} is wrong: {found}"
    return None


def in_words(kind: AttentionKind) -> str:
    """Return a kind of attention in words, for messages."""
    sizes = f"{kind.heads} heads of {kind.key_size} over {kind.kv_heads} in {str(kind.dtype).removeprefix('torch.')}"
    extras = [
        "sinks" if kind.has_sinks else "",
        f"a soft cap of {kind.softcap}" if kind.softcap is not None else "",
        f"a window of {kind.window}" if kind.window is not None else "",
        f"chunks of {kind.chunk}" if kind.chunk is not None else "",
    ]
    return ", ".join([sizes, *filter(None, extras)])


def _trial(kind: AttentionKind, device: torch.device, compute: Compute) -> str | None:
    """Compute passes of random numbers both ways, with gradients and without; return what differs, ``None`` if nothing
    does."""
    for lengths in LENGTHS:
        tensors, rule, towards = _random(kind, sum(lengths), device)
        flex = FlexPlan(lengths, device, compute=compute)
        found, wanted = (_values(plan, tensors, rule, towards) for plan in (flex, PackedPlan(lengths, device)))
        with torch.no_grad():
            found["the output without gradients"] = flex.attend(tensors[0], tensors[1], tensors[2], rule)
        wanted["the output without gradients"] = wanted["the output"]
        for name, expected in wanted.items():
            gap = (found[name].double() - expected.double()).abs().max().item()
            scale = max(expected.double().abs().max().item(), 1e-3)
            if not gap <= TOLERANCES[kind.dtype] * scale:
                return f"{name} differs by {gap / scale:.1e} of its largest number in a pass of {sum(lengths)} tokens"
    return None


def _random(kind: AttentionKind, count: int, device: torch.device) -> tuple[list[Tensor], Rule, Tensor]:
    """Return random queries, keys, values and sinks for ``count`` tokens, with the rule of the kind, and what outputs
    are multiplied with for a gradient. They are drawn on the host, so that every device gets the same."""
    rng = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        """Return normal numbers of this shape."""
        return torch.randn(shape, generator=rng).to(device, kind.dtype)

    shapes = (
        (count, kind.heads, kind.key_size),
        (count, kind.kv_heads, kind.key_size),
        (count, kind.kv_heads, kind.value_size),
    )
    tensors = [draw(*shape).requires_grad_() for shape in shapes]
    sinks_H = draw(kind.heads).requires_grad_() if kind.has_sinks else None
    window, chunk = (None if each is None else min(each, SHORT) for each in (kind.window, kind.chunk))
    rule = Rule(layer=0, scale=kind.scale, window=window, chunk=chunk, softcap=kind.softcap, sinks_H=sinks_H)
    leaves = [*tensors, *([] if sinks_H is None else [sinks_H])]
    return leaves, rule, draw(count, kind.heads, kind.value_size)


def _values(plan: Plan, leaves: list[Tensor], rule: Rule, towards: Tensor) -> dict[str, Tensor]:
    """Return the output of attention under a plan and its gradients, by their names in messages."""
    with torch.enable_grad():
        out = plan.attend(leaves[0], leaves[1], leaves[2], rule)
        gradients = torch.autograd.grad((out * towards).sum(), leaves)
    names = ("the gradient of queries", "the gradient of keys", "the gradient of values", "the gradient of sinks")
    return {"the output": out.detach(), **dict(zip(names, gradients, strict=False))}
