from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from torch import Tensor, nn

from headrace.base.errors import WeightsError
from headrace.engine.native.packing import PackedWeightReceiver
from headrace.models.attention import PackedPlan, forward
from headrace.models.config import LoraConfig, ModelConfig
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.fuse import fuse
from headrace.models.kernels.ops import kernels
from headrace.models.kernels.panels import get_products
from headrace.models.load import load_model
from headrace.models.weights import weight_tensors
from headrace.policy.slots import Slots

if isinstance(kernels(), Unavailable):
    pytest.skip("no kernels here", allow_module_level=True)

IDS = torch.arange(40) * 5 % 19
Directory = Callable[[str], Path]


class Pair:
    """A learner's model, and an engine's that gets its weights packed."""

    def __init__(
        self, directory: Path, lora: LoraConfig | None = None, dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        self.dtype, config = dtype, ModelConfig(path=str(directory), lora=lora, dtype=dtype)
        self.learner, self.engine = (load_model(config) for _ in (0, 1))
        fuse(self.engine)
        self.slots = Slots(weight_tensors(self.learner), weight_tensors(self.engine))
        self.packing = PackedWeightReceiver(self.slots, self.engine)
        self.version = 0

    def stage(self) -> int:
        """Other weights than before."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.learner.parameters():
                parameter.mul_(1.25).add_(0.01)
        self.packing.stage(self.slots.copy(self.version))
        return self.version

    def commit(self, version: int, parts: int = 1) -> None:
        for _ in self.packing.commit_parts(version, parts):
            pass

    def all_packed(self) -> bool:
        return all(product.weights().panels is not None for product in get_products(self.engine))

    def wanted(self) -> Tensor:
        """What a model without panels makes of the engine's weights."""
        plain = load_model(ModelConfig(path=str(self.learner.config.name_or_path), dtype=self.dtype))
        fuse(plain)
        for parameter, twin in zip(self.engine.parameters(), plain.parameters(), strict=True):
            twin.data = parameter.data.clone()
        return logits(plain)


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    return forward(model, IDS, PackedPlan([17, 3, 20]))


@pytest.fixture(params=[("qwen3", "float32"), ("gpt2", "float32"), ("qwen3", "bfloat16")], ids="-".join)
def pair(model_dir: Directory, request: pytest.FixtureRequest) -> Pair:
    kind, dtype = request.param
    return Pair(model_dir(kind), dtype=dtype)


def test_every_version_is_computed_with_its_own_panels(pair: Pair) -> None:
    assert pair.all_packed()
    assert torch.equal(logits(pair.engine), pair.wanted())
    for parts in (1, 3, 1, 2):
        before = logits(pair.engine)
        version = pair.stage()
        assert torch.equal(logits(pair.engine), before)
        pair.commit(version, parts)
        assert pair.all_packed()
        assert torch.equal(logits(pair.engine), pair.wanted())
        assert not torch.equal(logits(pair.engine), before)


def test_between_the_parts_of_a_commit_each_weight_has_its_own_panels(pair: Pair) -> None:
    for _ in pair.packing.commit_parts(pair.stage(), 4):
        assert pair.all_packed()
        assert torch.equal(logits(pair.engine), pair.wanted())


def test_a_version_that_never_came_into_use_makes_room_for_the_next(pair: Pair) -> None:
    before = logits(pair.engine)
    pair.stage(), pair.stage()
    assert torch.equal(logits(pair.engine), before)
    pair.commit(pair.stage())
    assert pair.all_packed()
    assert torch.equal(logits(pair.engine), pair.wanted())


def test_weights_of_an_older_version_are_packed_on_the_way_and_those_in_use_keep_their_panels(pair: Pair) -> None:
    tensors = list(weight_tensors(pair.engine).values())
    older, olders = [tensor.detach().clone() for tensor in tensors], logits(pair.engine)
    pair.commit(pair.stage())
    newer, newers = [tensor.data for tensor in tensors], logits(pair.engine)
    wrong, done = [], threading.Event()

    def stage() -> None:
        for _ in range(20):
            pair.stage()
        done.set()

    staging = threading.Thread(target=stage)
    staging.start()
    while not done.is_set():
        for weights, wanted in ((older, olders), (newer, newers)):
            for tensor, weight in zip(tensors, weights, strict=True):
                tensor.data = weight
            if not torch.equal(logits(pair.engine), wanted):
                wrong.append(weights is older)
    staging.join()
    assert not wrong


def test_what_is_changed_in_place_is_computed_as_it_is_then(pair: Pair) -> None:
    with torch.no_grad():
        for parameter in pair.engine.parameters():
            parameter.mul_(0.75)
    assert not pair.all_packed()
    assert torch.equal(logits(pair.engine), pair.wanted())
    pair.commit(pair.stage())
    assert pair.all_packed()
    assert torch.equal(logits(pair.engine), pair.wanted())


def test_a_model_that_was_loaded_in_inference_mode_has_no_panels_since_nobody_counts_its_changes(
    model_dir: Directory,
) -> None:
    with torch.inference_mode():
        pair = Pair(model_dir("qwen3"))
        for parameter in pair.engine.parameters():
            parameter.mul_(0.75)
    assert not pair.packing.num_bytes
    assert torch.equal(logits(pair.engine), pair.wanted())


def test_what_is_half_packed_cannot_be_committed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.commit(pair.stage())
    before, staged, refused = logits(pair.engine), pair.slots.staged_tensors, []

    def too_early() -> dict[str, Tensor]:
        with pytest.raises(WeightsError, match="still on its way") as raised:
            pair.packing.commit_parts(pair.version, 1)
        refused.append(raised)
        return staged()

    monkeypatch.setattr(pair.slots, "staged_tensors", too_early)
    version = pair.stage()
    assert refused
    assert torch.equal(logits(pair.engine), before)
    pair.commit(version)
    assert torch.equal(logits(pair.engine), pair.wanted())
    pair.slots.copy(version + 1)
    with pytest.raises(WeightsError, match="nothing is staged"):
        pair.commit(version + 1)


def test_frozen_weights_are_kept_once(model_dir: Directory) -> None:
    pair = Pair(model_dir("qwen3"), LoraConfig(rank=4))
    one, before = pair.packing.num_bytes, logits(pair.engine)
    pair.commit(pair.stage())
    pair.commit(pair.stage())
    assert one < pair.packing.num_bytes < 2 * one
    assert pair.all_packed()
    assert not torch.equal(logits(pair.engine), before)


def test_where_memory_is_short_there_are_none_and_the_bits_are_the_same(
    model_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rich = Pair(model_dir("qwen3"))
    assert rich.packing.num_bytes
    free = psutil.virtual_memory()._replace(available=rich.packing.num_bytes * 6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    poor = Pair(model_dir("qwen3"))
    assert poor.packing.num_bytes == 0
    for pair in (rich, poor):
        pair.commit(pair.stage())
    assert not any(product.weights().panels is not None for product in get_products(poor.engine))
    assert torch.equal(logits(poor.engine), logits(rich.engine))
