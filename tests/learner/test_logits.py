"""The head, run chunk by chunk, is the model's own, whatever the model does after it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from headrace.learner.logits import SplitModel, TokenLogprobs, WholeModel, split_model
from headrace.models import ModelConfig, load_model
from headrace.models.attention import NAME, PLAN, PackedPlan
from tests.learner.builders import VOCAB_SIZE, tiny

KINDS = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 5.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_neox": {"intermediate_size": 48},
}


def packed(num_tokens: int = 30) -> dict[str, object]:
    plan = PackedPlan([num_tokens - 11, 11])
    ids = torch.arange(num_tokens).remainder(VOCAB_SIZE)
    return {"input_ids": ids[None], "position_ids": plan.positions_N[None], PLAN: plan}


def load(directory):
    return load_model(ModelConfig(path=str(directory)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_apart_and_gives_the_logits_of_the_whole(tmp_path, kind):
    model = load(tiny(tmp_path / kind, kind=kind, extra=KINDS[kind]))
    split = split_model(model, packed(4 + 11))
    assert isinstance(split, SplitModel)
    inputs = packed()
    with torch.no_grad():
        hidden = split.hidden(inputs)
        found = torch.cat([split.logits(chunk) for chunk in hidden.split(7)])
        torch.testing.assert_close(found, model(**inputs, use_cache=False).logits[0], rtol=1e-5, atol=1e-6)


class Peculiar(LlamaForCausalLM):
    """Its logits are not a function of the trunk's last hidden state alone."""

    def forward(self, input_ids, position_ids, use_cache=False, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)
        output.logits = output.logits + self.model.embed_tokens(input_ids).sum(-1, keepdim=True)
        return output


def test_a_model_that_does_not_come_apart_is_run_whole(tmp_path):
    model = Peculiar.from_pretrained(tiny(tmp_path / "llama", kind="llama"), attn_implementation=NAME).eval()
    inputs = packed()
    whole = split_model(model, inputs)
    assert isinstance(whole, WholeModel)
    before, ids = torch.arange(29), inputs["input_ids"][0, 1:]
    found, *_ = TokenLogprobs(whole, chunk=5, temperature=1.0, entropy_gradient=False)(inputs, before, ids)
    expected = model(**inputs).logits[0, :-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found, expected)


def gradient(model, chunk: int, weigh_entropy: bool):
    token_logprobs = TokenLogprobs(split_model(model, packed()), chunk, temperature=0.8, entropy_gradient=weigh_entropy)
    inputs = packed()
    before = torch.arange(0, 29, 2)
    logprobs, entropies, _ = token_logprobs(inputs, before, inputs["input_ids"][0, before + 1])
    model.zero_grad()
    loss = (logprobs * torch.linspace(-1, 1, len(before))).sum()
    (loss + entropies.sum() if weigh_entropy else loss).backward()
    return logprobs.detach(), entropies.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("weigh_entropy", [False, True])
def test_chunks_give_the_values_and_gradients_of_one_piece(model_dir, weigh_entropy):
    model = load(model_dir)
    one = gradient(model, 1000, weigh_entropy)
    many = gradient(model, 4, weigh_entropy)
    torch.testing.assert_close(many[0], one[0])
    torch.testing.assert_close(many[1], one[1])
    for name, grad in many[2].items():
        torch.testing.assert_close(grad, one[2][name], rtol=1e-4, atol=1e-5, msg=name)


def test_entropy_for_the_report_carries_no_gradient(model_dir):
    inputs = packed()
    split = split_model(load(model_dir), inputs)
    _, entropies, _ = TokenLogprobs(split, 1000, temperature=1.0, entropy_gradient=False)(
        inputs, torch.tensor([3]), torch.tensor([5])
    )
    assert not entropies.requires_grad


def test_entropy_of_entries_that_are_ruled_out_is_finite():
    class Fixed:
        def hidden(self, inputs):
            return inputs["logits"]

        def logits(self, hidden_CD):
            return hidden_CD

        def matrix(self):
            return None

    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    _, entropies, _ = TokenLogprobs(Fixed(), 8, temperature=1.0, entropy_gradient=True)(
        {"logits": logits}, torch.tensor([0]), torch.tensor([1])
    )
    entropies.sum().backward()
    assert entropies.item() == pytest.approx(0.6931472)
    assert torch.isfinite(logits.grad).all()


def test_between_forward_and_backward_no_tensor_of_the_vocabularys_size_is_kept(tmp_path):
    vocabulary, tokens = 2000, 60
    model = load(tiny(tmp_path / "wide", extra={"vocab_size": vocabulary, "tie_word_embeddings": False}))
    token_logprobs = TokenLogprobs(split_model(model, packed(tokens)), 10, temperature=1.0, entropy_gradient=False)
    inputs = packed(tokens)
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    weight_shape = model.get_output_embeddings().weight.shape
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs, *_ = token_logprobs(inputs, torch.arange(tokens - 1), inputs["input_ids"][0, 1:])
    assert kept
    assert not [shape for shape in kept if vocabulary in shape and shape not in (weight_shape, weight_shape[::-1])]
    assert logprobs.requires_grad
