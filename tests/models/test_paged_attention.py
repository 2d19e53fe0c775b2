"""Every implementation of attention over blocks gives what the definition gives, one query after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.base.errors import ConfigError
from headrace.models.attention import Rule
from headrace.models.paged import IMPLEMENTATIONS, choose
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, LayerShape, PagedCache
from headrace.models.paged.reference import ReferenceAttention

CPU = torch.device("cpu")
MAKERS = {name: maker for name, offer in IMPLEMENTATIONS.items() if (maker := offer(torch.float32, CPU)) is not None}

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "tiny window": {"window": 1},
    "chunk": {"chunk": 19},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 40, "chunk": 50, "softcap": 2.0, "sinks": True},
}
SHAPES = {
    "multi-head": (3, LayerShape(heads=3, key_size=16, value_size=16)),
    "grouped": (6, LayerShape(heads=2, key_size=8, value_size=8)),
    "odd sizes": (4, LayerShape(heads=4, key_size=24, value_size=10)),
}


def case(seed: int, starts: list[int], counts: list[int]) -> tuple[Geometry, np.random.Generator]:
    """Rows of random blocks; of several tokens where the counts say so. Block 0 is nobody's."""
    rng = np.random.default_rng(seed)
    lengths = np.array(starts) + np.array(counts)
    width = -(-int(lengths.max()) // BLOCK) + 1
    blocks = rng.permutation(np.arange(1, len(starts) * width + 1)).reshape(len(starts), width)
    used = np.arange(width) < -(-lengths[:, None] // BLOCK)
    num_decode = next((row for row, count in enumerate(counts) if count > 1), len(counts))
    return Geometry(
        tables_RB=np.where(used, blocks, 0).astype(np.int32),
        starts_R=np.array(starts, np.int64),
        counts_R=np.array(counts, np.int64),
        num_decode=num_decode,
    ), rng


def tensors(
    geometry: Geometry, shape: LayerShape, num_heads: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor, Tensor], PagedCache]:
    """Random queries, keys and values, and pools that hold random numbers everywhere but in block 0, which is NaN."""
    random = torch.Generator().manual_seed(seed)
    total = int(geometry.counts_R.sum())
    sizes = [(num_heads, shape.key_size), (shape.heads, shape.key_size), (shape.heads, shape.value_size)]
    query, key, value = (torch.randn(total, *size, generator=random).to(dtype) for size in sizes)
    cache = PagedCache([shape], int(geometry.tables_RB.size) + 1, dtype=dtype, device=CPU)
    for pool in cache.layers[0]:
        pool.copy_(torch.randn(pool.shape, generator=random))
        pool[0] = torch.nan
    return (query, key, value), cache


def rule_of(settings: dict[str, Any], num_heads: int) -> Rule:
    sinks = torch.linspace(-1, 1, num_heads) if settings.get("sinks") else None
    numbers = {name: settings.get(name) for name in ("window", "chunk", "softcap")}
    return Rule(layer=0, scale=0.3, sinks_H=sinks, **numbers)


def defined(geometry: Geometry, query_NHE: Tensor, layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
    """The definition, over pools that hold the new keys and values already; in double precision."""
    outputs = []
    rows_N = np.repeat(np.arange(len(geometry.counts_R)), geometry.counts_R)
    for query_HE, row, position in zip(query_NHE.double(), rows_N, geometry.positions_N(), strict=True):
        first = 0 if rule.window is None else max(0, position - rule.window + 1)
        first = first if rule.chunk is None else max(first, position // rule.chunk * rule.chunk)
        places = np.arange(first, position + 1)
        blocks = torch.from_numpy(geometry.tables_RB[row, places // BLOCK].astype(np.int64))
        key_CKE, value_CKE = (pool[blocks, :, places % BLOCK].double() for pool in layer)
        group = query_HE.shape[0] // key_CKE.shape[1]
        scores_HC = torch.einsum("he,che->hc", query_HE, key_CKE.repeat_interleave(group, 1)) * rule.scale
        if rule.softcap is not None:
            scores_HC = torch.tanh(scores_HC / rule.softcap) * rule.softcap
        if rule.sinks_H is not None:
            scores_HC = torch.cat([scores_HC, rule.sinks_H.double()[:, None]], 1)
        weights_HC = scores_HC.softmax(1)[:, : len(places)]
        outputs.append(torch.einsum("hc,che->he", weights_HC, value_CKE.repeat_interleave(group, 1)))
    return torch.stack(outputs)


def check(make: AttentionMaker, geometry: Geometry, shape: str, rule: str, dtype: torch.dtype = torch.float32) -> None:
    num_heads, layer_shape = SHAPES[shape]
    qkv, cache = tensors(geometry, layer_shape, num_heads, seed=1, dtype=dtype)
    asked = rule_of(RULES[rule], num_heads)
    with torch.inference_mode():
        got = make(geometry, CPU).attend(qkv, cache.layers[0], asked)
    rows_N = np.repeat(np.arange(len(geometry.counts_R)), geometry.counts_R)
    positions_N = geometry.positions_N()
    blocks_N = torch.from_numpy(geometry.tables_RB[rows_N, positions_N // BLOCK].astype(np.int64))
    for new, pool in zip(qkv[1:], cache.layers[0], strict=True):
        torch.testing.assert_close(pool[blocks_N, :, positions_N % BLOCK], new, atol=0, rtol=0)
    expected = defined(geometry, qkv[0], cache.layers[0], asked)
    assert got.dtype == dtype
    close = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, atol=close, rtol=close)


GEOMETRIES = {
    "decoding": ([0, 15, 16, 99, 300], [1, 1, 1, 1, 1]),
    "prompts": ([0, 0, 0], [5, 40, 33]),
    "mixed": ([7, 64, 0, 48, 16, 0, 20], [1, 1, 31, 5, 30, 1, 70]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", GEOMETRIES)
@pytest.mark.parametrize("name", MAKERS)
def test_every_query_sees_its_own_past_and_nothing_else(name: str, rows: str, shape: str, rule: str) -> None:
    check(MAKERS[name], case(0, *GEOMETRIES[rows])[0], shape, rule)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 16, 17, 50])), min_size=1, max_size=7),
    rule=st.sampled_from(list(RULES)),
    shape=st.sampled_from(list(SHAPES)),
    seed=st.integers(0, 9),
)
@pytest.mark.parametrize("name", MAKERS)
def test_any_cut_into_passes_is_attention(
    name: str, rows: list[tuple[int, int]], rule: str, shape: str, seed: int
) -> None:
    starts, counts = [list(column) for column in zip(*rows, strict=True)]
    check(MAKERS[name], case(seed, starts, counts)[0], shape, rule)


def test_low_precision_is_as_close_as_it_can_be() -> None:
    check(ReferenceAttention, case(0, *GEOMETRIES["mixed"])[0], "grouped", "all", torch.bfloat16)


def test_implementation_that_does_not_exist_or_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"attention='tritn' does not exist\n.*did you mean 'triton'"):
        choose(torch.float32, CPU, "tritn")
    with pytest.raises(ConfigError, match=r"attention='triton' cannot run on cpu with float32"):
        choose(torch.float32, CPU, "triton")
    assert choose(torch.float32, CPU, "reference")[1] is ReferenceAttention
