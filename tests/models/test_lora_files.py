"""Adapters on the disk: peft reads them, they read peft's, and what does not fit is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import CheckpointError, ModelError
from headrace.learner.snapshot import restore_weights
from headrace.models import ModelConfig, load_model
from headrace.models.lora import load_adapter, read_lora_config, save_adapter
from headrace.models.merge import export_merged
from headrace.models.weights import weight_tensors
from tests.models.kinds import tiny
from tests.models.test_lora import IDS, Dirs, adapted, logits, moved

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"alpha": 6.0}),
    ("qwen3", {"use_dora": True}),
    ("gpt2", {}),
    ("qwen3_moe", {"experts": True}),
    ("gpt_oss", {"experts": True}),
    ("deepseek_v3", {"experts": True}),
]


@pytest.fixture
def saved(model_dir: Dirs, tmp_path: Path) -> Path:
    return written(moved(adapted(model_dir("qwen3"))), tmp_path / "adapter")


def written(model: Any, directory: Path) -> Path:
    directory.mkdir()
    save_adapter(model, directory)
    return directory


def plain_logits(model: Any) -> torch.Tensor:
    ids = IDS[None, :4]
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]


@pytest.mark.parametrize(("kind", "lora"), VARIANTS)
def test_peft_loads_what_is_saved_and_computes_the_same(
    model_dir: Dirs, tmp_path: Path, kind: str, lora: dict[str, Any]
) -> None:
    from peft import PeftModel

    model = moved(adapted(model_dir(kind), **lora))
    directory = written(model, tmp_path / "adapter")
    assert {path.name for path in directory.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers in words that are to change
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir(kind)), str(directory))
    torch.testing.assert_close(plain_logits(loaded), logits(model)[:4], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "lora"), VARIANTS)
def test_an_adapter_that_was_saved_is_loaded_bit_for_bit(
    model_dir: Dirs, tmp_path: Path, kind: str, lora: dict[str, Any]
) -> None:
    model = moved(adapted(model_dir(kind), **lora))
    directory = written(model, tmp_path / "adapter")
    again = adapted(model_dir(kind), **lora, adapter=str(directory))
    assert torch.equal(logits(again), logits(model))
    config = read_lora_config(directory)
    found = load_model(ModelConfig(path=str(model_dir(kind)), lora=config))
    assert torch.equal(logits(found), logits(model))
    assert (config.rank, config.experts, config.use_dora) == (4, bool(lora.get("experts")), bool(lora.get("use_dora")))


def test_an_adapter_that_peft_made_is_loaded(model_dir: Dirs, tmp_path: Path) -> None:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model_dir("llama"))
        config = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False
        )
        foreign = peft.get_peft_model(base, config)
        foreign.save_pretrained(str(tmp_path / "foreign"))
    settings = {"rank": 3, "alpha": 5.0, "target_modules": ["q_proj", "down_proj"]}
    model = adapted(model_dir("llama"), **settings, adapter=str(tmp_path / "foreign"))
    torch.testing.assert_close(logits(model)[:4], plain_logits(foreign), rtol=0, atol=1e-5)


def test_an_adapter_of_another_base_is_refused_with_both_names(model_dir: Dirs, saved: Path) -> None:
    with pytest.raises(ModelError, match=rf"trained on {model_dir('qwen3')}, and model.path is {model_dir('llama')}"):
        adapted(model_dir("llama"), adapter=str(saved))


def test_a_base_that_has_moved_is_the_same_base(model_dir: Dirs, saved: Path, tmp_path: Path) -> None:
    there = shutil.copytree(model_dir("qwen3"), tmp_path / "elsewhere" / model_dir("qwen3").name)
    adapted(there, adapter=str(saved))


@pytest.mark.parametrize(
    ("lora", "words", "remedy"),
    [({"rank": 8}, "rank=8", "model.lora.rank = 4"), ({"alpha": 1.0}, "alpha=1.0", "model.lora.alpha = 32.0"),
     ({"use_dora": True}, "use_dora=True", "model.lora.use_dora = false"),
     ({"target_modules": ["q_proj"]}, "has no place", "model.lora.target_modules = "),
     ({"adapter": "nowhere"}, "nowhere holds no usable adapter", "adapter_config.json")],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_the_settings_is_refused(
    model_dir: Dirs, saved: Path, lora: dict[str, Any], words: str, remedy: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        adapted(model_dir("qwen3"), **{"adapter": str(saved), **lora})
    assert remedy in caught.value.remedy


def test_a_base_of_another_shape_is_refused_by_tensor_and_nothing_is_copied(tmp_path: Path, saved: Path) -> None:
    name = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    other = adapted(tiny(tmp_path / Path(name).name, "qwen3", intermediate_size=96))
    before = {key: tensor.clone() for key, tensor in weight_tensors(other).items()}
    with pytest.raises(ModelError, match=r"down_proj.lora_A.weight is \[4, 128\], expected \[4, 96\]"):
        load_adapter(other, saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weight_tensors(other).items())


def test_a_tensor_that_is_missing_is_named(model_dir: Dirs, saved: Path) -> None:
    tensors = load_file(saved / "adapter_model.safetensors")
    lost = sorted(tensors)[3]
    del tensors[lost]
    save_file(tensors, saved / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"{lost.removeprefix('base_model.model.')} is missing"):
        adapted(model_dir("qwen3"), adapter=str(saved))


def spoil(directory: Path) -> str:
    """Write a NaN and two infinities into a tensor of an adapter; return how a refusal tells of them."""
    tensors = load_file(directory / "adapter_model.safetensors")
    broken = sorted(tensors)[3]
    tensors[broken].view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    save_file(tensors, directory / "adapter_model.safetensors")
    return re.escape(
        f"{directory / 'adapter_model.safetensors'} holds values that are infinite or not a number: "
        f"{broken} (3 of {tensors[broken].numel()} values)"
    )


def test_a_tensor_that_is_not_a_number_is_told_by_file_name_and_number(model_dir: Dirs, saved: Path) -> None:
    words = spoil(saved)
    with pytest.raises(ModelError, match=words) as caught:
        adapted(model_dir("qwen3"), adapter=str(saved))
    assert "before the training that wrote it diverged" in caught.value.remedy
    model = adapted(model_dir("qwen3"))
    before = {key: tensor.clone() for key, tensor in weight_tensors(model).items()}
    with pytest.raises(ModelError, match=words):
        load_adapter(model, saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weight_tensors(model).items())
    with pytest.raises(CheckpointError, match=f"holds no adapter of this run: {words}"):  # as a resume reads it
        restore_weights(saved, model)


@pytest.mark.parametrize(
    "extra", [{"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}}, {"use_rslora": True}]
)
def test_what_would_not_be_computed_here_is_refused(model_dir: Dirs, saved: Path, extra: dict[str, Any]) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    with pytest.raises(ModelError, match=next(iter(extra))):
        adapted(model_dir("qwen3"), adapter=str(saved))


def test_a_directory_of_an_adapter_is_no_model_and_says_so(saved: Path) -> None:
    with pytest.raises(ModelError, match="holds an adapter") as caught:
        load_model(ModelConfig(path=str(saved)))
    assert "model.lora.adapter" in caught.value.remedy


@pytest.mark.parametrize(("kind", "lora"), VARIANTS)
def test_a_merged_model_is_an_ordinary_one_that_computes_the_same(
    model_dir: Dirs, tmp_path: Path, kind: str, lora: dict[str, Any]
) -> None:
    model = moved(adapted(model_dir(kind), **lora))
    merged = export_merged(model_dir(kind), written(model, tmp_path / "adapter"), tmp_path / "merged")
    assert merged.lost == 0 < merged.changed
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert {name for name, _ in plain.named_parameters()} == {
        name for name, _ in AutoModelForCausalLM.from_pretrained(model_dir(kind)).named_parameters()
    }
    torch.testing.assert_close(plain_logits(plain), logits(model)[:4], rtol=0, atol=5e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"


def test_a_young_adapter_merged_in_bfloat16_is_mostly_lost_and_counted(model_dir: Dirs, tmp_path: Path) -> None:
    model = adapted(model_dir("qwen3"))
    with torch.no_grad():
        for name, tensor in weight_tensors(model).items():
            if name.endswith("lora_B.weight"):
                tensor.fill_(1e-6)
    adapter = written(model, tmp_path / "adapter")
    assert export_merged(model_dir("qwen3"), adapter, tmp_path / "whole").lost_share == 0
    merged = export_merged(model_dir("qwen3"), adapter, tmp_path / "rounded", "bfloat16")
    assert merged.lost_share > 0.95
