"""Whole runs with several agents: frozen weights are those that the run began with, and the books balance."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.episode import EpisodeGraph, Turn
from headrace.base.types.versions import FROZEN
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.lora import save_adapter
from headrace.rollout.agents import FROZEN_AGENT
from headrace.run.session import evaluate, train
from tests.rollout.environments.tasks import chat_model, episodes, make_env_run
from tests.rollout.environments.test_whole_runs import SYNCHRONOUS, same, trained
from tests.run.session.runs import components, running

DUEL = """
    import asyncio
    import headrace

    NAMES = {names}

    def small(text):
        return sum(character in "01234" for character in text)

    async def rollout(task, policy):
        asked = [{{"role": "user", "content": task["prompt"]}}]
        one, two = await asyncio.gather(*(policy.chat(asked, agent=name) for name in NAMES))
        more = await policy.chat([*asked, one.message, {{"role": "user", "content": two.message.content + "="}}],
                                 agent=NAMES[0])
        won = float(small(one.message.content + more.message.content) - small(two.message.content))
        {ends}
"""
BY_AGENT = "return headrace.Episode(agent_rewards={NAMES[0]: won, NAMES[1]: -won})"
AS_ONE = "return won"
FROZEN_B = ['env.agents=[{name="a", kind="trained"}, {name="b", kind="frozen"}]']
TRAINED_B = ['env.agents=[{name="a", kind="trained"}, {name="b", kind="trained"}]']


def duel(directory: Path, model: Path, *names: str, ends: str = BY_AGENT, **sections: Any) -> Path:
    code = textwrap.dedent(DUEL).format(names=repr(names), ends=ends)
    return make_env_run(directory, model, code, "rollout", **sections)


def played(run_file: Path, *overrides: str) -> tuple[Any, list[EpisodeGraph]]:
    summary = train(run_file, overrides=["observe.view=none", *overrides])
    assert summary.status == "finished", summary.cause
    return summary, episodes(run_file.parent / "run", summary.ledger.groups.submitted)


def answers(found: list[EpisodeGraph], agent: str) -> list[Turn]:
    return [turn for episode in found for turn in episode.turns if turn.author == agent]


def test_a_frozen_agent_is_the_model_as_it_was_and_is_in_the_books_by_reason(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b", learner={"lr": 3e-2}, run={"steps": 4})
    summary, found = played(run_file, *FROZEN_B)
    frozen = answers(found, "b")
    assert {turn.untrained for turn in frozen} == {FROZEN_AGENT}
    assert {int(version) for turn in frozen for version in turn.tokens.versions_T} == {FROZEN}
    num_frozen = sum(len(turn.tokens) for turn in frozen)
    tokens = summary.ledger.tokens
    assert tokens.dropped[FROZEN_AGENT] == num_frozen
    assert tokens.submitted == sum(episode.num_sampled for episode in found)
    assert tokens.submitted == tokens.trained + sum(tokens.dropped.values()) + tokens.in_flight
    assert summary.max_token_age <= 1
    model = load_model(ModelConfig(path=str(model_dir)))
    moved = [abs(gap(model, episode, turn)) for episode in found for turn in spoken(episode, "a")]
    stayed = [abs(gap(model, episode, turn)) for episode in found for turn in spoken(episode, "b")]
    assert max(stayed) < 1e-4
    assert max(moved) > 1e-2  # the policy has left where it was
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(lines[-1])["metrics"]
    assert {"agent/a/reward_mean", "agent/b/reward_mean"} <= metrics.keys()
    assert metrics["agent/a/reward_mean"] == pytest.approx(-metrics["agent/b/reward_mean"])
    assert any(episode.agent_rewards["a"] for episode in found)
    assert all(episode.reward == episode.agent_rewards["a"] for episode in found)


def spoken(episode: EpisodeGraph, agent: str) -> list[int]:
    return [place for place, turn in enumerate(episode.turns) if turn.author == agent]


def gap(model: Any, episode: EpisodeGraph, place: int) -> float:
    """log π of an answer under ``model`` less what was recorded: the mean over its tokens."""
    tokens = episode.path_tokens(episode.path(place))
    count = len(episode.turns[place].tokens)
    with torch.no_grad():
        ids_T = torch.from_numpy(tokens.ids_T.astype(np.int64))
        plan = PackedPlan([len(ids_T)], torch.device("cpu"))
        logits_TV = forward(model, ids_T, plan, torch.arange(len(ids_T))).double()
    logprobs_T = torch.log_softmax(logits_TV, -1)[:-1].gather(1, ids_T[1:, None])[:, 0]
    return float((logprobs_T[-count:] - torch.from_numpy(tokens.logprobs_T[-count:]).double()).mean())


@pytest.mark.slow
def test_names_alone_change_no_sample(tmp_path: Path, model_dir: Path) -> None:
    plain = duel(tmp_path / "plain", model_dir, "policy", "policy", ends=AS_ONE, flow=SYNCHRONOUS)
    _, nameless = trained(plain)
    _, named = trained(duel(tmp_path / "named", model_dir, "a", "b", ends=AS_ONE, flow=SYNCHRONOUS))
    assert same(nameless, named)
    assert {turn.author for episode in named for turn in episode.turns} == {"task", "user", "a", "b"}


@pytest.mark.slow
def test_at_equal_weights_a_frozen_agent_says_bit_for_bit_what_the_policy_says(tmp_path: Path, model_dir: Path) -> None:
    settings: dict[str, Any] = {"flow": SYNCHRONOUS, "learner": {"lr": 0.0}}
    exact = "model.deterministic=true"
    _, one = played(duel(tmp_path / "trained", model_dir, "a", "b", **settings), exact, *TRAINED_B)
    _, other = played(duel(tmp_path / "frozen", model_dir, "a", "b", **settings), exact, *FROZEN_B)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.agent_rewards == theirs.agent_rewards
        for agent in ("a", "b"):  # whose answers came first, of two that were asked at once, may differ
            for turn, twin in zip(answers([mine], agent), answers([theirs], agent), strict=True):
                assert turn.tokens.ids_T.tolist() == twin.tokens.ids_T.tolist()
                assert turn.tokens.logprobs_T.tobytes() == twin.tokens.logprobs_T.tobytes()


@pytest.mark.slow
def test_other_models_and_adapters_answer_as_what_they_are(tmp_path: Path) -> None:
    """A trained adapter on the base plays against another adapter, another model, and the base it began from."""
    base = chat_model(tmp_path / "base")
    other = chat_model(tmp_path / "other", seed=5, hidden_size=48)
    lora = LoraConfig(rank=4, alpha=8.0)
    coached = load_model(ModelConfig(path=str(base), lora=lora))
    with torch.no_grad():
        for name, parameter in coached.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    save_adapter(coached, tmp_path / "adapter")
    models = {
        "past": load_model(ModelConfig(path=str(base))),
        "coach": coached,
        "stranger": load_model(ModelConfig(path=str(other))),
    }
    agents = (
        '{name="a", kind="trained"}, {name="past", kind="frozen"}, '
        f'{{name="coach", kind="adapter", path="{tmp_path / "adapter"}"}}, '
        f'{{name="stranger", kind="model", path="{other}"}}'
    )
    code = """
        import asyncio
        import headrace

        async def rollout(task, policy):
            names = ("a", "past", "coach", "stranger")
            replies = await asyncio.gather(*(policy.chat(task["prompt"], agent=name) for name in names))
            return len(set(replies[0].message.content)) / 4
    """
    run_file = make_env_run(
        tmp_path / "run", base, code, "rollout", learner={"lr": 3e-2}, run={"steps": 3}
    )  # fmt: skip
    _, found = played(run_file, f"env.agents=[{agents}]", f"model.path={base}", "model.lora.rank=4")
    for name, model in models.items():
        gaps = [abs(gap(model, episode, place)) for episode in found for place in spoken(episode, name)]
        assert max(gaps) < 1e-4, name
        others = [each for each in models if each != name]
        strange = [abs(gap(models[others[0]], episode, spoken(episode, name)[0])) for episode in found]
        assert max(strange) > 1e-2, name


@pytest.mark.slow
def test_a_run_with_a_frozen_agent_that_is_killed_goes_on_with_the_same_opponent(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = duel(
        tmp_path, model_dir, "a", "b", learner={"lr": 3e-2}, flow={"record_tokens": 1},
        run={"steps": 6, "checkpoint_every": 2},
    )  # fmt: skip
    with running("train", run_file, "--set", FROZEN_B[0]) as program:
        program.until_step(3)
        assert "agent-b" in components(tmp_path / "run")
        program.process.kill()
        program.rest()
    summary = train(run_file, overrides=["observe.view=none", *FROZEN_B], resume=True)
    assert (summary.status, summary.steps) == ("finished", 6)
    for fates in (summary.ledger.groups, summary.ledger.episodes, summary.ledger.tokens):
        assert fates.submitted == fates.trained + sum(fates.dropped.values()) + fates.in_flight
    model = load_model(ModelConfig(path=str(model_dir)))
    found = episodes(tmp_path / "run", summary.ledger.groups.submitted)
    assert max(abs(gap(model, episode, place)) for episode in found for place in spoken(episode, "b")) < 1e-4


@pytest.mark.slow
def test_the_engine_of_an_agent_that_dies_is_started_again(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b", run={"steps": 40})
    with running("train", run_file, "--set", FROZEN_B[0]) as program:
        program.until_step(2)
        os.kill(components(tmp_path / "run")["agent-b"], signal.SIGKILL)
        program.rest()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 40)
    assert any("agent-b" in recovery for recovery in summary["recoveries"])
    for fates in summary["ledger"].values():
        assert fates["submitted"] == fates["trained"] + sum(fates["dropped"].values()) + fates["in_flight"]


@pytest.mark.slow
def test_evaluation_plays_against_the_frozen_agent_too(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"})
    found = evaluate(run_file, overrides=FROZEN_B)
    assert found.tokens > 12
    assert not found.warnings


@pytest.mark.slow
def test_a_typo_in_the_name_of_an_agent_ends_the_run_in_words(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "bb", flow={"max_failed_groups": 2})
    with pytest.raises(EnvError, match=r"agent 'bb' is asked for"):
        train(run_file, overrides=["observe.view=none", *FROZEN_B])


@pytest.mark.slow
def test_rewards_by_agent_beside_a_reward_function_fail_the_episode(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b", env={"reward": "reward.py:reward"}, flow={"max_failed_groups": 2})
    with pytest.raises(EnvError, match=r"what each agent earned, and there is a reward function"):
        train(run_file, overrides=["observe.view=none"])


@pytest.mark.slow
def test_a_run_with_a_frozen_agent_is_not_repeated_from_its_record(tmp_path: Path, model_dir: Path) -> None:
    run_file = duel(tmp_path, model_dir, "a", "b")
    played(run_file, *FROZEN_B)
    with pytest.raises(ConfigError, match=r"agent 'b' has an engine of its own"):
        train(run_file, overrides=[*FROZEN_B, f"run.dir={tmp_path / 'again'}"], replay=tmp_path / "run")
