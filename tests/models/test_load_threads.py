"""Threads load models at once, and none of them gets or leaves behind what another one has set."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from headrace.models import LoraConfig, ModelConfig, check, load_model
from headrace.models.weights import weight_tensors
from tests.models.kinds import tiny

LONGEST_S = 2.0
"""How long the first load waits for the second one to begin, which it must not."""


def test_two_threads_may_look_at_the_masks_of_two_models_at_once(tmp_path: Path) -> None:
    sizes = {"one": 64, "two": 32}
    models = [
        load_model(ModelConfig(path=str(tiny(tmp_path / name, "mistral", sliding_window=size))))
        for name, size in sizes.items()
    ]
    together, whole = threading.Barrier(2, timeout=60), check.forward

    def meet(*args: Any) -> torch.Tensor:
        together.wait()  # both have begun
        found = whole(*args)
        together.wait()
        return found

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(check, "forward", meet)
        assert list(threads.map(check._mask_limits, models)) == [{0: 64, 1: 64}, {0: 32, 1: 32}]


class Meeting:
    """Two loads that overlap if they may. The first waits at a place in the middle of its load until the second one has
    come there, and that one waits there until the first has ended."""

    def __init__(self, first: ModelConfig, second: ModelConfig) -> None:
        self._configs = first, second
        self._there = threading.Event(), threading.Event()
        self._ended = threading.Event()

    def loaded(self) -> list[PreTrainedModel]:
        """Return both models."""
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(self._load, 0)
            assert self._there[0].wait(60)
            second = threads.submit(self._load, 1)
            return [first.result(60), second.result(60)]

    def _load(self, number: int) -> PreTrainedModel:
        threading.current_thread().name = str(number)
        try:
            return load_model(self._configs[number])
        finally:
            if number == 0:
                self._ended.set()

    def meet(self) -> None:
        """Wait for the other load, at the place where they meet."""
        number = int(threading.current_thread().name)
        self._there[number].set()
        _ = self._ended.wait(60) if number else self._there[1].wait(LONGEST_S)


def assert_as_alone(model: PreTrainedModel, config: ModelConfig) -> None:
    alone = weight_tensors(load_model(config))
    for name, tensor in weight_tensors(model).items():
        assert torch.equal(tensor, alone[name]), name


def test_models_that_are_loaded_at_once_are_those_that_are_loaded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny(tmp_path / "model", "qwen3", tie_word_embeddings=True))
    configs = ModelConfig(path=path, dtype="bfloat16"), ModelConfig(path=path)
    before = torch.get_default_dtype(), PreTrainedModel.tie_weights
    meeting, whole, from_files = Meeting(*configs), Qwen3ForCausalLM.__init__, threading.local()

    def build(model: Qwen3ForCausalLM, *args: Any) -> None:
        whole(model, *args)
        if hasattr(from_files, "sized"):  # the one before it is built for its size alone
            meeting.meet()
        from_files.sized = True

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Qwen3ForCausalLM, "__init__", build)
            models = meeting.loaded()
        assert (torch.get_default_dtype(), PreTrainedModel.tie_weights) == before
    finally:
        torch.set_default_dtype(before[0])
        PreTrainedModel.tie_weights = before[1]  # type: ignore[method-assign]
    for model, config in zip(models, configs, strict=True):
        assert_as_alone(model, config)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_adapters_that_are_drawn_at_once_are_those_that_are_drawn_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny(tmp_path / "model", "qwen3"))
    configs = [ModelConfig(path=path, lora=LoraConfig(rank=2, seed=seed)) for seed in (1, 2)]
    meeting, seeded, before = Meeting(*configs), torch.manual_seed, torch.get_rng_state()

    def seed_and_meet(seed: int) -> torch.Generator:
        generator = seeded(seed)
        meeting.meet()
        return generator

    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", seed_and_meet)
        models = meeting.loaded()
    assert torch.equal(torch.get_rng_state(), before)
    for model, config in zip(models, configs, strict=True):
        assert_as_alone(model, config)
