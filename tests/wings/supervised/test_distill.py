"""Distillation on rows: a teacher beside the learner, and the same teacher's log-probabilities in the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.base.errors import ConfigError, DataError, HeadraceError
from headrace.wings.supervised import served as teacher_engine
from headrace.wings.supervised.served import TeacherServer
from headrace.wings.supervised.session import distill
from tests.wings.serve.server_process import TOKEN, make_model, served
from tests.wings.supervised.material import VOCAB, chat_model, conversations, settings

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
    tokens = [{"input_ids": ids} for ids in ROWS]
    for teacher, words in (
        ({"kind": "model", "path": str(other)}, "has another vocabulary than this model"),
        ({"kind": "model", "path": str(models[1]), "engine": {}}, "headrace distill starts no engine"),
    ):
        with pytest.raises(ConfigError, match=words):
            distill(settings(models[0], tmp_path / "run", learner={"teachers": [teacher]}), data=tokens)
    with pytest.raises(DataError, match="needs input_ids, teacher_ids and teacher_logprobs"):
        distill(settings(models[0], tmp_path / "run"), data=tokens)


@pytest.fixture(scope="module")
def teacher_url(models: tuple[Path, Path]) -> Iterator[str]:
    with served(models[1]) as server:
        yield server.url


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", TOKEN)


def by_engine(url: str, **more: Any) -> dict[str, Any]:
    return {"base_url": url, "api_key_env": "TEACHER_KEY", "top_k": ENTRIES, **more}


def test_a_teacher_on_an_engine_is_the_same_teacher_in_the_rows(models, teacher_url, tmp_path, monkeypatch):
    run, asked = {"steps": 5, "rows_per_step": 3}, list[int]()
    whole = TeacherServer.entries
    monkeypatch.setattr(TeacherServer, "entries", lambda self, *args: asked.append(1) or whole(self, *args))
    monkeypatch.setattr(teacher_engine, "PART_ROWS", 2)  # two files of answers
    tokens = [{"input_ids": ids} for ids in ROWS]
    named = settings(models[0], tmp_path / "a", teacher=by_engine(teacher_url), run={**run, "steps": 3})
    distill(named, data=tokens)
    assert len(asked) == 4  # one before the start, and three
    lines = distill({**named, "run": {**named["run"], "steps": 5}}, data=tokens, resume=True)
    assert len(asked) == 5, "the answers of before are used"
    rows = distill(settings(models[0], tmp_path / "b", run=run), data=recorded(models[1]))
    assert lines.loss_last == pytest.approx(rows.loss_last, abs=1e-5)
    for name, tensor in final_weights(tmp_path / "a", 5).items():
        torch.testing.assert_close(final_weights(tmp_path / "b", 5)[name], tensor, atol=1e-5, rtol=0)


def test_a_teacher_on_an_engine_reads_conversations_too(models, teacher_url, tmp_path):
    tree = settings(models[0], tmp_path / "run", teacher=by_engine(teacher_url), run={"steps": 20, "rows_per_step": 8})
    found = distill({**tree, "learner": {**tree["learner"], "lr": 3e-3}}, data=conversations(8))
    assert found.loss_last < 0.8 * found.loss_first


def test_a_teacher_on_an_engine_that_cannot_teach_is_refused_before_the_start(models, teacher_url, tmp_path):
    tokens = [{"input_ids": ids} for ids in ROWS]

    def refused(teacher: dict[str, Any], words: str, **more: Any) -> None:
        with pytest.raises(HeadraceError, match=words):
            distill(settings(models[0], tmp_path / "run", teacher=teacher, **more), data=tokens)
        assert not (tmp_path / "run").exists()

    refused(by_engine(teacher_url, top_k=30), r"teacher.top_k=30: .* does not tell as many entries")
    refused(by_engine(teacher_url, model="other"), "other is not served")
    refused(by_engine(teacher_url, api_key_env="NO_KEY"), "NO_KEY is not set")
    refused(by_engine("http://127.0.0.1:9"), "does not answer")
    refused(by_engine("ftp://x"), "is no URL")
    refused(by_engine("http://me:hush@localhost:1"), "holds a password")
    two = {"kind": "model", "path": str(models[1])}
    refused(by_engine(teacher_url), "are two teachers", learner={"teachers": [two]})
    with served(make_model(tmp_path / "larger")) as foreign:
        refused(by_engine(foreign.url), "the teacher has an entry with the id [4-9]., and the model knows 0 to 44")
    with served(make_model(tmp_path / "other", vocab=VOCAB[::-1])) as foreign:
        refused(by_engine(foreign.url), "the teacher other has another vocabulary: of '[^']+' it makes . tokens")
