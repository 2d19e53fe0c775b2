"""log π is that of what a token was really sampled from: cut by top-p and top-k, after temperature."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.recorded import KeptSets
from headrace.learner.logits import SplitModel, TokenLogprobs, split_model
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PLAN, PackedPlan
from tests.learner import reference
from tests.learner.builders import Setup, assert_close, gradients, random_batch, tiny

TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 20


def kept_ids(log_p_V: torch.Tensor, top_k: int = TOP_K) -> list[int]:
    """The likeliest entries, at most ``top_k``, whose mass before each is below ``TOP_P``."""
    order = log_p_V.argsort(descending=True)[:top_k]
    p = log_p_V.exp()[order]
    p = p / p.sum()
    return sorted(order[p.cumsum(0) - p < TOP_P].tolist())


def sampled(model_dir, seed: int = 0, temperature: float = TEMPERATURE) -> Batch:
    """Completions that a sampler in float64 drew from the kept-sets, at the learner's weights; every third token from
    the whole vocabulary."""
    batch = random_batch(seed=seed, num_samples=9)
    model, rng = reference.double(model_dir), torch.Generator().manual_seed(seed)
    ids, logprobs = batch.ids_N.copy(), np.zeros(batch.num_tokens, np.float32)
    spans: list[list[int]] = [[] for _ in range(batch.num_tokens)]
    for part in reference.samples(batch):
        for place in np.flatnonzero(batch.mask_N[part]) + part.start:
            prefix = torch.tensor(ids[part.start : place], dtype=torch.int64)
            with torch.no_grad():
                log_p = (model(input_ids=prefix[None]).logits[0, -1] / temperature).log_softmax(-1)
            keep = kept_ids(log_p) if place % 3 else list(range(len(log_p)))
            allowed = log_p[keep].log_softmax(-1)
            drawn = int(torch.multinomial(allowed.exp(), 1, generator=rng))
            ids[place], logprobs[place] = keep[drawn], float(allowed[drawn])
            spans[place] = keep if place % 3 else []
    return msgspec.structs.replace(batch, ids_N=ids, logprobs_N=logprobs, kept=KeptSets.from_spans(spans))


@pytest.fixture(scope="module")
def batch(model_dir):
    return sampled(model_dir)


@pytest.fixture
def setup(model_dir):
    return Setup(model_dir=model_dir, temperature=TEMPERATURE)


@pytest.mark.parametrize("budget", [14, 10_000])
def test_ratio_is_one_at_equal_weights_and_is_not_without_the_kept_sets(setup, batch, budget):
    learner = replace(setup, config={"tokens_per_microbatch": budget}).learner()
    mask = batch.mask_N
    ratio = np.exp(learner.logprobs(batch)[mask].astype(np.float64) - batch.logprobs_N[mask])
    np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
    blind = np.exp(learner.logprobs(msgspec.structs.replace(batch, kept=None))[mask] - batch.logprobs_N[mask])
    truncated = batch.kept.sizes_T[mask] > 0
    assert (blind[truncated] < 0.999).mean() > 0.9
    np.testing.assert_allclose(blind[~truncated], 1.0, atol=1e-5)


def test_gradient_is_that_of_the_renormalised_formula_in_float64(setup, batch):
    learner = setup.learner()
    gradient = learner.forward_backward(batch)
    model = reference.double(setup.model_dir)
    loss = reference.grpo_loss(model, batch, TEMPERATURE)
    loss.backward()
    assert gradient.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradient.metrics["mismatch_abs"] < 1e-5
    assert_close(gradients(learner), {name: p.grad for name, p in model.named_parameters()})


def test_kept_sets_travel_with_their_tokens_through_microbatches(setup, batch):
    whole, cut = (replace(setup, config={"tokens_per_microbatch": size}).learner() for size in (10_000, 14))
    one, many = whole.forward_backward(batch), cut.forward_backward(batch)
    assert_close(gradients(cut), gradients(whole))
    assert many.metrics["entropy"] == pytest.approx(one.metrics["entropy"], rel=1e-5)


def test_entropy_is_that_of_the_whole_distribution(setup, batch):
    with_kept, without = setup.learner(), setup.learner()
    found = with_kept.forward_backward(batch).metrics["entropy"]
    assert found == pytest.approx(
        without.forward_backward(msgspec.structs.replace(batch, kept=None)).metrics["entropy"]
    )


@pytest.mark.parametrize("chunk", [3, 1000])
def test_a_head_that_is_more_than_a_matrix_is_restricted_too(tmp_path, chunk):
    extra = {"final_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"]}
    model = load_model(ModelConfig(path=str(tiny(tmp_path / "gemma2", kind="gemma2", extra=extra))))
    ids = torch.arange(12)
    plan = PackedPlan([12])
    inputs = {"input_ids": ids[None], "position_ids": plan.positions_N[None], PLAN: plan}
    split = split_model(model, inputs)
    assert isinstance(split, SplitModel)
    assert split.matrix() is None
    spans = [sorted({place + 1, 3, 9}) if place % 2 else [] for place in range(11)]
    logprobs, entropy, _ = TokenLogprobs(split, chunk, temperature=1.0, entropy_gradient=True)(
        inputs, torch.arange(11), ids[1:], KeptSets.from_spans(spans)
    )
    logits = model(**inputs).logits[0, :11]
    for place, span in enumerate(spans):
        expected = logits[place, span or slice(None)].log_softmax(-1)[span.index(place + 1) if span else place + 1]
        torch.testing.assert_close(logprobs[place], expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    (gradient,) = torch.autograd.grad(logprobs.sum(), [model.get_input_embeddings().weight])
    assert torch.isfinite(gradient).all()


def spoil(kept: KeptSets, how: str) -> KeptSets:
    place = int(np.flatnonzero(kept.sizes_T)[0])
    start = int(kept.sizes_T[:place].sum())
    ids, sizes = kept.ids_E.copy(), kept.sizes_T.copy()
    match how:
        case "does not hold the sampled id":
            return KeptSets.from_spans([[] if t != place else [15] for t in range(len(kept))])
        case "kept-sets of 3 tokens for":
            return kept[:3]
        case "a kept-set holds id 99":
            ids[start + sizes[place] - 1] = 99
        case "is not ascending":
            ids[start : start + 2] = ids[start : start + 2][::-1]
        case "sizes of the kept-sets sum to":
            sizes[place] += 1
    return KeptSets(ids_E=ids, sizes_T=sizes)


@pytest.mark.parametrize(
    "how",
    [
        "does not hold the sampled id",
        "kept-sets of 3 tokens for",
        "a kept-set holds id 99",
        "is not ascending",
        "sizes of the kept-sets sum to",
    ],
)
def test_kept_sets_that_cannot_be_are_refused_before_anything_changes(setup, batch, how):
    place = int(np.flatnonzero(batch.kept.sizes_T)[0])
    ids = batch.ids_N.copy()
    spans = [span.tolist() for span in batch.kept.spans()]
    spans[place] = [0, 1, 2]
    ids[place] = 1
    batch = msgspec.structs.replace(batch, ids_N=ids, kept=KeptSets.from_spans(spans))
    learner = setup.learner()
    with pytest.raises(RunError, match=how):
        learner.train(msgspec.structs.replace(batch, kept=spoil(batch.kept, how)))
    assert gradients(learner) == {}
    assert learner.version == 0
