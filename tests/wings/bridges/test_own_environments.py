"""Libraries that need an environment of their own: what cannot be installed beside the others is tested here alone."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.run.session.runs import make_run
from tests.venvs import python_with, run_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TASKSET = '''
    """A taskset of verifiers with a harness that asks twice."""

    import httpx
    import verifiers.v1 as vf

    __all__ = ["Counting", "Twice"]

    class Data(vf.TaskData):
        letter: str

    class Task(vf.Task[Data]):
        @vf.reward
        async def uses(self, trace) -> float:
            said = [node.message.content or "" for node in trace.nodes if node.message.role == "assistant"]
            return sum(text.count(self.data.letter) for text in said) / 8

    class Counting(vf.Taskset[Task]):
        def load(self):
            for letter in "012":
                yield Task(Data(prompt=f"write {letter}", letter=letter), self.config.task)

    class Twice(vf.Harness[vf.HarnessConfig]):
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
            said = [{"role": "user", "content": data.prompt}]
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
                for _ in range(2):
                    body = {"model": ctx.model, "messages": said}
                    answer = await client.post(f"{endpoint}/chat/completions", json=body)
                    answer.raise_for_status()
                    content = answer.json()["choices"][0]["message"]["content"] or ""
                    said += [{"role": "assistant", "content": content}, {"role": "user", "content": "again"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''


def bridged(directory: Path, model: Path, entry: str, options: dict[str, Any], **sections: Any) -> Path:
    """A run file over ``entry``."""
    run_file = make_run(
        directory, model, env={"reward": "", "kind": "bridge", "entry": entry},
        data={"path": "", "count": 3, "eval_count": 0, **sections.pop("data", {})}, **sections,
    )  # fmt: skip
    text = run_file.read_text().replace("eval_count = 0\n", "")
    table = "".join(f"{name} = {_toml(value)}\n" for name, value in options.items())
    run_file.write_text(text + (f"[env.options]\n{table}" if table else ""))
    return run_file


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


def test_a_taskset_of_verifiers_is_trained(tmp_path: Path, model_dir: Path) -> None:
    python = python_with("verifiers==0.4.0")
    (tmp_path / "counting.py").write_text(textwrap.dedent(TASKSET))
    options = {"agent": {"runtime": {"type": "subprocess"}}}
    run_file = bridged(tmp_path, model_dir, "verifiers/counting", options, run={"steps": 2})
    done = run_with(python, "train", run_file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)


SERVER = '''
    import sys

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Said(Action):
        message: str
        language: str = ""

    class Seen(Observation):
        text: str

    class Digits(Environment):
        """Asks for digits, twice; pays for each."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.turns = 0
            return Seen(text=f"digits, please ({seed})")

        def step(self, action, timeout_s=None, **kwargs):
            self.turns += 1
            assert action.language == "none"
            paid = sum(character.isdigit() for character in action.message) / 8
            return Seen(text="more", reward=paid, done=self.turns == 2)

        @property
        def state(self):
            return State()

    uvicorn.run(create_fastapi_app(Digits, Said, Seen, max_concurrent_envs=64), port=int(sys.argv[1]))
'''


@contextmanager
def serving(*command: str | Path, port: int) -> Iterator[str]:
    """A server of its own process at a URL, which does not outlive the body."""
    with subprocess.Popen([str(part) for part in command]) as process:
        try:
            _wait_listening(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_listening(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the server does not listen")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_environment_behind_an_openenv_server_is_trained(tmp_path: Path, model_dir: Path) -> None:
    python = python_with("openenv==0.10.0")
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    options = {"action": "message", "observation": "text", "with": {"language": "none"}}
    with serving(python, tmp_path / "server.py", str(port := free_port()), port=port) as url:
        run_file = bridged(tmp_path, model_dir, f"openenv/{url}", options, run={"steps": 2}, data={"eval_count": 3})
        done = run_with(python, "train", run_file)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(run_with(python, "eval", run_file, "--json").stdout)
    assert found["tasks"] == 3
    assert re.search(r"step 2/2", done.stdout)
