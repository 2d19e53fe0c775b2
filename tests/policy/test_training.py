"""The learner's primitives: gradients are those of the formula, they add up, and state survives on the disk."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from headrace.algo.base import LossInputs
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import ModelConfig, load_model
from headrace.policy import Policy, Sample, Tokens
from tests.policy.builders import (
    VOCAB_SIZE,
    assert_close,
    assert_same_bits,
    gradients,
    load,
    made_up,
    numbers_for,
    opened,
    weights,
)


def test_one_step_is_the_learners_own_bit_for_bit(model_dir):
    groups = made_up()
    advantages = numbers_for(groups)
    policy = load(model_dir, loss="grpo")
    core = LearnerCore(
        load_model(ModelConfig(path=str(model_dir))),
        LearnerConfig(lr=1e-2),
        Objective.build(AlgoConfig.model_validate({"loss": "grpo"})),
        LearnerContext(temperature=1.0, total_steps=1, model_dir=model_dir, clock=RealClock()),
    )
    batch = Batch.collate(
        0,
        [
            TrainSample(
                key=EpisodeKey(place, member), spans=(sample.full,), mask_T=sample.full.sampled_T, advantage=credit
            )
            for place, (group, credits) in enumerate(zip(groups, advantages, strict=True))
            for member, (sample, credit) in enumerate(zip(group, credits, strict=True))
        ],
    )
    report = core.train(batch)
    gradient, update = policy.forward_backward(groups, advantages), policy.optim_step()
    assert_same_bits(weights(policy), dict(core.model.named_parameters()))
    assert (gradient.metrics["loss"], update.grad_norm) == (report.metrics["loss"], report.metrics["grad_norm"])
    assert policy.version == core.version == 1


def test_gradients_of_several_calls_add_up(model_dir):
    first, second = made_up(seed=3), made_up(seed=4)
    parts = []
    for groups in (first, second):
        policy = load(model_dir)
        policy.forward_backward(groups, numbers_for(groups))
        parts.append(gradients(policy))
    policy = load(model_dir)
    policy.forward_backward(first, numbers_for(first))
    policy.forward_backward(second, numbers_for(second))
    assert_close(gradients(policy), {name: parts[0][name] + parts[1][name] for name in parts[0]})


def grpo_by_hand(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate with a truncated weight, mean over answers of means over tokens."""
    ratio_N = (inputs.log_pi_N - inputs.log_pi_N.detach()).exp()
    surrogate_N = torch.minimum(ratio_N * inputs.advantages_N, ratio_N.clamp(0.8, 1.2) * inputs.advantages_N)
    weight_N = (inputs.log_pi_N.detach() - inputs.log_mu_N).exp().clamp(max=2.0)
    return -inputs.mean_S(weight_N * surrogate_N).mean(), {"largest_weight": weight_N.max()}


@pytest.mark.parametrize("budget", [8192, 15])
def test_grpo_written_by_hand_has_the_gradient_of_the_built_in_one(model_dir, budget):
    groups = made_up()
    advantages = numbers_for(groups)
    settings = {"learner": {"tokens_per_microbatch": budget}}
    built_in, by_hand = load(model_dir, loss="grpo", **settings), load(model_dir, **settings)
    expected = built_in.forward_backward(groups, advantages)
    found = by_hand.forward_backward_custom(groups, grpo_by_hand, advantages=advantages)
    assert_close(gradients(by_hand), gradients(built_in))
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert found.metrics["largest_weight"] <= 2.0
    assert found.trained_tokens == expected.trained_tokens


def test_custom_loss_may_combine_samples_of_different_micro_batches(model_dir):
    """A loss over pairs, against the same loss with everything in one micro-batch."""

    def pairwise(inputs: LossInputs) -> torch.Tensor:
        total_S = inputs.sum_S(inputs.log_pi_N)
        return -torch.nn.functional.logsigmoid(total_S[0::2] - total_S[1::2]).sum()

    groups = made_up(num_groups=4, size=2)
    found = []
    for budget in (14, 8192):
        policy = load(model_dir, learner={"tokens_per_microbatch": budget})
        policy.forward_backward_custom(groups, pairwise)
        found.append(gradients(policy))
    assert_close(found[0], found[1])


def test_custom_loss_is_given_the_kept_policies(model_dir):
    """After two updates the frozen π_old and the lagged reference are those that were the policy then."""
    groups = made_up()
    kept = {"old": {"kind": "frozen"}, "reference": {"kind": "lagged"}}
    policy = load(model_dir, algo={"loss": "grpo", "old": "kept"}, learner=kept)
    seen: list[LossInputs] = []

    def imitate(inputs: LossInputs) -> torch.Tensor:
        seen.append(inputs)
        return -inputs.log_pi_N.sum()

    for _ in range(3):
        policy.forward_backward_custom(groups, imitate)
        policy.optim_step()
    log_pi = [inputs.log_pi_N.detach() for inputs in seen]
    assert torch.equal(seen[2].log_old_N, log_pi[0])
    assert torch.equal(seen[2].log_ref_N, log_pi[1])
    assert not torch.equal(log_pi[0], log_pi[1])


def test_an_advantage_that_a_teacher_gives_is_refused(model_dir):
    with pytest.raises(ConfigError, match=r"advantage='reverse_kl' is for runs"):
        load(model_dir, algo={"advantage": "reverse_kl"}, learner={"teachers": [{"kind": "ema"}]})


def test_loss_of_one_call_leaves_that_of_the_next_alone(model_dir):
    groups = made_up()
    advantages = numbers_for(groups)
    expected, found = load(model_dir, loss="grpo"), load(model_dir, loss="grpo")
    expected.forward_backward(groups, advantages)
    found.forward_backward(groups, advantages, loss="gspo")
    other = gradients(found)
    found.forward_backward_custom(groups, lambda inputs: inputs.log_pi_N.sum())
    found._learner.model.zero_grad()
    found.forward_backward(groups, advantages)
    assert_same_bits(gradients(found), gradients(expected))
    assert any(not torch.equal(other[name], tensor) for name, tensor in gradients(expected).items())


def test_advantages_may_differ_from_token_to_token(model_dir):
    (group,) = made_up(num_groups=1)
    policy, reference = load(model_dir, loss="reinforce"), load(model_dir)
    credit = [np.linspace(-1, 1, len(sample.tokens)).tolist() for sample in group]
    policy.forward_backward(group, credit, loss={"loss": "reinforce", "correction": "none"})
    flat = torch.tensor([value for row in credit for value in row])

    def by_hand(inputs: LossInputs) -> torch.Tensor:
        log_pi_L, log_mu_L = inputs.log_pi_N[inputs.mask_N], inputs.log_mu_N[inputs.mask_N]
        weight_L = (log_pi_L.detach() - log_mu_L).exp().clamp(max=2.0)
        return -(weight_L * flat * log_pi_L).mean()

    reference.forward_backward_custom(group, by_hand)
    assert_close(gradients(policy), gradients(reference))


def test_sampled_tokens_of_a_prompt_carry_loss_and_given_ones_do_not():
    first = Sample(prompt=Tokens.observed([3, 4]), tokens=Tokens(ids_T=[5], logprobs_T=[-1.0], versions_T=[0]))
    second = Sample(
        prompt=first.full + Tokens.observed([6]), tokens=Tokens(ids_T=[7], logprobs_T=[-1.0], versions_T=[1])
    )
    assert second.mask_F.tolist() == [False, False, True, False, True]


def test_imitating_demonstrations_makes_them_likelier(model_dir):
    policy = load(model_dir)
    shown = policy.demonstrations(["abc", "cab"], ["ddd", "eee"])
    assert [sample.tokens.ids_T[-1] for sample in shown] == [policy.tokenizer.eos_token_id] * 2
    losses = []
    for _ in range(8):
        losses.append(policy.forward_backward(shown, [1.0, 1.0], loss="ce").metrics["loss"])
        policy.optim_step()
    assert losses[-1] < 0.5 * losses[0]


def test_old_samples_need_a_correction_or_an_explicit_word(model_dir):
    policy, groups = load(model_dir), made_up()
    advantages = numbers_for(groups)
    policy.forward_backward(groups, advantages)
    policy.optim_step()
    uncorrected = {"loss": "grpo", "correction": "none"}
    with pytest.raises(ConfigError, match="1 versions old"):
        policy.forward_backward(groups, advantages, loss=uncorrected)
    assert policy.forward_backward(groups, advantages, loss="grpo").metrics["age_mean"] == 1
    policy.forward_backward(groups, advantages, loss={**uncorrected, "allow_uncorrected": True})


def test_nested_rewards_give_nested_advantages(model_dir):
    policy = load(model_dir, algo={"advantage": "rloo"})
    assert policy.advantages(None, [[1, 0], [2, 2, 5]]) == [[1, -1], [-1.5, -1.5, 3]]
    assert policy.advantages("rloo", [1, 0, 2, 2], ["x", "x", "y", "y"]) == [1, -1, 0, 0]


BAD_BATCHES = {
    "there are no samples": lambda groups: ([], []),
    "sample 0 is a str": lambda groups: (["text"], [1.0]),
    "3 groups and 2 advantages": lambda groups: (groups, [[0.0] * 3] * 2),
    "3 samples in group 1 and 2 advantages": lambda groups: (groups, [[0.0] * 3, [0.0] * 2, [0.0] * 3]),
    "which is not a list": lambda groups: (groups, [0.0, 0.0, 0.0]),
    "advantage of sample 1 is not finite": lambda groups: (groups[0], [0.0, float("nan"), 0.0]),
    "advantage of sample 0 is 'much'": lambda groups: (groups[0], ["much", 0.0, 0.0]),
    "advantages of shape": lambda groups: (groups[0], [[1.0] * 30, 0.0, 0.0]),
}


@pytest.mark.parametrize("words", BAD_BATCHES)
def test_what_does_not_fit_together_is_refused_in_words(model_dir, words):
    policy = load(model_dir)
    with pytest.raises(DataError, match=words):
        policy.forward_backward(*BAD_BATCHES[words](made_up()))
    assert not gradients(policy)


def test_samples_of_another_model_or_of_later_weights_are_refused(model_dir):
    policy = load(model_dir)
    foreign = Sample(prompt=Tokens.observed([3]), tokens=Tokens(ids_T=[VOCAB_SIZE], logprobs_T=[-1.0], versions_T=[0]))
    with pytest.raises(DataError, match=f"token {VOCAB_SIZE}, outside this model's vocabulary"):
        policy.forward_backward([foreign], [1.0])
    with pytest.raises(RunError, match="sampled by version 2, and the learner has version 0"):
        policy.forward_backward(made_up(version=2), numbers_for(made_up()))


def test_refused_call_leaves_the_gradient_of_earlier_ones(model_dir):
    policy, groups = load(model_dir), made_up()
    policy.forward_backward(groups, numbers_for(groups))
    before = gradients(policy)
    with pytest.raises(DataError):
        policy.forward_backward(groups, [])
    with pytest.raises(ZeroDivisionError):
        policy.forward_backward_custom(groups, lambda inputs: 1 / 0)
    assert_same_bits(gradients(policy), before)


BAD_LOSSES = {
    "returned float": lambda inputs: 1.0,
    r"returned \(\d+,\)": lambda inputs: inputs.log_pi_N,
    "does not depend on log_pi_N": lambda inputs: inputs.log_pi_N.detach().sum(),
    "no gradient": lambda inputs: torch.ones((), requires_grad=True) * 2,
    "not all finite": lambda inputs: (inputs.log_pi_N * 0).log().sum(),
}


@pytest.mark.parametrize("words", BAD_LOSSES)
def test_function_that_is_no_loss_is_refused_in_words(model_dir, words):
    policy = load(model_dir)
    with pytest.raises(DataError, match=words):
        policy.forward_backward_custom(made_up(), BAD_LOSSES[words])
    assert not gradients(policy)


def test_formula_that_the_learner_cannot_compute_is_refused(model_dir):
    policy, groups = load(model_dir), made_up()
    with pytest.raises(ConfigError, match="reads log_ref"):
        policy.forward_backward(groups, numbers_for(groups), loss={"loss": {"kind": "grpo", "kl_coef": 0.1}})
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        policy.forward_backward(groups, numbers_for(groups), loss="gsp")
    bonus = {"loss": {"kind": "grpo", "entropy_coef": 0.1}}
    with pytest.raises(ConfigError, match="entropies without gradient"):
        policy.forward_backward(groups, numbers_for(groups), loss=bonus)
    assert load(model_dir, algo=bonus).forward_backward(groups, numbers_for(groups)).metrics["entropy"] > 0


def test_step_without_a_gradient_is_refused(model_dir):
    with pytest.raises(RunError, match="has no gradient"):
        load(model_dir).optim_step()


def test_second_thread_inside_the_learner_is_refused(model_dir):
    policy = load(model_dir)
    heard: list[Exception] = []

    def step() -> None:
        try:
            policy.optim_step()
        except RunError as error:
            heard.append(error)

    def meanwhile(inputs: LossInputs) -> torch.Tensor:
        other = threading.Thread(target=step)
        other.start()
        other.join()
        return inputs.log_pi_N.sum()

    policy.forward_backward_custom(made_up(), meanwhile)
    assert "another thread is inside forward_backward_custom" in str(heard[0])
    policy.optim_step()


async def two_steps(policy: Policy) -> list[list[int]]:
    seen = []
    for _ in range(2):
        groups = await policy.sample(["ab", "cd"], n=3, max_new_tokens=5)
        seen += [sample.tokens.ids_T.tolist() for group in groups for sample in group]
        rewards = [[float(sample.text.count("a")) + len(sample.tokens) for sample in group] for group in groups]
        policy.forward_backward(groups, policy.advantages("grpo", rewards))
        policy.optim_step()
        await policy.publish()
    return seen


def test_saved_policy_goes_on_bit_for_bit(model_dir, tmp_path):
    async def through(policy: Policy) -> list[list[int]]:
        await two_steps(policy)
        policy.save(tmp_path / "saved")
        return await two_steps(policy)

    whole, resumed = load(model_dir, loss="grpo", seed=5), None
    expected = opened(whole, through)
    resumed = Policy.load(tmp_path / "saved")
    assert (resumed.version, resumed.config.seed, resumed.config.algo.loss.kind) == (2, 5, "grpo")
    assert opened(resumed, two_steps) == expected
    assert_same_bits(weights(resumed), weights(whole))


def test_settings_given_at_load_are_laid_over_the_saved_ones(model_dir, tmp_path):
    load(model_dir, loss="gspo").save(tmp_path / "saved")
    again = Policy.load(tmp_path / "saved", lr=5e-4)
    assert (again.config.learner.lr, again.config.algo.loss.kind) == (5e-4, "gspo")
    with pytest.raises(ConfigError, match=r"lr and learner\.lr are both given"):
        Policy.load(model_dir, lr=1e-3, learner={"lr": 1e-4})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_lost_by_saving(model_dir, tmp_path, dtype):
    policy, groups = load(model_dir, model={"dtype": dtype}), made_up()
    policy.forward_backward(groups, numbers_for(groups))
    with pytest.raises(RunError, match="a gradient that no step has used"):
        policy.save(tmp_path / "saved")
    policy.optim_step()
    policy.save(tmp_path / "saved")
    with pytest.raises(Exception, match="not empty"):
        policy.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_adapter_is_saved_and_goes_on(model_dir, tmp_path):
    pytest.importorskip("peft")

    def step(policy: Policy) -> None:
        groups = made_up()
        policy.forward_backward(groups, numbers_for(groups))
        policy.optim_step()

    policy = load(model_dir, model={"lora": {"rank": 4}})
    step(policy)
    policy.save(tmp_path / "saved")
    again = Policy.load(tmp_path / "saved")
    step(policy)
    step(again)
    assert_same_bits(weights(again), weights(policy))


def test_schedule_that_decays_needs_an_end(model_dir):
    with pytest.raises(ConfigError, match="total_steps"):
        load(model_dir, learner={"schedule": "cosine"})
    policy, groups = load(model_dir, learner={"schedule": "linear"}, total_steps=2), made_up()
    rates = []
    for _ in range(2):
        policy.forward_backward(groups, numbers_for(groups))
        rates.append(policy.optim_step().lr)
    assert rates == pytest.approx([1e-2, 5e-3])


def test_training_in_a_thread_leaves_the_event_loop_free(model_dir):
    async def run() -> None:
        policy, groups = load(model_dir), made_up()
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(asyncio.to_thread(policy.forward_backward, groups, numbers_for(groups)))
            async with policy:
                await policy.sample(["a"], max_new_tokens=2)
        assert training.result().trained_tokens > 0

    asyncio.run(run())
