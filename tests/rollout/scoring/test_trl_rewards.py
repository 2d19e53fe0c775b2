"""Rewards written for TRL get what TRL passes them, and one that cannot be called is refused before the run starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError, EnvError, HeadraceError
from headrace.base.types.messages.scorer import ScoreCompletions, TrainerState
from headrace.base.types.task import Task
from headrace.control.metrics.rewards import RewardCounts
from headrace.rollout.scoring import ExactReward, FunctionReward, Graded, JudgeReward, RewardFunction, Scores
from headrace.rollout.scoring.fit import find_reliable_columns, refuse_missing_columns
from headrace.rollout.scoring.signature import inspect_signature, read_signature

CHAT = [{"role": "user", "content": "1+1="}]
NOW = TrainerState(global_step=3, max_steps=10, epoch=0.5)


def called(function: Callable[..., Any], *completions: str, row: dict[str, Any] | None = None, **more: Any) -> Scores:
    """What the function is passed by the scoring stage, and what comes of it."""
    ids = tuple(np.arange(len(text) + 1, dtype=np.int32) for text in completions)
    request = ScoreCompletions(
        call=0,
        prompt=more.get("prompt", CHAT),
        completions=completions,
        row={"prompt": "p", "answer": "2", **(row or {})},
        completion_ids=ids,
        trainer=NOW,
    )
    with ThreadPoolExecutor(max_workers=1) as executor:
        return asyncio.run(RewardFunction(function, executor).score(request))


def test_a_reward_for_trl_gets_all_that_trl_passes_and_no_more() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, completion_ids=completion_ids, state=trainer_state, completions=completions)
        kwargs["log_metric"]("length", sum(map(len, completion_ids)) / 2)
        kwargs["log_extra"]("gold", kwargs["answer"])
        return [float(len(ids)) for ids in completion_ids]

    scores = called(reward, "ab", "c", row={"completion": "x", "completion_ids": [9]})
    assert scores.rewards == (3.0, 2.0)
    assert scores.metrics == {"length": (2.5,)}
    assert scores.extra == ({"gold": "2"}, {"gold": "2"})
    assert seen["completion_ids"] == [[0, 1, 2], [0, 1]]
    assert (seen["state"].global_step, seen["state"].max_steps, seen["state"].epoch) == (3, 10, 0.5)
    assert seen.keys() - {"state", "completions", "completion_ids"} == {"answer", "log_extra", "log_metric"}


def test_trls_own_rewards_work_as_they_are() -> None:
    rewards = pytest.importorskip("trl.rewards")
    said = ("<think>a</think>\\boxed{2}", "no")
    assert called(rewards.think_format_reward, *said).rewards == (1.0, 0.0)
    punish = rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    assert called(punish, "abc", "a").rewards == (-1.0, 0.0), "it takes completion_ids and no completions"
    repeats = rewards.get_repetition_penalty_reward(ngram_size=2)
    assert called(repeats, "abc").rewards == (0.0,)
    pytest.importorskip("math_verify")
    scores = called(rewards.accuracy_reward, *said, row={"solution": "2"})
    assert scores.rewards == (1.0, 0.0)
    assert scores.extra[1]["answer_parsed"] == "[unparseable]"
    assert called(rewards.reasoning_accuracy_reward, *said, row={"solution": "2"}).rewards == (1.0, 0.0)
    cosine = rewards.get_cosine_scaled_reward(max_len=100)
    assert called(cosine, *said, row={"solution": "2"}).rewards[0] == pytest.approx(0.95, abs=0.05)


def test_a_reward_of_one_completion_gets_them_by_name_and_its_row_stays_the_row() -> None:
    def by_name(completion: str, completion_ids: list[int], trainer_state: Any, log_metric: Any) -> float:
        log_metric("n", len(completion_ids))
        return float(trainer_state.global_step)

    assert called(by_name, "ab") == Scores(rewards=(3.0,), metrics={"n": (3.0,)})

    def row_alone(completion: str, **row: Any) -> float:
        return float(set(row) == {"prompt", "answer"})

    assert called(row_alone, "ab").rewards == (1.0,)


def test_what_the_trainer_state_does_not_have_is_said() -> None:
    def reward(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [trainer_state.log_history[-1]["loss"]]

    assert "trainer_state has no 'log_history' here; it has global_step, max_steps" in called(reward, "a").failure


def test_a_column_that_does_not_fit_the_completions_is_a_failure() -> None:
    def reward(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("gold", [1])
        return [0.0] * len(completions)

    assert "log_extra('gold') was given 1 values for 2 completions" in called(reward, "a", "b").failure


FILE = """
import functools
from os.path import join as imported

def plain(completion, answer, *, strict=True, key): ...
async def grouped(completions, solution, environments=None, **columns): ...
def turns(completion, history, turn): ...
def strict(completion, answer, /): ...
def needs_environments(completions, environments): ...
@functools.cache
def decorated(completion): ...
made = functools.partial(plain, key=1)
if True:
    def nested(completion): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "r.py").write_text(FILE)
    return tmp_path / "r.py"


def test_the_text_of_a_file_tells_what_the_function_itself_would(file: Path) -> None:
    names: dict[str, Any] = {}
    exec(FILE, names)  # noqa: S102 - a text of this file
    for name in ("plain", "grouped", "turns", "strict", "needs_environments"):
        assert read_signature(file, name) == inspect_signature(names[name])
    for name in ("decorated", "made", "nested", "imported", "absent"):
        assert read_signature(file, name) is None


def tasks(*rows: dict[str, Any]) -> list[Task]:
    return [Task(row_index=n, row=row, prompt="p", prompt_ids_T=np.zeros(1, np.int32)) for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "plain",
            {},
            r"requires the parameter 'key', .*columns answer, keys; passed are prompt, completion(.|\n)*'keys'",
        ),
        (
            "grouped",
            {},
            r"requires the parameter 'solution', which is neither a column of every row nor passed.*\n  remedy: known",
        ),
        ("turns", {}, "requires the parameter 'history'"),
        ("grouped", {"by_turn": True}, "is scored by turn, and it wants all completions of a group"),
        ("strict", {}, "takes 'completion' by position alone"),
        ("needs_environments", {}, "the objects of an environment, which live in other processes"),
        ("made", {}, "requires the parameter 'key'|takes"),
    ],
)
def test_a_reward_whose_parameters_nobody_can_give_is_refused(
    file: Path, name: str, settings: dict[str, Any], words: str
) -> None:
    reward = FunctionReward(ref=f"{file}:{name}", **settings)
    if name == "made":  # with its key bound, only running the file tells that nothing is missing
        refuse_missing_columns([reward], tasks({"answer": 1}), thorough=True)
        with pytest.raises(EnvError, match="requires the parameter 'answer'"):
            refuse_missing_columns([reward], tasks({"keys": 1}), thorough=True)
        return
    with pytest.raises(HeadraceError, match=words):
        refuse_missing_columns([reward], tasks({"answer": 1, "keys": 2}), thorough=False)


def test_a_class_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    file = tmp_path / "scorer.py"
    file.write_text("class Scorer:\n    def __call__(self, completion):\n        return 1.0\n\nscore = Scorer()\n")
    with pytest.raises(EnvError, match=r"function Scorer is a class\n  remedy: write score = Scorer\(\)"):
        refuse_missing_columns([FunctionReward(ref=f"{file}:Scorer")], tasks({}), thorough=True)
    refuse_missing_columns([FunctionReward(ref=f"{file}:score")], tasks({}), thorough=True)


def test_columns_that_settings_name_are_looked_for_too() -> None:
    with pytest.raises(
        ConfigError, match=r"answer_column='answer'\), which no row has \(they have anser\)(.|\n)*'anser'"
    ):
        refuse_missing_columns([ExactReward()], tasks({"anser": 1}), thorough=False)
    judge = JudgeReward(base_url="http://x/v1", model="m", prompt="{completion} {rubric}")
    with pytest.raises(ConfigError, match=r"'rubric' \(the \{rubric\} of its prompt\), and row 2 has none"):
        refuse_missing_columns([judge], tasks({"rubric": 1}, {}), thorough=False)
    optional = judge.model_copy(update={"optional": True, "default": 0.0})
    refuse_missing_columns([optional], tasks({"rubric": 1}, {}), thorough=False)
    assert find_reliable_columns(optional, tasks({"rubric": 1}, {})) == {"rubric"}


def failing(reward: float | None, cause: str = "reward_error: away") -> Graded:
    return Graded(reward=reward, calls={"judge": (cause,), "rule": ("",)})


def test_the_first_failure_is_told_with_its_cause_and_all_are_counted() -> None:
    told: list[str] = []
    book = RewardCounts(max_failing_calls=100)
    for graded in (failing(1.0), Graded(reward=1.0, calls={"judge": ("",)}), failing(1.0), failing(None)):
        book.add(graded, lambda words, kind: told.append(words))
    assert told[0] == "the reward 'judge' failed and counts as its default: reward_error: away"
    assert str(book.get_failing()["judge"]) == "failed for 3 of 4; the first: reward_error: away"
    assert "rule" not in book.get_failing()
    assert book.pop_metrics() == {"reward_failed/judge": 0.75, "reward_failed/rule": 0.0}
    assert book.pop_metrics() == {}


def test_a_component_that_fails_for_a_whole_batch_from_the_start_ends_the_run() -> None:
    book = RewardCounts(max_failing_calls=3)
    book.add(failing(1.0), lambda words, kind: None)
    book.add(failing(1.0), lambda words, kind: None)
    with pytest.raises(EnvError, match=r"'judge' has failed for each of the first 3 answers(.|\n)*away"):
        book.add(failing(1.0), lambda words, kind: None)
    once = RewardCounts(max_failing_calls=3)
    once.add(Graded(reward=1.0, calls={"judge": ("",)}), lambda words, kind: None)
    for _ in range(9):
        once.add(failing(1.0), lambda words, kind: None)
    assert once.get_failing()["judge"].failed == 9


def test_metrics_of_rewards_are_means_and_what_is_no_number_is_told() -> None:
    told: list[str] = []
    book = RewardCounts()
    for values in ((1.0, 2.0), (6.0, float("nan"))):
        book.add(Graded(reward=1.0, metrics={"a b": values}), lambda words, kind: told.append(words))
    assert book.pop_metrics() == {"logged/a_b": 3.0}
    assert told == ["a reward gave log_metric('a b') a value that is not finite, which counts in no mean"]
    assert json.dumps(book.pop_metrics()) == "{}"
