"""Adapters on a frozen model: what they compute, what is trained of it, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.base.config import validate
from headrace.base.errors import ConfigError, ModelError
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.kernels.fuse import fuse, unfuse
from headrace.models.lora import active, active_adapter, adapters, add_adapter
from headrace.models.weights import weight_tensors
from tools.families.tiny import write_model

IDS, LENGTHS = torch.arange(3, 12), [4, 5]
Dirs = Callable[[str], Path]


def adapted(directory: Path, dtype: str = "float32", **lora: Any) -> Any:
    return load_model(ModelConfig(path=str(directory), dtype=dtype, lora=LoraConfig(**{"rank": 4, **lora})))


def moved(model: nn.Module, seed: int = 0) -> Any:
    """As after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in weight_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return forward(model, IDS, PackedPlan(LENGTHS))


def by_hand(model: Any, directory: Path, scale: float) -> Any:
    """A plain model whose weights are base + scale · B·A, summed in float64."""
    plain = load_model(ModelConfig(path=str(directory))).double()
    tensors = weight_tensors(model)
    for name in {name.partition(".lora_")[0] for name in tensors}:
        down, up = (tensors[f"{name}.lora_{half}.weight"].double() for half in "AB")
        with torch.no_grad():
            plain.get_submodule(name).weight += scale * up @ down
    return plain


def test_an_adapted_layer_is_its_base_plus_the_scaled_product_and_so_is_its_gradient(model_dir: Dirs) -> None:
    model = moved(adapted(model_dir("qwen3"), alpha=6.0)).double()
    plain = by_hand(model, model_dir("qwen3"), 6.0 / 4)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-11)

    weights = torch.linspace(-1, 1, len(IDS)).double()[:, None]
    for one in (model, plain):
        (forward(one, IDS, PackedPlan(LENGTHS)).log_softmax(-1) * weights).sum().backward()
    tensors = weight_tensors(model)
    names = {name.partition(".lora_")[0] for name in tensors}
    assert len(names) == 14
    for name in names:
        full = 1.5 * plain.get_submodule(name).weight.grad
        down, up = (tensors[f"{name}.lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close(up.grad, full @ down.T, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(down.grad, up.T @ full, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("qwen3", {}), ("gpt2", {}), ("qwen3", {"use_dora": True}), ("qwen3_moe", {"experts": True}),
     ("gpt_oss", {"experts": True}), ("deepseek_v3", {}), ("gemma3_text", {"init": "gaussian"})],
)  # fmt: skip
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(model_dir: Dirs, kind: str, lora: dict[str, Any]) -> None:
    model, plain = adapted(model_dir(kind), **lora), load_model(ModelConfig(path=str(model_dir(kind))))
    assert type(model) is type(plain)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    forward(model, IDS, PackedPlan(LENGTHS)).square().sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert {id(p) for p in trained} == {id(p) for p in weight_tensors(model).values()}
    assert not torch.equal(logits(moved(model)), logits(plain))


def test_every_expert_has_an_adapter_of_its_own(model_dir: Dirs) -> None:
    model = moved(adapted(model_dir("qwen3_moe"), experts=True, target_modules=[]))
    plain = load_model(ModelConfig(path=str(model_dir("qwen3_moe"))))
    tensors = weight_tensors(model)
    wraps = sorted({name.partition("lora_")[0] for name in tensors})
    assert len(wraps) == 2 * plain.config.num_hidden_layers
    for wrap in wraps:
        down, up = (tensors[f"{wrap}lora_{half}.weight"] for half in "AB")
        experts = plain.get_submodule(wrap.partition(".experts")[0]).experts
        (weight,) = [p for p in experts.parameters() if p.shape[1:] == (up.shape[0], down.shape[1])]
        each_A, each_B = down.unflatten(0, (4, 4)), up.unflatten(1, (4, 4))  # (expert, rank) and (rank, expert)
        for expert in range(4):
            weight.data[expert] += 32.0 / 4 * each_B[..., expert] @ each_A[expert]
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("qwen3_5_text", set()), ("qwen3_5_moe_text", set()), ("lfm2", set()),
        ("nemotron_h", {"out_proj"}), ("dbrx", {"layer"}),
        ("deepseek_v3", {"gate_proj", "up_proj", "down_proj"}),  # peft would take them for those of experts
    ],
)  # fmt: skip
def test_all_linear_layers_but_head_and_routers_are_adapted(kind: str, left_out: set[str], tmp_path: Path) -> None:
    model = adapted(write_model(tmp_path / "model", kind), rank=2)
    wrapped = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
    linear = {name.removesuffix(".base_layer") for name, module in model.named_modules() if type(module) is nn.Linear}
    linear = {name for name in linear if ".lora_" not in name and name != "lm_head"}
    assert wrapped <= linear
    assert {name.rpartition(".")[2] for name in linear - wrapped} == left_out


@pytest.mark.parametrize("kind", ["nemotron_h", "lfm2_moe", "qwen3_5_moe_text"])
def test_experts_of_hybrids_are_adapted_and_not_their_convolutions(kind: str, tmp_path: Path) -> None:
    model = adapted(write_model(tmp_path / "model", kind), rank=2, experts=True, target_modules=[])
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(".experts." in name for name in names)


def test_adapters_are_drawn_from_their_seed_whatever_was_drawn_before(model_dir: Dirs) -> None:
    one = weight_tensors(adapted(model_dir("llama"), seed=3))
    state = torch.rand(5).sum() and torch.get_rng_state()
    other = weight_tensors(adapted(model_dir("llama"), seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = weight_tensors(adapted(model_dir("llama"), seed=4))
    assert all(torch.equal(one[name], third[name]) == name.endswith("lora_B.weight") for name in one)


def test_adapters_are_float32_on_a_base_in_bfloat16(model_dir: Dirs) -> None:
    model = adapted(model_dir("qwen3_moe"), dtype="bfloat16", experts=True)
    assert {tensor.dtype for tensor in weight_tensors(model).values()} == {torch.float32}
    assert logits(moved(model)).dtype == torch.bfloat16


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
def test_an_engine_whose_adapter_is_pointed_at_the_learners_computes_the_learners_numbers(
    model_dir: Dirs, lora: dict[str, Any]
) -> None:
    learner, engine = moved(adapted(model_dir("qwen3"), **lora)), adapted(model_dir("qwen3"), **lora)
    report = fuse(engine)
    try:
        for tensor, trained in zip(weight_tensors(engine).values(), weight_tensors(learner).values(), strict=True):
            tensor.data = trained.detach()
        with torch.inference_mode():
            torch.testing.assert_close(
                forward(engine, IDS, PackedPlan(LENGTHS)), logits(learner), rtol=0, atol=1e-4, msg=str(report)
            )
    finally:
        unfuse(engine)
    assert torch.equal(logits(engine), logits(learner))


def test_one_of_several_adapters_computes_and_is_trained(model_dir: Dirs) -> None:
    directory = model_dir("qwen3_moe")
    alone = {name: moved(adapted(directory, experts=True, seed=seed), seed) for name, seed in (("a", 1), ("b", 2))}
    model = load_model(ModelConfig(path=str(directory)))
    for seed, name in enumerate(alone, 1):
        add_adapter(model, LoraConfig(rank=4, experts=True, seed=seed), str(directory), name)
        moved(model, seed)
    assert adapters(model) == ("a", "b")
    assert active_adapter(model) == "b"
    for name, other in alone.items():
        with active(model, name):
            assert torch.equal(logits(model), logits(other))
            assert list(weight_tensors(model)) == list(weight_tensors(other))
    with active(model, "a"):
        assert active_adapter(model) == "a"
    assert active_adapter(model) == "b"
    with pytest.raises(ModelError, match="no adapter 'c'"), active(model, "c"):
        pass


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"dropout": 0.1}, "random"), ({"target_modules": []}, "adapts nothing"), ({"rank": 0}, "model.lora.rank"),
     ({"experts": True, "use_dora": True}, "no DoRA"), ({"r": 8}, "model.lora.r is not a setting")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_load(lora: dict[str, Any], words: str) -> None:
    from headrace.run.session import RunConfig

    with pytest.raises(ConfigError, match=words):
        validate(RunConfig, {"model": {"path": "m", "lora": lora}})


@pytest.mark.parametrize(
    ("kind", "lora", "words"),
    [("qwen3", {"target_modules": ["query"]}, "no layer 'query'"),
     ("qwen3", {"target_modules": ["lm_head"]}, "no layer 'lm_head'"),
     ("qwen3", {"target_modules": ["embed_tokens"]}, "no layer 'embed_tokens'"),
     ("qwen3_moe", {"target_modules": ["gate_proj"]}, "experts=true"),
     ("qwen3", {"experts": True}, "no weights of experts"),
     ("qwen3_5_text", {"experts": True}, "no weights of experts")],
)  # fmt: skip
def test_layers_that_cannot_be_adapted_are_refused_by_name(
    model_dir: Dirs, kind: str, lora: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        adapted(model_dir(kind), **lora)
    assert "q_proj" in caught.value.remedy or "leave" in caught.value.remedy


def test_without_peft_the_error_names_the_extra(model_dir: Dirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[lora\]'"):
        adapted(model_dir("qwen3"))


def test_target_modules_names_the_only_layers_that_travel(model_dir: Dirs) -> None:
    names = list(weight_tensors(adapted(model_dir("qwen3"), target_modules=["v_proj", "self_attn.q_proj"])))
    assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}
    assert names[0] == "model.layers.0.self_attn.q_proj.lora_A.weight"
