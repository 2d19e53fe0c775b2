"""The compiled kernels for bfloat16: by the processor's unit for matrices, by its dot products, and in float32."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.attention import PackedPlan, Rule, forward
from headrace.models.config import ModelConfig
from headrace.models.kernels.build import NATIVE, Unavailable
from headrace.models.kernels.fuse import fuse, unfuse
from headrace.models.kernels.ops import Kernels, kernels, open_kernels
from headrace.models.kernels.panels import LowRank, PackedProduct
from headrace.models.load import load_model
from headrace.models.paged.base import Geometry, LayerShape, PagedCache
from headrace.models.paged.compiled import CompiledAttention

Directory = Callable[[str], Path]
HALF = 2.0**-8
"""The largest relative error of rounding to bfloat16, which has eight significant bits. Cutting off the rest would err
by twice as much."""
X86 = platform.machine() == "x86_64"
TARGETS = {"native": NATIVE, "dot products": (*NATIVE, "-mno-amx-tile", "-mno-amx-bf16"), "avx2": ("-mavx2", "-mfma"),
           "baseline": ("-O2",)}  # fmt: skip


@pytest.fixture(scope="module", params=TARGETS)
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    target = TARGETS[request.param]
    if target is NATIVE:
        loaded = kernels(torch.bfloat16)
    elif not X86:
        pytest.skip("options for another processor")
    else:
        loaded = open_kernels(tmp_path_factory.getbasetemp() / "kernels", target, torch.bfloat16)
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    return loaded


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(ops: Kernels, weight: Tensor) -> Tensor:
    panels = torch.full((ops.panel_numbers(weight) + 1,), torch.nan, dtype=torch.bfloat16)
    ops.pack([(weight, panels[:-1])], 1)
    assert panels[-1].isnan()
    return panels[:-1]


def off(found: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> float:
    """The largest error of a product beyond that of rounding its result, relative to the sum of all magnitudes."""
    wanted = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), w.double().abs()) + (0 if bias is None else bias.double().abs())
    return float((((found - wanted).abs() - HALF * wanted.abs()) / magnitude).max())


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 80), n=st.integers(1, 90), k=st.integers(1, 200), bias=st.booleans())
def test_products_are_those_of_double_precision_rounded_once(m: int, n: int, k: int, bias: bool) -> None:
    loaded = kernels(torch.bfloat16)
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    x, w, b = drawn(m, k), drawn(n, k, seed=1), drawn(n, seed=2) if bias else None
    found = loaded.linear(x, PackedProduct(w, b))
    assert found.dtype == torch.bfloat16
    assert off(found, x, w, b) < 1e-6
    assert torch.equal(loaded.linear(x, PackedProduct(w, b, packed(loaded, w))), found)


@pytest.mark.parametrize("k", [64, 131])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_tokens_product_has_the_same_bits_in_every_batch(ops: Kernels, k: int, threads: int) -> None:
    x, w, b = drawn(200, k), drawn(77, k, seed=1), drawn(77, seed=2)
    whole = ops.linear(x, PackedProduct(w, b, packed(ops, w)))
    assert off(whole, x, w, b) < 1e-6
    torch.set_num_threads(threads)
    for size in [*range(1, 70), 97, 128, 199]:
        at = (size * 37) % (201 - size)
        assert torch.equal(ops.linear(x[at : at + size], PackedProduct(w, b)), whole[at : at + size]), size


def test_products_of_torch_between_two_calls_do_not_change_the_second(ops: Kernels) -> None:
    x, w = drawn(64, 256), drawn(96, 256, seed=1)
    wanted = ops.linear(x, PackedProduct(w))
    for rows in (64, 33, 16, 1):
        F.linear(x[:rows, :96], w.T.contiguous())  # oneDNN shapes the tiles of this thread for itself
        assert torch.equal(ops.linear(x[:rows], PackedProduct(w)), wanted[:rows])


def test_a_number_that_is_not_finite_stays_in_its_token(ops: Kernels) -> None:
    x, w = drawn(40, 77), drawn(64, 77, seed=1)
    x[2, 5], x[30, 0] = torch.nan, torch.inf
    square = PackedProduct(drawn(77, 77, seed=2))
    for out in (ops.linear(x, PackedProduct(w)), ops.gated(x, square, square, square)):
        assert (~out.isfinite()).any(-1).nonzero()[:, 0].tolist() == [2, 30]


@pytest.mark.parametrize("size", [32, 100])
def test_norm_and_mlp_are_near_those_of_double_precision(ops: Kernels, size: int) -> None:
    x, w = drawn(30, size), drawn(size, seed=1)
    double = x.double()
    normed = double * torch.rsqrt(double.square().mean(-1, keepdim=True) + 1e-6)
    for plus in (0.0, 1.0):
        wanted = normed * (w.double() + plus)
        assert ((ops.rms_norm(x, w, 1e-6, plus) - wanted).abs() <= 2 * HALF * wanted.abs()).all()
    gate, up, down = drawn(90, size, seed=2) / 8, drawn(90, size, seed=3) / 8, drawn(size, 90, seed=4) / 8
    inner = F.silu(F.linear(double, gate.double())) * F.linear(double, up.double())
    found = ops.gated(x, PackedProduct(gate), PackedProduct(up), PackedProduct(down))
    wanted = F.linear(inner, down.double())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.02
    whole = ops.gated(x, PackedProduct(gate), PackedProduct(up), PackedProduct(down))
    for rows in (1, 2, 17):
        part = ops.gated(x[3 : 3 + rows], PackedProduct(gate), PackedProduct(up), PackedProduct(down))
        assert torch.equal(part, whole[3 : 3 + rows])


def test_adapters_in_float32_are_added_before_the_result_is_rounded(ops: Kernels) -> None:
    x, w = drawn(40, 64), drawn(50, 64, seed=1)
    a_GIR, b_GRO = drawn(2, 64, 16, seed=2).float() / 8, drawn(2, 16, 50, seed=3).float()
    adapter_N = torch.arange(40, dtype=torch.int32) % 3 - 1
    found = ops.linear(x, PackedProduct(w, None, None, LowRank(a_GIR, b_GRO, adapter_N)))
    wanted = F.linear(x.double(), w.double())
    for adapter in (0, 1):
        mine = adapter_N == adapter
        wanted[mine] += x[mine].double() @ a_GIR[adapter].double() @ b_GRO[adapter].double()
    assert float((found - wanted).abs().max() / wanted.abs().max()) < HALF


def test_tokens_in_another_format_are_refused(ops: Kernels) -> None:
    w = drawn(32, 32)
    with pytest.raises(ValueError, match=r"tokens in torch\.float32 for kernels that compute torch\.bfloat16"):
        ops.linear(torch.ones(2, 32), PackedProduct(w))


CASES = {  # heads, key-value heads, key size, value size, rule, lengths
    "grouped": (8, 4, 64, 64, Rule(layer=0, scale=0.125), (300, 1, 17)),
    "window": (6, 2, 33, 48, Rule(layer=0, scale=0.2, window=20), (200, 5)),
    "softcap": (5, 5, 24, 20, Rule(layer=0, scale=0.2, window=150, softcap=5.0), (200, 5)),
    "sinks": (16, 1, 80, 40, Rule(layer=0, scale=0.2, sinks_H=torch.linspace(-2, 3, 16).bfloat16()), (200, 5)),
}


def exact(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Attention within one sequence in double precision."""
    q, (k, v) = query.double(), (t.double().repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    apart = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = torch.einsum("lhe,mhe->hlm", q, k) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill((apart < 0) | (apart >= (rule.window or len(q))), -torch.inf)
    if rule.sinks_H is not None:
        scores = torch.cat([scores, rule.sinks_H.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hlm,mhe->lhe", scores.softmax(-1)[..., : len(q)], v)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_over_blocks_is_that_of_double_precision_and_decodes_to_the_same_bits(ops: Kernels, case) -> None:
    heads, kv_heads, key_size, value_size, rule, lengths = case
    width, sizes = -(-max(lengths) // 16), ((heads, key_size), (kv_heads, key_size), (kv_heads, value_size))
    shape = LayerShape(heads=kv_heads, key_size=key_size, value_size=value_size)
    cache = PagedCache([shape], len(lengths) * width, dtype=torch.bfloat16, device="cpu")
    for pool in cache.layers[0]:
        pool.fill_(torch.nan)
    tables = np.random.default_rng(0).permutation(len(lengths) * width).reshape(len(lengths), -1).astype(np.int32)
    qkv = [[drawn(n, *size, seed=n + i) for i, size in enumerate(sizes)] for n in lengths]

    def attend(starts: list[int], counts: list[int]) -> list[Tensor]:
        geometry = Geometry(tables_RB=tables, starts_R=np.array(starts), counts_R=np.array(counts), num_decode=0)
        parts = [
            torch.cat([each[i][s : s + c] for each, s, c in zip(qkv, starts, counts, strict=True)]) for i in range(3)
        ]
        attention = CompiledAttention(ops, geometry, torch.device("cpu"))
        return list(attention.attend((parts[0], parts[1], parts[2]), cache.layers[0], rule).split(counts))

    whole = attend([0] * len(lengths), list(lengths))
    for out, tensors in zip(whole, qkv, strict=True):
        wanted = exact(*tensors, rule)
        assert float((out - wanted).abs().max() / wanted.abs().max()) < HALF
    last = attend([n - 1 for n in lengths], [1] * len(lengths))
    assert all(torch.equal(one[0], all_[-1]) for one, all_ in zip(last, whole, strict=True))


def load(directory: Path, dtype: str) -> torch.nn.Module:
    return load_model(ModelConfig(path=str(directory), dtype=dtype))


@torch.inference_mode()
def logits(model: torch.nn.Module) -> Tensor:
    return forward(model, torch.arange(40) * 5 % 37, PackedPlan([17, 3, 20])).double()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt_oss", "gemma3_text"])
def test_a_model_on_kernels_is_no_further_from_float32_than_on_torch(model_dir: Directory, kind: str) -> None:
    if isinstance(kernels(torch.bfloat16), Unavailable):
        pytest.skip("no kernels here")
    model = load(model_dir(kind), "bfloat16")
    wide = load(model_dir(kind), "float32")
    with torch.no_grad():  # the same weights
        for parameter, twin in zip(wide.parameters(), model.parameters(), strict=True):
            parameter.copy_(twin.float())
    exact, on_torch = logits(wide), logits(model)
    report = fuse(model)
    assert report.swapped, str(report)
    on_kernels = logits(model)
    assert (on_kernels - exact).abs().mean() <= 1.1 * (on_torch - exact).abs().mean()
    if kind == "gemma3_text":
        assert report.swapped["Gemma3RMSNorm"]
        assert report.swapped["Gemma3Attention"]
    if kind in ("llama", "qwen3", "mistral"):
        assert not report.kept
        assert any("DecoderLayer" in name for name in report.swapped)
    unfuse(model)
    assert torch.equal(logits(model), on_torch)


def test_copies_in_float32_for_the_comparison_are_freed_one_by_one(model_dir: Directory) -> None:
    if isinstance(kernels(torch.bfloat16), Unavailable):
        pytest.skip("no kernels here")
    model = load(model_dir("llama"), "bfloat16")

    def copies() -> int:
        return sum(isinstance(each, torch.nn.Linear) for each in gc.get_objects())

    gc.collect()
    before = copies()
    gc.disable()
    try:
        assert fuse(model).swapped
        assert copies() == before
    finally:
        gc.enable()


def test_sinks_and_rotations_in_float32_are_read_as_the_numbers_that_they_are() -> None:
    loaded = kernels(torch.bfloat16)
    if isinstance(loaded, Unavailable):
        pytest.skip(loaded.reason)
    shape = LayerShape(heads=2, key_size=32, value_size=32)
    query, key, value = drawn(5, 4, 32), drawn(5, 2, 32, seed=1), drawn(5, 2, 32, seed=2)
    sinks_H = drawn(4, seed=3)
    found = []
    for each_H in (sinks_H, sinks_H.float()):
        cache = PagedCache([shape], 2, dtype=torch.bfloat16, device="cpu")
        geometry = Geometry(
            tables_RB=np.array([[1]], np.int32), starts_R=np.zeros(1, np.int64), counts_R=np.array([5]), num_decode=0
        )
        attention = CompiledAttention(loaded, geometry, torch.device("cpu"))
        rule = Rule(layer=0, scale=0.2, sinks_H=each_H)
        found.append(attention.attend((query, key, value), cache.layers[0], rule))
    assert torch.equal(*found)


def test_a_hybrid_in_bfloat16_decodes_on_the_kernels_that_there_are(model_dir: Directory) -> None:
    if isinstance(kernels(torch.bfloat16), Unavailable):
        pytest.skip("no kernels here")
    report = fuse(load(model_dir("qwen3_5_text"), "bfloat16"))
    assert report.swapped["Qwen3_5RMSNorm"], str(report)
