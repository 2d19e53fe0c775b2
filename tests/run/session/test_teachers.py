"""Runs that learn from teachers: one beside the learner, several in engines of their own."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.config import validate
from headrace.base.errors import HeadraceError, NothingToLearn
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.base.types.versions import FROZEN
from headrace.flow.layout import collate
from headrace.flow.ledger.browse import Browser
from headrace.flow.ledger.opening import open_ledger
from headrace.learner import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.work import StepWork
from headrace.models import load_model, load_tokenizer
from headrace.run.observe.jsonl import METRICS_FILE, read_steps
from headrace.run.session import load_config, train
from headrace.run.session.config import RunConfig
from headrace.run.session.prepare import Inputs, prepare
from tests.learner.reference import double
from tests.rollout.environments.tasks import chat_model
from tests.run.session.runs import components, make_run, running, tiny_model

INDIFFERENT = """
    def reward(completion):
        return 0.5
"""
SETTINGS = ["observe.view=none", "flow.max_idle_batches=2", "run.steps=4"]


@pytest.mark.slow
def test_rewards_that_are_all_equal_end_a_run_unless_a_teacher_says_what_to_prefer(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    teacher = tiny_model(tmp_path / "teacher", hidden_size=48)
    with pytest.raises(NothingToLearn, match="got the same reward"):
        train(make_run(tmp_path / "alone", model, reward=INDIFFERENT), overrides=SETTINGS)
    run_file = make_run(
        tmp_path / "taught",
        model,
        reward=INDIFFERENT,
        algo={"advantage": "reverse_kl"},
        learner={"lr": 1e-2},
    )
    train(run_file, overrides=[*SETTINGS, f"learner.teachers=[{{kind='model', path='{teacher}'}}]"])
    summary = json.loads((run_file.parent / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    with closing(Browser.open_run(run_file.parent / "run")) as browser:
        episode = browser.episode(EpisodeKey(0, 0))
        learned = browser.token_results(0)
    assert episode is not None
    assert learned is not None
    (said,) = learned.teacher_scores(episode).values()
    assert np.isfinite(said.logprobs_T).all()
    assert set(said.versions_T.tolist()) == {FROZEN}


ROWS = "".join(
    json.dumps({"prompt": f"{a}+{a + 1}=", "answer": 2 * a + 1, "subject": ("sums", "rest")[a % 2]}) + "\n"
    for a in range(8)
)


def taught_run(directory: Path, model: Path, teachers: str, *more: str) -> tuple[RunConfig, list[ScoredGroup]]:
    """A run that distils, sampled with truncation and at another temperature; and its groups."""
    run_file = make_run(directory, model, rows=ROWS, learner={"lr": 1e-2, "top_k": 5}, engine={"temperature": 0.8})
    overrides = [
        "algo.loss='distill'",
        "engine.top_p=0.9",
        f"learner.teachers={teachers}",
        "observe.view=none",
        "run.steps=2",
        *more,
    ]
    summary = train(run_file, overrides=overrides)
    assert summary.status == "finished", summary.cause
    with closing(open_ledger(directory / "run")) as ledger:
        numbers = range(summary.ledger.groups.submitted)
        groups = [ScoredGroup(number=number, episodes=tuple(ledger.episodes(number))) for number in numbers]
    return load_config(run_file, overrides), [group for group in groups if group.scored]


def asked(groups: list[ScoredGroup]) -> list[tuple[IntColumn, Tokens]]:
    """Prompt and answer of every scored episode."""
    found = [[turn.tokens for turn in episode.turns] for group in groups for episode in group.scored]
    assert all(len(turns) == 2 for turns in found)
    return [(turns[0].ids_T, turns[1]) for turns in found]


def names(groups: list[ScoredGroup]) -> list[str]:
    """Who taught every scored episode."""
    return [episode.turns[1].teacher for group in groups for episode in group.scored]


def gap(model_dir: Path, prompt_ids_T: IntColumn, answer: Tokens) -> float:
    """How far what was said of an answer is from what transformers says in float64, at worst."""
    model = double(model_dir)
    ids_T = torch.tensor(np.concatenate([prompt_ids_T, answer.ids_T]).astype(np.int64))
    with torch.no_grad():
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, len(prompt_ids_T) - 1 : -1] / 0.8
    whole_TV = logits_TV.log_softmax(-1)
    assert answer.kept is not None
    assert answer.teacher_scores is not None
    spans = answer.kept.spans()
    ruled_out = [[len(span) > 0 and entry not in span for entry in range(logits_TV.shape[1])] for span in spans]
    own_TV = logits_TV.masked_fill(torch.tensor(ruled_out), -torch.inf).log_softmax(-1)
    own_T = own_TV.gather(1, ids_T[len(prompt_ids_T) :, None])[:, 0].numpy()
    best_TK = whole_TV.topk(answer.teacher_scores.ids_TK.shape[1]).values.numpy()
    named_TK = whole_TV.gather(1, torch.tensor(answer.teacher_scores.ids_TK.astype(np.int64))).numpy()
    apart = [np.abs(each - answer.teacher_scores.logs_TK).max() for each in (best_TK, named_TK)]
    return float(max(*apart, np.abs(own_T - answer.teacher_scores.logprobs_T).max()))


@pytest.mark.slow
def test_a_teacher_in_an_engine_says_what_one_beside_the_learner_says(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    other = tiny_model(tmp_path / "other", hidden_size=48, seed=3)
    config, groups = taught_run(tmp_path / "run", model, f"[{{kind='model', path='{other}', engine={{}}}}]")
    answers = asked(groups)
    assert {len(answer.teacher_scores or ()) == len(answer) for _, answer in answers} == {True}
    versions = {int(version) for _, answer in answers for version in answer.teacher_scores.versions_T}
    assert versions == {FROZEN}
    assert max(gap(other, *one) for one in answers) < 1e-5
    batch = collate(0, groups[:2], [0.0] * sum(len(group.counted) for group in groups[:2]))
    work = _beside(config, other, batch)
    mask_N = batch.mask_N
    assert work.top is not None
    np.testing.assert_allclose(batch.teacher_scores.logs_TK[mask_N], work.top.logs_NK.numpy()[mask_N], atol=1e-5)
    np.testing.assert_array_equal(batch.teacher_scores.ids_TK[mask_N], work.top.ids_NK.numpy()[mask_N])
    metrics = [step.metrics for step in read_steps(tmp_path / "run" / "run" / METRICS_FILE)]
    assert all("teacher_version" not in step for step in metrics)  # its weights are none of the run's


def _beside(config: RunConfig, other: Path, batch: Batch) -> StepWork:
    """The batch with the columns of a teacher that the learner computes."""
    learner = validate(LearnerConfig, {"top_k": 5, "teachers": [{"kind": "model", "path": str(other)}]})
    context = LearnerContext(
        temperature=config.engine.temperature, total_steps=1, model_dir=Path(config.model.path), clock=RealClock()
    )
    core = LearnerCore(load_model(config.model), learner, Objective.build(config.algo), context)
    return core.add_columns(
        StepWork(batch=batch, mask_N=batch.mask_N, weights_N=torch.ones(batch.num_tokens), old=config.algo.old)
    )


def test_rows_name_their_teachers_one_of_which_reads_the_solution_first(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    other = tiny_model(tmp_path / "other", hidden_size=48, seed=3)
    teachers = (
        f"[{{kind='model', path='{other}', engine={{name='sums'}}}},"
        "{kind='frozen', engine={name='rest', prompt='{answer}={prompt}'}}]"
    )
    _, groups = taught_run(tmp_path / "run", model, teachers, "learner.teacher_column='subject'")
    by_name = names(groups)
    tokenizer = load_tokenizer(str(model))
    rows = {tuple(tokenizer.encode(row["prompt"])): row for row in map(json.loads, ROWS.splitlines())}
    seen = set[str]()
    for name, (prompt_ids_T, answer) in zip(by_name, asked(groups), strict=True):
        row = rows[tuple(prompt_ids_T.tolist())]
        seen.add(row["subject"])
        assert name == row["subject"]
        assert answer.teacher_scores is not None
        if row["subject"] == "sums":
            assert gap(other, prompt_ids_T, answer) < 1e-5
            assert set(answer.teacher_scores.versions_T.tolist()) == {FROZEN}
            continue
        read = np.array(tokenizer.encode(f"{row['answer']}={row['prompt']}"), np.int32)
        assert gap(model, read, answer) < 1e-5
        assert gap(model, prompt_ids_T, answer) > 1e-3
        assert set(answer.teacher_scores.versions_T.tolist()) == {0}
    assert seen == {"sums", "rest"}
    metrics = [step.metrics for step in read_steps(tmp_path / "run" / "run" / METRICS_FILE)]
    assert {step.get("teacher_version", 0.0) for step in metrics} == {0.0}
    assert any("teacher_version" in step for step in metrics)


def test_of_a_chat_the_last_message_is_replaced_and_columns_are_filled_in(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model")
    chat = [{"role": "system", "content": "0"}, {"role": "user", "content": "1+2="}]
    rows = "".join(json.dumps({"prompt": prompt, "hint": 3}) + "\n" for prompt in (chat, "4+4="))
    run_file = make_run(tmp_path / "run", model, rows=rows, algo={"loss": "distill"})
    teachers = "learner.teachers=[{kind='frozen', engine={prompt='{hint}={prompt}'}}]"
    prepared = prepare(load_config(run_file, [teachers, "flow.groups_per_step=2"]), Inputs())
    tokenizer, order = load_tokenizer(str(model)), prepared.teachers[""]
    assert order.config.prompts is not None
    read = [tokenizer.decode(ids_T) for ids_T in order.config.prompts]
    assert read == ["03=1+2=", "3=4+4="]
    assert order.max_context == prepared.max_context + 2  # of the longest prompt, and an answer


@pytest.mark.slow
def test_a_teacher_that_dies_is_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run_file = make_run(tmp_path / "run", model, algo={"loss": "distill"}, run={"dir": "run", "steps": 8})
    with running("train", run_file, "--set", "learner.teachers=[{kind='frozen', engine={}}]") as run:
        run.until_step(2)
        os.kill(components(tmp_path / "run" / "run")["teacher"], signal.SIGKILL)
        run.rest()
    summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 8)
    assert any("teacher" in recovery for recovery in summary["recoveries"])
    assert not summary["ledger"]["episodes"]["dropped"]


@pytest.mark.parametrize(
    ("teachers", "problem"),
    [
        ("[{{kind='model', path='{stranger}', engine={{}}}}]", "has another vocabulary than this model"),
        ("[{{kind='model', path='{stranger}'}}]", "has another vocabulary than this model"),
        ("[{{kind='model', path='{short}', engine={{}}}}]", "was made for 6 tokens"),
        ("[{{kind='frozen', engine={{prompt='{{hint}} {{prompt}}'}}}}]", "asks for the column 'hint', which row 1"),
        (
            "[{{kind='frozen', engine={{name='a'}}}}, {{kind='frozen', engine={{name='b'}}}}]",
            "row 1 has no column 'teacher'",
        ),
        ("[{{kind='model', path='{nowhere}', engine={{}}}}]", "is not a directory that can be read"),
    ],
)
def test_what_could_not_teach_is_refused_before_anything_starts(tmp_path: Path, teachers: str, problem: str) -> None:
    model = tiny_model(tmp_path / "model")
    paths = {
        "stranger": tiny_model(tmp_path / "stranger", vocab="0123456789=+"),
        "short": tiny_model(tmp_path / "short", max_positions=6),
        "nowhere": tmp_path / "nowhere",
    }
    run_file = make_run(tmp_path / "run", model, algo={"loss": "distill"})
    with pytest.raises(HeadraceError, match=problem):
        train(run_file, overrides=[f"learner.teachers={teachers.format(**paths)}", "observe.view=none"])
    assert not (tmp_path / "run" / "run" / "ledger.sqlite").exists()
    assert not (tmp_path / "run" / "run" / "logs").exists()
