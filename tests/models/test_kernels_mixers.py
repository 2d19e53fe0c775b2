"""A layer with the gated delta rule decodes in one kernel call: to torch's numbers, and to the same bits whatever else
is in the pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.models.attention import forward
from headrace.models.config import ModelConfig
from headrace.models.kernels.fuse import fuse, unfuse
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.load import load_model
from headrace.models.paged.base import Geometry, PagedCache
from headrace.models.paged.compiled import maker
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.recurrent import RecurrentForward, StatePass, StatePool, state_shapes
from tests.models.kinds import VOCAB

Directory = Callable[[str], Path]
KIND = "qwen3_5_text"
PROMPTS, NEW = (5, 19, 3), 6
IDS = torch.randint(3, 3 + len(VOCAB), (len(PROMPTS), 32), generator=torch.Generator().manual_seed(1))

if not isinstance(kernels(), Kernels):
    pytest.skip("no kernels here", allow_module_level=True)


@pytest.fixture
def model(model_dir: Directory) -> nn.Module:
    return load_model(ModelConfig(path=str(model_dir(KIND))))


class Sequences:
    """Three sequences of a model, whose prompts are in a cache and in slots of states."""

    def __init__(self, model: nn.Module, ops: object, prompts: tuple[int, ...] = PROMPTS) -> None:
        self._model = model
        self._cache = PagedCache(cache_shapes(model), 6, dtype=torch.float32, device="cpu")
        self._pool = StatePool(state_shapes(model), len(PROMPTS), "cpu", ops if isinstance(ops, Kernels) else None)
        self._done = np.zeros(len(PROMPTS), np.int64)
        self.add([row for row, count in enumerate(prompts) if count], [count for count in prompts if count], 0)

    @torch.inference_mode()
    def add(self, rows: list[int], counts: list[int], num_decode: int) -> tuple[Tensor, ...]:
        """The logits of the next tokens of some rows, of which the first ones decode."""
        make, starts_R = maker(), self._done[rows]
        assert make is not None
        tables_RB = np.arange(6, dtype=np.int32).reshape(3, 2)[rows]
        counts_R = np.array(counts, np.int64)
        geometry = Geometry(tables_RB=tables_RB, starts_R=starts_R, counts_R=counts_R, num_decode=num_decode)
        states = StatePass(self._pool, np.array(rows, np.int64))
        plan = PagedPlan(self._cache, geometry, make, torch.device("cpu"), states)
        ids = [IDS[row, at : at + count] for row, at, count in zip(rows, starts_R, counts, strict=True)]
        self._done[rows] += counts_R
        return forward(self._model, torch.cat(ids), plan).split(counts)


def decode(sequences: Sequences, rows: list[int]) -> Tensor:
    """The logits of the first of ``rows``, which decode together."""
    return torch.cat([sequences.add(rows, [1] * len(rows), len(rows))[0] for _ in range(NEW)])


def test_every_layer_of_the_hybrid_is_one_call(model: nn.Module) -> None:
    report = fuse(model)
    assert not report.kept
    assert report.swapped["Qwen3_5GatedDeltaNet"] == report.swapped["Qwen3_5Attention"] == 1
    assert report.swapped["Qwen3_5DecoderLayer"] == 2


@pytest.mark.parametrize("layers", [False, True])
def test_tokens_and_states_are_those_that_torch_computes(model: nn.Module, layers: bool) -> None:
    wanted = decode(Sequences(model, None), [0, 1, 2])
    fuse(model, layers=layers)
    found = decode(Sequences(model, kernels()), [0, 1, 2])
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    unfuse(model)
    assert isinstance(model.model.layers[0].linear_attn.forward, RecurrentForward)
    assert torch.equal(decode(Sequences(model, None), [0, 1, 2]), wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_what_else_is_in_the_pass(model: nn.Module, threads: int) -> None:
    fuse(model)
    wanted = decode(Sequences(model, kernels()), [0])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(decode(Sequences(model, kernels()), [0, 1, 2]), wanted)
        beside_a_prompt = Sequences(model, kernels(), (*PROMPTS[:2], 0))
        parts = [beside_a_prompt.add([0, 1, 2], [1, 1, 4], 2)[0] for _ in range(NEW)]
        assert torch.equal(torch.cat(parts), wanted)
        unfuse(model)
        fuse(model, layers=False)
        assert torch.equal(decode(Sequences(model, kernels()), [0, 1, 2]), wanted)
    finally:
        torch.set_num_threads(before)


def test_weights_that_are_exchanged_underneath_take_effect(model: nn.Module, model_dir: Directory) -> None:
    other = load_model(ModelConfig(path=str(model_dir(KIND))))
    fuse(model)
    with torch.no_grad():
        for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = parameter * 0.9
            twin.mul_(0.9)
    fuse(other)
    assert torch.equal(decode(Sequences(model, kernels()), [0, 1]), decode(Sequences(other, kernels()), [0, 1]))


def test_a_mixer_that_computes_something_else_stays_on_torch_and_is_named(model: nn.Module) -> None:
    mixer = model.model.layers[0].linear_attn
    mixer.norm.forward = lambda hidden, gate: hidden * gate.tanh()
    report = fuse(model)
    assert "Qwen3_5GatedDeltaNet" in report.kept
    assert "Qwen3_5GatedDeltaNet" not in report.swapped
    assert isinstance(mixer.forward, RecurrentForward)
