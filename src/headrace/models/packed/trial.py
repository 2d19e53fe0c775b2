"""A trial of flex attention before a run uses it: its values and gradients are compared with those of padded rows.

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
"""The lengths of the sequences of two passes. They have several blocks and a sequence of one token. The passes differ
in size, so that kernels for passes of any size are compiled."""
SHORT = 50
"""The largest window and chunk of a trial, in tokens, so that they are shorter than its sequences."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""The largest difference that rounding can cause, by dtype and relative to the largest number of a tensor. Softmax is
always computed in float32."""


def find_failure(kinds: Sequence[AttentionKind], device: torch.device, compute: Compute) -> str | None:
    """Return why flex attention, computed by ``compute``, cannot be used for ``kinds`` on ``device``: a kernel does not
    compile, or its results are wrong. Return ``None`` if it can be used."""
    for kind in kinds:
        try:
            found = _trial(kind, device, compute)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:  # as compilers raise them
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"it does not compile for {describe_kind(kind)}: {words}"
        if found is not None:
            return f"a trial of {describe_kind(kind)} is wrong: {found}"
    return None


def describe_kind(kind: AttentionKind) -> str:
    """Return a description of a kind of attention, for messages."""
    sizes = f"{kind.heads} heads of {kind.key_size} over {kind.kv_heads} in {str(kind.dtype).removeprefix('torch.')}"
    extras = [
        "sinks" if kind.has_sinks else "",
        f"a soft cap of {kind.softcap}" if kind.softcap is not None else "",
        f"a window of {kind.window}" if kind.window is not None else "",
        f"chunks of {kind.chunk}" if kind.chunk is not None else "",
    ]
    return ", ".join([sizes, *filter(None, extras)])


def _trial(kind: AttentionKind, device: torch.device, compute: Compute) -> str | None:
    """Compute two passes of random numbers for a layer of the kind ``kind`` on ``device``, with flex attention
    (``compute``) and with padded rows, with and without gradients. Return the first difference, in words; ``None`` if
    the results are the same up to rounding."""
    for lengths in LENGTHS:
        tensors, rule, output_gradient = _random_inputs(kind, sum(lengths), device)
        flex = FlexPlan(lengths, device, compute=compute)
        found, expected_values = (
            _output_and_gradients(plan, tensors, rule, output_gradient) for plan in (flex, PackedPlan(lengths, device))
        )
        with torch.no_grad():
            found["the output without gradients"] = flex.attend(tensors[0], tensors[1], tensors[2], rule)
        expected_values["the output without gradients"] = expected_values["the output"]
        for name, expected in expected_values.items():
            gap = (found[name].double() - expected.double()).abs().max().item()
            scale = max(expected.double().abs().max().item(), 1e-3)
            if not gap <= TOLERANCES[kind.dtype] * scale:
                return f"{name} differs by {gap / scale:.1e} of its largest number in a pass of {sum(lengths)} tokens"
    return None


def _random_inputs(kind: AttentionKind, count: int, device: torch.device) -> tuple[list[Tensor], Rule, Tensor]:
    """Return random queries, keys, values and sinks for ``count`` tokens, the rule of the kind, and the gradient of the
    output. The numbers are drawn on the host, so that they are the same on every device."""
    rng = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        """Return standard normal random numbers of this shape."""
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


def _output_and_gradients(plan: Plan, leaves: list[Tensor], rule: Rule, output_gradient: Tensor) -> dict[str, Tensor]:
    """Return the output of attention under a plan and the gradients of ``leaves``, by their names in messages.
    ``towards`` is the gradient of the output."""
    with torch.enable_grad():
        out = plan.attend(leaves[0], leaves[1], leaves[2], rule)
        gradients = torch.autograd.grad((out * output_gradient).sum(), leaves)
    names = ("the gradient of queries", "the gradient of keys", "the gradient of values", "the gradient of sinks")
    return {"the output": out.detach(), **dict(zip(names, gradients, strict=False))}
