"""Large products of a learner by oneDNN are those of torch, and a pass that is filled up computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headrace.learner import products
from tests.learner.builders import Setup, assert_close, gradients, random_batch, tiny
from tests.learner.test_prefixes import alike
from tests.models.families import family

pytestmark = pytest.mark.skipif(products._onednn() is None, reason="this torch has no such operator")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product counts as large, on any processor, and every pass is filled up."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "padded_rows", lambda rows: rows + 3)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(70, 33, 17), (5, 16, 130), (300, 1024, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_and_its_gradients_are_those_of_float64(always, rows, inputs, outputs, bias) -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, rows, inputs), (outputs, inputs), *([(outputs,)] if bias else []))
    given = [torch.randn(shape, generator=rng, requires_grad=True) for shape in shapes]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    found, expected = products.linear(*given, *([] if bias else [None])), F.linear(*wide)  # type: ignore[arg-type]
    slope = torch.randn(found.shape, generator=rng)
    found.backward(slope)
    expected.backward(slope.double())
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(given, wide, strict=True))]
    for one, other in ((one.detach(), other.detach()) for one, other in pairs):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_parts_of_columns_are_copied_and_not_multiplied_as_they_are(always: None) -> None:
    whole = torch.randn(64, 96)
    part = whole[:, 10:40]
    assert products._dense(whole) is whole
    assert products._dense(whole.t()).data_ptr() == whole.data_ptr()
    assert products._dense(part).is_contiguous()
    total = torch.ones(64, 20)
    weight = torch.randn(30, 20)
    products.add_product(total, part, weight)
    torch.testing.assert_close(total, 1 + part @ weight)


@pytest.mark.parametrize(
    ("kind", "config", "batch"),
    [
        ({}, {}, lambda: random_batch(num_samples=7)),
        ({}, {"tokens_per_microbatch": 30}, lambda: random_batch(num_samples=7)),
        ({}, {"share_prefixes": True}, alike),
        ({"extra": {"attention_bias": True}}, {"memory": {"recompute": True}}, lambda: random_batch(num_samples=7)),
    ],
)  # fmt: skip
def test_a_learner_computes_the_same(kind: Any, config: Any, batch: Any, tmp_path: Path, monkeypatch) -> None:
    setup = Setup(model_dir=tiny(tmp_path / "model", **kind), config=config)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    usual = setup.learner()
    expected = usual.forward_backward(batch())
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "padded_rows", lambda rows: rows + 3)
    counted: list[torch.Size] = []
    product = products._product
    monkeypatch.setattr(products, "_product", lambda *given: counted.append(given[0].shape) or product(*given))
    learner = setup.learner()
    found = learner.forward_backward(batch())
    assert counted
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5, abs=1e-6)
    assert found.log_pi_N == pytest.approx(expected.log_pi_N, abs=1e-5, nan_ok=True)
    assert_close(gradients(learner), gradients(usual))


def test_unused_tokens_change_nothing_where_layers_keep_a_state(always: None, tmp_path: Path, monkeypatch) -> None:
    setup = Setup(model_dir=family(tmp_path / "model", "qwen3_5_text"))
    filled = setup.learner()
    monkeypatch.setattr(products, "padded_rows", int)
    usual = setup.learner()
    for learner in (filled, usual):
        learner.forward_backward(alike())
    assert_close(gradients(filled), gradients(usual))
    assert filled.logprobs(alike()) == pytest.approx(usual.logprobs(alike()), abs=1e-6)


@pytest.mark.parametrize(
    ("maker", "capability", "system", "faster"),
    [
        ("AuthenticAMD", "AVX512", "Linux", True),
        ("GenuineIntel", "AVX512", "Linux", False),
        ("AuthenticAMD", "AVX2", "Linux", False),
        ("", "AVX512", "Linux", False),
        ("AuthenticAMD", "AVX512", "Darwin", False),
    ],
)  # fmt: skip
def test_the_processor_decides(maker, capability, system, faster, monkeypatch) -> None:
    monkeypatch.setattr(products, "_cpu_vendor", lambda: maker)
    monkeypatch.setattr(products.platform, "system", lambda: system)
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products.onednn_is_faster.__wrapped__() is faster


def test_layers_of_other_libraries_and_small_models_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 3))
    model[1].forward = other = lambda x: x
    assert not products.install(model, most_rows=4096)
    assert model[1].forward is other
    assert "forward" not in model[2].__dict__
    x = torch.randn(4, 8)
    assert torch.equal(model[0](input=x), F.linear(x, model[0].weight, model[0].bias))
