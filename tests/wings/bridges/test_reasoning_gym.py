"""Tasks of reasoning-gym, from the question to the score."""

from __future__ import annotations

import pytest
import reasoning_gym

from headrace.base.errors import EnvError, EpisodeError
from tests.wings.bridges.scripted import attempts, readable

TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "leg_counting",
    "gcd",
    "lcm",
    "letter_counting",
    "number_sorting",
    "prime_factorization",
    "simple_equations",
    "word_sorting",
    "spell_backward",
    "base_conversion",
    "knights_knaves",
    "mini_sudoku",
    "family_relationships",
)


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_that_the_library_knows_earns_everything(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, seed=0, size=10_000)
    entries = [dataset[number] for number in (0, 7)]

    def knows(read: str) -> str:
        for entry in entries:
            if readable(entry["question"]) in read:
                return str(entry["answer"])
        raise AssertionError(read)

    right = attempts(f"reasoning_gym/{task}", [{"number": 0}, {"number": 7}], knows)
    wrong = attempts(f"reasoning_gym/{task}", [{"number": 0}], lambda _: "no idea")
    assert [attempt.ended.reward for attempt in right] == [1.0, 1.0]
    assert (wrong[0].ended.reward or 0.0) < 0.5


def test_with_a_system_prompt_what_stands_in_answer_tags_counts() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=20)[5]
    says = iter([f"<answer>{entry['answer']}</answer>", str(entry["answer"])])
    options = {"system_prompt": "simple", "seed": 3, "size": 20}
    tagged, bare = attempts("reasoning_gym/chain_sum", [{"number": 5}] * 2, lambda _: next(says), **options)
    assert {tagged.ended.reward, bare.ended.reward} == {1.0, 0.0}
    assert "Provide your final answer" in tagged.read[0]


@pytest.mark.parametrize("task", ["countdown", "n_queens", "polynomial_multiplication", "string_insertion"])
def test_a_scorer_that_runs_the_answer_as_code_is_used_on_request_only(task: str) -> None:
    with pytest.raises(EnvError, match="runs what the model writes as Python"):
        attempts(f"reasoning_gym/{task}", [], str)
    assert attempts(f"reasoning_gym/{task}", [], str, evaluates=True) == []


def test_a_mixture_is_refused_for_one_such_part() -> None:
    parts = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "countdown")]
    with pytest.raises(EnvError, match="'countdown'"):
        attempts("reasoning_gym/composite", [], str, datasets=parts)
    assert attempts("reasoning_gym/composite", [{"number": 1}], lambda _: "1", datasets=parts[:1])


def test_what_the_library_does_not_know_is_told_at_once() -> None:
    with pytest.raises(EnvError, match="no task 'chain_sun'") as told:
        attempts("reasoning_gym/chain_sun", [], str)
    assert "chain_sum" in told.value.remedy
    with pytest.raises(EnvError, match="max_termz"):
        attempts("reasoning_gym/chain_sum", [], str, max_termz=3)
    with pytest.raises(EnvError, match="system prompt 'simpel'"):
        attempts("reasoning_gym/chain_sum", [], str, system_prompt="simpel")


def test_a_row_beyond_the_tasks_fails_in_words() -> None:
    with pytest.raises(ExceptionGroup) as told:
        attempts("reasoning_gym/chain_sum", [{"number": 20}], str, size=20)
    assert isinstance(told.value.exceptions[0], EpisodeError)
    assert "env.options.size" in told.value.exceptions[0].remedy
    with pytest.raises(ExceptionGroup) as told:
        attempts("reasoning_gym/chain_sum", [{"prompt": "1+1="}], str)
    assert "data.count" in told.value.exceptions[0].remedy  # type: ignore[union-attr]
