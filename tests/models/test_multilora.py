"""Adapters as records of tensors: several in one pass."""

import numpy as np
import pytest
import torch

from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.multilora import GroupedRows, LoraStack, MultiLora, Segment
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
    made = [multi.new(rank=rank, parts=parts, seed=place) for place, (rank, parts) in enumerate(SHAPES)]
    generator = torch.Generator().manual_seed(0)
    for each in made:
        for tensor in each.tensors.values():
            tensor.data += 0.1 * torch.randn(tensor.shape, generator=generator)
    return made


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 3, 1, 2], [0, 2, 2, 0], [3, 3, 3, 1]])
def test_a_stack_computes_each_row_as_its_adapter_does_alone(model, multi, loras, order):
    ids = [torch.arange(3 + place) % 8 + 3 for place in range(4)]
    lengths = [len(each) for each in ids]
    with torch.no_grad():
        expected = list[torch.Tensor]()
        for adapter, each in zip(order, ids, strict=True):
            with multi.on([Segment(lora=loras[adapter - 1] if adapter else None)]):
                expected.append(forward(model, each, PackedPlan([len(each)]))[-1])
        adapters = sorted({*order} - {0})
        of_tokens = GroupedRows.of(np.repeat(order, lengths), adapters, multi.device)
        of_logits = GroupedRows.of(np.array(order), adapters, multi.device)
        stack = LoraStack.of([loras[adapter - 1] for adapter in adapters])
        last = torch.tensor(lengths).cumsum(0) - 1
        with multi.on_stack(stack, of_tokens, of_logits):
            found = forward(model, torch.cat(ids), PackedPlan(lengths), last)
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(found, forward(model, torch.cat(ids), PackedPlan(lengths), last), atol=1e-3)
