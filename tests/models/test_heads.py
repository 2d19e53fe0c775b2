"""The prediction heads of checkpoints: they compute what their architectures say, and bad files are refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from headrace.base.errors import ModelError
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan
from headrace.models.heads import HEADS_FILE, LAYOUTS, copy_later, later_tensors, load_head, refuse_headless
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.deterministic import InvariantPlan
from headrace.models.kernels.ops import kernels
from tests.models.headed import HEADED, Headed, headed
from tests.models.kinds import tiny

__all__ = ["headed"]
NUM = 9
PARTS = ((0, 1), (1, 10), (10, 29), (29, 40))
"""The first tokens of four sequences, and those after their last."""


@pytest.fixture
def files(tmp_path: Path, headed: Headed) -> Path:
    """A copy of a GLM with a head, to be spoilt."""
    return Path(shutil.copytree(headed("glm4_moe"), tmp_path / "copy"))


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_head(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / HEADS_FILE)
    change(tensors)
    save_file(tensors, directory / HEADS_FILE)


def computed(directory: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, states, and what the head makes of them."""
    config = ModelConfig(path=str(directory))
    model = load_model(config)
    ids_N, states_NH = torch.arange(NUM) * 3 + 3, torch.randn(NUM, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found_NH = load_head(config, model)(model.get_input_embeddings()(ids_N), states_NH, PackedPlan([NUM]))
    return ids_N, states_NH, found_NH


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_a_head_behind_the_last_layer_computes_what_transformers_computes(kind: str, headed: Headed) -> None:
    ids_N, states_NH, found_NH = computed(headed(kind))
    plain = AutoModelForCausalLM.from_pretrained(headed(kind)).eval()
    plain._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # by which transformers finds the head
    plain.config._name_or_path = str(_in_one_file(headed(kind)))
    theirs = MtpModel.from_pretrained(plain).eval()
    with torch.no_grad():
        expected_NH = theirs.forward_layer(0, states_NH[None], torch.arange(NUM)[None], None, input_ids=ids_N[None])[0]
    torch.testing.assert_close(found_NH, expected_NH, atol=1e-5, rtol=1e-5)


def _in_one_file(directory: Path) -> Path:
    """Return a copy of the checkpoint ``directory`` with all tensors in one file, as small checkpoints are released."""
    whole = directory.with_name("whole")
    if not whole.exists():
        shutil.copytree(directory, whole)
        save_file(
            {**load_file(whole / "model.safetensors"), **load_file(whole / HEADS_FILE)},
            whole / "model.safetensors",
            metadata={"format": "pt"},
        )
    return whole


def test_a_head_of_mimo_takes_the_state_before_the_embedding_and_is_a_layer_of_qwen2(headed: Headed) -> None:
    ids_N, states_NH, found_NH = computed(headed("qwen2"))
    plain = AutoModelForCausalLM.from_pretrained(headed("qwen2")).eval()
    config, start = copy.deepcopy(plain.config), "model.mtp_layers.0."
    own = {name.removeprefix(start): one for name, one in load_file(headed("qwen2") / HEADS_FILE).items()}
    layer = Qwen2DecoderLayer(config, 0).eval()
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})

    def norm(name: str, x: Tensor) -> Tensor:
        made = Qwen2RMSNorm(32, config.rms_norm_eps)
        made.weight.data = own[f"{name}.weight"]
        return made(x)

    with torch.no_grad():
        embedding = plain.get_input_embeddings()(ids_N)
        joined = torch.cat([norm("hidden_layernorm", states_NH), norm("token_layernorm", embedding)], -1)
        x = (joined @ own["input_proj.weight"].T)[None]
        turn = plain.model.rotary_emb(x, torch.arange(NUM)[None])
        expected = norm("final_layernorm", layer(x, position_embeddings=turn)[0])
    torch.testing.assert_close(found_NH, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(isinstance(kernels(), Unavailable), reason="no kernels here")
@torch.no_grad()
def test_a_head_of_a_deterministic_model_computes_the_same_bits_beside_other_sequences(headed: Headed) -> None:
    """The head's router has four experts, of which torch computes the last sigmoids of a pass by another formula."""
    config = ModelConfig(path=str(headed("glm4_moe")), deterministic=True)
    head = load_head(config, load_model(config))
    for seed in range(8):
        given_2NH = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(seed))
        beside_NH = head(given_2NH[0], given_2NH[1], InvariantPlan([end - start for start, end in PARTS]))
        alone_NH = [head(*given_2NH[:, start:end], InvariantPlan([end - start])) for start, end in PARTS]
        assert torch.equal(torch.cat(alone_NH), beside_NH)


def test_the_first_token_of_a_later_one_changes_no_earlier_state(headed: Headed) -> None:
    config = ModelConfig(path=str(headed("qwen2")))
    model = load_model(config)
    head, states_NH = load_head(config, model), torch.randn(NUM, 32)
    with torch.no_grad():
        first, second = (
            head(model.get_input_embeddings()(torch.tensor([5] * (NUM - 1) + [last])), states_NH, PackedPlan([NUM]))
            for last in (6, 7)
        )
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.equal(first[-1], second[-1])


def test_a_kind_whose_heads_are_unknown_is_refused_by_name_with_the_known_ones(tmp_path: Path) -> None:
    words = r"engine\.speculation='heads'.* is a llama, of which no prediction heads"
    with pytest.raises(ModelError, match=words) as caught:
        refuse_headless(str(tiny(tmp_path / "llama", "llama", num_nextn_predict_layers=1)))
    assert "'history'" in caught.value.remedy
    assert all(kind in caught.value.remedy for kind in HEADED)
    assert HEADED.keys() == LAYOUTS.keys()


def test_a_model_without_heads_is_refused_by_name(files: Path) -> None:
    edit_config(files, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(ModelError, match=r"a glm4_moe without prediction heads: .*num_nextn_predict_layers"):
        refuse_headless(str(files))


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.pop(f"model.layers.2.{name}")


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"model.layers.2.{name}": tensor})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("eh_proj.weight"), "its files hold no model.layers.2.eh_proj.weight"),
        (_with("eh_proj.weight", torch.zeros(32, 32)), "model.layers.2.eh_proj.weight has the shape [32, 32], and a"),
        (_with("enorm.weight", torch.zeros(31)), "model.layers.2.enorm.weight has the shape [31]"),
    ],
)
def test_a_head_that_lacks_tensors_or_has_others_is_refused_by_name_before_anything_is_loaded(
    change: Callable[[dict[str, Tensor]], None], words: str, files: Path
) -> None:
    edit_head(files, change)
    with pytest.raises(ModelError) as caught:
        refuse_headless(str(files))
    assert words in str(caught.value)
    assert str(files) in str(caught.value)
    assert "'history'" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("self_attn.q_proj.weight"), "self_attn.q_proj.weight is missing"),
        (_with("self_attn.q_proj.weight", torch.zeros(8, 8)), "self_attn.q_proj.weight has the shape [8, 8], not"),
        (_with("self_attn.gate.weight", torch.zeros(8, 8)), "self_attn.gate.weight has no place in it"),
        (_with("self_attn.o_proj.weight", torch.full((32, 32), torch.nan)), "are infinite or not a number"),
    ],
)
def test_a_layer_of_a_head_that_does_not_fit_is_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], words: str, files: Path
) -> None:
    edit_head(files, change)
    config = ModelConfig(path=str(files))
    with pytest.raises(ModelError) as caught:
        load_head(config, load_model(config))
    assert words in str(caught.value)
    assert str(files) in str(caught.value)


def test_copies_of_embedding_and_output_layer_in_a_head_are_not_read(files: Path) -> None:
    before = computed(files)[2]
    edit_head(files, _with("embed_tokens.weight", torch.zeros(40, 32)))
    edit_head(files, _with("shared_head.head.weight", torch.zeros(40, 32)))
    assert torch.equal(computed(files)[2], before)


def test_a_snapshot_gets_the_heads_of_its_checkpoint_bit_for_bit_and_an_index_of_all_tensors(
    files: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    load_model(ModelConfig(path=str(files))).save_pretrained(snapshot)
    copy_later(files, snapshot)
    ours, theirs = load_file(snapshot / HEADS_FILE), load_file(files / HEADS_FILE)
    assert ours.keys() == theirs.keys() == set(later_tensors(files))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    listed = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
    assert listed.keys() == ours.keys() | load_file(snapshot / "model.safetensors").keys()
    assert torch.equal(computed(snapshot)[2], computed(files)[2])
    copy_later(snapshot, snapshot)  # which has them already
    assert load_file(snapshot / HEADS_FILE).keys() == theirs.keys()


def test_a_model_without_heads_gets_no_file_of_them(tmp_path: Path) -> None:
    directory = tiny(tmp_path / "plain", "qwen3")
    snapshot = tmp_path / "snapshot"
    load_model(ModelConfig(path=str(directory))).save_pretrained(snapshot)
    before = sorted(snapshot.iterdir())
    copy_later(directory, snapshot)
    assert sorted(snapshot.iterdir()) == before
