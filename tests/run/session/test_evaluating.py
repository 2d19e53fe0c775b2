"""``headrace eval`` over whole processes: any environment, several attempts, pages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, DeadlineError
from headrace.base.types.observation import Event
from headrace.engine.remote import RemoteEndpoint
from headrace.launch.local import launch_serving
from headrace.launch.processes import Processes
from headrace.run.session import Measures, evaluate
from tests.rollout.environments.tasks import chat_model, make_env_run
from tests.run.session.runs import verb
from tests.wings.serve.server_process import TOKEN, served

ENVIRONMENT = """
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

    async def branches(task, policy):
        said = [{"role": "user", "content": task["prompt"]}]
        one, two = await policy.chat(said), await policy.chat(said)
        return (earned(one.message.content) + earned(two.message.content))
"""
STEPS = """
def step(completion, turn):
    return float(turn)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("tiny") / "model")


def test_an_environment_of_several_turns_is_measured_with_intervals_and_pages(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    (tmp_path / "steps.py").write_text(STEPS)
    process_reward = '[[env.rewards]]\nkind = "function"\nref = "steps.py:step"\nby_turn = true\nover_turns = "sum"\n'
    run_file.write_text(run_file.read_text() + process_reward)
    out = tmp_path / "eval"
    told = verb("eval", run_file, "--n", "3", "--k", "1", "--k", "3", "--pass-reward", "1.0", "--out", out, "--json")
    found = json.loads(told)
    assert found["samples"] == 3
    assert found["tasks"] == 12
    assert found["mean_reward"] == 1.0  # of the turns 0 and 1
    assert found["pass_at"]["3"]["value"] == found["pass_hat"]["3"]["value"] == 1.0
    assert found["pass_at"]["1"]["low"] < 1.0
    assert json.loads((out / "evaluation.json").read_text()) == found
    lines = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert {line["answers"] for line in lines} == {2}
    assert len(list((out / "episodes").glob("*.html"))) == 36
    assert "pass^3" in (out / "index.html").read_text()
    assert "3 · policy" in (out / "episodes" / "0-0.html").read_text()


@pytest.mark.slow
def test_attempts_are_others_each_time_and_the_same_in_a_repetition(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def warning(order: Any, remote: Any) -> AsyncIterator[Any]:
        order.on_event(Event(wall_s=0.0, text="engine-1 is lost", level="warning"))
        async with launch_serving(order, remote) as serving:
            yield serving

    monkeypatch.setattr("headrace.run.session.evaluating.launch_serving", warning)
    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "branches", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    overrides = ["run.eval_samples=4"]
    measures = Measures(pass_reward=0.5, directory=tmp_path / "first", max_pages=5)
    first = evaluate(run_file, overrides=overrides, measures=measures)
    again = evaluate(run_file, overrides=overrides, measures=Measures(pass_reward=0.5))
    assert (first.avg, first.pass_at, first.pass_hat) == (again.avg, again.pass_at, again.pass_hat)
    assert "engine-1 is lost" in first.warnings
    assert list(first.pass_at) == [1, 2, 4]
    assert first.pass_at[1] == first.pass_hat[1]
    assert first.pass_hat[4].value < first.pass_hat[1].value < first.pass_at[4].value
    assert first.directory == str(tmp_path / "first")
    assert again.directory == ""
    assert len(list((tmp_path / "first" / "episodes").iterdir())) == 5


def test_an_engine_that_an_evaluation_loses_is_a_warning(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def losing(order: Any, _: None) -> AsyncIterator[Any]:
        processes = Processes(site=None, starter=None, order=order, weights=tmp_path)  # type: ignore[arg-type]
        gone = DeadlineError("engine-1 found no free resources within 30 s\nthe cluster has 1 CPU", remedy="add nodes")
        processes.make_engines(own_weights=True)._on_loss("engine-1", gone)
        raise ConfigError("it ends", remedy="nothing")
        yield

    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    monkeypatch.setattr("headrace.run.session.evaluating.launch_serving", losing)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="it ends"):
        evaluate(run_file, on_progress=lines.append)
    lost = "engine-1 is lost, since it could not be started again: engine-1 found no free resources within 30 s"
    assert f"warning: {lost}" in lines


def test_a_k_that_the_attempts_cannot_tell_is_refused(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    with pytest.raises(ConfigError, match=r"k=8 cannot be told from 4 attempts"):
        evaluate(run_file, overrides=["run.eval_samples=4"], measures=Measures(ks=[1, 8]))


@pytest.mark.slow
def test_an_engine_of_somebody_else_gives_the_same_attempts(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    own = evaluate(run_file, overrides=["run.eval_samples=2"], measures=Measures(pass_reward=0.5))
    with served(model_dir) as server:
        where = RemoteEndpoint(url=f"{server.url}/v1", token=TOKEN)
        found = evaluate(
            run_file, overrides=["run.eval_samples=2"], measures=Measures(pass_reward=0.5, running_engine=where)
        )
    assert (found.avg, found.pass_at, found.tokens) == (own.avg, own.pass_at, own.tokens)
    assert 0 < found.mean_reward < 1


def test_an_address_without_an_engine_is_told_in_words(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_env_run(
        tmp_path, model_dir, ENVIRONMENT, "Twice", data={"path": "rows.jsonl", "eval_path": "rows.jsonl"}
    )
    where = RemoteEndpoint(url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="does not tell its models"):
        evaluate(run_file, measures=Measures(running_engine=where))
