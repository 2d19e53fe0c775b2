"""The text part of a multimodal checkpoint is an ordinary model here, and goes back into the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ModelError
from headrace.models import LoraConfig, ModelConfig, context_length, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.lora import read_lora_config, save_adapter
from headrace.models.merge import export_merged
from headrace.models.text_part import write_whole
from headrace.models.weights import weight_tensors
from headrace.run.session.exporting import export
from tests.models.wrapped import WRAPPERS, tiny_wrapper, whole

IDS = torch.arange(3, 36)


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return tiny_wrapper(tmp_path_factory.mktemp(request.param) / request.param, request.param)


each = pytest.mark.parametrize("wrapper", WRAPPERS, indirect=True)
one = pytest.mark.parametrize("wrapper", ["gemma3"], indirect=True)


def logprobs(model: torch.nn.Module, *, packed: bool = True) -> torch.Tensor:
    with torch.no_grad():
        if not packed:
            return model(input_ids=IDS[None], use_cache=False).logits[0].log_softmax(-1)
        both = forward(model, torch.cat([IDS.flip(0), IDS]), PackedPlan([len(IDS), len(IDS)]))
        return both[len(IDS) :].log_softmax(-1)


def changed(path: Path, **settings: object) -> torch.nn.Module:
    model = load_model(ModelConfig(path=str(path), **settings))
    with torch.no_grad():
        for number, parameter in enumerate(each for each in model.parameters() if each.requires_grad):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


@each
def test_text_part_computes_what_the_multimodal_model_computes_for_text(wrapper: Path) -> None:
    model = load_model(ModelConfig(path=str(wrapper)))
    torch.testing.assert_close(logprobs(model), logprobs(whole(wrapper), packed=False), atol=2e-5, rtol=0)
    assert context_length(str(wrapper)) == 512


@each
def test_trained_text_goes_back_and_everything_else_stays_bit_for_bit(wrapper: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in wrapper.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(3, 3), "ids": torch.arange(3)}  # what transformers' class does not read
    save_file({**tensors, **extra}, base / "model.safetensors", metadata={"format": "pt"})
    model = changed(base)
    write_whole(base, model, tmp_path / "out")
    torch.testing.assert_close(logprobs(whole(tmp_path / "out"), packed=False), logprobs(model), atol=2e-5, rtol=0)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert list(before) == list(after)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == len({name for name, _ in model.named_parameters()})
    assert not [name for name in moved if "vision" in name or "visual" in name or name in extra]


@each
def test_snapshot_is_a_text_model_that_export_puts_back(wrapper: Path, tmp_path: Path) -> None:
    model = changed(wrapper)
    model.save_pretrained(tmp_path / "snapshot")
    again = load_model(ModelConfig(path=str(tmp_path / "snapshot")))
    torch.testing.assert_close(logprobs(again), logprobs(model), atol=0, rtol=0)
    done = export(tmp_path / "snapshot", tmp_path / "out")
    assert done.whole == str(wrapper)
    torch.testing.assert_close(logprobs(whole(tmp_path / "out"), packed=False), logprobs(model), atol=2e-5, rtol=0)


@one
def test_adapter_of_the_text_part_is_merged_into_the_whole(wrapper: Path, tmp_path: Path) -> None:
    model = changed(wrapper, lora=LoraConfig(rank=2))
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter")
    export_merged(wrapper, tmp_path / "adapter", tmp_path / "out")
    merged = logprobs(whole(tmp_path / "out"), packed=False)
    torch.testing.assert_close(merged, logprobs(model), atol=2e-5, rtol=0)
    assert (merged - logprobs(whole(wrapper), packed=False)).abs().max() > 1e-3


@one
def test_text_in_bfloat16_is_read_back_as_it_was_trained(wrapper: Path, tmp_path: Path) -> None:
    model = changed(wrapper, dtype="bfloat16")
    write_whole(wrapper, model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"
    assert whole(tmp_path / "out").dtype == torch.bfloat16


@one
def test_several_text_parts_are_refused_by_name(wrapper: Path, tmp_path: Path) -> None:
    tree = json.loads((wrapper / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**tree, "decoder": tree["text_config"]}))
    with pytest.raises(ModelError, match=r"'decoder', 'text_config'.*ambiguous"):
        load_model(ModelConfig(path=str(tmp_path)))


def copy_with(tensors: dict[str, torch.Tensor], wrapper: Path, directory: Path) -> None:
    """Copy a checkpoint with ``tensors`` in place of its own."""
    shutil.copytree(wrapper, directory, dirs_exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@one
def test_checkpoint_without_a_text_weight_is_refused_by_its_name(wrapper: Path, tmp_path: Path) -> None:
    tensors = load_file(wrapper / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))]
    copy_with(tensors, wrapper, tmp_path)
    with pytest.raises(ModelError, match=r"lack.*layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelConfig(path=str(tmp_path)))


@one
def test_checkpoint_without_other_parts_is_refused_by_what_it_lacks(wrapper: Path, tmp_path: Path) -> None:
    tensors = load_file(wrapper / "model.safetensors")
    copy_with({name: tensor for name, tensor in tensors.items() if "vision" not in name}, wrapper, tmp_path)
    with pytest.raises(ModelError, match=r"lack.*model\.vision_tower"):
        load_model(ModelConfig(path=str(tmp_path)))


@one
def test_checkpoint_without_settings_of_the_text_is_refused_by_their_name(wrapper: Path, tmp_path: Path) -> None:
    copy_with(load_file(wrapper / "model.safetensors"), wrapper, tmp_path)
    tree = json.loads((wrapper / "config.json").read_text())
    del tree["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match="no text_config"):
        load_model(ModelConfig(path=str(tmp_path)))


@each
def test_superfluous_weight_of_a_text_layer_is_refused(wrapper: Path, tmp_path: Path) -> None:
    tensors = load_file(wrapper / "model.safetensors")
    like = next(name for name in tensors if name.endswith("layers.1.input_layernorm.weight") and "vis" not in name)
    copy_with({**tensors, like.replace("layers.1.", "layers.9."): tensors[like].clone()}, wrapper, tmp_path)
    with pytest.raises(ModelError, match=r"does not ask for: model\.layers\.9\.input_layernorm\.weight"):
        load_model(ModelConfig(path=str(tmp_path)))


@one
def test_export_into_another_checkpoint_is_refused(wrapper: Path, tmp_path: Path) -> None:
    other = tiny_wrapper(tmp_path / "other", "gemma3", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ModelError, match="no place"):
        write_whole(other, changed(wrapper), tmp_path / "out")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@each
def test_adapter_of_the_text_part_is_what_peft_loads_onto_the_whole(wrapper: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    layers = {"num_hidden_layers": 4} if "qwen3_vl" in wrapper.name else {}
    base = tiny_wrapper(tmp_path / "base", wrapper.name, **layers)  # peft shortens the names of over 20 layers
    model = changed(base, lora=LoraConfig(rank=2))
    saved, out = tmp_path / "saved", tmp_path / "out"
    saved.mkdir()
    save_adapter(model, saved)
    assert export(saved, out, adapter="separate").kind == "adapter"
    export(saved, tmp_path / "merged")
    before = logprobs(whole(base), packed=False)
    inner, merged = whole(base), whole(tmp_path / "merged").double()
    adapted = PeftModel.from_pretrained(inner, str(out)).double()
    for each_model in (inner, merged):
        each_model.set_experts_implementation("eager")  # the others do not know float64
    torch.testing.assert_close(logprobs(adapted, packed=False), logprobs(merged, packed=False), atol=1e-5, rtol=0)
    assert (logprobs(adapted, packed=False) - before).abs().max() > 1e-3
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(names) == len(weight_tensors(model))
    assert not [name for name in names if "vision" in name or "visual" in name]
    again = load_model(ModelConfig(path=str(base), lora=read_lora_config(out)))
    assert torch.equal(logprobs(again), logprobs(model))


@one
def test_adapter_that_names_the_layers_of_the_text_part_is_read(wrapper: Path, tmp_path: Path) -> None:
    model = changed(wrapper, lora=LoraConfig(rank=2))
    save_adapter(model, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace("model.language_model.", "model."))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    inner = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(inner, tmp_path / "adapter_model.safetensors")
    again = load_model(ModelConfig(path=str(wrapper), lora=read_lora_config(tmp_path)))
    assert torch.equal(logprobs(again), logprobs(model))
