"""Tiny models are ordinary directories."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from headrace.models import ModelConfig, context_length, load_model, load_tokenizer
from headrace.models.tiny import TinySpec, char_tokenizer, make_tiny

VOCAB = "abc 01\n+"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_same_spec_makes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    one, two, three = (
        make_tiny(tmp_path / name, TinySpec(vocab=VOCAB, seed=seed)) / "model.safetensors"
        for name, seed in (("one", 1), ("two", 1), ("three", 2))
    )
    assert one.read_bytes() == two.read_bytes() != three.read_bytes()


def test_making_one_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_tiny(tmp_path, TinySpec(vocab=VOCAB))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_model_fits_its_tokenizer_and_says_its_context(tmp_path: Path) -> None:
    path = str(make_tiny(tmp_path, TinySpec(vocab=VOCAB, max_positions=64, chat_template=TEMPLATE)))
    tokenizer = load_tokenizer(path)
    assert load_model(ModelConfig(path=path)).get_input_embeddings().num_embeddings == len(tokenizer)
    assert context_length(path) == 64
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a+b"}], tokenize=False) == "a+b"


@given(st.text(alphabet=VOCAB))
def test_tokenizer_gives_every_character_its_own_token_and_back(text: str) -> None:
    tokenizer = char_tokenizer(VOCAB)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_an_answer_may_be_as_likely_to_end_in_any_place(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz012345"
    tied = {"tie_word_embeddings": True}
    path = make_tiny(tmp_path / "even", TinySpec(vocab=letters, even_ends=True, extra=tied))
    model, end = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(str(path)).eos_token_id
    with torch.no_grad():
        logits_STV = model(torch.randint(3, 35, (8, 16), generator=torch.Generator().manual_seed(0))).logits
    assert not logits_STV[..., end].any()
    ends_ST = logits_STV.softmax(-1)[..., end]
    assert 1 / 40 < float(ends_ST.mean()) < 1 / 30
    assert float(ends_ST.std()) < 0.05 * float(ends_ST.mean())
