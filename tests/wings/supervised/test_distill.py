"""Distillation on rows: a teacher beside the learner, and the same teacher's log-probabilities in the rows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.base.errors import ConfigError, DataError
from headrace.wings.supervised import teaching
from headrace.wings.supervised.session import distill
from tests.wings.serve.server_process import TOKEN, Server, served
from tests.wings.supervised.material import chat_model, settings

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12], [7, 6, 5, 13]]
ENTRIES = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("distill")
    return chat_model(home / "model"), chat_model(home / "teacher", seed=7, hidden_size=64)


def said(teacher_dir: Path, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's likeliest entries of each token, by plain transformers: log-probabilities and ids."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32)
    with torch.no_grad():
        logs = teacher(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logs[:-1].topk(ENTRIES)


def recorded(teacher_dir: Path) -> list[dict[str, Any]]:
    rows = []
    for ids in ROWS:
        logs, entries = said(teacher_dir, ids)
        rows.append(
            {"input_ids": ids, "teacher_ids": [[], *entries.tolist()], "teacher_logprobs": [[], *logs.tolist()]}
        )
    return rows


def final_weights(run_dir: Path, steps: int) -> dict[str, Any]:
    return load_file(run_dir / "checkpoints" / f"step-{steps:06}" / "model.safetensors")


def test_a_teacher_in_the_rows_is_the_teacher_beside_the_learner_and_both_are_the_formula(models, tmp_path):
    model, teacher = models
    run = {"steps": 5, "rows_per_step": 3}
    beside = {"lr": 1e-3, "top_k": ENTRIES, "teachers": [{"kind": "model", "path": str(teacher)}]}
    tokens = [{"input_ids": ids} for ids in ROWS]
    first = distill(settings(model, tmp_path / "a", learner=beside, run=run), data=tokens)
    second = distill(settings(model, tmp_path / "b", run=run), data=recorded(teacher))
    assert first.loss_first == pytest.approx(second.loss_first, abs=1e-5)
    for name, tensor in final_weights(tmp_path / "a", 5).items():
        torch.testing.assert_close(final_weights(tmp_path / "b", 5)[name], tensor, atol=1e-5, rtol=1e-4)
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = 0.0, 0
    for ids in ROWS:
        log_nu, entries = said(teacher, ids)
        with torch.no_grad():
            log_pi = student(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1].gather(1, entries)
        tails = [(1 - each.exp().sum(1, keepdim=True)).log() for each in (log_nu, log_pi)]
        nu, pi = (torch.cat([each, tail], 1) for each, tail in zip((log_nu, log_pi), tails, strict=True))
        total, count = total + float((nu.exp() * (nu - pi)).sum()), count + len(nu)
    assert first.loss_first == pytest.approx(total / count, abs=1e-5)
    assert second.loss_last < second.loss_first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"teacher_ids": None}, "do not have one list for each of the 5 input_ids"),
        ({"teacher_ids": [[], [1], [1], [1], [999]]}, "token id 999"),
        ({"teacher_ids": [[], [1], [1], [1], [1, 2]]}, "of token 4 are not as many"),
        ({"teacher_logprobs": [[], [0.5], [-1.0], [-1.0], [-1.0]]}, "are no log-probabilities"),
        ({"teacher_logprobs": [[], [float("nan")], [-1.0], [-1.0], [-1.0]]}, "are no log-probabilities"),
    ],
)
def test_rows_without_what_a_teacher_says_are_refused_by_name_and_row(models, tmp_path, change, words):
    row = {"input_ids": ROWS[0], "teacher_ids": [[], *[[1]] * 4], "teacher_logprobs": [[], *[[-1.0]] * 4]}
    with pytest.raises(DataError) as refused:
        distill(settings(models[0], tmp_path / "run"), data=[row, {**row, **change}])
    assert "data, row 2: " in str(refused.value)
    assert words in str(refused.value)


def test_a_teacher_that_cannot_be_is_refused(models, tmp_path):
    other = chat_model(tmp_path / "other", extra={}, seed=1)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"q"', '"Q"'))
    short = chat_model(tmp_path / "short", max_positions=4)
    tokens = [{"input_ids": ids} for ids in ROWS]
    for teacher, words in (
        ({"kind": "model", "path": str(other)}, "has another vocabulary than this model"),
        ({"kind": "model", "path": str(other), "engine": {}}, "has another vocabulary than this model"),
        ({"kind": "model", "path": str(short), "engine": {}}, "was made for 4 tokens, and the longest row has 5"),
        (
            {"kind": "model", "path": str(models[1]), "engine": {"prompt": "{prompt}!"}},
            "engine.prompt has no effect",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            distill(settings(models[0], tmp_path / "run", learner={"teachers": [teacher]}), data=tokens)
        assert not (tmp_path / "run").exists()  # as a dry run, which prepares and makes none
    with pytest.raises(DataError, match="needs input_ids, teacher_ids and teacher_logprobs"):
        distill(settings(models[0], tmp_path / "run"), data=tokens)


def test_a_teacher_on_an_engine_of_this_process_is_the_teacher_in_the_rows(models, tmp_path):
    model, teacher = models
    run = {"steps": 5, "rows_per_step": 3}
    engine = {"lr": 1e-3, "top_k": ENTRIES, "teachers": [{"kind": "model", "path": str(teacher), "engine": {}}]}
    first = distill(settings(model, tmp_path / "a", learner=engine, run=run), data=[{"input_ids": ids} for ids in ROWS])
    second = distill(settings(model, tmp_path / "b", run=run), data=recorded(teacher))
    assert first.loss_first == pytest.approx(second.loss_first, abs=1e-5)
    for name, tensor in final_weights(tmp_path / "b", 5).items():
        torch.testing.assert_close(final_weights(tmp_path / "a", 5)[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path]) -> Iterator[Server]:
    with served(models[1]) as running:
        yield running


def served_teacher(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("KEY_OF_THE_TEACHER", TOKEN)
    return {"base_url": f"{url}/v1", "api_key_env": "KEY_OF_THE_TEACHER", "top_k": ENTRIES}


def test_a_teacher_on_a_server_is_the_teacher_in_the_rows_and_is_asked_once(models, server, tmp_path, monkeypatch):
    model, teacher = models
    asked = served_teacher(server.url, monkeypatch)
    tokens = [{"input_ids": ids} for ids in ROWS]
    tree = settings(model, tmp_path / "a", teacher=asked, run={"steps": 3, "rows_per_step": 3})
    first = distill(tree, data=tokens)
    requests = server.figures()
    second = distill(settings(model, tmp_path / "b", run={"steps": 5, "rows_per_step": 3}), data=recorded(teacher))
    assert first.loss_first == pytest.approx(second.loss_first, abs=1e-5)
    tree["run"]["steps"] = 5
    distill(tree, data=tokens, resume=True)
    assert server.figures() == requests
    for name, tensor in final_weights(tmp_path / "b", 5).items():
        torch.testing.assert_close(final_weights(tmp_path / "a", 5)[name], tensor, atol=1e-5, rtol=1e-4)
    unbroken = settings(model, tmp_path / "c", teacher=asked, run={"steps": 5, "rows_per_step": 3})

    async def notebook() -> None:
        distill(unbroken, data=tokens)  # beside a loop that runs

    asyncio.run(notebook())
    for name, tensor in final_weights(tmp_path / "a", 5).items():
        assert torch.equal(tensor, final_weights(tmp_path / "c", 5)[name]), name


def test_a_server_that_cannot_teach_is_refused(models, server, tmp_path, monkeypatch):
    asked = served_teacher(server.url, monkeypatch)
    other = chat_model(tmp_path / "other", seed=1)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace('"q"', '"Q"'))
    tokens = [{"input_ids": ids} for ids in ROWS]
    for model, change, words in (
        (other, {}, "has another vocabulary than this model: 19 is 'Q' here, and not there"),
        (models[0], {"base_url": "http://127.0.0.1:9/v1"}, "does not tell its models"),
        (models[0], {"base_url": "localhost"}, "is not an address"),
        (models[0], {"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            distill(settings(model, tmp_path / "run", teacher={**asked, **change}), data=tokens)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        DataError, match=r"the teacher cannot score a row of \d tokens: the engine answered 400"
    ) as refused:
        distill(settings(models[0], tmp_path / "run", teacher={**asked, "top_k": 21}), data=tokens)
    assert "logprobs" in refused.value.problem
    beside = {"teachers": [{"kind": "model", "path": str(models[1])}]}
    with pytest.raises(ConfigError, match="are both set"):
        distill(settings(models[0], tmp_path / "run", teacher=asked, learner=beside), data=tokens)


def test_scores_that_a_failed_run_has_got_are_not_asked_for_again(models, tmp_path, monkeypatch):
    monkeypatch.setattr(teaching, "ROWS_PER_FILE", 1)
    tokens = [{"input_ids": ids} for ids in ROWS]
    engine = {"top_k": ENTRIES, "teachers": [{"kind": "model", "path": str(models[1]), "engine": {}}]}
    tree = settings(models[0], tmp_path / "run", learner=engine, run={"steps": 2})
    files = tmp_path / "run" / "teacher"
    distill(tree, data=tokens)
    assert sorted(path.name for path in files.iterdir()) == [f"{number:05d}.safetensors" for number in range(3)]
    times = {path.name: path.stat().st_mtime_ns for path in files.iterdir()}
    (files / "00001.safetensors").write_bytes(b"torn")
    tree["run"]["steps"] = 4
    distill(tree, data=tokens, resume=True)
    again = {path.name: path.stat().st_mtime_ns for path in files.iterdir()}
    assert {name for name in times if times[name] != again[name]} == {"00001.safetensors"}
