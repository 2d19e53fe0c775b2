"""Recorded routing reaches the experts of exactly its tokens, whatever the packing; impossible routing is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from tests.learner.builders import Setup, assert_close, gradients, random_batch, tiny

EXPERTS, LAYERS = 4, 2
SPEC = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(model_dir=tiny(tmp_path_factory.mktemp("moe") / "model", kind="qwen3_moe", extra=SPEC))


def routed(batch: Batch, seed: int = 0) -> Batch:
    """Two distinct experts for most tokens."""
    rng = np.random.default_rng(seed)
    known = rng.random(batch.num_tokens) < 0.8
    experts = np.argsort(rng.random((int(known.sum()), LAYERS, EXPERTS)), -1)[..., :2].astype(np.uint8)
    return msgspec.structs.replace(batch, routing=Routing(known_T=known, experts_RLK=experts))


@pytest.mark.parametrize("share", [False, True])
def test_routing_travels_with_its_tokens_through_microbatches(setup, share):
    batch = routed(random_batch(num_samples=12))
    sizes = ((10_000, False), (20, share))
    whole, cut = (
        replace(setup, config={"tokens_per_microbatch": size, "share_prefixes": shared}).learner()
        for size, shared in sizes
    )
    one, many = whole.forward_backward(batch), cut.forward_backward(batch)
    assert one.metrics["routing_differs"] > 0.3
    assert many.metrics["routing_differs"] == pytest.approx(one.metrics["routing_differs"])
    assert_close(gradients(cut), gradients(whole))


def test_replay_changes_log_pi_and_its_absence_routes_live(setup):
    learner = setup.learner()
    batch = random_batch()
    live = learner.logprobs(batch)
    assert np.abs(learner.logprobs(routed(batch)) - live)[batch.mask_N].max() > 1e-3
    np.testing.assert_array_equal(learner.logprobs(batch), live)


def spoil(routing: Routing, how: str) -> Routing:
    experts = routing.experts_RLK.copy()
    match how:
        case r"expert 4 of 4":
            experts[3, 1, 0] = EXPERTS
        case "for 2 layers of 2 experts":
            experts = experts[:, :1]
        case "routing of 5 tokens for":
            return routing[:5]
    return Routing(known_T=routing.known_T, experts_RLK=experts)


@pytest.mark.parametrize("how", [r"expert 4 of 4", "for 2 layers of 2 experts", "routing of 5 tokens for"])
def test_routing_that_cannot_be_is_refused_before_anything_changes(setup, how):
    learner, batch = setup.learner(), routed(random_batch())
    with pytest.raises(RunError, match=how):
        learner.train(msgspec.structs.replace(batch, routing=spoil(batch.routing, how)))
    assert gradients(learner) == {}
    assert learner.version == 0


def test_routing_for_a_dense_model_is_refused(model_dir):
    with pytest.raises(RunError, match="the model has none"):
        Setup(model_dir=model_dir).learner().train(routed(random_batch()))
