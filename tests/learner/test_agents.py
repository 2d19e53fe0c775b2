"""Several agents train adapters of their own in one learner: each as if it were alone, weighed by the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.algo.base import BatchLayout, Shares
from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.errors import ModelError, RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.tokens import Tokens
from headrace.learner.checkpoint import begin
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.config import AGENTS
from headrace.models.lora import DEFAULT, Switch, read_lora_config
from headrace.models.weights import parse_adapter_name, weight_tensors
from tests.learner.builders import VOCAB_SIZE, assert_same_bits, random_batch, tiny

AGENT_NAMES = ("proposer", "solver")


class Fixed:
    """Weighs a token the same whatever is beside it, so that a part of a batch can be held against all of it."""

    def __call__(self, layout: BatchLayout) -> Shares:
        return Shares(weights_N=layout.mask_N.float(), mass=torch.tensor(24.0))


@dataclass(frozen=True)
class Build:
    """Makes learners of adapters on one base."""

    model_dir: Path

    def __call__(self, agents: tuple[str, ...] = (), algo: dict[str, Any] | None = None, **config: Any) -> LearnerCore:
        lora = LoraConfig(rank=4, agents=agents)
        objective = Objective.build(AlgoConfig.model_validate(algo or {"bundle": "grpo"}))
        settings = {"lr": 1e-2, "weight_decay": 0.1, "tokens_per_microbatch": 20, "max_grad_norm": 0.05, **config}
        return LearnerCore(
            load_model(ModelConfig(path=str(self.model_dir), lora=lora)),
            LearnerConfig(**settings),
            objective if algo and "reduction" in algo else replace(objective, reduction=Fixed()),
            LearnerContext(temperature=1.0, total_steps=6, model_dir=self.model_dir, clock=RealClock()),
        )


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tiny(tmp_path / "model"))


def of_roles(step: int, *roles: str, seed: int = 0) -> Batch:
    """A batch of whose samples one is of each role in turn."""
    batch = random_batch(step, seed=seed)
    owners_S = np.arange(len(batch.lengths_S)) % len(roles)
    places = np.array([("", *AGENT_NAMES).index(role) for role in roles], np.int32)
    return msgspec.structs.replace(
        batch, agents=("", *AGENT_NAMES), agents_N=np.repeat(places[owners_S], batch.lengths_S)
    )


def alone(batch: Batch, role: str) -> Batch:
    """The tokens of ``role``, for a learner that knows no others."""
    own_N = batch.agents_N == batch.agents.index(role)
    return msgspec.structs.replace(batch, mask_N=batch.mask_N & own_N, agents=("",), agents_N=None)


def adapter(learner: LearnerCore, agent: str = "") -> dict[str, torch.Tensor]:
    """Its tensors, under names that do not say whose they are."""
    name = agent or DEFAULT
    tensors = dict(learner.model.named_parameters())
    return {
        key.replace(f".{name}.", "."): tensor.detach().clone()
        for key, tensor in tensors.items()
        if "lora_" in key and parse_adapter_name(key) == name
    }


def everything(learner: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weight_tensors(learner.model).items()}


@pytest.mark.parametrize("shared", [False, True])
def test_two_agents_in_one_learner_are_bit_for_bit_two_learners_of_one_each(build: Build, shared: bool) -> None:
    both = build(AGENT_NAMES, share_prefixes=shared)
    each = {name: build(share_prefixes=shared) for name in AGENT_NAMES}
    for step in range(3):
        batch = of_roles(step, *AGENT_NAMES)
        report = both.train(batch)
        parts = {name: learner.train(alone(batch, name)) for name, learner in each.items()}
        for name, part in parts.items():
            assert report.metrics[f"agent/{name}/grad_norm"] == part.metrics["grad_norm"] > 0.05
        assert report.metrics["loss"] == pytest.approx(sum(part.metrics["loss"] for part in parts.values()), rel=1e-5)
        assert report.trained_tokens == sum(part.trained_tokens for part in parts.values())
    for name, learner in each.items():
        assert_same_bits(adapter(both, name), adapter(learner))
    assert_same_bits(adapter(both), adapter(build()))
    assert not torch.equal(*(adapter(both, name)["model.layers.0.mlp.down_proj.lora_B.weight"] for name in AGENT_NAMES))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "prompt_mean"])
def test_a_token_weighs_what_it_weighs_in_the_whole_batch(build: Build, reduction: str) -> None:
    """While all adapters compute the same, their gradients add up to that of one adapter for everybody."""
    algo = {"bundle": "grpo", "reduction": reduction}
    batch = mixed(0)
    both, one = build(AGENT_NAMES, algo), build((), algo)
    both.forward_backward(batch)
    one.forward_backward(msgspec.structs.replace(batch, agents=("",), agents_N=None))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in both.model.named_parameters():
        if tensor.grad is not None:
            key = name.replace(f".{parse_adapter_name(name)}.", ".")
            found[key] = found.get(key, 0) + tensor.grad
    for name, tensor in one.model.named_parameters():
        if tensor.grad is not None:
            torch.testing.assert_close(found[name.replace(".default.", ".")], tensor.grad, rtol=1e-4, atol=1e-7)


def mixed(step: int) -> Batch:
    """Conversations in which the policy and two agents answer in turn."""
    rng = np.random.default_rng(step)
    samples = []
    for place in range(4):
        roles = [("task", 3), ("proposer", 4), ("solver", 3), ("user", 1), ("proposer", 2), ("policy", 2)]
        asked = np.concatenate([np.full(count, role in ("task", "user")) for role, count in roles])
        count = len(asked)
        samples.append(
            TrainSample(
                key=EpisodeKey(place // 2, place % 2),
                spans=(
                    Tokens(
                        ids_T=rng.integers(0, VOCAB_SIZE, count).astype(np.int32),
                        logprobs_T=np.where(asked, 0, -rng.uniform(0.5, 2, count)).astype(np.float32),
                        versions_T=np.where(asked, -1, step).astype(np.int32),
                    ),
                ),
                mask_T=~asked,
                advantage=float(rng.normal()),
                roles=tuple(roles),
            )
        )
    return Batch.collate(step, samples, AGENT_NAMES)


def test_answers_of_several_agents_in_one_conversation_train_each_their_own(build: Build) -> None:
    both, each = build(AGENT_NAMES), {name: build() for name in ("", *AGENT_NAMES)}
    for step in range(2):
        batch = mixed(step)
        report = both.train(batch)
        assert report.trained_tokens == int(batch.mask_N.sum()) == 44
        assert np.isfinite(report.log_pi_N[batch.mask_N]).all()
        losses = []
        for name, learner in each.items():
            part = learner.train(alone(batch, name))
            losses.append(part.metrics["loss"])
            own_N = batch.mask_N & (batch.agents_N == batch.agents.index(name))
            assert report.log_pi_N[own_N].tobytes() == part.log_pi_N[own_N].tobytes()
        assert report.metrics["loss"] == pytest.approx(sum(losses), rel=1e-5)
    for name, learner in each.items():
        assert_same_bits(adapter(both, name), adapter(learner))


def test_log_pi_of_every_token_is_that_of_its_agent(build: Build) -> None:
    both, each = build(AGENT_NAMES), {name: build() for name in ("", *AGENT_NAMES)}
    for name, learner in each.items():
        learner.train(alone(mixed(0), name))
    both.train(mixed(0))
    batch = mixed(1)
    found = both.logprobs(batch)
    for name, learner in each.items():
        own_N = batch.mask_N & (batch.agents_N == batch.agents.index(name))
        assert found[own_N].tobytes() == learner.logprobs(alone(batch, name))[own_N].tobytes()
    assert not found[~batch.mask_N].any()


def test_an_adapter_without_tokens_takes_no_step_and_does_not_decay(build: Build) -> None:
    both = build(AGENT_NAMES)
    both.train(of_roles(0, *AGENT_NAMES))
    before = adapter(both, "solver")
    both.train(of_roles(1, "proposer"))
    assert_same_bits(adapter(both, "solver"), before)
    assert both.version == 2
    late, solver = of_roles(2, "solver"), build()
    solver.train(alone(of_roles(0, *AGENT_NAMES), "solver"))
    both.train(late)
    solver.train(msgspec.structs.replace(alone(late, "solver"), step=1))  # its second update: the moments stood still
    torch.testing.assert_close(adapter(both, "solver"), adapter(solver), rtol=1e-5, atol=1e-7)


def test_the_gradient_of_one_agent_does_not_shorten_the_step_of_another(build: Build) -> None:
    batch = of_roles(0, *AGENT_NAMES)
    loud_N = batch.agents_N == batch.agents.index("proposer")
    loud = msgspec.structs.replace(batch, advantages_N=np.where(loud_N, 1e4 * batch.advantages_N, batch.advantages_N))
    calm, shaken = build(AGENT_NAMES), build(AGENT_NAMES)
    one, other = calm.train(batch), shaken.train(loud)
    assert other.metrics["agent/proposer/grad_norm"] > 1e3 * one.metrics["agent/proposer/grad_norm"]
    assert other.metrics["grad_norm"] > 1e3 * one.metrics["grad_norm"]
    assert_same_bits(adapter(shaken, "solver"), adapter(calm, "solver"))


def test_steps_in_parts_equal_whole_ones(build: Build) -> None:
    from tests.learner.test_parts import part

    whole, parted = (build(AGENT_NAMES, eps=1e-4) for _ in range(2))  # the update of a tiny gradient is not its sign
    batch = of_roles(0, *AGENT_NAMES)
    whole.train(batch)
    for group in (0, 1):
        split = part(batch, [group])
        chosen_N = np.repeat(np.isin(batch.groups_S, [group]), batch.lengths_S)
        parted.add(msgspec.structs.replace(split, agents=batch.agents, agents_N=batch.agents_N[chosen_N]))
    parted.finish()
    parted.optim_step()
    for name in AGENT_NAMES:
        torch.testing.assert_close(adapter(parted, name), adapter(whole, name), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"memory": {"recompute": True}},
        {"memory": {"offload_activations": True}},
        {"reference": {"kind": "frozen"}},
        {"reference": {"kind": "ema", "decay": 0.5}},
    ],
    ids=["recompute", "offload", "reference", "average"],
)
def test_every_way_to_compute_is_each_agents_own(build: Build, config: dict[str, Any]) -> None:
    algo = {"loss": "ref_kl"} if "reference" in config else None
    both, each = build(AGENT_NAMES, algo, **config), {name: build((), algo, **config) for name in AGENT_NAMES}
    for step in range(2):
        batch = of_roles(step, *AGENT_NAMES)
        both.train(batch)
        for name, learner in each.items():
            learner.train(alone(batch, name))
    for name, learner in each.items():
        assert_same_bits(adapter(both, name), adapter(learner))


def test_a_learner_of_several_adapters_goes_on_from_its_snapshot_bit_for_bit(build: Build, tmp_path: Path) -> None:
    unbroken, first = build(AGENT_NAMES), build(AGENT_NAMES)
    batches = [of_roles(0, *AGENT_NAMES), of_roles(1, "proposer"), of_roles(2, *AGENT_NAMES), mixed(3)]
    for batch in batches[:2]:
        unbroken.train(batch)
        first.train(batch)
    unfinished = begin(tmp_path / "checkpoints", 2)
    first.save(unfinished)
    assert {path.name for path in (unfinished / AGENTS).iterdir()} == set(AGENT_NAMES)
    assert read_lora_config(unfinished / AGENTS / "solver").rank == 4
    resumed = build(AGENT_NAMES)
    resumed.restore(unfinished)
    assert resumed.version == 2
    assert_same_bits(everything(resumed), everything(unbroken))
    for batch in batches[2:]:
        unbroken.train(batch)
        resumed.train(batch)
    assert_same_bits(everything(resumed), everything(unbroken))


def test_a_model_begins_with_the_adapters_of_a_snapshot_or_all_with_a_lone_one(build: Build, tmp_path: Path) -> None:
    both = build(AGENT_NAMES)
    both.train(mixed(0))
    unfinished = begin(tmp_path / "checkpoints", 1)
    both.save(unfinished)
    base = ModelConfig(path=str(build.model_dir), lora=LoraConfig(rank=4, agents=AGENT_NAMES))
    loaded = load_model(base.with_snapshot(str(unfinished)))
    assert_same_bits({name: tensor.detach() for name, tensor in weight_tensors(loaded).items()}, everything(both))
    lone = build()
    lone.model = load_model(base.with_snapshot(str(unfinished / AGENTS / "solver")))
    for name in ("", *AGENT_NAMES):
        assert_same_bits(adapter(lone, name), adapter(both, "solver"))
    strange = LoraConfig(rank=4, agents=("judge",), adapter=str(unfinished))
    with pytest.raises(ModelError, match=r"agents/judge holds no usable adapter"):
        load_model(ModelConfig(path=str(build.model_dir), lora=strange))


def test_tokens_of_an_agent_without_an_adapter_are_refused_before_anything_changes(build: Build) -> None:
    learner = build(("proposer",))
    before = everything(learner)
    with pytest.raises(RunError, match="tokens of agent 'solver', which trains no adapter here"):
        learner.train(of_roles(0, *AGENT_NAMES))
    batch = of_roles(0, "proposer")
    with pytest.raises(RunError, match="agent 'number 9'"):
        learner.train(msgspec.structs.replace(batch, agents_N=np.full(batch.num_tokens, 9, np.int32)))
    with pytest.raises(RunError, match="agents_N is 3"):
        learner.train(msgspec.structs.replace(batch, agents_N=np.ones(3, np.int32)))
    assert_same_bits(everything(learner), before)
    with pytest.raises(ModelError, match="agent 'solver' trains no adapter"), Switch(learner.model).on("solver"):
        pass


def test_names_of_agents_that_nobody_is_change_no_bit(build: Build) -> None:
    plain, named = build(), build(("proposer",))
    for step in range(2):
        batch = random_batch(step)
        plain.train(batch)
        named.train(
            msgspec.structs.replace(batch, agents=("", "proposer"), agents_N=np.zeros(batch.num_tokens, np.int32))
        )
    assert_same_bits(adapter(named), adapter(plain))
