"""A new engine shows that it computes what transformers computes; another is refused, with where and how much."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ModelError
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine, engine
from headrace.engine.native.packing import PackedWeightReceiver
from headrace.engine.native.swaps import LoadedWeights
from headrace.models import ModelConfig, load_model
from headrace.models.attention import Rule
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.models.paged import plan
from headrace.models.paged.base import AttentionMaker, Geometry, PagedAttention
from tests.models.kinds import KINDS, tiny

Dir = Callable[[str], Path]
Layer = tuple[torch.Tensor, torch.Tensor]


def make(directory: Path, *, dtype: str = "float32", deterministic: bool = False, **settings: Any) -> NativeEngine:
    model = load_model(ModelConfig(path=str(directory), dtype=dtype, deterministic=deterministic))
    config = EngineConfig(device="cpu", **settings)
    return NativeEngine(model, config, max_context=96, receiver=LoadedWeights(), clock=RealClock())


def told(directory: Path, **settings: Any) -> str:
    """Return what the refusal says, which must say where and how much."""
    with pytest.raises(ModelError, match="does not compute what transformers computes") as refused:
        make(directory, **settings)
    found = re.search(
        r"mean \|Δ logprob\| (\S+) over (\d+) tokens.*largest is (\S+) after \d+ of \d+", str(refused.value)
    )
    assert found is not None
    assert float(found[3]) >= float(found[1]) > 1e-3
    return str(refused.value)


def with_rule(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Every layer attends by another rule than the model asks for."""
    chosen = engine.choose

    class Other:
        def __init__(self, attention: PagedAttention) -> None:
            self._attention = attention

        def attend(self, qkv: tuple[torch.Tensor, ...], layer: Layer, rule: Rule) -> torch.Tensor:
            return self._attention.attend(qkv, layer, dataclasses.replace(rule, **changes))  # type: ignore[arg-type]

    def choose(*args: Any) -> tuple[str, AttentionMaker]:
        name, maker = chosen(*args)
        return name, lambda geometry, device: Other(maker(geometry, device))

    monkeypatch.setattr(engine, "choose", choose)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"softcap": None}),
        ("mistral", {"window": None}),
        ("gpt_oss", {"sinks_H": None}),
        ("llama", {"scale": 0.3}),
    ],
)
def test_attention_that_leaves_a_term_out_is_refused(
    kind: str, changes: dict[str, object], model_dir: Dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rule(monkeypatch, **changes)
    told(model_dir(kind), kernels="off")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("off", [-1, 1])
def test_window_longer_than_the_probe_is_looked_beyond(
    off: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny(tmp_path / "model", "mistral", sliding_window=200)
    make(directory, dtype=dtype, kernels="off")
    with_rule(monkeypatch, window=200 + off)
    with pytest.raises(ModelError, match="sliding window of layer 1, of 200 tokens"):
        make(directory, dtype=dtype, kernels="off")


@pytest.mark.parametrize("deterministic", [False, True])
def test_rope_that_turns_decoded_tokens_one_position_too_far_is_refused(
    deterministic: bool, model_dir: Dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shifted(plan.PagedPlan):
        def __init__(self, cache: Any, geometry: Geometry, *rest: Any) -> None:
            super().__init__(cache, geometry, *rest)
            self.positions_N[: geometry.num_decode] += 1

    if deterministic and isinstance(kernels(), Unavailable):
        pytest.skip("no kernels here")
    monkeypatch.setattr("headrace.engine.native.selfcheck.PagedPlan", Shifted)
    assert "LlamaForCausalLM" in told(model_dir("llama"), deterministic=deterministic)


@pytest.mark.skipif(isinstance(kernels(), Unavailable), reason="no kernels here")
def test_packed_weight_that_is_not_the_models_is_refused(model_dir: Dir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoiled(PackedWeightReceiver):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for _, product in self._products[:2]:
                packed = product.rooms[self._active]
                assert packed is not None
                packed.panels.mul_(1.05)

    monkeypatch.setattr(engine, "PackedWeightReceiver", Spoiled)
    told(model_dir("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_engines_of_every_kind_pass_in_bfloat16(kind: str, model_dir: Dir) -> None:
    make(model_dir(kind), dtype="bfloat16")


def test_context_shorter_than_the_probe_is_no_fault(model_dir: Dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir("llama"))))
    for context in (2, 3, 17):
        NativeEngine(model, EngineConfig(), max_context=context, receiver=LoadedWeights(), clock=RealClock())
