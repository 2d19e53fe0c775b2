"""Layers with a state keep the sequences of a packed pass apart, in values and in gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from headrace.base.errors import ModelError
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.config import LoraConfig
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.recurrent import Recurrence, recurrent_layers, state_shapes
from headrace.models.recurrent.convolution import Convolution
from headrace.models.recurrent.delta_rule import DeltaRule
from headrace.models.recurrent.selective import Selective
from headrace.models.recurrent.state_space import StateSpace
from tests.models.kinds import HYBRIDS, VOCAB, plain, tiny

Dir = Callable[[str], Path]
LENGTHS = [1, 37, 5, 300, 2]


def make_sequences(lengths: list[int] = LENGTHS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 3 + len(VOCAB), (length,), generator=draw) for length in lengths]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_sequences_get_what_transformers_gives_each_alone(kind: str, model_dir: Dir) -> None:
    model, own = load_model(ModelConfig(path=str(model_dir(kind)))), plain(model_dir(kind))
    sequences = make_sequences()
    with torch.no_grad():
        packed = forward(model, torch.cat(sequences), PackedPlan(LENGTHS)).log_softmax(-1).split(LENGTHS)
        for ids_T, found in zip(sequences, packed, strict=True):
            alone = forward(model, ids_T, PackedPlan([len(ids_T)])).log_softmax(-1)
            expected = own(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_copied_model_keeps_sequences_apart_by_itself(kind: str, model_dir: Dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir(kind))))
    copied, ids_N = copy.deepcopy(model), torch.cat(make_sequences([1, 9, 5]))
    with torch.no_grad():
        found = forward(copied, ids_N, PackedPlan([1, 9, 5]))  # before the model has had any plan
        assert torch.equal(found, forward(model, ids_N, PackedPlan([1, 9, 5])))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_gradients_of_packed_sequences_are_the_sum_of_those_of_each_alone(kind: str, model_dir: Dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir(kind))))
    sequences = make_sequences([7, 21, 1, 4])

    def gradients(passes: list[list[Tensor]]) -> dict[str, Tensor]:
        model.zero_grad()
        for members in passes:
            logits_NV = forward(model, torch.cat(members), PackedPlan([len(each) for each in members]))
            logits_NV.log_softmax(-1)[:, 5].sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    packed, alone = gradients([sequences]), gradients([[each] for each in sequences])
    assert {name for name in packed if "conv" in name or "A_log" in name}
    for name, wanted in alone.items():
        torch.testing.assert_close(packed[name], wanted, rtol=0, atol=2e-5 * max(1.0, float(wanted.abs().max())))


def test_sequences_that_share_the_tokens_of_a_prefix_compute_what_they_compute_apart(model_dir: Dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir("qwen3_5_text"))))
    prefix, first, second = make_sequences([19, 4, 9])
    shared = PackedPlan([23, 28], rows_T=[*range(19), *range(19, 23), *range(19), *range(23, 32)])
    apart = PackedPlan([23, 28])
    results = []
    for ids_N, plan, tokens in (
        (torch.cat([prefix, first, second]), shared, slice(19, 32)),
        (torch.cat([prefix, first, prefix, second]), apart, [*range(19, 23), *range(42, 51)]),
    ):
        model.zero_grad()
        logprobs = forward(model, ids_N, plan).log_softmax(-1)[tokens]
        logprobs[:, 4].sum().backward()
        results.append((logprobs.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    for got, wanted in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5 * max(1.0, float(wanted.abs().max())))


def _odd(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def recurrences() -> dict[str, tuple[Recurrence, tuple[Tensor, ...]]]:
    """Each recurrence with inputs of 5 rows, in sizes that fill no vector."""
    delta_inputs = _odd(5, 2, 7), _odd(5, 2, 7) + 1, _odd(5, 6, 11), -_odd(5, 6).abs(), _odd(5, 6).sigmoid()
    scan_inputs = _odd(5, 6, 3), _odd(5, 6).abs(), _odd(5, 2, 19), _odd(5, 2, 19) + 1
    select_inputs = _odd(5, 26)[:, ::2], _odd(5, 13).abs(), _odd(5, 11), _odd(5, 11) + 1
    return {
        "convolution": (Convolution(_odd(13, 4), _odd(13), "silu"), (_odd(5, 26)[:, ::2].T.contiguous().T,)),
        "convolution of two": (Convolution(_odd(13, 2), None, None), (_odd(5, 13),)),
        "delta rule": (DeltaRule(lambda: None, 64, normed=True), delta_inputs),
        "delta rule as it is": (DeltaRule(lambda: None, 64, normed=False), delta_inputs),
        "state space": (StateSpace(lambda: None, 64, rate_H=-_odd(6).exp(), skip_H=_odd(6)), scan_inputs),
        "selective state space": (Selective(-_odd(13, 11).exp()), select_inputs),
        "state space alone": (StateSpace(lambda: None, 64, rate_H=-_odd(6).exp(), skip_H=None), scan_inputs),
    }


@pytest.mark.parametrize("name", recurrences())
def test_compiled_kernels_update_the_states_that_torch_updates(name: str) -> None:
    ops = kernels()
    if not isinstance(ops, Kernels):
        pytest.skip(str(ops))
    recurrence, inputs_R = recurrences()[name]
    slots_R, pool = torch.tensor([3, 0, 6, 2, 5]), _odd(8, *recurrence.shape(inputs_R).sizes)
    theirs, ours = pool.clone(), pool.clone()
    wanted, found = recurrence.decode(inputs_R, theirs, slots_R), recurrence.decode(inputs_R, ours, slots_R, ops)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[[1, 4, 7]], pool[[1, 4, 7]])


def test_state_that_leaks_over_a_border_is_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: PackedPlan, key: object, recurrence: DeltaRule, inputs_N: tuple[Tensor, ...]) -> Tensor:
        everything = torch.tensor([len(inputs_N[0])])
        return recurrence.chunk(tuple(each[None] for each in inputs_N), everything, None)[0][0]

    directory = tiny(tmp_path, "lfm2")
    monkeypatch.setattr(PackedPlan, "recur", whole)
    with pytest.raises(ModelError, match="packed behind another"):
        load_model(ModelConfig(path=str(directory)))


def test_state_of_every_mixer_is_known_and_a_model_that_only_attends_has_none(model_dir: Dir) -> None:
    hybrid = load_model(ModelConfig(path=str(model_dir("qwen3_5_text"))))
    assert recurrent_layers(hybrid) == [0]
    assert {key: shape.sizes for key, shape in state_shapes(hybrid).items()} == {(0, 0): (64, 3), (0, 1): (4, 8, 8)}
    assert state_shapes(load_model(ModelConfig(path=str(model_dir("qwen3"))))) == {}


def test_recurrent_model_in_deterministic_mode_is_refused(model_dir: Dir) -> None:
    with pytest.raises(ModelError, match=r"deterministic=true.*recurrences of layers \[0\]"):
        load_model(ModelConfig(path=str(model_dir("lfm2")), deterministic=True))


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("minimax", "a mixer of their own"),
    ],
)
def test_mixer_whose_state_cannot_be_kept_is_refused_by_the_config(tmp_path: Path, kind: str, by: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{kind}: it has layers of type linear_attention, computed by {by}"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_layers_that_do_not_tell_their_mixers_what_belongs_together_are_refused_by_name(tmp_path: Path) -> None:
    directory = tiny(tmp_path, "mamba", max_position_embeddings=512)
    with pytest.raises(ModelError, match=r"layers \[0, 1\] do not tell their mixers which tokens belong together"):
        load_model(ModelConfig(path=str(directory)))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "llama4_text"])
def test_adapters_of_all_linear_layers_are_trained_on_packed_sequences(kind: str, model_dir: Dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir(kind)), lora=LoraConfig(rank=2)))
    forward(model, torch.arange(3, 15), PackedPlan([5, 7])).log_softmax(-1)[:, 4].sum().backward()
    adapted = {name.split(".lora_B")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_B" in name}
    wanted = {"qwen3_5_text": "in_proj_qkv", "mamba2": "in_proj", "llama4_text": "q_proj"}[kind]
    assert wanted in adapted
    assert "router" not in adapted
    grads = [each.grad for name, each in model.named_parameters() if "lora_B" in name]
    assert all(each is not None and each.any() for each in grads)
