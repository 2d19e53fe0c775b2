"""Adapters as records of tensors: several in one pass."""

import copy

import numpy as np
import pytest
import torch

from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.fuse import fuse
from headrace.models.kernels.ops import kernels
from headrace.models.kernels.panels import LowRank, PackedProduct
from headrace.models.multilora import AdapterRows, MultiLora, Segment
from headrace.models.paged.base import Geometry, PagedCache
from headrace.models.paged.compiled import CompiledAttention
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.recurrent import StatePass, StatePool, state_shapes
from headrace.models.tiny import TinySpec, make_tiny

SHAPES = [(2, ("attention",)), (5, ("attention", "mlp", "head")), (3, ("mlp",))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny(tmp_path_factory.mktemp("model"), TinySpec(vocab="abcdefgh", hidden_size=16, init_std=0.2))
    return load_model(ModelConfig(path=str(path)))


@pytest.fixture(scope="module")
def multi(model):
    return MultiLora(model)


@pytest.fixture(scope="module")
def loras(multi):
    made = [multi.create(rank=rank, parts=parts, seed=place) for place, (rank, parts) in enumerate(SHAPES)]
    generator = torch.Generator().manual_seed(0)
    for each in made:
        for tensor in each.tensors.values():
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator)
    return made


def computed(model, multi, loras, order, ids):
    """Return the logits of each sequence's last token in one pass."""
    lengths, adapters = [len(each) for each in ids], sorted({*order} - {0})
    number = np.array([adapters.index(adapter) if adapter else -1 for adapter in order], np.int32)
    rows = AdapterRows(np.repeat(number, lengths), number)
    last = torch.tensor(lengths).cumsum(0) - 1
    with torch.no_grad(), multi.on_rows([loras[adapter - 1] for adapter in adapters], rows):
        return forward(model, torch.cat(ids), PackedPlan(lengths), last)


def on_kernels(model, **how):
    """Return a copy of the model on kernels, and its hooks."""
    if isinstance(kernels(), Unavailable):
        pytest.skip(str(kernels()))
    twin = copy.deepcopy(model)
    for module in twin.modules():
        module._forward_hooks.clear()
    multi = MultiLora(twin)
    assert fuse(twin, **how).swapped
    return twin, multi


@pytest.fixture(params=["torch", "kernels"])
def served(request, model, multi):
    """A model that samples, and its hooks."""
    return (model, multi) if request.param == "torch" else on_kernels(model)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 3, 1, 2], [0, 2, 2, 0], [3, 3, 3, 1], [2, 2, 2, 2], [0, 0, 0, 0]])
def test_each_row_of_a_pass_is_computed_as_with_its_adapter_alone(served, model, multi, loras, order):
    ids = [torch.arange(3 + place) % 8 + 3 for place in range(4)]
    expected = list[torch.Tensor]()
    for adapter, each in zip(order, ids, strict=True):
        with torch.no_grad(), multi.on([Segment(lora=loras[adapter - 1] if adapter else None)]):
            expected.append(forward(model, each, PackedPlan([len(each)]))[-1])
    found = computed(*served, loras, order, ids)
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)
    if any(order):
        assert not torch.allclose(found, computed(*served, loras, [0, 0, 0, 0], ids), atol=1e-3)


def decoded(model, multi, loras, order):
    """Return the logits of two sequences that fill a paged cache and then decode over it, the first before the
    other."""
    cache = PagedCache(cache_shapes(model), 4, dtype=torch.float32, device="cpu")
    shapes = state_shapes(model)
    pool = StatePool(shapes, 2, "cpu", kernels()) if shapes else None
    tables_RB, starts_R, found = np.array([[0, 1], [2, 3]], np.int32), np.zeros(2, np.int64), []
    for counts, decoding in (((2, 15), 0), ((1, 2), 1), ((1, 1), 2)):
        counts_R = np.array(counts, np.int64)
        geometry = Geometry(
            tables_RB=tables_RB, starts_R=starts_R.copy(), counts_R=counts_R, num_decode=decoding if shapes else 0
        )
        states = None if pool is None else StatePass(pool, np.arange(2))
        plan = PagedPlan(cache, geometry, lambda g, d: CompiledAttention(kernels(), g, d), torch.device("cpu"), states)
        of_N = np.repeat(np.array(order, np.int32), counts_R)
        with torch.inference_mode(), multi.on_rows(loras, AdapterRows(of_N, of_N)):
            found.append(forward(model, torch.arange(int(counts_R.sum())) * 3 % 8 + 3, plan))
        starts_R += counts_R
    return torch.cat(found)


def test_whole_layers_on_kernels_give_adapted_rows_the_bits_of_their_modules(model, loras):
    parts, layers = on_kernels(model, layers=False), on_kernels(model)
    found = decoded(*parts, loras, [2, 0])
    assert torch.equal(decoded(*layers, loras, [2, 0]), found)
    assert not torch.allclose(decoded(*layers, loras, [-1, 0]), found, atol=1e-3)


def test_mixers_on_kernels_adapt_rows_that_decode_and_prompts_beside_them(tmp_path):
    spec = TinySpec(kind="qwen3_5_text", vocab="abcdefgh", hidden_size=16, init_std=0.2)
    hybrid = load_model(ModelConfig(path=str(make_tiny(tmp_path / "model", spec))))
    twin, multi = on_kernels(hybrid)
    own = MultiLora(hybrid)
    made = [own.create(rank=3, parts=("attention", "mlp"), seed=seed) for seed in range(2)]
    for each in made:
        for tensor in each.tensors.values():
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    for order in ([0, 1], [1, -1], [-1, 0]):
        expected = decoded(hybrid, own, made, order)
        assert torch.allclose(decoded(twin, multi, made, order), expected, atol=2e-4), order


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(16, 32, 16), (37, 41, 32), (3, 7, 16), (130, 100, 48)])
def test_kernels_add_the_products_of_each_rows_adapter_and_no_others(inputs, outputs, rank):
    if isinstance(kernels(), Unavailable):
        pytest.skip(str(kernels()))
    generator = torch.Generator().manual_seed(0)
    x, weight, a, b = (
        torch.randn(shape, generator=generator)
        for shape in [(29, inputs), (outputs, inputs), (3, inputs, rank), (3, rank, outputs)]
    )
    of = torch.arange(29, dtype=torch.int32) % 4 - 1
    found = kernels().linear(x, PackedProduct(weight, None, None, LowRank(a, b, of)))
    expected = x.double() @ weight.double().T
    for row, adapter in enumerate(of.tolist()):
        if adapter >= 0:
            expected[row] += (x[row].double() @ a[adapter].double()) @ b[adapter].double()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4)
    for row in range(0, 29, 5):  # the same bits alone, beside nobody
        own = LowRank(a, b, of[row : row + 1])
        assert torch.equal(kernels().linear(x[row : row + 1], PackedProduct(weight, None, None, own))[0], found[row])
