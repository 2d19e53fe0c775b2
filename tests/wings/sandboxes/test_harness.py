"""Programs of others work on task directories, in sessions whose only way out is the endpoint of their episode."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EnvError, EpisodeError
from headrace.flow.ledger.opening import open_ledger
from headrace.models.tiny import TinySpec, make_tiny
from headrace.rollout.environments.base import LAST
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.registry import ENVIRONMENTS
from headrace.run.session import train
from headrace.wings.sandboxes import SandboxDriver, SandboxSession, SandboxSnapshot, SandboxSpec, world
from headrace.wings.sandboxes.world import close_shared_worlds
from tests.wings.bridges.conftest import PRINTABLE, TEMPLATE
from tests.wings.sandboxes.task_files import HARBOR, write_task
from tests.wings.sandboxes.test_environment import Saying

KEY = "sk-of-this-episode"
AGENT = r"""
import json, os, subprocess, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": open(os.environ["HEADRACE_INSTRUCTION"]).read()}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
command = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
with open("/tmp/transcript.json", "w") as file:
    json.dump({"command": command, "directory": os.getcwd()}, file)
sys.exit(subprocess.run(["bash", "-c", command]).returncode)
"""


class Endpoint:
    """An endpoint that gives one answer, and keeps what it was asked."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.splitlines())}
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        self.asked.append((fields["authorization"], body))
        data = json.dumps({"choices": [{"message": {"content": self.answer}}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(data) + data)
        await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(close_shared_worlds())


def attempt(
    runner: asyncio.Runner, task: Path, endpoint: Endpoint, base_url: str = "", host: str = "127.0.0.1", **options: Any
) -> Episode:
    """Attempt a task with a program; the episode's endpoint stands on this machine."""
    write_task(task, {"environment/agent.py": AGENT})

    async def body() -> Episode:
        server = await asyncio.start_server(endpoint.serve, host, 0)
        url = base_url or f"http://{host}:{server.sockets[0].getsockname()[1]}"
        variables = {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY,
        }  # fmt: skip
        given = {"image": "machine", "command": f"{sys.executable} agent.py", **options}
        with ThreadPoolExecutor(1) as executor:
            rollout = as_rollout(partial(ENVIRONMENTS.load("harness"), **given), executor)
            async with server:
                return await rollout({"directory": str(task)}, EpisodePolicy(Saying([]), variables=variables))

    return runner.run(body())


@pytest.mark.parametrize("kind", ["jail", "bubblewrap"])
def test_a_program_reaches_its_episode_and_its_tests_are_the_reward(
    runner: asyncio.Runner, tmp_path: Path, kind: str
) -> None:
    task = write_task(tmp_path / "one", HARBOR)
    kept = {"keep": ["/tmp/transcript.json", "/tmp/missing"], "keep_in": str(tmp_path / "kept")}
    solving = Endpoint("sed -i s/41/42/ answer.sh")
    assert attempt(runner, task, solving, sandbox=kind, **kept).reward == 1.0
    ((authorization, body),) = solving.asked
    assert authorization == f"Bearer {KEY}"
    assert body["messages"] == [{"role": "user", "content": "Make answer.sh print 42."}]
    assert [path.name for path in (tmp_path / "kept/one-0").iterdir()] == ["transcript.json"]
    found = json.loads((tmp_path / "kept/one-0/transcript.json").read_text())
    assert found == {"command": solving.answer, "directory": "/app"}
    unsolved = attempt(runner, task, Endpoint("true"), sandbox=kind)
    assert (unsolved.reward, unsolved.extra) == (0.25, {})


def test_a_limit_that_ends_the_tests_is_recorded_with_the_last_answer(runner: asyncio.Runner, tmp_path: Path) -> None:
    changes = {"tests/test.sh": "sleep 99", "task.toml": "[verifier]\ntimeout_sec = 0.5"}
    ended = attempt(runner, write_task(tmp_path / "one", HARBOR, **changes), Endpoint("true"))
    assert (ended.reward, ended.extra) == (0.0, {LAST: {"tests": "ended: wall time"}})


def test_an_endpoint_elsewhere_is_reached_under_the_address_of_the_session(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "one", HARBOR)
    kept = {"keep": ["/tmp/seen"], "keep_in": str(tmp_path / "kept")}
    endpoint = Endpoint("env | grep _URL > /tmp/seen")
    attempt(runner, task, endpoint, host="127.0.0.2", **kept)
    assert len(endpoint.asked) == 1
    assert (tmp_path / "kept/one-0/seen").read_text().count("=http://127.0.0.1:") == 2


def test_it_is_alone_with_its_endpoint(runner: asyncio.Runner, tmp_path: Path) -> None:
    """Not even the variables of this process are there, nor a server of this machine beside the endpoint."""
    task = write_task(tmp_path / "one", HARBOR)
    options = {"keep": ["/tmp/seen"], "keep_in": str(tmp_path / "kept"), "variables": {"MORE": "given"}}
    look = "env > /tmp/seen; ulimit -v >> /tmp/seen; "
    look += "for p in 22 80 6379; do (: < /dev/tcp/127.0.0.1/$p) 2>> /tmp/seen; done; true"

    with socket.create_server(("127.0.0.1", 0)) as other:
        attempt(runner, task, Endpoint(look.replace("6379", str(other.getsockname()[1]))), **options)
    seen = (tmp_path / "kept/one-0/seen").read_text()
    names = {line.partition("=")[0] for line in seen.splitlines() if "=" in line}
    assert {"MORE", "WORD", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "HEADRACE_INSTRUCTION"} <= names
    assert not names & {"PYTEST_CURRENT_TEST", "VIRTUAL_ENV", "SHELL", "USER"}
    assert seen.lower().count("connection refused") >= 3
    assert f"\n{256 << 20}\n" in seen  # KiB of addresses: programs of Node.js reserve them


@pytest.mark.parametrize(("on_exit_code", "reward"), [("fail", None), ("grade", 0.25)])
def test_an_exit_code_fails_the_episode_or_is_graded(
    runner: asyncio.Runner, tmp_path: Path, on_exit_code: str, reward: float | None
) -> None:
    task = write_task(tmp_path / "one", HARBOR)
    endpoint = Endpoint("echo out of words >&2; exit 3")
    if reward is not None:
        assert attempt(runner, task, endpoint, on_exit_code=on_exit_code).reward == reward
        return
    with pytest.raises(EpisodeError, match="program of the task one ended with exit code 3: out of words") as failed:
        attempt(runner, task, endpoint, on_exit_code=on_exit_code)
    assert failed.value.reason == "program_failed"


def test_a_program_whose_time_is_over_is_graded_as_it_has_left_the_world(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    slow = HARBOR["task.toml"].replace("timeout_sec = 60.0", "timeout_sec = 2.0")
    task = write_task(tmp_path / "one", HARBOR, **{"task.toml": slow})
    assert attempt(runner, task, Endpoint("sed -i s/41/42/ answer.sh; sleep 100")).reward == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ""}, "env.options.command"),
        ({"keep": ["/tmp/x"]}, "keep=.*belong together"),
        ({"on_exit_code": "ignore"}, "env.options.on_exit_code"),
        ({"base_url": "https://127.0.0.1:4433"}, "certificate is of another name"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    runner: asyncio.Runner, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(EnvError, match=words):
        attempt(runner, write_task(tmp_path / "one", HARBOR), Endpoint(""), **options)


def test_the_commands_of_the_page_are_each_one_command() -> None:
    """A line break would end a command of bash before its last arguments."""
    page = (Path(__file__).parents[3] / "docs/sandboxes.md").read_text()
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    commands = [block["env"]["options"]["command"] for block in blocks if block["env"]["kind"] == "harness"]
    assert commands
    assert [command for command in commands if "\n" in command] == []
    assert all(command.endswith('-t "$(cat $HEADRACE_INSTRUCTION)" ') for command in commands if "mini" in command)


class Walled(SandboxDriver):
    """A driver whose sessions have no ways out; it would fail to start one."""

    kind = "docker"

    async def start(self, spec: SandboxSpec) -> SandboxSession:
        assert not spec.forwards
        raise EpisodeError("nothing starts", remedy="none", reason="session_start")

    async def fork(self, snapshot: SandboxSnapshot) -> SandboxSession:
        raise NotImplementedError

    async def release(self, snapshot: SandboxSnapshot) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("network", "error", "words"),
    [
        ({}, EnvError, "kind 'docker' have no network"),
        ({"network": False}, EnvError, "kind 'docker' have no network"),
        ({"network": "none"}, EnvError, "kind 'docker' have no network"),
        ({"network": "bridge"}, EpisodeError, "nothing starts"),
    ],
)
def test_a_driver_without_ways_out_needs_a_network(
    runner: asyncio.Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    network: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    async def opened(*_: Any) -> SandboxDriver:
        return Walled()

    monkeypatch.setattr(world, "open_sandboxes", opened)
    with pytest.raises(error, match=words):
        attempt(runner, write_task(tmp_path / "one", HARBOR), Endpoint(""), sandbox="docker", driver=network)


ACTIONS = [
    f"```mswea_bash_command\n{command}\n```"
    for command in (
        "ls -la",
        "cat count.txt",
        "echo 3 > count.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        "seq 100",
        "cd / && pwd",
    )
]
COUNTING = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 30.0\n',
    "instruction.md": "Write 3 to count.txt.\n",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nCOPY count.txt /app/\n",
    "environment/count.txt": "0\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/count.txt)" = 3 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
}


def make_acting_model(directory: Path) -> Path:
    """A model of two layers that mostly answers with one of :data:`ACTIONS`, each of which is one token, and ends."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = TinySpec(
        vocab=PRINTABLE, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, max_positions=16384,
        chat_template=TEMPLATE,
    )  # fmt: skip
    path = make_tiny(directory, spec)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    tokenizer.add_tokens(ACTIONS)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids, end = tokenizer.convert_tokens_to_ids(ACTIONS), tokenizer.eos_token_id
    read, written = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    for weight in (read, written):
        weight.normal_(0, 0.02)
    read[:, :2] = read.new_tensor([1.0, 0.0])
    read[ids, :2] = read.new_tensor([0.0, 3.0])
    written[ids, :2] = written.new_tensor([1.5, -5.0])
    written[end, :2] = written.new_tensor([-1.0, 3.0])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mini_swe_agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with mini-swe-agent from PyPI."""
    directory = tmp_path_factory.mktemp("mini")
    directory.chmod(0o755)  # the user of a session is another one
    venv.create(directory, with_pip=True)
    command = [directory / "bin/pip", "install", "--quiet", "mini-swe-agent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        pytest.skip(f"mini-swe-agent cannot be installed: {done.stderr[-300:]}")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_episodes_of_mini_swe_agent_are_trained_as_it_has_written_them_down(
    tmp_path: Path, mini_swe_agent: Path
) -> None:
    """Its own transcripts, rendered again by the chat template, are the tokens in the ledger."""
    from transformers import AutoTokenizer

    for number in range(10):
        write_task(
            tmp_path / f"tasks/count-{number}", COUNTING, **{"instruction.md": f"Count to 3, and to {number}.\n"}
        )
    model = make_acting_model(tmp_path / "model")
    command = (
        f"{mini_swe_agent}/bin/mini -y --exit-immediately -m openai/policy --model-class litellm_textbased "
        "-c mini_textbased.yaml -c agent.step_limit=5 -c agent.cost_limit=0 -o /tmp/trajectory.json "
        '-t "$(cat $HEADRACE_INSTRUCTION)"'
    )
    options = {
        "image": "machine", "memory_mb": 2048, "readable": [str(mini_swe_agent)], "command": command,
        "variables": {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        "keep": ["/tmp/trajectory.json"], "keep_in": str(tmp_path / "kept"),
    }  # fmt: skip
    summary = train({
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "tasks")},
        "env": {
            "kind": "harness", "options": options, "max_turns": 12, "timeout_s": 300, "concurrency": 6, "workers": 1,
            "processes": 2048,
        },
        "engine": {"max_new_tokens": 24, "max_context": 16384, "max_sequences": 16},
        "flow": {"groups_per_step": 5, "group_size": 2},
        "launch": {"engine_threads": 1, "learner_threads": 1},
        "observe": {"view": "none", "report": False},
        "run": {"dir": str(tmp_path / "run"), "steps": 5},
    })  # fmt: skip
    assert summary.steps == 5
    tokenizer = AutoTokenizer.from_pretrained(model)
    written: Counter[tuple[int, ...]] = Counter()
    for path in (tmp_path / "kept").glob("*/trajectory.json"):
        messages = json.loads(path.read_text())["messages"]
        said = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "exit"]
        while said[-1]["role"] != "assistant":
            said.pop()
        written[tuple(tokenizer.apply_chat_template(said, tokenize=True, return_dict=False))] += 1
    ledger = open_ledger(tmp_path / "run")
    episodes = [episode for number in range(25) for episode in ledger.episodes(number)]
    trained = Counter(tuple(int(i) for turn in each.turns for i in turn.tokens.ids_T) for each in episodes)
    assert len(episodes) == written.total() == 50
    assert trained == written
    assert {each.reward for each in episodes} == {0.0, 1.0}
    assert any(len(each.turns) >= 6 for each in episodes)
