"""Weights that are kept: each kind is what its formula says, and lending them leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter

from headrace.base.errors import CheckpointError, ConfigError
from headrace.learner.auxiliary.config import KeptConfig
from headrace.learner.auxiliary.kept import keep
from headrace.learner.core import LearnerCore
from headrace.models import LoraConfig
from headrace.models.lora import add_adapter
from tests.learner import reference
from tests.learner.builders import Setup, assert_same_bits, random_batch, tiny, weights

KINDS = {
    "frozen": {"kind": "frozen"},
    "ema": {"kind": "ema", "decay": 0.8},
    "refreshed": {"kind": "refreshed", "every": 3},
    "lagged": {"kind": "lagged", "versions": 2},
}
KL = {"bundle": "grpo", "loss": {"kind": "grpo", "kl_coef": 0.1}}


def learner_of(model_dir, kept: dict | None, **setup: object) -> LearnerCore:
    config = {"tokens_per_microbatch": 20, "reference": kept}
    return Setup(model_dir=model_dir, config=config, algo=KL, **setup).learner()


def swap_in(learner: LearnerCore) -> dict[str, torch.Tensor]:
    (auxiliary,) = learner._auxiliary
    before = weights(learner)
    with auxiliary._source.computing():
        inside = weights(learner)
    assert_same_bits(weights(learner), before)
    return inside


def expected_weights(kind: str, history: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    now = len(history) - 1
    if kind == "ema":
        return {
            name: sum(
                (0.8 ** (now - v) * (0.2 if v else 1.0)) * history[v][name].double() for v in range(now + 1)
            ).float()
            for name in history[0]
        }
    version = {"frozen": 0, "refreshed": now - now % 3, "lagged": max(0, now - 2)}[kind]
    return history[version]


@pytest.mark.parametrize("device", ["model", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_every_update_the_kept_weights_are_those_of_the_formula(model_dir, kind, device):
    learner = learner_of(model_dir, {**KINDS[kind], "device": device})
    history = [weights(learner)]
    for step in range(5):
        learner.train(random_batch(step))
        history.append(weights(learner))
        found, expected = swap_in(learner), expected_weights(kind, history)
        for name, tensor in found.items():
            if kind == "ema":
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(tensor, expected[name]), (step, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(model_dir, tmp_path, kind):
    unbroken = learner_of(model_dir, KINDS[kind])
    for step in range(4):
        unbroken.train(random_batch(step))
    first = learner_of(model_dir, KINDS[kind])
    for step in range(4):
        first.train(random_batch(step))
    first.save(tmp_path)
    resumed = learner_of(model_dir, KINDS[kind])
    resumed.restore(tmp_path)
    for step in range(4, 6):
        expected, found = unbroken.train(random_batch(step)), resumed.train(random_batch(step))
        assert found.metrics["kl_ref"] == expected.metrics["kl_ref"] > 0
    assert_same_bits(weights(resumed), weights(unbroken))


def test_the_reference_a_snapshot_lacks_is_missed_at_resume(model_dir, tmp_path):
    plain = Setup(model_dir=model_dir).learner()
    plain.train(random_batch(0))
    plain.save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no reference"):
        learner_of(model_dir, None).restore(tmp_path)


def test_a_failure_while_weights_are_lent_gives_them_back(model_dir):
    learner = learner_of(model_dir, KINDS["lagged"])
    learner.train(random_batch(0))
    before = weights(learner)
    (auxiliary,) = learner._auxiliary
    with pytest.raises(MemoryError), auxiliary._source.computing():
        raise MemoryError
    assert_same_bits(weights(learner), before)


def test_an_average_of_bfloat16_weights_adds_up_what_bfloat16_would_lose(tmp_path):
    """Masters move by less than bfloat16 shows; the average is of the masters."""
    learner = learner_of(tiny(tmp_path / "model"), KINDS["frozen"])
    model = learner.model.to(torch.bfloat16)
    from headrace.learner.parallel.mesh import SingleRank
    from headrace.learner.parallel.optim import ShardOptimizer

    optimizer = ShardOptimizer(model, learner._config, SingleRank(model.device))
    kept = keep(TypeAdapter(KeptConfig).validate_python({"kind": "ema", "decay": 0.5}), model, optimizer.trained)
    one = optimizer.trained[0]
    start = one.master.detach().clone()
    assert one.has_own_memory
    with torch.no_grad():
        one.master.add_(1e-5)
    kept.after_update(1)
    live = one.weight.detach().clone()
    state = dict(kept.state())
    torch.testing.assert_close(state[one.name], start + 0.5e-5, rtol=0, atol=1e-7)
    with kept.swap_in():
        assert torch.equal(one.weight, state[one.name].bfloat16())
    assert torch.equal(one.weight, live)
    torch.testing.assert_close(dict(kept.state())[one.name], start + 0.5e-5, rtol=0, atol=1e-7)


def test_a_frozen_adapter_is_the_base_model(model_dir, tmp_path):
    """B begins at 0: the reference costs an adapter and computes what the base does."""
    from headrace.algo.config import AlgoConfig
    from headrace.algo.objective import Objective
    from headrace.base.clock import RealClock
    from headrace.learner.config import LearnerConfig
    from headrace.learner.core import LearnerContext
    from headrace.models import ModelConfig, load_model

    model = load_model(ModelConfig(path=str(model_dir)))
    add_adapter(model, LoraConfig(rank=2, alpha=4), str(model_dir))
    learner = LearnerCore(
        model,
        LearnerConfig(lr=1e-2),
        Objective.build(AlgoConfig.model_validate(KL)),
        LearnerContext(temperature=1.0, total_steps=10, model_dir=model_dir, clock=RealClock()),
    )
    learner.train(random_batch(0))
    assert learner.train(random_batch(1)).metrics["kl_ref"] > 0
    (auxiliary,) = learner._auxiliary
    held = dict(auxiliary.state())
    assert held.keys() == {one.name for one in learner._optimizer.trained}
    with auxiliary._source.computing():
        found = learner.logprobs(random_batch(2))
    batch = random_batch(2)
    expected = reference.logprobs(reference.double(model_dir), batch, 1.0)
    torch.testing.assert_close(torch.from_numpy(found[batch.mask_N]).double(), expected, rtol=1e-5, atol=1e-5)


def test_frozen_weights_of_a_directory_are_those_and_no_snapshot_holds_them(model_dir, tmp_path):
    other = tiny(tmp_path / "other", seed=5)
    learner = learner_of(model_dir, {"kind": "frozen", "path": str(other)})
    assert_same_bits(weights(learner), weights(Setup(model_dir=model_dir).learner()))
    learner.train(random_batch(0))
    assert_same_bits(swap_in(learner), weights(Setup(model_dir=other).learner()))
    (tmp_path / "saved").mkdir()
    learner.save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("reference*"))
    learner_of(model_dir, {"kind": "frozen", "path": str(other)}).restore(tmp_path / "saved")


def test_a_directory_of_another_architecture_is_refused_by_name(model_dir, tmp_path):
    other = tiny(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ConfigError, match=r"learner\.reference\.path=.*wide.*another model") as refusal:
        learner_of(model_dir, {"kind": "frozen", "path": str(other)})
    assert "learner.reference.kind = 'model'" in refusal.value.remedy


def test_another_model_with_the_same_vocabulary_is_a_reference(model_dir, tmp_path):
    other = tiny(tmp_path / "wide", hidden_size=48, num_layers=3, seed=3)
    learner = learner_of(model_dir, {"kind": "model", "path": str(other)})
    batch = random_batch(0)
    found = learner.forward_backward(batch).metrics["kl_ref"]
    pi = reference.logprobs(reference.double(model_dir), batch, 1.0)
    ref = reference.logprobs(reference.double(other), batch, 1.0)
    x = (ref - pi).detach().clamp(-20, 20)
    assert found == pytest.approx(float((x.expm1() - x).mean()), rel=1e-4)


def test_another_vocabulary_is_refused_by_the_first_token_that_differs(model_dir, tmp_path):
    from headrace.models.tiny import TinySpec, make_tiny

    other = make_tiny(tmp_path / "strange", TinySpec(vocab="9876543210+=?", hidden_size=32))
    with pytest.raises(ConfigError, match=r"another vocabulary .* is .* here and .* there"):
        learner_of(model_dir, {"kind": "model", "path": str(other)})


def double_kl_loss(model, frozen, batch, coef: float):
    """GRPO's reference with coef · k3 on every token of the mask, in float64."""
    total = reference.grpo_loss(model, batch, 1.0)
    for part in reference.samples(batch):
        rows = torch.tensor(batch.mask_N[part])[1:]
        ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)[1:][rows]
        pi, ref = (
            reference.log_softmax(one, batch, part, 1.0)[rows].gather(1, ids[:, None])[:, 0] for one in (model, frozen)
        )
        x = (ref.detach() - pi).clamp(-20, 20)
        total = total + coef * (x.expm1() - x).mean() / len(batch.lengths_S)
    return total


@pytest.mark.parametrize("budget", [15, 200])
def test_loss_and_gradient_with_a_penalty_are_those_of_an_independent_computation(model_dir, tmp_path, budget):
    setup = Setup(model_dir=model_dir, algo=KL, config={"tokens_per_microbatch": budget})
    learner = setup.learner()
    learner.train(random_batch(0))
    (tmp_path / "one").mkdir()
    learner.save(tmp_path / "one")
    batch = random_batch(1)
    found = learner.forward_backward(batch)
    model, frozen = reference.double(tmp_path / "one"), reference.double(model_dir)
    loss = double_kl_loss(model, frozen, batch, 0.1)
    loss.backward()
    assert found.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    for name, parameter in learner.model.named_parameters():
        expected = dict(model.named_parameters())[name].grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=0, atol=2e-5 * scale, msg=name)


def test_a_batch_in_parts_has_the_penalty_of_the_whole(model_dir):
    from tests.learner.test_parts import part

    whole, parts = learner_of(model_dir, None), learner_of(model_dir, None)
    for learner in (whole, parts):
        learner.train(random_batch(0))
    batch = random_batch(1)
    expected = whole.forward_backward(batch).metrics
    parts.add(part(batch, [0]))
    parts.add(part(batch, [1]))
    found = parts.finish().metrics
    assert found["kl_ref"] == pytest.approx(expected["kl_ref"], rel=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)


def test_a_reference_without_a_penalty_is_measured_and_changes_nothing(model_dir):
    plain = Setup(model_dir=model_dir).learner()
    watched = Setup(model_dir=model_dir, config={"reference": {"kind": "frozen"}}).learner()
    for step in range(2):
        plain.train(random_batch(step))
        metrics = watched.train(random_batch(step)).metrics
    assert metrics["kl_ref"] > 0
    assert_same_bits(weights(watched), weights(plain))


def test_kept_old_weights_are_what_the_ratio_is_taken_to(model_dir):
    """With a frozen π_old the clip sees how far π has gone from version 0."""
    algo = {"loss": {"kind": "grpo"}, "old": "kept", "correction": "none"}
    setup = Setup(model_dir=model_dir, algo=algo, config={"old": {"kind": "frozen"}, "lr": 3e-2})
    learner = setup.learner()
    assert learner.train(random_batch(0)).metrics["clip_frac"] == 0
    batch = random_batch(1)
    first = Setup(model_dir=model_dir).learner().logprobs(batch)
    now = learner.logprobs(batch)
    ratio = torch.tensor(now - first).exp()[torch.tensor(batch.mask_N)]
    advantage = torch.tensor(batch.advantages_N[batch.mask_N])
    clipped = ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    assert learner.train(batch).metrics["clip_frac"] == pytest.approx(float(clipped.float().mean()), abs=1e-6)
    assert clipped.any()


def test_an_objective_that_reads_what_nobody_keeps_is_refused(model_dir):
    with pytest.raises(ConfigError, match="log_old of kept weights") as refusal:
        Setup(model_dir=model_dir, algo={"loss": "grpo", "old": "kept"}).learner()
    assert "learner.old" in refusal.value.remedy
    with pytest.raises(ConfigError, match="top_k") as refusal:
        replace(Setup(model_dir=model_dir), algo={"loss": "distill"}).learner()
    assert "learner.teachers" in refusal.value.remedy
