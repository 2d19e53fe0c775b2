"""A directory that cannot be used is refused in words, before anything runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from headrace.base.errors import ModelError
from headrace.models import ModelConfig, context_length, load_model, load_tokenizer
from headrace.models.attention import PackedPlan, forward
from headrace.models.endings import stop_ids
from headrace.models.load import CACHE_LINE, num_weight_bytes
from headrace.models.weights import refuse_not_finite
from tests.models.kinds import tiny


@pytest.fixture
def copy(tmp_path: Path, model_dir: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(model_dir("qwen3"), tmp_path / "copy"))


def refused(path: Path, load: Callable[[str], object] = lambda path: load_model(ModelConfig(path=path))) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    return str(caught.value)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    for load in (load_tokenizer, context_length, lambda path: load_model(ModelConfig(path=path))):
        assert "does not exist" in refused(tmp_path / "nowhere", load)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    assert "cannot be read" in refused(tmp_path / "model")


def test_directory_without_config_is_refused(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "holds no config.json" in refused(copy)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_config_that_is_none_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json cannot be used" in refused(copy)


def test_code_in_the_directory_is_never_run(copy: Path) -> None:
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(copy / "config.json", model_type="evil", auto_map=auto_map)
    assert "cannot be used" in refused(copy)


def test_pickled_weights_are_refused_with_the_way_out(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = refused(copy)
    assert "holds no *.safetensors" in message
    assert "save_pretrained" in message


def test_damaged_weights_are_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "model.safetensors is damaged or incomplete" in refused(copy)


def test_the_size_of_weights_is_read_from_their_headers(copy: Path) -> None:
    numbers = sum(tensor.numel() for tensor in load_file(copy / "model.safetensors").values())
    save_file({"moment": torch.zeros(9)}, copy / "optimizer.safetensors")
    assert num_weight_bytes(copy, 2) == 2 * numbers


def test_missing_weight_is_named_and_not_made_up(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.self_attn.q_norm.weight" in refused(copy)


def test_weight_of_another_shape_is_refused(copy: Path) -> None:
    edit(copy / "config.json", intermediate_size=96)
    assert "model.layers.0.mlp.down_proj.weight ([32, 128], expected [32, 96])" in refused(copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weight_that_is_not_finite_is_named_with_the_number_of_its_values(copy: Path, value: float) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = value
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert "not a number: model.layers.1.mlp.up_proj.weight (3 of " in refused(copy)


def test_weights_that_cannot_be_compared_and_masks_in_buffers_pass() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([-torch.inf]))
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    model.register_parameter("eight", torch.nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False))
    model.register_parameter("far", torch.nn.Parameter(torch.zeros(2, device="meta")))
    refuse_not_finite(model, "x")
    model.register_buffer("e_score_correction_bias", torch.tensor([0.0, torch.nan]))
    with pytest.raises(ModelError, match=r"e_score_correction_bias \(1 of 2 values\)"):
        refuse_not_finite(model, "x")


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.bias"),
        "model.embed_positions.weight",
        "model.layers.0.mtp_gate.weight",
    ],
)
def test_weight_of_the_layers_that_the_model_does_not_compute_is_refused(copy: Path, name: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    unread = {"mtp.fc.weight": torch.zeros(3), "model.mtp.norm.weight": torch.zeros(3), "v_head.weight": torch.zeros(3)}
    save_file({**tensors, **unread, name: torch.zeros(3)}, copy / "model.safetensors")
    assert f"does not ask for: {name}\n" in refused(copy)
    edit(copy / "config.json", num_nextn_predict_layers=1)
    assert f"does not ask for: {name}\n" in refused(
        copy
    )  # a layer like the others, and none that predicts later tokens
    if "layers.2" in name:
        later = {name: torch.zeros(3), "model.layers.2.eh_proj.weight": torch.zeros(3)}
        save_file({**tensors, **later}, copy / "model.safetensors")
        load_model(ModelConfig(path=str(copy)))


def test_config_that_describes_a_far_larger_model_is_refused_before_one_is_built(copy: Path) -> None:
    edit(copy / "config.json", vocab_size=2**40)  # no machine has the memory
    assert "config.json" in refused(copy)
    assert "describes a qwen3 of " in refused(copy)


def test_tensor_that_one_expert_lacks_is_named(tmp_path: Path) -> None:
    tiny(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if ".experts.1.up_proj" in name)
    save_file({name: each for name, each in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    assert f"lack what config.json asks for: {lost}\n" in refused(tmp_path)


def test_layers_that_transformers_does_not_know_are_refused_with_the_types_that_are_supported(copy: Path) -> None:
    edit(copy / "config.json", layer_types=["wavelet_attention", "full_attention"])
    said = refused(copy)
    assert "layers of type wavelet_attention" in said
    assert "sliding_attention" in said
    assert "compressed_sparse_attention" not in said
    with pytest.raises(ModelError, match="layers of type wavelet_attention"):  # and the tokenizer is not blamed
        load_tokenizer(str(copy))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3", {"max_position_embeddings": 0}, "whose config.json says max_position_embeddings=0"),
        ("qwen3", {"hidden_act": "wobble"}, "transformers knows no hidden_act='wobble'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "says num_experts_per_tok=9, of 4 experts"),
        ("llama4_text", {"attention_chunk_size": None}, "says attention_chunk_size=None, with layers of type"),
        ("llama4_text", {"attention_chunk_size": 0}, "says attention_chunk_size=0, with layers of type"),
        ("mamba2", {"chunk_size": 0}, "says chunk_size=0"),
        ("qwen3", {"rms_norm_eps": float("nan")}, "its logits are not numbers (NaN), as transformers itself"),
    ],
)
def test_setting_that_no_model_can_have_is_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    path = tiny(tmp_path / "model", kind)
    edit(path / "config.json", **changes)
    assert reason in refused(path)


def test_ends_outside_the_vocabulary_are_left_out_and_one_is_needed(copy: Path) -> None:
    (copy / "generation_config.json").write_text("{}")
    edit(copy / "generation_config.json", eos_token_id=[1, 2**20, -3])
    assert stop_ids(str(copy), 2) == (2, 1)
    assert stop_ids(str(copy), 2**21) == (1,)
    edit(copy / "generation_config.json", eos_token_id=2**20)
    assert "could end" in refused(copy, lambda path: stop_ids(path, 2**21))


def test_tokenizer_that_is_not_there_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refused(copy, load_tokenizer)


def test_damaged_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "cannot be loaded" in refused(copy, load_tokenizer)


def test_tokenizer_without_end_of_sequence_is_refused(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", eos_token=None)
    assert "no end-of-sequence token" in refused(copy, load_tokenizer)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("minimax", "layers of type linear_attention"),
        ("deepseek_v4", "layers of type compressed_sparse_attention"),
        ("vit", "knows no causal language model"),
    ],
)
def test_architecture_that_cannot_work_is_refused_by_its_config(tmp_path: Path, kind: str, reason: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    message = refused(tmp_path)
    assert kind in message
    assert reason in message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bert", "differ by"),
        ("mamba", "do not tell their mixers which tokens belong together"),
        ("bloom", "attention interface"),
        ("diffllama", "calls come from layers [0, 0, 1, 1]"),
        ("stablelm", "without a plan"),
        ("gptj", "is a gptj: it does not attend through transformers' attention interface"),
    ],
)
def test_architecture_that_cannot_work_is_refused_by_what_it_does(tmp_path: Path, kind: str, reason: str) -> None:
    message = refused(tiny(tmp_path, kind))
    assert reason in message
    assert message.count("remedy:") == 1
    assert "decoder-only text model" in message


def test_quantised_weights_are_refused(copy: Path) -> None:
    edit(copy / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "quantised" in refused(copy)


def test_context_that_is_not_said_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom").save_pretrained(tmp_path)
    assert "max_position_embeddings" in refused(tmp_path, context_length)


def test_context_is_read_under_the_names_of_older_models(model_dir: Callable[[str], Path]) -> None:
    assert context_length(str(model_dir("gpt2"))) == 512


def test_dropout_is_off_even_in_training_mode(tmp_path: Path) -> None:
    directory = tiny(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = load_model(ModelConfig(path=str(directory))).train()
    ids, plan = torch.arange(3, 12), PackedPlan([4, 5])
    assert torch.equal(forward(model, ids, plan), forward(model, ids, plan))


def test_weights_begin_where_a_line_of_the_cache_begins_wherever_they_lie_in_the_file(
    model_dir: Callable[[str], Path], copy: Path
) -> None:
    def loaded(path: Path) -> dict[str, torch.Tensor]:
        model = load_model(ModelConfig(path=str(path)))
        assert {parameter.data_ptr() % CACHE_LINE for parameter in model.parameters()} == {0}
        return model.state_dict()

    found = load_file(copy / "model.safetensors")
    save_file(found, copy / "model.safetensors", metadata={"format": "pt", "room": "x" * 8})  # they move by a little
    before, after = loaded(model_dir("qwen3")), loaded(copy)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_bfloat16_is_loaded_as_such(model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(path=str(model_dir("llama")), dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_settings_of_the_model_cost_no_heavy_import() -> None:
    code = "import sys, headrace.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_window_that_a_model_puts_into_its_mask_alone_is_refused_unless_it_is_longer_than_the_context(
    tmp_path: Path,
) -> None:
    message = refused(tiny(tmp_path / "short", "phimoe", sliding_window=64, max_position_embeddings=128))
    assert "layer 0 sees the last 64 tokens by transformers' mask" in message
    load_model(
        ModelConfig(path=str(tiny(tmp_path / "long", "phimoe", sliding_window=128, max_position_embeddings=128)))
    )


def test_window_that_a_layer_names_and_its_mask_has_not_is_refused(tmp_path: Path) -> None:
    directory = tiny(tmp_path / "model", "qwen3", sliding_window=64, layer_types=["full_attention"] * 2)
    load_model(ModelConfig(path=str(directory)))  # whose layers say nothing then
    whole = Qwen3Attention.forward

    def windowed(self: Qwen3Attention, *args: object, **kwargs: object) -> object:
        self.sliding_window = 64
        return whole(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3Attention, "forward", windowed)
        assert "by what it says of itself the last 64 tokens" in refused(directory)
