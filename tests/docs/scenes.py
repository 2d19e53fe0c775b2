"""What the text around the Python blocks of a page has said: the names and files that they take as given, and what has
to have come of them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from asyncio import Runner
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.flow import FlowConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.plan import Simulation, Workload, World
from headrace.wings.plan.costs import Linear, TrainingRate
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.recipes.demo.task import CHAT_TEMPLATE

Names = dict[str, Any]
LETTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz .,\n"
SERVE = "from headrace.run.cli import main; main()"


def tiny(directory: Path) -> Path:
    """A model that any of the pages may take."""
    return make_tiny(directory, TinySpec(vocab=LETTERS, hidden_size=32, chat_template=CHAT_TEMPLATE))


@contextlib.contextmanager
def nothing(runner: Runner) -> Iterator[Names]:
    yield {}


@contextlib.contextmanager
def readme(runner: Runner) -> Iterator[Names]:
    import headrace

    tiny(Path("models/Qwen3-0.6B"))
    names: Names = {"headrace": headrace, "prompts": ["1+1=", "1+2="], "score": len}
    yield names
    assert names["policy"].version == names["policy"].engine_version == 1
    assert names["reward"](" 2 ", "2") == 1.0


@contextlib.contextmanager
def own_loop(runner: Runner) -> Iterator[Names]:
    import headrace
    from headrace.base.types.tokens import Tokens

    tiny(Path("path/to/model"))
    policy = headrace.Policy.load("path/to/model", lr=1e-6, loss="grpo", engine={"max_new_tokens": 8})
    runner.run(policy.start())
    pair = runner.run(policy.sample(["1+1="], n=4))[0]
    names: Names = {"policy": policy, "question": "1+1=", "tool_output_ids": [3, 4], "reward": 1.0, "samples": pair}
    names |= {"my_batches": [(["1+1=", "1+2="], ["2", "3"])], "score": lambda text, *answer: float(len(text))}
    names |= {"Tokens": Tokens, "torch": torch, "batches": [["1+1=", "1+2="], ["1+3="], ["1+4="]]}
    yield names
    assert Path("out/step-100/config.json").is_file()
    assert names["policy"].version == names["policy"].engine_version == 2
    runner.run(policy.close())


@contextlib.contextmanager
def environments(runner: Runner) -> Iterator[Names]:
    names: Names = {}
    yield names
    env = names["Sums"]()
    env.reset({"question": "1+1", "answer": 2})
    assert env.step(type("Said", (), {"content": " 2 "})()).reward == 1.0
    assert names["multiply"](6, 7) == 42


@contextlib.contextmanager
def scoring(runner: Runner) -> Iterator[Names]:
    names: Names = {}
    yield names
    assert (names["done"].ok, names["done"].stdout, names["done"].reason.name) == (True, "42\n", "EXITED")


@contextlib.contextmanager
def serving(runner: Runner) -> Iterator[Names]:
    """A server on the page's port."""
    tiny(Path("model"))
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("something listens on port 8000 already")
    command = [sys.executable, "-c", SERVE, "serve", "model"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert any(line.startswith("serving") for line in server.stdout)
        names: Names = {}
        yield names
        assert len(names["answer"].choices) == 2
        assert names["answer"].choices[0].versions
    finally:
        server.terminate()
        server.communicate(timeout=30)
        names.pop("client").close()


@contextlib.contextmanager
def planning(runner: Runner) -> Iterator[Names]:
    names: Names = {}
    yield names
    assert names["outcome"].tok_s > 0


@contextlib.contextmanager
def extending(runner: Runner) -> Iterator[Names]:
    tiny(Path("demo/model"))
    names: Names = {}
    yield names
    assert runner.run(names["reward"]("  ", "x")) is None
    flow = FlowConfig(groups_per_step=4, group_size=2, max_age=0, policy="synchronous", ledger="memory")
    told = flow.model_copy(update={"policy": names["OneBatch"](), "filters": (names["TooEasy"](ceiling=0.7),)})
    outcome = simulated(told)
    assert (len(outcome.steps), outcome.mean_age) == (5, 0.0)
    assert outcome.dropped_groups["too_easy"] > 0


def simulated(flow: FlowConfig) -> SimulatedOutcome:
    """Five steps of the real flow on virtual time."""
    costs: Names = {"engine": Linear(fixed_s=0.02), "learner": TrainingRate(tok_s=20_000)}
    work = Workload(prompt_tokens=10, answer_tokens={"kind": "lognormal", "mean": 50, "cv": 1.0}, solved=(2.0, 2.0))
    return Simulation(World(flow=flow, steps=5, workload=work, **costs), seed=0).run()


@contextlib.contextmanager
def quickstart(runner: Runner) -> Iterator[Names]:
    """``test_newcomer.py`` walks it; here each block runs by itself."""
    yield {}
    assert len(Path("train.jsonl").read_text().splitlines()) == 800
    assert json.loads(Path("held_out.jsonl").read_text().splitlines()[0]).keys() == {"prompt", "total"}


SCENES = {
    "README.md": readme,
    "docs/own_loop.md": own_loop,
    "docs/environments.md": environments,
    "docs/scoring.md": scoring,
    "docs/serving.md": serving,
    "docs/planning.md": planning,
    "docs/extending.md": extending,
    "docs/quickstart.md": quickstart,
}
"""By page; other pages take nothing as given."""
