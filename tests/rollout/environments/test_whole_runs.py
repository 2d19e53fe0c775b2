"""Whole runs over environments: the same samples whichever way a task is written, and whatever befalls its workers."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.scored import paths
from headrace.control.metrics.summary import Summary
from headrace.run.session import evaluate, train
from tests.rollout.environments.tasks import episodes, make_env_run
from tests.run.session.runs import components, headrace, make_run, running, verb

WAYS = """
    import headrace

    def earned(text):
        return sum(character in "01234" for character in text) / 4

    class Once(headrace.Env):
        def reset(self, task):
            return task["prompt"]

        def step(self, message):
            return headrace.StepResult(reward=earned(message.content), done=True)

    class OnceAsync(headrace.Env):
        async def reset(self, task):
            return task["prompt"]

        async def step(self, message):
            return headrace.StepResult(reward=earned(message.content), done=True)

    async def rollout(task, policy):
        reply = await policy.chat(task["prompt"])
        return earned(reply.message.content)

    async def in_tokens(task, policy):
        reply = await policy.sample(policy.prompt_ids)
        return headrace.Episode(reward=earned(reply.message.content))
"""

TWICE = """
    import headrace

    def earned(text):
        return sum(character in "01234" for character in text) / 8

    class Twice(headrace.Env):
        def reset(self, task):
            self.turns = 0
            return task["prompt"]

        def step(self, message):
            self.turns += 1
            return headrace.StepResult(messages="=", reward=earned(message.content), done=self.turns == 2)

    async def twice(task, policy):
        said = [{"role": "user", "content": task["prompt"]}]
        reward = 0.0
        for _ in range(2):
            reply = await policy.chat(said)
            reward += earned(reply.message.content)
            said += [reply.message, {"role": "user", "content": "="}]
        return reward
"""
SYNCHRONOUS = {"max_age": 0}


def trained(run_file: Path) -> tuple[Summary, list[EpisodeGraph]]:
    summary = train(run_file, overrides=["observe.view=none"])
    assert summary.status == "finished"
    return summary, episodes(run_file.parent / "run", summary.ledger.groups.submitted)


def same(one: list[EpisodeGraph], other: list[EpisodeGraph]) -> bool:
    """Rewards and train samples, bit for bit: ids, masks, logprobs, versions."""
    return [*map(_sample_bytes, one)] == [*map(_sample_bytes, other)]


def _sample_bytes(episode: EpisodeGraph) -> tuple[object, ...]:
    samples = paths(episode, 0.0)
    columns = [
        column.tobytes()
        for sample in samples
        for column in (sample.tokens.ids_T, sample.mask_T, sample.tokens.logprobs_T, sample.tokens.versions_T)
    ]
    return episode.key, episode.status, episode.reward, columns


@pytest.mark.parametrize(
    "entries", [("rollout",), pytest.param(("Once", "OnceAsync", "in_tokens"), marks=pytest.mark.slow)]
)
def test_a_task_gives_the_same_samples_whichever_way_it_is_written(
    tmp_path: Path, model_dir: Path, entries: tuple[str, ...]
) -> None:
    rows = "".join(json.dumps({"prompt": [{"role": "user", "content": f"{a}+{a + 1}="}]}) + "\n" for a in range(12))
    _, plain = trained(make_run(tmp_path / "plain", model_dir, rows=rows, flow=SYNCHRONOUS))
    assert len({episode.reward for episode in plain}) > 1
    for entry in entries:
        run_file = make_env_run(tmp_path / entry, model_dir, WAYS, entry, rows=rows, flow=SYNCHRONOUS)
        summary, found = trained(run_file)
        assert same(plain, found), entry
        assert not summary.warnings


@pytest.mark.slow
def test_two_turns_are_the_same_as_a_class_and_as_a_function_and_in_any_number_of_workers(
    tmp_path: Path, model_dir: Path
) -> None:
    _, of_class = trained(make_env_run(tmp_path / "class", model_dir, TWICE, "Twice", flow=SYNCHRONOUS))
    _, of_function = trained(
        make_env_run(
            tmp_path / "function", model_dir, TWICE, "twice", flow=SYNCHRONOUS, env={"workers": 2, "concurrency": 3}
        )
    )
    assert same(of_class, of_function)
    assert [turn.author for turn in of_class[0].turns] == ["task", "policy", "user", "policy"]
    assert of_class[0].reward == pytest.approx(sum(turn.reward or 0.0 for turn in of_class[0].turns))


@pytest.mark.parametrize("killed", [False, True])
def test_two_turns_are_the_same_in_shards_also_if_one_is_killed_with_its_workers(
    killed: bool, tmp_path: Path, model_dir: Path
) -> None:
    sections = {"flow": {**SYNCHRONOUS, "record_tokens": 2}, "run": {"dir": "run", "steps": 6, "checkpoint_every": 6}}
    _, plain = trained(make_env_run(tmp_path / "plain", model_dir, TWICE, "Twice", **sections))
    run_file = make_env_run(tmp_path / "shards", model_dir, TWICE, "Twice", launch={"rollouts": 2}, **sections)
    run_dir = tmp_path / "shards" / "run"
    with running("train", run_file) as life:
        life.until_step(1)
        if killed:
            os.kill(components(run_dir)["rollout-1"], signal.SIGKILL)
        said = life.rest(120.0) + "".join(life.lines)
    assert life.process.returncode == 0, said
    assert ("was killed by SIGKILL" in said) == killed
    assert same(plain, episodes(run_dir, 12))
    parts = json.loads(verb("status", run_dir, "--json"))["components"]
    workers = {part["parent"] for part in parts if part["role"].startswith("environment-")}
    restarts = {part["role"]: part["restarts"] for part in parts if part["role"].startswith("rollout-")}
    assert restarts == {"rollout-0": 0, "rollout-1": int(killed)}
    # the run may end before the shard that was started again has a worker
    assert ({"rollout-0"} if killed else restarts.keys()) <= workers <= restarts.keys(), parts


def test_an_environment_that_cannot_be_imported_in_a_shard_ends_the_run_with_its_own_error(
    tmp_path: Path, model_dir: Path
) -> None:
    broken = "raise ValueError('no such world')\nasync def twice(task, policy): ..."
    run_file = make_env_run(tmp_path, model_dir, broken, "twice", launch={"rollouts": 1})
    with pytest.raises(HeadraceError, match="no such world"):
        train(run_file, overrides=["observe.view=none"])


@pytest.mark.slow
def test_a_reward_function_counts_where_the_environment_gives_a_reward_too(tmp_path: Path, model_dir: Path) -> None:
    reward = "def reward(completion, number):\n    return number + len(completion) / 100\n"
    run_file = make_env_run(
        tmp_path, model_dir, TWICE, "Twice", reward=reward, env={"reward": "reward.py:reward"}, run={"steps": 1}
    )
    summary = train(run_file, overrides=["observe.view=none"])
    found = episodes(tmp_path / "run", summary.ledger.groups.submitted)
    possible = {round(number + size / 100, 2) for number in range(12) for size in range(5)}
    assert {round(episode.reward or 0.0, 2) for episode in found} <= possible


CHOOSES = """
    import asyncio
    import headrace

    async def rollout(task, policy):
        said = [{"role": "user", "content": task["prompt"]}]
        one, two = await asyncio.gather(policy.chat(said), policy.chat(said))
        cold = await policy.chat([*said, one.message, *said], temperature=0.5, max_new_tokens=2)
        abandoned = asyncio.get_running_loop().create_task(policy.chat("="))
        await policy.chat([*said, two.message, *said])
        abandoned.cancel()
        reward = len(set(one.message.content)) / 4
        return headrace.Episode(reward=reward, rewards={one.turn: reward}, trained=[one, cold])
"""


@pytest.mark.slow
def test_answers_without_loss_are_in_the_books_by_reason(tmp_path: Path, model_dir: Path) -> None:
    summary, found = trained(make_env_run(tmp_path, model_dir, CHOOSES, "rollout"))
    tokens = summary.ledger.tokens
    assert set(tokens.dropped) >= {"not_chosen", "other_sampling"}
    assert tokens.submitted == tokens.trained + sum(tokens.dropped.values()) + tokens.in_flight
    chosen = [sum(sample.mask_T.sum() for sample in paths(episode, 0.0)) for episode in found]
    assert all(0 < count <= 4 for count in chosen)


HOSTILE = """
    import asyncio, os, signal, time
    import headrace

    class Hostile(headrace.Env):
        def __init__(self):
            self.number = 0

        async def reset(self, task):
            self.number = task["number"]
            return task["prompt"]

        async def step(self, message):
            match self.number:
                case 1:
                    raise ValueError("no")
                case 2:
                    await asyncio.sleep(1000)
                case 3:
                    time.sleep(1000)
                case 4:
                    os._exit(3)
                case 5:
                    return "done"
                case 6:
                    return headrace.StepResult(reward=float("nan"), done=True)
                case 7:
                    raise SystemExit(3)
                case 8:
                    hog = bytearray(4 << 30)
                    for at in range(0, len(hog), 4096):
                        hog[at] = 1
                case 9:
                    return headrace.StepResult(reward="1", done=True)
            return headrace.StepResult(reward=len(set(message.content)) / 4, done=True)
"""


@pytest.mark.slow
def test_hostile_environments_cost_their_own_episodes_and_are_counted_by_reason(
    tmp_path: Path, model_dir: Path
) -> None:
    rows = "".join(json.dumps({"prompt": "1+1=", "number": number}) + "\n" for number in range(12))
    run_file = make_env_run(
        tmp_path, model_dir, HOSTILE, "Hostile", rows=rows,
        env={"timeout_s": 20.0, "block_s": 2.0, "memory_mb": 600}, data={"shuffle": False},
        flow={"groups_per_step": 1, "group_size": 2, "max_failed_groups": 20, "max_idle_batches": 20},
        run={"steps": 3},
    )  # fmt: skip
    summary = train(run_file, overrides=["observe.view=none"])
    assert (summary.status, summary.steps) == ("finished", 3)
    dropped = summary.ledger.groups.dropped
    assert set(dropped) >= {"env_error", "env_timeout", "env_blocked", "env_crashed", "reward_nan"}
    assert dropped["env_error"] == 4
    assert dropped["env_crashed"] == 2
    groups = summary.ledger.groups
    assert groups.submitted == groups.trained + sum(dropped.values()) + groups.in_flight


KILLED_ONCE = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    import headrace
    from twice import Twice

    class Killed(Twice):
        def step(self, message):
            if self.turns == 1 and not os.path.exists({mark!r}):
                open({mark!r}, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(message)
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_that_was_sampled(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "twice.py").write_text(textwrap.dedent(TWICE))
    _, undisturbed = trained(make_env_run(tmp_path / "calm", model_dir, TWICE, "Twice", flow=SYNCHRONOUS))
    code = KILLED_ONCE.format(here=str(tmp_path), mark=str(tmp_path / "mark"))
    summary, found = trained(make_env_run(tmp_path / "killed", model_dir, code, "Killed", flow=SYNCHRONOUS))
    assert (tmp_path / "mark").exists()
    assert same(undisturbed, found)
    assert any("an environment worker died" in warning for warning in summary.warnings)


@pytest.mark.slow
def test_a_run_that_is_killed_between_two_turns_goes_on_with_what_was_sampled(tmp_path: Path, model_dir: Path) -> None:
    slow = TWICE.replace("self.turns += 1", "self.turns += 1; __import__('time').sleep(0.05)")
    run_file = make_env_run(
        tmp_path, model_dir, slow, "Twice", flow={"record_tokens": 1}, run={"steps": 6, "checkpoint_every": 2}
    )
    with running("train", run_file) as program:
        program.until_step(3)
        program.process.kill()
        program.rest()
    headrace("train", run_file, "--resume")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    for fates in summary["ledger"].values():
        assert fates["submitted"] == fates["trained"] + sum(fates["dropped"].values()) + fates["in_flight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reasons"),
    [({"max_turns": 1}, "env.max_turns"), ({"max_tokens": 5}, "env.max_tokens")],
)
def test_an_environment_that_has_used_up_a_budget_ends_with_what_it_has_earned(
    tmp_path: Path, model_dir: Path, settings: dict[str, Any], reasons: str
) -> None:
    code = TWICE.replace("self.turns == 2", "self.turns == 9")
    run_file = make_env_run(tmp_path, model_dir, code, "Twice", env=settings)
    summary, found = trained(run_file)
    assert any(reasons in warning for warning in summary.warnings)
    assert max(episode.num_sampled for episode in found) <= 5
    assert any(episode.reward for episode in found)


@pytest.mark.slow
def test_evaluation_asks_the_same_environment(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(tmp_path, model_dir, TWICE, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"})
    found = evaluate(run_file)
    assert 0 < found.mean_reward < 1
    assert found.tokens > 12


def test_an_entry_that_cannot_be_imported_ends_the_run_before_it_begins(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(tmp_path, model_dir, "import nothing_of_that_name\nclass Twice: pass", "Twice")
    with pytest.raises(ConfigError, match=r"my_env.py:1: there is no module 'nothing_of_that_name'"):
        train(run_file, overrides=["observe.view=none"])
