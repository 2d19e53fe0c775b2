"""Flex attention of packed passes: what it computes, where it is refused, and what it holds.

Shape legend: N tokens of the pass, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.base.errors import ConfigError
from headrace.models import packed
from headrace.models.attention import PackedPlan, Rule
from headrace.models.packed import choose
from headrace.models.packed.flex import Compute, FlexMask, FlexPlan, fused, written_out
from headrace.models.packed.kinds import AttentionKind
from headrace.models.packed.reach import BlockTables, Queries, Reach
from headrace.models.packed.trial import LENGTHS, find_failure
from headrace.models.shape import pair_bytes
from tests.models.held import layer_bytes

CPU = torch.device("cpu")
FLEX = partial(FlexPlan, compute=written_out)
KIND = AttentionKind(
    heads=4, kv_heads=2, key_size=16, value_size=16, dtype=torch.float32, scale=0.25, window=None, chunk=None,
    softcap=None, has_sinks=False, indexed=False,
)  # fmt: skip


def forest(draw: Callable[..., Any], most: int = 12) -> list[list[int]]:
    """Sequences as lists of rows of the pass, in any order; some continue a beginning of another."""
    paths: list[list[int]] = []
    count = 0
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from(paths)) if paths else []
        kept, added = draw(st.integers(0, len(before))), draw(st.integers(0 if paths else 1, most))
        paths.append(before[:kept] + list(range(count, count + added)))
        count += added
    order, names = draw(st.permutations(range(len(paths)))), draw(st.permutations(range(count)))
    return [[names[row] for row in paths[place]] for place in order]


def seen_by(paths: list[list[int]], rule: Rule) -> Tensor:
    """The definition: which row sees which, written out path by path."""
    count = 1 + max(max(path, default=0) for path in paths)
    seen = torch.zeros(count, count, dtype=torch.bool)
    for path in paths:
        for at, row in enumerate(path):
            first = 0 if rule.window is None else max(0, at - rule.window + 1)
            first = first if rule.chunk is None else max(first, at // rule.chunk * rule.chunk)
            seen[row, path[first : at + 1]] = True
    return seen


def dense(tensors: list[Tensor], seen: Tensor, rule: Rule) -> Tensor:
    """The formula of attention over all pairs of rows, in the tensors' own precision."""
    query, key, value = tensors[:3]
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = torch.where(seen, scores.exp(), 0.0)
    sink = 0.0 if rule.sinks_H is None else rule.sinks_H.exp()[:, None, None]
    return torch.einsum("hnm,mhd->nhd", weights / (weights.sum(-1, keepdim=True) + sink), value)


def leaves(count: int, kv_heads: int, seed: int, *, sinks: bool) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(count, 4, 8), (count, kv_heads, 8), (count, kv_heads, 6), *([(4,)] if sinks else [])]
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def both(attend: Callable[[list[Tensor]], Tensor], tensors: list[Tensor], towards: Tensor) -> list[Tensor]:
    own = [each.detach().requires_grad_() for each in tensors]
    out = attend(own)
    return [out.detach(), *torch.autograd.grad((out * towards.to(out.dtype)).sum(), own)]


@settings(max_examples=20)
@given(
    data=st.data(),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 9),
    chunk=st.none() | st.integers(1, 9),
    softcap=st.none() | st.just(1.5),
    sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_of_the_formula_in_float64(
    data, *, kv_heads, window, chunk, softcap, sinks, seed
) -> None:
    """Trees of samples, of which packed samples that share nothing are the simplest, under mixtures of all rules."""
    paths = forest(data.draw)
    rule = Rule(layer=0, scale=0.6, window=window, chunk=chunk, softcap=softcap)
    seen = seen_by(paths, rule)
    exact = leaves(len(seen), kv_heads, seed, sinks=sinks)
    towards = torch.randn(len(seen), 4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plan = FLEX([len(path) for path in paths], rows_T=[row for path in paths for row in path])

    def flex(own: list[Tensor]) -> Tensor:
        return plan.attend(*own[:3], replace(rule, sinks_H=own[3] if sinks else None))

    def formula(own: list[Tensor]) -> Tensor:
        return dense(own, seen, replace(rule, sinks_H=own[3] if sinks else None))

    wanted = both(formula, exact, towards)
    for found, expected in zip(both(flex, [each.float() for each in exact], towards), wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=1e-5 * max(1, expected.abs().max().item()), rtol=0)


@pytest.mark.parametrize("sinks", [False, True])
def test_in_bfloat16_it_errs_by_no_more_than_its_numbers_are_rounded(sinks: bool) -> None:
    lengths = [9, 1, 30]
    rule = Rule(layer=0, scale=0.6, window=7, softcap=1.5)
    exact = [each.bfloat16().double() for each in leaves(sum(lengths), 2, 5, sinks=sinks)]
    rows = list(range(sum(lengths)))
    seen = seen_by([rows[:9], rows[9:10], rows[10:]], rule)
    towards = torch.randn(40, 4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()

    def with_sinks(own: list[Tensor]) -> Rule:
        return replace(rule, sinks_H=own[3] if sinks else None)

    wanted = both(lambda own: dense(own, seen, with_sinks(own)), exact, towards)
    narrow = [each.bfloat16() for each in exact]
    found = both(lambda own: FLEX(lengths).attend(*own[:3], with_sinks(own)), narrow, towards)
    padded = both(lambda own: PackedPlan(lengths).attend(*own[:3], with_sinks(own)), narrow, towards)
    for one, other, expected in zip(found, padded, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        scale = expected.abs().max().item()
        gap = (one.double() - expected).abs().max().item()
        assert gap <= 3 * 2.0**-8 * scale
        assert gap <= 2 * max((other.double() - expected).abs().max().item(), 2.0**-9 * scale)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient() -> None:
    tensors = leaves(4, 2, 0, sinks=True)
    whole = Reach.from_lengths([4])
    mask = FlexMask(whole.take(np.array([1, 3]), 2), whole, CPU, written_out)
    rule = Rule(layer=0, scale=0.6, softcap=2.0)
    towards = torch.ones(4, 4, 6, dtype=torch.float64)

    def flex(own: list[Tensor]) -> Tensor:
        return mask.attend(own[0], *own[1:3], replace(rule, sinks_H=own[3]))

    def formula(own: list[Tensor]) -> Tensor:
        seen = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
        return dense(own, seen, replace(rule, sinks_H=own[3]))

    found, wanted = (both(each, tensors, towards) for each in (flex, formula))
    assert not found[0][2:].any()
    assert not found[1][2:].any()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_samples_of_one_token_are_the_values_of_their_tokens() -> None:
    tensors = leaves(3, 4, 0, sinks=False)
    for lengths in ([1, 1, 1], [1]):
        own = [each[: len(lengths)] for each in tensors]
        found = FLEX(lengths).attend(*own, Rule(layer=0, scale=0.6))
        torch.testing.assert_close(found, own[2], atol=1e-12, rtol=0)


@given(data=st.data(), window=st.none() | st.integers(1, 9), chunk=st.none() | st.integers(1, 9))
def test_tables_of_blocks_leave_out_only_what_nobody_sees_and_look_at_all_that_is_not_seen_by_all(
    data, window, chunk
) -> None:
    paths, block = forest(data.draw), data.draw(st.sampled_from([1, 3, 4]))
    seen = seen_by(paths, Rule(layer=0, scale=1.0, window=window, chunk=chunk)).numpy()
    reach = Reach.from_lengths([len(path) for path in paths], [row for path in paths for row in path])
    tables = BlockTables.create(Queries(number_Q=reach.number_N, first_Q=reach.first(window, chunk)), reach, block)
    count = len(tables.some_IJ)
    whole = np.zeros((count * block, count * block), np.bool_)
    whole[: len(seen), : len(seen)] = seen
    pairs = whole.reshape(count, block, count, block)
    assert count >= 2
    assert not (tables.some_IJ & tables.all_IJ).any()
    assert not (pairs.any((1, 3)) & ~(tables.some_IJ | tables.all_IJ)).any()
    assert not (tables.all_IJ & ~pairs.all((1, 3))).any()


def test_packed_samples_cost_no_blocks_of_each_other() -> None:
    reach = Reach.from_lengths([512] * 8)
    tables = BlockTables.create(Queries(number_Q=reach.number_N, first_Q=reach.first(None, None)), reach)
    assert tables.all_IJ.sum() == 8 * 6  # below the diagonal of 4 × 4 blocks
    assert tables.some_IJ.sum() == 8 * 4
    near = BlockTables.create(Queries(number_Q=reach.number_N, first_Q=reach.first(128, None)), reach)
    assert near.all_IJ.sum() == 0
    assert near.some_IJ.sum() == 8 * 7  # the diagonal, and the one below


def test_on_a_cpu_it_is_computed_only_if_asked_for() -> None:
    assert choose("auto", [KIND], CPU).plan is PackedPlan
    assert choose("padded", [KIND], CPU).plan is PackedPlan
    asked = choose("flex", [KIND, replace(KIND, softcap=5.0, has_sinks=True, window=6)], CPU)
    assert asked.compute is written_out
    assert "written out" in asked.why


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_size": 8}, "heads of size 8 are smaller than 16"),
        ({"value_size": 12}, "heads of size 12 are smaller than 16"),
        ({"dtype": torch.float64}, "torch's kernels have no float64"),
        ({"indexed": True}, "an indexer chooses the tokens"),
    ],
)
def test_what_a_gpu_cannot_compute_is_refused_by_name_and_padded_if_nobody_asked(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed.importlib.util, "find_spec", lambda name: name)  # type: ignore[attr-defined]
    kinds, gpu = [KIND, replace(KIND, **changes)], torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=rf"learner.attention='flex' cannot be computed on cuda:0: {reason}"):
        choose("flex", kinds, gpu)
    chosen = choose("auto", kinds, gpu)
    assert chosen.plan is PackedPlan
    assert reason in chosen.why


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Triton, with which torch compiles it, is not installed"):
        choose("flex", [KIND], torch.device("cuda", 0))


def faulty(change: Callable[..., tuple[Any, ...]]) -> Compute:
    """Flex attention of which ``change`` changes what it is given, or its results."""

    def compute(qkv, score, mask, *, scale, with_sums):
        qkv, scale = change(qkv, scale)
        return written_out(qkv, score, mask, scale=scale, with_sums=with_sums)

    return compute


def no_sums(qkv, score, mask, *, scale, with_sums):
    out, sums = written_out(qkv, score, mask, scale=scale, with_sums=with_sums)
    return out, None if sums is None else sums + 1


def no_compiler(qkv, score, mask, *, scale, with_sums):
    raise RuntimeError("no compiler\nfound")


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (faulty(lambda qkv, scale: (qkv, 1.0)), "a trial of 4 heads of 16 over 2 in float32, sinks is wrong: the outp"),
        (faulty(lambda qkv, scale: ((qkv[0], qkv[1].detach(), qkv[2]), scale)), "does not compile for 4 heads of 16"),
        (faulty(lambda qkv, scale: ((*qkv[:2], qkv[2].detach() * 2 - qkv[2]), scale)), "the gradient of values differ"),
        (no_sums, "the output differs by"),
        (no_compiler, "it does not compile for 4 heads of 16 over 2 in float32, sinks: no compiler"),
    ],
)
def test_a_trial_finds_kernels_that_do_not_compile_or_are_wrong(compute: Compute, words: str) -> None:
    kind = replace(KIND, has_sinks=True)
    assert find_failure([kind], CPU, written_out) is None
    with pytest.raises(ConfigError, match=words):
        choose("flex", [kind], CPU, compute)


def test_no_scores_are_held_for_gpt_oss() -> None:
    """64 heads of 64 over 8, sinks and a window, in bfloat16: bytes of one layer, kept and at most."""
    for tokens, kept, most in ((8192, 26.0e9, 51.0e9), (16384, 104.0e9, 206.0e9)):
        before = layer_bytes(PackedPlan, [tokens], window=128, sinks=True)
        after = layer_bytes(FLEX, [tokens], window=128, sinks=True)
        assert before[0] > kept
        assert before[1] > most
        assert after[0] < tokens * 64 * (4 * 64 + 12) + 2 * 10**6  # outputs without and with sinks, sums
        assert after[1] < tokens * 100_000


def test_a_prompt_that_samples_share_is_not_copied() -> None:
    rows = [row for start in range(1024, 5120, 512) for row in [*range(1024), *range(start, start + 512)]]
    own, copied = (layer_bytes(make, [1536] * 8, rows, sinks=True)[1] for make in (FLEX, PackedPlan))
    assert own < copied / 10


def test_what_padded_rows_keep_is_foreseen() -> None:
    for softcap, sinks in ((50.0, False), (None, True)):
        kind = replace(KIND, heads=64, kv_heads=8, dtype=torch.bfloat16, softcap=softcap, has_sinks=sinks)
        kept = layer_bytes(PackedPlan, [2048], softcap=softcap, sinks=sinks)[0]
        assert kind.writes_scores(on_host=True, shares=False)
        scores = kind.heads * pair_bytes(kind.dtype.itemsize, softcapped=kind.softcap is not None)
        assert kept == pytest.approx(scores * 2048**2, rel=0.1)
    assert pair_bytes(4, softcapped=False) == 4  # in float32 the weights are kept once
    assert layer_bytes(PackedPlan, [2048])[0] < 2048**2 * 64
    assert not KIND.writes_scores(on_host=False, shares=False)
    assert KIND.writes_scores(on_host=False, shares=True)
    assert replace(KIND, window=6).writes_scores(on_host=False, shares=False)
    assert not replace(KIND, window=6, kv_heads=4).writes_scores(on_host=False, shares=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, which its compiler imports
@pytest.mark.timeout(1800)
@pytest.mark.slow  # compiling takes minutes of processor time
def test_kernels_that_torch_compiles_use_the_tables_rightly_and_serve_passes_of_any_length() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    rng = torch.Generator().manual_seed(0)
    shared = [*range(200), *range(200, 300), *range(200), *range(300, 450)]
    for lengths, rows in [*((each, None) for each in (*LENGTHS, (30, 20), (1000, 24))), ((300, 350), shared)]:
        count = sum(lengths) if rows is None else 450
        tensors = [torch.randn(count, heads, 16, generator=rng) for heads in (4, 2, 2)]
        for rule in (Rule(layer=0, scale=0.3, window=17), Rule(layer=0, scale=0.3, softcap=2.0, chunk=50)):
            with torch.no_grad():  # torch compiles neither gradients nor log-sum-exps for a CPU
                found, wanted = (make(lengths, rows_T=rows).attend(*tensors, rule) for make in (FlexPlan, PackedPlan))
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
    assert counters["stats"]["unique_graphs"] - before == 2  # with a soft cap, and without


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it compiles
def test_what_torch_does_not_compile_is_never_computed_with_scores_written_out() -> None:
    tensors = [torch.randn(4, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    with pytest.raises(RuntimeError, match="does not support backward on CPU"):
        FlexPlan([4], compute=fused).attend(*tensors, Rule(layer=0, scale=0.3))
