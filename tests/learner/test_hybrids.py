"""The learner's suites over a model whose first layer keeps a state, over the text of a multimodal checkpoint, and over
position embeddings that are scaled by length: packing, shared prefixes, gradients, updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.learner.builders import Setup, assert_close, gradients, random_batch
from tests.learner.test_core import (  # noqa: F401 - tests, which run here with the setup below
    test_a_step_tells_log_pi_of_every_token_that_carried_loss,
    test_entropy_bonus_has_the_gradient_of_the_entropy,
    test_gradients_of_two_calls_add_up,
    test_packed_gradient_is_the_formulas_one_sample_at_a_time_in_float64,
    test_result_does_not_depend_on_the_microbatches,
    test_same_batches_give_the_same_weights_bit_for_bit,
    test_training_moves_the_weights_and_raises_the_probability_of_what_was_good,
)
from tests.learner.trees import forest
from tests.models.families import family
from tests.models.kinds import tiny

NAMES = ("qwen3_5_text", "gemma3", "longrope")


@pytest.fixture(scope="module", params=NAMES)
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return family(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture
def setup(directory: Path) -> Setup:
    return Setup(model_dir=directory)


@pytest.mark.parametrize("budget", [45, 10_000])
def test_gradient_of_trees_is_that_of_whole_samples(setup: Setup, budget: int) -> None:
    shared, apart = (
        replace(setup, config={"tokens_per_microbatch": budget, "share_prefixes": share}).learner()
        for share in (True, False)
    )
    batch = forest()
    np.testing.assert_allclose(shared.logprobs(batch), apart.logprobs(batch), atol=1e-5)
    shared.forward_backward(batch)
    apart.forward_backward(batch)
    assert_close(gradients(shared), gradients(apart), within=1e-4)  # a delta rule in float64 agrees to 13 digits


def test_recomputed_layers_give_the_same_gradient(setup: Setup) -> None:
    once, again = setup.learner(), replace(setup, config={"memory": {"recompute": True}}).learner()
    batch = random_batch()
    once.forward_backward(batch)
    again.forward_backward(batch)
    assert_close(gradients(again), gradients(once))


def test_a_head_that_returns_another_dtype_than_its_weights_is_trained(tmp_path: Path) -> None:
    setup = Setup(model_dir=tiny(tmp_path / "model", "nemotron_h"), dtype="bfloat16")  # its logits are float32
    assert np.isfinite(setup.learner().train(random_batch()).metrics["loss"])
