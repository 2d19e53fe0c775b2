"""Whole runs whose episodes are programs: what they train is what a function of the same agent trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError
from headrace.base.types.episode import EpisodeGraph
from headrace.run.session import load_config, train
from tests.rollout.environments.tasks import chat_model, episodes, make_env_run

EARNED = """
    def earned(text):
        return sum(character in "01234" for character in text) / 8
"""
FUNCTION = (
    EARNED
    + """
    async def twice(task, policy):
        said = [{"role": "user", "content": task["prompt"]}]
        reward = 0.0
        for _ in range(2):
            reply = await policy.chat(said)
            reward += earned(reply.message.content)
            said += [reply.message, {"role": "user", "content": "="}]
        return reward
"""
)
CLIENTS = (
    EARNED
    + """
    import anthropic, openai

    async def either(task, policy):
        said = [{"role": "user", "content": task["prompt"]}]
        reward = 0.0
        for _ in range(2):
            content = await (chat if task["number"] % 2 else messages)(policy, said)
            reward += earned(content)
            said += [{"role": "assistant", "content": content}, {"role": "user", "content": "="}]
        return reward

    async def chat(policy, said):
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            completion = await client.chat.completions.create(model="any", messages=said)
            return completion.choices[0].message.content

    async def messages(policy, said):
        async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as client:
            message = await client.messages.create(model="any", messages=said, max_tokens=999)
            return "".join(block.text for block in message.content)
"""
)
PROGRAM = (
    EARNED
    + """
    import json, os, sys, urllib.request

    def ask(body):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/responses", data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        return json.load(urllib.request.urlopen(request))

    task = json.load(open(os.environ["HEADRACE_TASK"]))
    body, reward = {"input": task["prompt"]}, 0.0
    for _ in range(2):
        told = ask(body)
        reward += sum(earned(part["text"]) for item in told["output"] for part in item["content"])
        body = {"input": "=", "previous_response_id": told["id"]}
    if "fail" in sys.argv and task["number"] % 3 == 0:
        sys.exit("no, " + task["prompt"])
    print("a word about it")
    print(json.dumps({"reward": reward}))
"""
)
SHORT: Any = {"flow": {"max_age": 0, "group_size": 2}, "run": {"steps": 2}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("tiny") / "model")


def make_program_run(directory: Path, model: Path, command: Any, **sections: Any) -> Path:
    env = {"kind": "program", "entry": "", "command": command, **sections.pop("env", {})}
    return make_env_run(directory, model, PROGRAM, "agent", env=env, **sections)


def trained(run_file: Path) -> tuple[Any, list[EpisodeGraph]]:
    summary = train(run_file, overrides=["observe.view=none"])
    assert summary.status == "finished"
    return summary, episodes(run_file.parent / "run", summary.ledger.groups.submitted)


def recorded(found: list[EpisodeGraph]) -> list[Any]:
    return [
        (episode.reward, turn.author, turn.parent, *(column.tolist() for column in columns))
        for episode in found
        for turn in episode.turns
        for columns in [(turn.tokens.ids_T, turn.tokens.logprobs_T, turn.tokens.versions_T)]
    ]


@pytest.mark.slow
def test_programs_and_clients_train_what_a_function_trains(tmp_path: Path, model_dir: Path) -> None:
    _, plain = trained(make_env_run(tmp_path / "function", model_dir, FUNCTION, "twice", **SHORT))
    assert [turn.author for turn in plain[0].turns] == ["task", "policy", "user", "policy"]
    summary, found = trained(make_env_run(tmp_path / "clients", model_dir, CLIENTS, "either", **SHORT))
    assert recorded(found) == recorded(plain)
    assert not summary.warnings
    command = ["python", "my_env.py"]
    summary, found = trained(make_program_run(tmp_path / "program", model_dir, command, **SHORT))
    assert recorded(found) == recorded(plain)
    assert not summary.warnings


@pytest.mark.slow
def test_a_program_that_fails_costs_its_own_episodes_and_a_reward_function_scores_the_others(
    tmp_path: Path, model_dir: Path
) -> None:
    rows = "".join(json.dumps({"prompt": f"{a}+{a}=", "number": a}) + "\n" for a in range(12))
    reward = "def reward(completion, number):\n    return number + len(completion) / 100\n"
    run_file = make_program_run(
        tmp_path, model_dir, "python my_env.py fail", rows=rows, reward=reward, env={"reward": "reward.py:reward"},
        flow={"group_size": 2, "max_failed_groups": 20}, data={"shuffle": False}, run={"steps": 2},
    )  # fmt: skip
    summary, found = trained(run_file)
    failed = [episode for episode in found if episode.cause]
    words = "program_failed: the program of env.command failed: it ended with exit code 1: no, "
    assert failed
    assert all(episode.cause.startswith(words) and episode.num_sampled for episode in failed)
    assert summary.ledger.groups.dropped["program_failed"] * 2 == len(failed)
    assert all(episode.reward != int(episode.reward) for episode in found if episode.reward is not None)
    fates = summary.ledger.tokens
    assert fates.submitted == fates.trained + sum(fates.dropped.values()) + fates.in_flight


@pytest.mark.parametrize(
    ("env", "kind", "words"),
    [
        ({"command": ""}, ConfigError, "needs env.command"),
        ({"command": "python 'agent"}, ConfigError, "cannot be split: No closing quotation"),
        ({"command": "no-such-program-anywhere x"}, EnvError, "there is no program 'no-such-program-anywhere'"),
        ({"command": "python x", "entry": "my_env.py:twice"}, ConfigError, "does not use it"),
        ({"kind": "single_turn", "command": "python x"}, ConfigError, "does not use it"),
    ],
)
def test_a_command_that_cannot_be_used_ends_the_run_before_it_begins(
    tmp_path: Path, model_dir: Path, env: Any, kind: type[Exception], words: str
) -> None:
    run_file = make_program_run(tmp_path, model_dir, "", env=env)
    with pytest.raises(kind, match=words):
        train(run_file, overrides=["observe.view=none"])


def test_files_of_a_command_are_found_from_the_run_file(tmp_path: Path, model_dir: Path) -> None:
    config = load_config(make_program_run(tmp_path, model_dir, "python -u my_env.py --name 'my env.py'"))
    assert config.env.argv == ("python", "-u", str(tmp_path / "my_env.py"), "--name", "my env.py")
