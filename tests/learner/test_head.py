"""A linear head in tiles gives the values and gradients of the dense formula, and never holds its logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.types.recorded import KeptSets
from headrace.learner import head
from headrace.learner.head import HeadMatrix, HeadRequest, KeptEntries, TopRequest, linear_logprobs, linear_top

TOKENS, VOCAB, HIDDEN = 7, 11, 5
OTHERS = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(row))[:6] for row in range(TOKENS)])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(head.TILES, "cpu", (3, 4))


def asked(ids_P: Tensor, kept: KeptSets | None, *, entropy: bool = True, keep: bool = False) -> HeadRequest:
    return HeadRequest(
        ids_P=ids_P,
        temperature=0.7,
        kept=None if kept is None else KeptEntries(kept, torch.device("cpu")),
        entropy_gradient=entropy,
        keep_logits=keep,
        top_PK=OTHERS if len(ids_P) == TOKENS else None,
    )


def problem(seed: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, KeptSets]:
    rng = torch.Generator().manual_seed(seed)
    leaves = [
        (3 * torch.randn(size, generator=rng, dtype=torch.float64)).to(dtype).requires_grad_()
        for size in [(TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]
    ]
    ids_P = torch.randint(VOCAB, (TOKENS,), generator=rng)
    extra = torch.rand(TOKENS, VOCAB, generator=rng) < torch.rand(TOKENS, 1, generator=rng)
    spans = [
        sorted({int(ids_P[row]), *extra[row].nonzero()[:, 0].tolist()}) if row % 3 else [] for row in range(TOKENS)
    ]
    return leaves, ids_P, KeptSets.from_spans(spans)


def as_head(leaves: Sequence[Tensor]) -> tuple[Tensor, HeadMatrix]:
    hidden, weight, bias = leaves
    return hidden, HeadMatrix(weight, bias)


def dense(leaves: list[Tensor], ids_P: Tensor, kept: KeptSets | None) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias = leaves
    logits = (hidden @ weight.T + bias) / 0.7
    every = logits.log_softmax(-1)
    drawn = logits.clone()
    for row, span in enumerate(kept.spans() if kept else []):
        if len(span):
            out = torch.ones(VOCAB, dtype=torch.bool)
            out[torch.from_numpy(span).long()] = False
            drawn[row] = logits[row].masked_fill(out, -torch.inf)
    logprobs = drawn.log_softmax(-1).gather(1, ids_P[:, None])[:, 0]
    return logprobs, -(every.exp() * every).sum(-1), every.gather(1, OTHERS)


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
def test_values_and_gradients_are_those_of_the_dense_formula(seed, with_kept, entropy, keep):
    leaves, ids, kept = problem(seed)
    kept = kept if with_kept else None
    found = linear_logprobs(*as_head(leaves), asked(ids, kept, entropy=entropy, keep=keep))
    expected = dense(leaves, ids, kept)
    towards = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    others = torch.linspace(2, -1, OTHERS.numel(), dtype=torch.float64).view(OTHERS.shape)
    losses = [
        (one[0] * towards).sum() + (one[2] * others).sum() + ((one[1] * towards.flip(0)).sum() if entropy else 0)
        for one in (found, expected)
    ]
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("with_kept", [False, True])
def test_gradients_are_those_of_finite_differences(with_kept):
    leaves, ids, kept = problem(1)
    assert torch.autograd.gradcheck(
        lambda *given: linear_logprobs(*as_head(given), asked(ids, kept if with_kept else None)), leaves
    )


@pytest.mark.parametrize("num", [1, 5, 9])
def test_the_likeliest_entries_of_all_tiles_are_those_of_the_whole_row(num):
    (hidden, weight, bias), _, _ = problem(5)
    below = 9
    ids, logs = linear_top(hidden, HeadMatrix(weight, bias), 0.7, TopRequest(num=num, below=below))
    every = ((hidden @ weight.T + bias) / 0.7).log_softmax(-1)
    expected, places = every[:, :below].topk(num)
    torch.testing.assert_close(logs, expected)
    assert torch.equal(ids, places)


def test_frozen_weight_gets_no_gradient_and_hidden_states_do():
    (hidden, weight, bias), ids, _ = problem(2)
    logprobs, *_ = linear_logprobs(hidden, HeadMatrix(weight.detach(), bias.detach()), asked(ids, None))
    (gradient,) = torch.autograd.grad(logprobs.sum(), [hidden])
    (expected,) = torch.autograd.grad(dense([hidden, weight, bias], ids, None)[0].sum(), [hidden])
    torch.testing.assert_close(gradient, expected)


def test_half_precision_weights_sum_in_float32():
    leaves, ids, kept = problem(3, torch.bfloat16)
    logprobs, entropy, _ = linear_logprobs(*as_head(leaves), asked(ids, kept))
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs.sum() + entropy.sum()).backward()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = dense(wide, ids, kept)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0.02, atol=0.1)
    (expected[0].sum() + expected[1].sum()).backward()
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=0, atol=0.05 * scale)


def test_no_token_asked_for_is_no_logprob_and_a_gradient_of_zero():
    (hidden, weight, bias), _, _ = problem(4)
    logprobs, *_ = linear_logprobs(
        hidden[:0], HeadMatrix(weight, bias), asked(torch.zeros(0, dtype=torch.int64), KeptSets.none(0))
    )
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert not weight.grad.any()


def test_logits_far_apart_give_finite_numbers():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.linspace(-1, 1, VOCAB)[:, None].requires_grad_()
    logprobs, entropy, _ = linear_logprobs(hidden, HeadMatrix(weight), asked(torch.tensor([0, 0]), None))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[0].item() == pytest.approx(-600 / 0.7)
    assert logprobs[1].item() == pytest.approx(0.0, abs=1e-6)
    for tensor in (entropy, hidden.grad, weight.grad):
        assert torch.isfinite(tensor).all()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().size() // tensor.element_size())
        return made


def test_nothing_grows_with_tokens_times_vocabulary(monkeypatch):
    """At 150k entries: besides the weight's gradient and the hidden states, no tensor is larger than a tile."""
    monkeypatch.setitem(head.TILES, "cpu", (64, 2048))
    tokens, vocabulary, hidden_size = 96, 151_936, 4
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=rng, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, generator=rng, requires_grad=True)
    ids = torch.randint(vocabulary, (tokens,), generator=rng)
    with Largest() as largest:
        logprobs, entropy, _ = linear_logprobs(hidden, HeadMatrix(weight), asked(ids, None))
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numbers == weight.numel() < tokens * vocabulary // 20
