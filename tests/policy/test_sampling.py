"""Samples are honest about what made them, and new weights reach the engine while it samples."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError, DataError, ModelError, RequestError, RunError
from headrace.base.types.episode import StopReason
from headrace.models.weights import correction_biases
from headrace.policy import Interrupt, Policy, Sample, Tokens
from tests.learner.test_parallel import KINDS
from tests.policy.builders import get_model, gradients, load, made_up, numbers_for, opened, tiny


def move(policy: Policy) -> None:
    """One step of the learner, somewhere."""
    groups = made_up()
    policy.forward_backward(groups, numbers_for(groups))
    policy.optim_step()


def test_tiny_task_is_learned(model_dir):
    """Answers full of the letter a."""

    async def learn(policy: Policy) -> list[float]:
        means = []
        for _ in range(15):
            groups = await policy.sample(["ab", "cd", "ef", "gh"], n=8, max_new_tokens=6)
            rewards = [[sample.text.count("a") / 6 for sample in group] for group in groups]
            means.append(float(np.mean(rewards)))
            policy.forward_backward(groups, policy.advantages("grpo", rewards))
            policy.optim_step()
            await policy.publish()
        return means

    means = opened(load(model_dir, loss="grpo"), learn)
    assert np.mean(means[:3]) < 0.25
    assert np.mean(means[-3:]) > 0.6


def test_samples_are_nested_as_asked_and_say_what_made_them(model_dir):
    async def ask(policy: Policy) -> list[list[Sample]]:
        return await policy.sample(["ab", "c"], n=3, max_new_tokens=4)

    policy = load(model_dir)
    groups = opened(policy, ask)
    assert [len(group) for group in groups] == [3, 3]
    assert {sample.group for sample in groups[0]} == {0}
    assert {sample.group for sample in groups[1]} == {1}
    for sample in groups[0] + groups[1]:
        assert sample.tokens.versions_T.tolist() == [0] * len(sample.tokens)
        assert (sample.tokens.logprobs_T < 0).all()
        assert sample.text == policy.tokenizer.decode(sample.tokens.ids_T, skip_special_tokens=True)
        ended = sample.tokens.ids_T[-1] == policy.tokenizer.eos_token_id
        assert sample.stop_reason is (StopReason.STOP if ended else StopReason.LENGTH)


def test_seed_repeats_a_call_and_no_seed_draws_anew(model_dir):
    async def ask(policy: Policy) -> list[list[list[int]]]:
        calls = [{"seed": 3}, {"seed": 3}, {"seed": 4}, {}, {}]
        asked = [await policy.sample(["ab"], n=4, max_new_tokens=8, **call) for call in calls]
        return [[sample.tokens.ids_T.tolist() for sample in group] for (group,) in asked]

    same, again, other, fresh, fresher = opened(load(model_dir), ask)
    assert same == again
    assert len({str(drawn) for drawn in (same, other, fresh, fresher)}) == 4
    assert len({str(ids) for ids in same}) == 4


def test_publish_changes_the_version_that_tokens_carry(model_dir):
    async def run(policy: Policy) -> None:
        assert (policy.version, policy.engine_version) == (0, 0)
        move(policy)
        assert (policy.version, policy.engine_version) == (1, 0)
        ((stale,),) = await policy.sample(["ab"], max_new_tokens=3)
        report = await policy.publish()
        assert (report.version, policy.engine_version) == (1, 1)
        ((fresh,),) = await policy.sample(["ab"], max_new_tokens=3)
        assert set(stale.tokens.versions_T.tolist()) == {0}
        assert set(fresh.tokens.versions_T.tolist()) == {1}
        metrics = policy.forward_backward([stale, fresh], [1.0, -1.0]).metrics
        assert (metrics["age_max"], metrics["mismatch_abs"] < 1e-5) == (1, True)

    policy = load(model_dir)
    assert policy.engine_version == -1
    opened(policy, run)


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.DRAIN, Interrupt.STREAM])
def test_sequences_go_on_while_weights_are_exchanged(model_dir, mode):
    async def run(policy: Policy) -> None:
        move(policy)
        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(policy.sample(["ab"], n=2, max_new_tokens=400, stop_ids=()))
            for _ in range(6):  # each is answered between two steps of the engine
                await policy.score([Tokens.observed([3, 4])])
            await policy.publish(mode)
        for sample in long.result()[0]:
            versions = sample.tokens.versions_T
            assert len(versions) == 400
            expected = {"inflight": {0, 1}, "drain": {0}, "stream": {0, -2, 1}}[mode]
            assert set(versions.tolist()) == expected
            assert (np.diff(np.where(versions == -2, 0, versions)) >= 0).all()
        policy.forward_backward(long.result(), [[1.0, -1.0]])
        move(policy)
        await policy.publish()
        ((sample,),) = await policy.sample(["ab"], max_new_tokens=2)
        assert set(sample.tokens.versions_T.tolist()) == {policy.version}

    opened(load(model_dir), run)


def test_weights_that_are_published_are_the_learners(model_dir):
    """The engine scores what the learner computes, version after version."""

    async def run(policy: Policy) -> None:
        for _ in range(3):
            move(policy)
            await policy.publish()
            (group,) = await policy.sample(["abc"], n=2, max_new_tokens=6)
            seen = {}

            def look(inputs, seen=seen):
                seen["log_pi"] = inputs.log_pi_N[inputs.mask_N].tolist()
                return inputs.log_pi_N.sum()

            policy.forward_backward_custom(group, look)
            policy._learner.model.zero_grad()
            scored = await policy.score(group)
            recorded = np.concatenate([sample.tokens.logprobs_T for sample in group])
            again = np.concatenate([row[len(one.prompt) :] for row, one in zip(scored, group, strict=True)])
            np.testing.assert_allclose(seen["log_pi"], recorded, atol=1e-4)
            np.testing.assert_allclose(again, recorded, atol=1e-4)

    opened(load(model_dir), run)


def test_adapter_is_published_by_itself(model_dir):
    pytest.importorskip("peft")

    async def run(policy: Policy) -> None:
        before = await policy.score([Tokens.observed([3, 4, 5])])
        for _ in range(2):
            move(policy)
            await policy.publish()
        assert not np.allclose(before, await policy.score([Tokens.observed([3, 4, 5])]))
        (group,) = await policy.sample(["abc"], n=2, max_new_tokens=6)
        assert policy.forward_backward(group, [1.0, -1.0]).metrics["mismatch_abs"] < 1e-5

    opened(load(model_dir, model={"lora": {"rank": 4}}), run)


def test_truncated_sampling_brings_its_kept_sets_to_the_learner(model_dir):
    async def run(policy: Policy) -> None:
        (group,) = await policy.sample(["abc"], n=4, max_new_tokens=6, top_k=3)
        assert all(sample.tokens.kept is not None for sample in group)
        metrics = policy.forward_backward(group, [1.0, -1.0, 0.5, 0.0]).metrics
        assert metrics["mismatch_abs"] < 1e-5

    opened(load(model_dir), run)


@pytest.mark.parametrize("keep", [True, False])
def test_what_the_learner_shall_not_replay_is_not_recorded(tmp_path, keep):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    directory = tiny(tmp_path / "mixture", kind="qwen3_moe", extra=extra)

    async def run(policy: Policy) -> None:
        ((sample,),) = await policy.sample(["abc"], max_new_tokens=3, top_k=3)
        assert (sample.tokens.kept is not None, sample.tokens.routing is not None) == (keep, keep)

    opened(load(directory, learner={"keep_routing": keep, "keep_sampling_mask": keep}), run)


def test_mixture_whose_routing_cannot_be_replayed_is_refused_unless_that_is_wished(tmp_path):
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2}
    directory = tiny(tmp_path / "mixture", kind="phimoe", extra=extra)
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM .*\n.*learner\.keep_routing = false"):
        load(directory)

    async def run(policy: Policy) -> None:
        (group,) = await policy.sample(["abc"], n=2, max_new_tokens=3)
        policy.forward_backward(group, [1.0, -1.0])

    opened(load(directory, learner={"keep_routing": False}), run)


def test_experts_that_sampled_are_those_that_are_trained(tmp_path):
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    directory = tiny(tmp_path / "mixture", kind="qwen3_moe", extra=extra)

    async def run(policy: Policy) -> None:
        (group,) = await policy.sample(["abc"], n=3, max_new_tokens=6)
        assert all(sample.full.routing is not None for sample in group)
        metrics = policy.forward_backward(group, [1.0, -1.0, 0.5]).metrics
        assert metrics["routing_differs"] == 0
        for scored, sample in zip(await policy.score(group), group, strict=True):
            np.testing.assert_allclose(scored[len(sample.prompt) :], sample.tokens.logprobs_T, atol=1e-4)
        (fork,) = await policy.fork(group[0], at=2, max_new_tokens=3)
        assert len(fork.full.routing) == len(fork.full)
        (again,) = await policy.sample([group[0].full + Tokens.observed([3])], max_new_tokens=3)
        policy.forward_backward(again, [1.0])

    opened(load(directory), run)


def test_fork_begins_with_its_parents_first_tokens(model_dir):
    async def run(policy: Policy) -> None:
        ((parent,),) = await policy.sample(["ab"], max_new_tokens=12, stop_ids=())
        forks = await policy.fork(parent, at=5, n=3, max_new_tokens=4, stop_ids=())
        for fork in forks:
            assert fork.prompt.ids_T.tolist() == parent.full.ids_T[:7].tolist()
            assert len(fork.tokens) == 4
            assert fork.mask_F.sum() == 4
            assert fork.group == parent.group
        assert len({str(fork.tokens.ids_T) for fork in forks}) > 1
        assert policy.forward_backward([parent, *forks], [0.0, 1.0, -1.0, 0.5]).trained_tokens == 12 + 3 * 4
        with pytest.raises(RequestError, match="at=13"):
            await policy.fork(parent, at=13)
        with pytest.raises(DataError, match="not sampled by this policy"):
            await policy.fork(made_up()[0][0], at=1)

    opened(load(model_dir), run)


def test_sample_of_another_policy_is_not_forked(model_dir):
    """Its number may be that of another sequence here."""

    async def run(policy: Policy) -> None:
        ((foreign,),) = await policy.sample(["ab"], max_new_tokens=3)
        async with load(model_dir) as other:
            await other.sample(["cd"], max_new_tokens=3)
            with pytest.raises(DataError, match="not sampled by this policy"):
                await other.fork(foreign, at=1)

    opened(load(model_dir), run)


def test_conversation_trains_every_turn_token_for_token(model_dir):
    async def run(policy: Policy) -> None:
        ((first,),) = await policy.sample(["ab"], max_new_tokens=5)
        ((second,),) = await policy.sample([first.full + Tokens.observed([3, 4])], max_new_tokens=5)
        gradient = policy.forward_backward([second], [1.0])
        assert gradient.trained_tokens == len(first.tokens) + len(second.tokens)
        assert gradient.metrics["mismatch_abs"] < 1e-5

    opened(load(model_dir), run)


def test_samples_of_another_temperature_are_not_trained(model_dir):
    async def run(policy: Policy) -> None:
        (greedy,) = await policy.sample(["ab"], temperature=0, max_new_tokens=3)
        with pytest.raises(RunError, match="sampled at temperature 0"):
            policy.forward_backward(greedy, [1.0])
        (usual,) = await policy.sample(["ab"], max_new_tokens=3)
        assert usual[0].sampling.temperature == 0.7
        assert policy.forward_backward(usual, [1.0]).metrics["mismatch_abs"] < 1e-5

    opened(load(model_dir, engine={"temperature": 0.7}), run)


def test_answer_ends_with_a_text(model_dir):
    async def run(policy: Policy) -> None:
        (group,) = await policy.sample(["ab"], n=8, max_new_tokens=60, stop=("h",), stop_ids=())
        ended = [sample for sample in group if sample.stop_reason is StopReason.STOP]
        assert ended
        assert all(sample.text.endswith("h") and sample.text.count("h") == 1 for sample in ended)

    opened(load(model_dir), run)


BAD_CALLS = {
    "give a list of prompts": (DataError, {"prompts": "ab"}),
    "there are no prompts": (DataError, {"prompts": []}),
    r"prompts\[1\], row 1: the prompt is empty": (DataError, {"prompts": ["ab", ""]}),
    r"prompts\[0\] is \['ab'": (DataError, {"prompts": [["ab", "cd"]]}),
    "no chat template": (DataError, {"prompts": [[{"role": "user", "content": "a"}]]}),
    "n=0 answers": (ConfigError, {"n": 0}),
    "did you mean 'temperature'": (ConfigError, {"temprature": 1.0}),
    "Expected `float`": (ConfigError, {"top_p": "much"}),
    "top_p=2.0": (RequestError, {"top_p": 2.0}),
    "exceed max_context": (RequestError, {"max_new_tokens": 10_000}),
    "outside the vocabulary": (RequestError, {"prompts": [[3, 400]]}),
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_call_that_cannot_be_served_is_refused_in_words(model_dir, words):
    kind, call = BAD_CALLS[words]

    async def run(policy: Policy) -> None:
        with pytest.raises(kind, match=words):
            await policy.sample(**{"prompts": ["ab"], **call})
        assert len(await policy.sample(["ab"], max_new_tokens=1)) == 1

    opened(load(model_dir), run)


def test_nothing_new_cannot_be_published(model_dir):
    async def run(policy: Policy) -> None:
        with pytest.raises(RunError, match="version 0 is published already"):
            await policy.publish()
        with pytest.raises(ConfigError, match="mode='later'"):
            await policy.publish("later")

    opened(load(model_dir), run)


def test_policy_samples_only_while_it_is_open(model_dir):
    policy = load(model_dir)
    with pytest.raises(RunError, match="sample: the policy is not open"):
        asyncio.run(policy.sample(["ab"]))
    opened(policy, lambda policy: policy.sample(["ab"], max_new_tokens=1))
    with pytest.raises(RunError, match="publish: the policy has been closed"):
        asyncio.run(policy.publish())
    with pytest.raises(RunError, match="was opened before"):
        asyncio.run(policy.start())
    move(policy)
    assert policy.version == 1


def test_other_event_loop_is_refused(model_dir):
    async def run(policy: Policy) -> None:
        with pytest.raises(RunError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(policy.sample(["ab"])))

    opened(load(model_dir), run)


def test_closing_tells_whoever_waits_for_samples(model_dir):
    async def run() -> None:
        policy = load(model_dir)
        await policy.start()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_refused(policy))
            await asyncio.sleep(0)
            await policy.score([Tokens.observed([3, 4])])
            await policy.close()
        assert "was closed" in waiting.result()

    asyncio.run(run())


async def _refused(policy: Policy) -> str:
    with pytest.raises(RunError) as caught:
        await policy.sample(["ab"], n=4, max_new_tokens=500, stop_ids=())
    return str(caught.value)


def test_gap_of_a_publication_is_short(model_dir):
    async def run(policy: Policy) -> None:
        gaps = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(policy.sample(["ab"], n=8, max_new_tokens=300, stop_ids=()))
            for _ in range(6):
                move(policy)
                gaps.append((await policy.publish()).gap_s)
        assert min(gaps) < 1e-3

    opened(load(model_dir), run)


def test_samples_without_any_finite_logprob_teach_nothing(model_dir):
    policy = load(model_dir)
    broken = Sample(prompt=Tokens.observed([3]), tokens=Tokens(ids_T=[4], logprobs_T=[math.nan], versions_T=[0]))
    with pytest.raises(RunError, match="no token of the batch"):
        policy.forward_backward([broken], [1.0])
    assert not gradients(policy)


def test_engine_chooses_experts_by_the_biases_that_the_learner_has_moved(tmp_path):
    async def ask(policy: Policy) -> Sample:
        for seed in range(3):
            groups = made_up(seed=seed)
            policy.forward_backward(groups, numbers_for(groups))
            policy.optim_step()
        await policy.publish()
        return (await policy.sample(["abcd"], n=1, max_new_tokens=40))[0][0]

    directory = tiny(tmp_path / "model", max_positions=64, **KINDS["biased"])
    policy = load(directory, lr=1e-4, learner={"mixture": {"bias_rate": 0.5}})
    sample = opened(policy, ask)
    found = logprobs_by_transformers(policy, sample)
    for bias in correction_biases(get_model(policy)).values():
        bias.zero_()
    unmoved = logprobs_by_transformers(policy, sample)
    np.testing.assert_allclose(sample.tokens.logprobs_T, found, atol=2e-5)
    assert np.abs(found - unmoved).max() > 1e-3


@torch.no_grad()
def logprobs_by_transformers(policy: Policy, sample: Sample) -> np.ndarray:
    ids = torch.from_numpy(sample.full.ids_T.astype(np.int64))
    model = get_model(policy)
    model.set_attn_implementation("sdpa")
    log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return log_p[:-1].gather(1, ids[1:, None])[-len(sample.tokens) :, 0].numpy()


def test_what_is_no_flat_list_of_samples_or_text_is_refused_by_name(model_dir):
    async def ask(policy: Policy) -> None:
        groups = await policy.sample(["ab"], n=2, max_new_tokens=2)
        with pytest.raises(DataError, match=r"score\(\) got a list in place of a sample"):
            await policy.score(groups)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="an answer is a list"):
            policy.demonstrations(["ab"], [[1, 2]])  # type: ignore[list-item]

    opened(load(model_dir), ask)
