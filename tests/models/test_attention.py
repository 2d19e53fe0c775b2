"""Packed sequences see only themselves, exactly, forward and backward.

Shape legend: N tokens of the pass, S sequences, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from headrace.base.errors import ModelError
from headrace.models import ModelConfig, load_model
from headrace.models.attention import MIN_FILL, ROW_STEP, PackedPlan, Rule, bucket_by_length, forward
from tests.models.kinds import KINDS, VOCAB, plain

LENGTHS = [7, 1, 30, 7, 12, 2]


def dense(query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, lengths: list[int], rule: Rule) -> Tensor:
    """The definition, written out over all pairs of tokens."""
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place_N = torch.arange(len(sequence_N))
    ahead = place_N[:, None] - place_N[None]
    sees = (sequence_N[:, None] == sequence_N[None]) & (ahead >= 0)
    if rule.window is not None:
        sees &= ahead < rule.window
    repeats = query_NHD.shape[1] // key_NKD.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key_NKD, value_NKD))
    scores = torch.einsum("nhd,mhd->hnm", query_NHD, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.masked_fill(~sees, -torch.inf).exp()
    sink = 0 if rule.sinks_H is None else rule.sinks_H.exp()[:, None, None]
    return torch.einsum("hnm,mhd->nhd", weights / (weights.sum(-1, keepdim=True) + sink), value)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 70),
    terms=st.tuples(st.none() | st.just(3.0), st.booleans()),
    seed=st.integers(0, 2**31),
)
def test_packed_attention_is_attention_within_each_sequence(
    lengths: list[int], kv_heads: int, window: int | None, terms: tuple[float | None, bool], seed: int
) -> None:
    softcap, with_sinks = terms
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    sizes = [(total, 4, 8), (total, kv_heads, 8), (total, kv_heads, 6)]
    tensors = [torch.randn(size, generator=rng, requires_grad=True) for size in sizes]
    sinks_H = torch.randn(4, generator=rng, requires_grad=True) if with_sinks else None
    rule = Rule(layer=0, scale=0.3, window=window, softcap=softcap, sinks_H=sinks_H)
    leaves = [*tensors, *([sinks_H] if sinks_H is not None else [])]
    towards = torch.randn(total, 4, 6, generator=rng)

    packed = PackedPlan(lengths).attend(*tensors, rule)
    expected = dense(*tensors, lengths, rule)
    torch.testing.assert_close(packed, expected, atol=2e-5, rtol=1e-5)
    gradients = torch.autograd.grad((packed * towards).sum(), leaves)
    for found, wanted in zip(gradients, torch.autograd.grad((expected * towards).sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_model_gives_each_sequence_what_it_gets_alone(kind: str, model_dir: Callable[[str], Path]) -> None:
    model, alone = load_model(ModelConfig(path=str(model_dir(kind)))), plain(model_dir(kind))
    rng = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 3 + len(VOCAB), (length,), generator=rng) for length in LENGTHS]
    towards = [torch.randn(length, 3 + len(VOCAB), generator=rng) for length in LENGTHS]

    packed_NV = forward(model, torch.cat(sequences), PackedPlan(LENGTHS))
    alone_NV = torch.cat([alone(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    torch.testing.assert_close(packed_NV, alone_NV, atol=1e-4, rtol=1e-4)

    (packed_NV * torch.cat(towards)).sum().backward()
    (alone_NV * torch.cat(towards)).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, name
            continue
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-4 * max(1.0, scale), rtol=1e-3, msg=name)


def test_only_the_kept_places_get_logits(model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(path=str(model_dir("qwen3"))))
    ids, keep = torch.arange(3, 15), torch.tensor([4, 11])
    plan = PackedPlan([5, 7])
    torch.testing.assert_close(forward(model, ids, plan, keep), forward(model, ids, plan)[keep])


def test_model_called_without_a_plan_says_how_to_call_it(model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(path=str(model_dir("llama"))))
    with pytest.raises(ModelError, match=r"without a plan[\s\S]*forward\(model, ids_N, plan\)"):
        model(input_ids=torch.tensor([[3, 4]]))


@given(st.lists(st.integers(0, 2000), max_size=60))
def test_padding_is_bounded_and_so_is_the_number_of_buckets(lengths: list[int]) -> None:
    lengths_S = np.array(lengths, np.int64)
    buckets = bucket_by_length(lengths_S)
    members = [index for bucket in buckets for index in bucket.tolist()]
    assert sorted(members) == np.flatnonzero(lengths_S).tolist()
    for bucket in buckets:
        longest = lengths_S[bucket].max()
        assert (longest <= np.maximum(lengths_S[bucket] / MIN_FILL, lengths_S[bucket] + ROW_STEP)).all()
    assert len(buckets) <= 20


def test_empty_sequences_take_no_place() -> None:
    query = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    rule = Rule(layer=0, scale=1.0)
    with_empty = PackedPlan([0, 2, 0, 1]).attend(query, query, query, rule)
    assert torch.equal(with_empty, PackedPlan([2, 1]).attend(query, query, query, rule))


@given(
    prefix=st.integers(1, 20),
    suffixes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_sequences_that_share_rows_attend_as_if_each_had_its_own(
    prefix: int, suffixes: list[int], window: int | None, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    own = [prefix + sum(suffixes[:index]) for index in range(len(suffixes))]
    rows = [
        row
        for start, count in zip(own, suffixes, strict=True)
        for row in [*range(prefix), *range(start, start + count)]
    ]
    lengths, rows_T = [prefix + count for count in suffixes], torch.tensor(rows)
    leaves = [torch.randn(prefix + sum(suffixes), heads, 8, generator=rng, requires_grad=True) for heads in (4, 2, 2)]
    towards = torch.randn(len(rows), 4, 8, generator=rng)
    rule = Rule(layer=0, scale=0.3, window=window)

    plan = PackedPlan(lengths, rows_T=rows)
    shared = plan.attend(*leaves, rule)[rows_T]
    apart = PackedPlan(lengths).attend(*(leaf[rows_T] for leaf in leaves), rule)
    torch.testing.assert_close(shared, apart, atol=2e-5, rtol=1e-5)
    assert plan.positions_N[rows_T].tolist() == PackedPlan(lengths).positions_N.tolist()
    gradients = torch.autograd.grad((shared * towards).sum(), leaves)
    for found, wanted in zip(gradients, torch.autograd.grad((apart * towards).sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)


@given(st.data(), st.none() | st.integers(1, 12), st.sampled_from(["window", "chunk", "sinks", "softcap"]))
def test_paths_of_a_tree_attend_as_if_each_had_rows_of_its_own(data, limit, kind):
    """Sequences that continue any beginning of any earlier one; some add nothing."""
    paths: list[list[int]] = []
    count = 0
    for _ in range(data.draw(st.integers(1, 7))):
        before = data.draw(st.sampled_from(paths)) if paths else []
        kept, added = data.draw(st.integers(0, len(before))), data.draw(st.integers(0, 30))
        paths.append(before[:kept] + list(range(count, count + added)))
        count += added
    assume(count)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    lengths, rows = [len(path) for path in paths], [row for path in paths for row in path]
    rows_T = torch.tensor(rows)
    sinks = torch.randn(4, generator=rng, dtype=torch.float64) if kind == "sinks" else None
    rule = Rule(
        layer=0, scale=0.3, window=limit if kind != "chunk" else None, chunk=limit if kind == "chunk" else None,
        sinks_H=sinks, softcap=2.0 if kind == "softcap" else None,
    )  # fmt: skip
    leaves = [
        torch.randn(count, heads, 8, generator=rng, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    towards = torch.randn(len(rows), 4, 8, generator=rng, dtype=torch.float64)
    plan = PackedPlan(lengths, rows_T=rows)
    shared = plan.attend(*leaves, rule)[rows_T]
    apart = PackedPlan(lengths).attend(*(leaf[rows_T] for leaf in leaves), rule)
    torch.testing.assert_close(shared, apart, atol=1e-6, rtol=0)  # softmax is in float32 with sinks
    assert plan.positions_N[rows_T].tolist() == PackedPlan(lengths).positions_N.tolist()
    gradients = torch.autograd.grad((shared * towards).sum(), leaves)
    for found, wanted in zip(gradients, torch.autograd.grad((apart * towards).sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([7, 3, 40, 1], None),
        ([5], None),
        ([4, 4], None),
        ([6, 5, 30], [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8, *range(9, 39)]),
    ],
)
def test_gradients_come_back_from_the_slots_as_torch_adds_them(lengths: list[int], rows: list[int] | None) -> None:
    plan = PackedPlan(lengths, rows_T=rows)
    count = sum(lengths) if rows is None else max(rows) + 1
    tensors = [torch.randn(count, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    outward = torch.randn(count, 4, 8, dtype=torch.float64)
    found = torch.autograd.grad(plan.attend(*tensors, Rule(layer=0, scale=0.3)), tensors, outward)
    rows_T = torch.arange(count) if rows is None else torch.tensor(rows)
    parts, places = [], rows_T.split(lengths)
    for place in places:  # each sequence by itself
        query, key, value = (tensor[place].transpose(0, 1)[None] for tensor in tensors)
        parts.append(
            F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(
                0, 1
            )
        )
    joined = torch.zeros(count, 4, 8, dtype=torch.float64)
    for place, part in zip(places, parts, strict=True):
        joined = joined.index_copy(0, place, part)  # of a shared token, any one
    expected = torch.autograd.grad(joined, tensors, outward)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
