"""The stage ``kernels``: every Triton kernel, in each number format and for each size of heads, compared with its
definition in float64 on the device; its time in microseconds, and the used fraction of the device's bandwidth.

With ``--pretend`` Triton's interpreter runs the kernels on small inputs, if Triton is installed.

Shape legend: R rows, which decode one token each; B blocks of a row; P blocks of the pool, S tokens of a block, K
key-value heads, H query heads, E size of a key, V size of a value, C tokens of a context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.base.environ import secret
from headrace.models.attention import Rule
from headrace.models.paged.base import BLOCK, Geometry, LayerShape, PagedCache
from headrace.wings.bench.base import at_most
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.gpu.probe import probe

SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
"""The sizes of keys and values of the supported architectures that the decoding kernel has room for."""
RULES: Mapping[str, Mapping[str, Any]] = {
    "plain": {}, "window": {"window": True}, "softcap": {"softcap": 30.0}, "sinks": {"sinks": True},
}  # fmt: skip
"""The kinds of attention that are checked, by name: without or with a sliding window, a soft cap, or sinks."""
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The largest acceptable difference from float64, relative to the largest number, by number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase:
    """One call of the decoding kernel: a batch, and the heads of a layer."""

    rows: int
    """The number of sequences, each of which decodes one token."""
    context: int
    """The longest context, in tokens; the rows have random contexts between half of this and this length."""
    kv_heads: int
    """The number of key-value heads."""
    group: int
    """The number of query heads for each key-value head."""


def run(stage: StageContext) -> None:
    """Check all kernels, and on a real device also measure them; ``stage`` records the results."""
    if not probe().triton:
        stage.add_row(what="kernels", left_out="Triton is not installed: pip install 'headrace[cuda]'")
        return
    case = DecodeCase(rows=64, context=1024, kv_heads=8, group=4)
    if stage.pretend:
        assert secret("TRITON_INTERPRET") == "1", "the command starts this stage with Triton's interpreter"
        case = DecodeCase(rows=3, context=40, kv_heads=2, group=2)
    for sizes in SIZES[:2] if stage.pretend else SIZES:
        for dtype in CLOSE:
            if stage.pretend and dtype == torch.bfloat16:
                continue  # the interpreter reads the bits of a bfloat16 matrix as integers
            for rule in RULES if sizes in ((64, 64), (128, 128)) else ("plain",):
                name = f"{str(dtype).removeprefix('torch.')}, heads of {sizes[0]} and {sizes[1]}, {rule}"
                stage.attempt(name, partial(_check_kernel, stage, name, case, (sizes, dtype, rule)))


def _check_kernel(
    stage: StageContext, name: str, case: DecodeCase, kind: tuple[tuple[int, int], torch.dtype, str]
) -> None:
    """Compare the kernel ``name`` with its definition on inputs of the sizes of ``case``, and record its time in
    ``stage``. ``kind`` contains the sizes of keys and values, the number format and the rule of attention, one of
    :data:`RULES`."""
    sizes, dtype, rule = kind
    from headrace.models.paged.triton import TritonAttention, columns

    if not columns(*sizes, dtype.itemsize):
        stage.add_row(what=name, left_out="no card has room for a tile of these: such heads are gathered")
        return
    device = torch.device("cpu" if stage.pretend else stage.request.device)
    geometry, qkv, cache = _inputs(case, sizes, dtype, device)
    heads = case.kv_heads * case.group
    given = dict(RULES[rule])
    sinks = torch.linspace(-1, 1, heads, device=device, dtype=dtype) if given.pop("sinks", False) else None
    given |= {"window": case.context // 8} if given.pop("window", False) else {}
    limits: dict[str, Any] = {"window": None, "softcap": None, "chunk": None, **given}
    attention_rule = Rule(layer=0, scale=sizes[0] ** -0.5, sinks_H=sinks, **limits)
    attention = TritonAttention(geometry, device)
    with torch.inference_mode():
        computed = attention.attend(qkv, cache.layers[0], attention_rule)
        expected = reference_attention(geometry, qkv[0], cache.layers[0], attention_rule)
    num_wrong = _count_wrong_writes(geometry, qkv, cache)
    stage.add_target(at_most(f"write, {name}: numbers that differ", num_wrong, 0, "numbers"))
    worst = float((computed.double() - expected).abs().max() / expected.abs().max())
    stage.add_target(at_most(f"decode, {name}: largest difference from float64", worst, CLOSE[dtype], "of largest"))
    if stage.pretend:
        stage.add_row(what=f"decode, {name}", interpreted=True, worst=worst)
        return
    with torch.inference_mode():
        calls_s = stage.shortest_s(lambda: [attention.attend(qkv, cache.layers[0], attention_rule) for _ in range(20)])
        seconds = calls_s / 20
    window = given.get("window") or case.context
    read = int(np.minimum(geometry.starts_R + 1, window).sum()) * case.kv_heads * sum(sizes) * dtype.itemsize
    stage.add_row(
        what=f"decode and write, {name}", us=seconds * 1e6, worst=worst,
        share_of_bandwidth=read / seconds / 1e9 / stage.request.ceilings.get("copy_device_gb_s", float("inf")),
    )  # fmt: skip


def _inputs(
    case: DecodeCase, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Geometry, tuple[Tensor, Tensor, Tensor], PagedCache]:
    """Return the geometry of a pass in which every row decodes one token, random queries, keys and values of these
    tokens, and a cache that is filled with random numbers. ``sizes`` are the sizes of a key and a value, ``dtype`` is
    their number format, and ``case`` has the other sizes."""
    rng = np.random.default_rng(0)
    width = -(-case.context // BLOCK)
    tables_RB = rng.permutation(case.rows * width).reshape(case.rows, width).astype(np.int32)
    starts_R = rng.integers(case.context // 2, case.context - 1, case.rows)
    geometry = Geometry(
        tables_RB=tables_RB, starts_R=starts_R, counts_R=np.ones(case.rows, np.int64), num_decode=case.rows
    )
    draws = torch.Generator().manual_seed(0)
    key, value = sizes
    heads = ((case.kv_heads * case.group, key), (case.kv_heads, key), (case.kv_heads, value))
    query, keys, values = (torch.randn(case.rows, *each, generator=draws).to(device, dtype) for each in heads)
    shape = LayerShape(heads=case.kv_heads, key_size=key, value_size=value)
    cache = PagedCache([shape], case.rows * width, dtype=dtype, device=device)
    for pool in cache.layers[0]:
        pool.copy_(torch.randn(pool.shape, generator=draws).to(device, dtype))
    return geometry, (query, keys, values), cache


def _count_wrong_writes(geometry: Geometry, qkv: tuple[Tensor, Tensor, Tensor], cache: PagedCache) -> int:
    """Return how many numbers of the new keys and values differ from the content of their blocks of the cache after the
    pass."""
    rows = np.arange(len(geometry.starts_R))
    device = qkv[0].device
    blocks = torch.from_numpy(geometry.tables_RB[rows, geometry.starts_R // BLOCK].astype(np.int64)).to(device)
    within = torch.from_numpy(geometry.starts_R % BLOCK).to(device)
    pairs = zip(qkv[1:], cache.layers[0], strict=True)
    return sum(int((pool[blocks, :, within] != new).sum()) for new, pool in pairs)


def reference_attention(geometry: Geometry, query_RHE: Tensor, layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
    """Return the attention output ``[R, H, V]`` of one decoded token for each row, computed by the definition of
    attention in float64. The pools of ``layer`` must already contain the new keys and values. ``query_RHE`` are the
    queries, ``geometry`` describes the pass, and ``rule`` the kind of attention."""
    outputs = []
    for row, start in enumerate(geometry.starts_R):
        first = 0 if rule.window is None else max(0, int(start) - rule.window + 1)
        places = np.arange(first, int(start) + 1)
        blocks = torch.from_numpy(geometry.tables_RB[row, places // BLOCK].astype(np.int64)).to(query_RHE.device)
        within = torch.from_numpy(places % BLOCK).to(query_RHE.device)
        key_CKE, value_CKV = (pool[blocks, :, within].double() for pool in layer)
        group = query_RHE.shape[1] // key_CKE.shape[1]
        key_CHE, value_CHV = (each.repeat_interleave(group, 1) for each in (key_CKE, value_CKV))
        scores_HC = torch.einsum("he,che->hc", query_RHE[row].double(), key_CHE) * rule.scale
        if rule.softcap is not None:
            scores_HC = torch.tanh(scores_HC / rule.softcap) * rule.softcap
        if rule.sinks_H is not None:
            scores_HC = torch.cat([scores_HC, rule.sinks_H.double()[:, None]], 1)
        outputs.append(torch.einsum("hc,chv->hv", scores_HC.softmax(1)[:, : len(places)], value_CHV))
    return torch.stack(outputs)
