"""A critic beside the policy: values before every token, advantages from them, and its own way of learning."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

from headrace.algo import gae
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import CheckpointError, ConfigError, ModelError, RunError
from headrace.base.types.batch import Batch
from headrace.learner.auxiliary.config import CriticConfig
from headrace.learner.auxiliary.critic import HEAD, Critic
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.optim import learning_rate
from headrace.models import LoraConfig, ModelConfig, load_model
from tests.learner import reference
from tests.learner.builders import Setup, assert_close, assert_same_bits, random_batch, tiny, weights

GAMMA, LAM = 0.97, 0.8
LR = 3e-3
STEP = 1e-3
"""Of finite differences."""


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """A learner with a critic."""

    setup: Setup
    critic: dict[str, object]

    def learner(self, advantage: dict[str, object] | None = None, **config: object) -> LearnerCore:
        table = {"kind": "gae", "gamma": GAMMA, "lam": LAM, **(advantage or {})}
        algo = {"bundle": "grpo", "advantage": table}
        settings = {**config, "critic": {"lr": LR, **self.critic}}
        return replace(self.setup, algo=algo, config=settings).learner()


@pytest.fixture
def ppo(model_dir):
    return Ppo(setup=Setup(model_dir=model_dir), critic={})


def rewarded(step: int = 0, seed: int = 0, num_samples: int = 6) -> Batch:
    """Rewards of samples stand where advantages will; every third sample has an observation amid its answer."""
    batch = random_batch(step, num_samples=num_samples, seed=seed)
    mask, ends = batch.mask_N.copy(), batch.lengths_S.cumsum()
    for sample in range(0, num_samples, 3):
        if mask[ends[sample] - 2] and mask[ends[sample] - 3]:
            mask[ends[sample] - 2] = False
    rewards = np.random.default_rng([7, seed, step]).integers(0, 2, num_samples).astype(np.float32)
    return msgspec.structs.replace(batch, mask_N=mask, advantages_N=np.repeat(rewards, batch.lengths_S))


def critic_of(learner: LearnerCore) -> Critic:
    (critic,) = learner._auxiliary
    assert isinstance(critic, Critic)
    return critic


def state(learner: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic_of(learner).state()}


def warmed(learner: LearnerCore, steps: int = 2) -> LearnerCore:
    """With a head that is no longer 0."""
    for _ in range(steps):
        learner.train(rewarded(learner.version))
    return learner


def reference_values(critic: Critic, model_dir, batch: Batch) -> list[torch.Tensor]:
    """For each sample, V (T,) of what stands before each token, in float64, one sample at a time, in the architecture's
    own attention; NaN before the first token."""
    trunk = AutoModel.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager").eval()
    held = dict(critic.model.named_parameters())
    trunk.load_state_dict({name: t.detach().double() for name, t in held.items() if not name.startswith(HEAD)})
    for parameter in trunk.parameters():
        parameter.requires_grad_(True)
    weight, bias = (held[f"{HEAD}.{name}"].detach().double().requires_grad_() for name in ("weight", "bias"))
    values = []
    for part in reference.samples(batch):
        ids = torch.tensor(batch.ids_N[part], dtype=torch.int64)
        hidden = trunk(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        values.append(torch.cat([torch.full((1,), torch.nan), (hidden @ weight[0] + bias)[:-1]]))
    named = {**dict(trunk.named_parameters()), f"{HEAD}.weight": weight, f"{HEAD}.bias": bias}
    reference_values.parameters = named  # what a gradient is asked of
    return values


def reference_step(critic: Critic, model_dir, batch: Batch) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Advantages before they are normalised, and the gradient of ½ mean (V − return)², by definition."""
    values = reference_values(critic, model_dir, batch)
    advantages, loss = np.zeros(batch.num_tokens), torch.zeros((), dtype=torch.float64)
    for part, values_T in zip(reference.samples(batch), values, strict=True):
        places = np.flatnonzero(batch.mask_N[part])
        own = values_T[torch.from_numpy(places)]
        rewards = torch.zeros(len(places), dtype=torch.float64)
        rewards[-1] = float(batch.advantages_N[part][-1])
        credit = gae(rewards, own.detach(), torch.ones(len(places)), GAMMA, LAM)
        advantages[part][places] = credit.advantages.numpy()
        loss = loss + ((own - credit.returns) ** 2).sum() / 2
    (loss / batch.num_loss_tokens).backward()
    return advantages, {name: p.grad for name, p in reference_values.parameters.items()}


def gradient(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in critic.model.named_parameters() if p.grad is not None}


def credited(learner: LearnerCore, batch: Batch) -> np.ndarray:
    """The advantages that the learner trains on; the critic's gradient stays behind."""
    work, _, _ = learner._prepare(batch)
    return critic_of(learner).prepare(work).batch.advantages_N


@pytest.mark.parametrize("budget", [14, 10_000])
def test_advantages_and_gradient_are_those_of_the_definition_in_float64(ppo, budget):
    learner = warmed(ppo.learner({"normalize": False}, tokens_per_microbatch=budget))
    critic, batch = critic_of(learner), rewarded(learner.version, seed=1)
    advantages, expected = reference_step(critic, ppo.setup.model_dir, batch)
    found = credited(learner, batch)
    np.testing.assert_allclose(found, advantages, atol=1e-5)
    assert_close(gradient(critic), expected)


def test_gradient_is_that_of_finite_differences(ppo):
    """Along random directions through all weights of the critic; the architecture's norms compute in float32."""
    learner = warmed(ppo.learner())
    critic, batch = critic_of(learner), rewarded(learner.version, seed=2)
    critic.model.double()
    (micro,) = learner._forward.pack(batch, batch.mask_N)
    values = critic._values(batch, micro).detach()
    returns = torch.from_numpy(critic._estimate(batch, micro, values.numpy()).returns_N)
    credited(learner, batch)
    slopes, parameters = gradient(critic), dict(critic.model.named_parameters())

    @torch.no_grad()
    def loss_at(direction: dict[str, torch.Tensor], distance: float) -> float:
        for name, parameter in parameters.items():
            parameter.add_(direction[name], alpha=distance)
        loss = float(((critic._values(batch, micro) - returns) ** 2).sum() / 2 / batch.num_loss_tokens)
        for name, parameter in parameters.items():
            parameter.sub_(direction[name], alpha=distance)
        return loss

    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        direction = {name: torch.randn(p.shape, generator=rng, dtype=torch.float64) for name, p in parameters.items()}
        direction["embed_tokens.weight"][critic.model.config.pad_token_id] = 0.0  # which torch keeps from learning
        slope = (loss_at(direction, STEP) - loss_at(direction, -STEP)) / (2 * STEP)
        expected = sum(float((slopes[name] * direction[name]).sum()) for name in slopes)
        assert slope == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    "other", [{"tokens_per_microbatch": 14}, {"share_prefixes": True}, {"memory": {"recompute": True}}]
)
def test_a_step_does_not_depend_on_how_the_batch_is_cut(ppo, other):
    one, many = warmed(ppo.learner()), warmed(ppo.learner(**other))
    batch = rewarded(2, seed=3)
    np.testing.assert_allclose(credited(one, batch), credited(many, batch), atol=2e-4)
    assert_close_enough(state(one), state(many))


def assert_close_enough(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if name.startswith("weight"):
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0.02 * LR, msg=name)


def test_advantages_are_normalised_over_the_loss_tokens_of_the_batch(ppo):
    learner = warmed(ppo.learner())
    raw = credited(warmed(ppo.learner({"normalize": False})), rewarded(2))
    found, mask = credited(learner, rewarded(2)), rewarded(2).mask_N
    # the two learners have trained on differently scaled advantages, but their critics on the same returns
    np.testing.assert_allclose(found[mask], (raw[mask] - raw[mask].mean()) / raw[mask].std(), atol=1e-4)
    assert not found[~mask].any()


def test_values_are_those_before_the_token_is_sampled(ppo):
    learner = warmed(ppo.learner())
    batch = rewarded(2)
    (micro,) = learner._forward.pack(batch, batch.mask_N)
    last = batch.lengths_S.cumsum() - 1
    ids = batch.ids_N.copy()
    ids[last] = (ids[last] + 1) % 10
    changed = msgspec.structs.replace(batch, ids_N=ids)
    with torch.no_grad():
        assert torch.equal(critic_of(learner)._values(batch, micro), critic_of(learner)._values(changed, micro))


def test_critic_learns_what_batches_earn(ppo):
    """Rewards that the first token of the prompt decides: everything can be known."""
    learner = ppo.learner(lr=0.0)

    def batch(step: int) -> Batch:
        drawn = rewarded(step, num_samples=24)
        starts = [part.start for part in reference.samples(drawn)]
        rewards = (drawn.ids_N[starts] % 2).astype(np.float32)
        return msgspec.structs.replace(drawn, advantages_N=np.repeat(rewards, drawn.lengths_S))

    reports = [learner.train(batch(step)) for step in range(30)]
    first, last = reports[0].metrics, reports[-1].metrics
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["explained_variance"] > 0.4
    assert last["value_loss"] < 0.6 * first["value_loss"]


def test_policy_stays_as_it_is_while_the_critic_is_warmed_up(ppo):
    learner = replace(ppo, critic={"warmup_steps": 2}).learner()
    before, values = weights(learner), state(learner)
    for _ in range(2):
        assert learner.train(rewarded(learner.version)).metrics["lr"] == 0.0
    assert_same_bits(weights(learner), before)
    assert learner.version == 2
    assert not torch.equal(state(learner)[f"weight|{HEAD}.weight"], values[f"weight|{HEAD}.weight"])
    assert learner.train(rewarded(2)).metrics["lr"] == 1e-2


def test_schedule_of_the_policy_begins_after_the_warm_up():
    plain = LearnerConfig(lr=1.0, warmup_steps=2, schedule="cosine")
    warmed_up = plain.model_copy(update={"critic": CriticConfig(warmup_steps=3)})
    rates = [learning_rate(warmed_up, step, total_steps=13) for step in range(13)]
    assert rates == [0.0] * 3 + [learning_rate(plain, step, total_steps=10) for step in range(10)]


def test_adapters_of_the_policy_leave_the_critic_whole(ppo):
    """All of its weights are trained, beside a policy of which only an adapter is."""
    objective = Objective.build(AlgoConfig.model_validate({"bundle": "grpo", "advantage": {"kind": "gae"}}))
    directory = ppo.setup.model_dir
    learner = LearnerCore(
        load_model(ModelConfig(path=str(directory), lora=LoraConfig(rank=2))),
        LearnerConfig(lr=1e-2, critic=CriticConfig(lr=LR)),
        objective,
        LearnerContext(temperature=1.0, total_steps=10, model_dir=directory, clock=RealClock()),
    )
    before = state(learner)
    warmed(learner)
    assert not any("lora" in name for name in before)
    assert all(not torch.equal(state(learner)[name], tensor) for name, tensor in before.items())


def test_several_updates_learn_more_from_a_batch_and_the_clip_holds_them_back(ppo):
    def moved(**critic: object) -> float:
        learner = replace(ppo, critic=critic).learner()
        batch = rewarded()
        learner.train(batch)
        (micro,) = learner._forward.pack(batch, batch.mask_N)
        with torch.no_grad():
            return float(critic_of(learner)._values(batch, micro).abs().max())

    assert moved(updates=8) > 2 * moved()
    assert moved(updates=8, clip=0.01) < moved(updates=8)


@pytest.mark.parametrize("dtype_masters", ["plain", "offload"])
def test_resumed_critic_goes_on_bit_for_bit(ppo, tmp_path, dtype_masters):
    config = {} if dtype_masters == "plain" else {"memory": {"offload_optimizer": True}}
    learner = warmed(ppo.learner(**config))
    directory = tmp_path / "snapshot"
    directory.mkdir()
    learner.save(directory)
    resumed = ppo.learner(**config)
    resumed.restore(directory)
    assert_same_bits(_floats(state(resumed)), _floats(state(learner)))
    for _ in range(2):
        reports = [one.train(rewarded(one.version)) for one in (learner, resumed)]
        assert _told(reports[0].metrics) == _told(reports[1].metrics)
    assert_same_bits(_floats(state(resumed)), _floats(state(learner)))
    assert_same_bits(weights(resumed), weights(learner))


def _floats(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _told(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def test_critic_begins_with_that_of_an_earlier_run(ppo, tmp_path):
    learner = warmed(ppo.learner())
    learner.save(tmp_path)
    begun = replace(ppo, critic={"path": str(tmp_path)}).learner()
    held, found = state(learner), state(begun)
    names = [name for name in held if name.startswith("weight|")]
    assert_same_bits({name: found[name] for name in names}, {name: held[name] for name in names})
    assert int(found["updates"]) == 0


def test_snapshot_without_a_critic_is_no_snapshot_of_such_a_run(ppo, tmp_path):
    ppo.setup.learner().save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no critic"):
        ppo.learner().restore(tmp_path)


def test_critic_of_another_shape_is_refused(ppo, tmp_path):
    other = tiny(tmp_path / "wide", hidden_size=64)
    run = replace(ppo, critic={"path": str(other)})
    learner = run.learner()
    learner.train(rewarded())
    (tmp_path / "snapshot").mkdir()
    learner.save(tmp_path / "snapshot")
    with pytest.raises(CheckpointError, match=r"is \(.*\), not"):
        ppo.learner().restore(tmp_path / "snapshot")
    with pytest.raises(ModelError, match="critic of another shape"):
        replace(ppo, critic={"path": str(tmp_path / "snapshot")}).learner()


def test_critic_with_fewer_tokens_than_the_policy_is_refused(ppo, tmp_path):
    from headrace.models.tiny import TinySpec, make_tiny

    few = make_tiny(tmp_path / "few", TinySpec(vocab="01", hidden_size=32))
    with pytest.raises(ConfigError, match="knows 5 tokens"):
        replace(ppo, critic={"path": str(few)}).learner()


def test_failing_batch_leaves_policy_and_critic_as_they_were(ppo):
    learner = warmed(ppo.learner())
    values, before = state(learner), weights(learner)
    spoiled = rewarded(2)
    spoiled = msgspec.structs.replace(spoiled, advantages_N=np.full_like(spoiled.advantages_N, 1e30))
    with pytest.raises(RunError, match="gradient norm of the critic"):
        learner.train(spoiled)
    assert not learner.has_gradient
    assert_same_bits(_floats(state(learner)), _floats(values))
    assert_same_bits(weights(learner), before)
    twin = warmed(ppo.learner())
    for one in (learner, twin):
        one.train(rewarded(2))
    assert_same_bits(_floats(state(learner)), _floats(state(twin)))


def test_batch_in_parts_is_refused(ppo):
    learner = ppo.learner()
    with pytest.raises(ConfigError, match="makes its advantages of it"):
        learner.add(rewarded())
    assert not learner.has_gradient


def test_without_gae_there_is_no_critic(ppo):
    assert ppo.setup.learner()._auxiliary == ()
    assert Objective.build(AlgoConfig()).critic is None
