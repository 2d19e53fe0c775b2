"""A batch that does not fit in memory is refused in words that help, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.algo.objective import Objective
from headrace.algo.reductions import TokenMean
from headrace.base.errors import ConfigError, RunError
from headrace.learner.config import LearnerConfig
from headrace.learner.footprint import levers
from headrace.learner.memory import compute_sizes
from headrace.learner.parallel.mesh import SingleRank
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.models import LoraConfig, ModelConfig, load_model
from tests.learner.builders import Setup, assert_same_bits, gradients, random_batch, weights
from tests.learner.rank_core_cases import Greedy


def test_memory_that_runs_out_costs_the_gradient_only_and_the_batch_can_be_given_again(model_dir) -> None:
    setup = Setup(model_dir=model_dir, config={"tokens_per_microbatch": 20})
    learner = replace(setup, objective=Objective(Greedy(at=2), (), TokenMean())).learner()
    before = weights(learner)
    with pytest.raises(RunError, match="step 0 does not fit in memory") as refused:
        learner.forward_backward(random_batch())
    assert "can't allocate memory" in refused.value.problem
    assert "learner.tokens_per_microbatch = 10 (every sample must fit): about " in refused.value.remedy
    assert "learner.memory.recompute = true: about " in refused.value.remedy
    assert "offload" not in refused.value.remedy  # the device is the host
    assert gradients(learner) == {}
    assert_same_bits(weights(learner), before)
    learner.train(random_batch())
    assert learner.version == 1


def test_levers_that_are_pulled_already_are_not_named(model_dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir)))
    memory = {"recompute": True, "offload_optimizer": True}
    sizes = replace(compute_sizes(model, LearnerConfig.model_validate({"memory": memory})), on_host=False)
    assert [setting.partition(" ")[0] for setting in levers(sizes)] == [
        "learner.tokens_per_microbatch", "learner.memory.offload_activations",
    ]  # fmt: skip


def test_no_lever_is_named_that_an_adapter_cannot_pull(model_dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir), lora=LoraConfig(rank=2)))
    sizes = replace(compute_sizes(model, LearnerConfig()), on_host=False)
    assert [setting.partition(" ")[0] for setting in levers(sizes)] == [
        "learner.tokens_per_microbatch", "learner.memory.recompute", "learner.memory.offload_activations",
        "learner.parallel.data",
    ]  # fmt: skip


def test_moving_the_optimizer_of_an_adapter_is_refused(model_dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir), lora=LoraConfig(rank=2)))
    config = LearnerConfig.model_validate({"memory": {"offload_optimizer": True}})
    with pytest.raises(ConfigError, match=r"offload_optimizer=true: an adapter"):
        ShardOptimizer(model, config, SingleRank(model.device))


@pytest.mark.parametrize("settings", [{"recompute": True}, {"offload_activations": True}])
def test_saving_memory_changes_no_bit_in_one_process(model_dir, settings) -> None:
    plain, saving = (Setup(model_dir=model_dir, config={"memory": memory}).learner() for memory in ({}, settings))
    for learner in (plain, saving):
        learner.train(random_batch())
    assert_same_bits(weights(plain), weights(saving))


def test_muon_in_one_process_is_saved_and_goes_on(model_dir, tmp_path) -> None:
    setup = Setup(model_dir=model_dir, config={"optimizer": {"kind": "muon"}})
    unbroken, resumed = setup.learner(), setup.learner()
    unbroken.train(random_batch())
    unbroken.save(tmp_path)
    resumed.restore(tmp_path)
    for learner in (unbroken, resumed):
        learner.train(random_batch(step=1))
    assert_same_bits(weights(unbroken), weights(resumed))


def test_prefixes_are_not_shared_between_ranks_of_one_context() -> None:
    from headrace.base.config import validate

    with pytest.raises(ConfigError, match=r"share_prefixes=true with learner.parallel.context=2"):
        validate(LearnerConfig, {"share_prefixes": True, "parallel": {"context": 2}})


@pytest.mark.parametrize(
    ("parallel", "words"),
    [({}, "one process has no gradients to sum"), ({"data": 2, "tensor": 2}, r"tensor=2 sums gradients after every")],
)
def test_whole_gradients_are_refused_where_they_cannot_be_summed_once(parallel, words) -> None:
    from headrace.base.config import validate

    with pytest.raises(ConfigError, match=words):
        validate(LearnerConfig, {"memory": {"whole_gradients": True}, "parallel": parallel})


def test_whole_gradients_of_an_adapter_are_refused(model_dir) -> None:
    model = load_model(ModelConfig(path=str(model_dir), lora=LoraConfig(rank=2)))
    config = LearnerConfig.model_validate({"memory": {"whole_gradients": True}, "parallel": {"data": 2}})
    with pytest.raises(ConfigError, match="whole_gradients=true has no effect on an adapter"):
        ShardOptimizer(model, config, SingleRank(model.device))


def test_whole_gradients_are_a_lever(model_dir) -> None:
    settings = {"memory": {"whole_gradients": True}, "parallel": {"data": 4}, "tokens_per_microbatch": 1}
    config = LearnerConfig.model_validate(settings)
    sizes = compute_sizes(load_model(ModelConfig(path=str(model_dir))), config)
    assert levers(sizes)["learner.memory.whole_gradients = false"] == pytest.approx(sizes.trained * 4 * 3 / 4)


@pytest.mark.parametrize("given", [0, 3])
def test_moments_that_find_no_memory_leave_everything_as_it_was(
    model_dir, monkeypatch: pytest.MonkeyPatch, given: int
) -> None:
    """Half of them made, some of one weight's made: whatever comes first."""
    setup = Setup(model_dir=model_dir)
    learner, twin = setup.learner(), setup.learner()
    learner.forward_backward(random_batch())
    before, zeros_like, left = weights(learner), torch.zeros_like, [given]

    def scarce(tensor: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return zeros_like(tensor)

    monkeypatch.setattr(torch, "zeros_like", scarce)
    with pytest.raises(RunError, match=r"step 0 does not fit in memory") as refused:
        learner.optim_step()
    monkeypatch.undo()
    assert "Tried to allocate 2.00 GiB; there is no gradient, weights and optimizer are unchanged" in str(refused.value)
    assert "learner.tokens_per_microbatch" in refused.value.remedy
    assert gradients(learner) == {}
    assert_same_bits(weights(learner), before)
    for one in (learner, twin):
        one.train(random_batch())
    assert_same_bits(weights(learner), weights(twin))


def test_an_update_that_runs_out_of_memory_half_way_says_that_a_snapshot_is_needed(
    model_dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Setup(model_dir=model_dir).learner()
    learner.forward_backward(random_batch())

    def step(lr: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learner._optimizer, "step", step)
    with pytest.raises(RunError, match="resume from the last one") as refused:
        learner.optim_step()
    assert "unchanged" not in str(refused.value)
