"""Harnesses of others, unmodified, against a server: the same figures as with their own backend."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.run.cli.app import app
from tests.run.session.runs import command
from tests.wings.serve.server_process import make_model

TASKS = ("likelihood", "choices", "rolling", "generated")


def lacks(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def write_tasks(directory: Path) -> Path:
    """The tasks, with rows of their own."""
    directory.mkdir()
    rng = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6))) for _ in range(rng.randint(least, most))
        )

    rows = [
        {
            "question": words(3, 12), "answer": words(1, 3), "options": [words(1, 3) for _ in range(4)],
            "right": rng.randrange(4), "text": words(100, 130),
        }
        for _ in range(12)
    ]  # fmt: skip
    data = directory / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for task in (Path(__file__).parent / "harness_tasks").glob("*.yaml"):
        (directory / task.name).write_text(task.read_text().replace("DATA", str(data)))
    return directory


def harness(
    program: list[str], tasks: Path, out: Path, home: Path, *arguments: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a run of lm-eval, and the answers to each row."""
    given = ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    subprocess.run(
        [*program, *given, "--device", "cpu", "--batch_size", "4", *arguments],
        check=True,
        timeout=1200,
        env={**os.environ, "HF_HOME": str(home), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    (results,) = out.rglob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    answers = {}
    for file in out.rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        task = next(name for name in TASKS if file.name.startswith(f"samples_{name}_"))
        answers[task] = {line["doc_id"]: line["filtered_resps"] for line in lines}
    return figures, answers


def numbers(tree: Any) -> list[float]:
    """All numbers in a tree, in order."""
    if isinstance(tree, bool | int | float):
        return [float(tree)]
    if isinstance(tree, dict):
        return [number for key in sorted(tree) for number in numbers(tree[key])]
    if isinstance(tree, list):
        return [number for each in tree for number in numbers(each)]
    try:
        return [float(tree)]  # lm-eval writes numbers as text
    except (TypeError, ValueError):
        return []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--harness", "no-such"], "no-such"),
        (["--", "--tasks"], "there is none"),
        (["--harness", "lm-eval", "--n", "3"], "--n is not read by a harness"),
    ],
)
def test_what_a_harness_cannot_do_is_refused_in_words(arguments: list[str], words: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["eval", str(tmp_path), *arguments])
    assert isinstance(said.exception, ConfigError)
    assert words in said.exception.problem


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(lacks("lm_eval"), reason="pip install 'lm_eval[api]'")
def test_lm_eval_finds_the_same_as_with_its_own_backend(tmp_path: Path) -> None:
    model, tasks, home = make_model(tmp_path / "little"), write_tasks(tmp_path / "tasks"), tmp_path / "home"
    arguments = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32,max_length=510",
    ]  # its windows end one later
    own, own_answers = harness([sys.executable, "-m", "lm_eval"], tasks, tmp_path / "own", home, *arguments)
    ours = [*command("eval", model, "--harness", "lm-eval"), "--"]
    told, told_answers = harness(ours, tasks, tmp_path / "told", home)
    assert own.keys() == told.keys() == set(TASKS)
    for task in TASKS:
        figures = {name for name, value in own[task].items() if isinstance(value, float) and not math.isnan(value)}
        assert figures
        for name in figures:
            assert told[task][name] == pytest.approx(own[task][name], rel=1e-4, abs=1e-4), (task, name)
        assert told_answers[task].keys() == own_answers[task].keys()
        for row, answer in own_answers[task].items():
            if task == "generated":
                assert told_answers[task][row] == answer
            assert numbers(told_answers[task][row]) == pytest.approx(numbers(answer), rel=1e-4, abs=1e-3)


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def words():
    return Task(dataset=json_dataset("DATA"), solver=generate(), scorer=includes())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(lacks("inspect_ai"), reason="pip install inspect-ai openai")
def test_inspect_runs_an_offline_task_as_it_is(tmp_path: Path) -> None:
    model, data, script = make_model(tmp_path / "little"), tmp_path / "rows.jsonl", tmp_path / "words.py"
    data.write_text("\n".join(json.dumps({"input": f"word {number}", "target": "e"}) for number in range(6)))
    script.write_text(INSPECT_TASK.replace("DATA", str(data)))
    how = ["--log-format", "json", "--max-tokens", "12", "--temperature", "0", "--display", "plain"]
    subprocess.run(
        [*command("eval", model, "--harness", "inspect"), "--", script.name, "--log-dir", str(tmp_path / "logs"), *how],
        check=True,
        timeout=900,
        cwd=tmp_path,  # Inspect looks for tasks below the folder it runs in
    )
    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success"
    assert len(log["samples"]) == 6
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for sample in log["samples"]:
        chat = [{"role": "user", "content": sample["input"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        answer = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert sample["output"]["choices"][0]["message"]["content"] == tokenizer.decode(
            answer, skip_special_tokens=True
        )
        assert sample["output"]["usage"]["input_tokens"] == ids.shape[1]
