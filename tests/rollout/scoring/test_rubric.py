"""Rewards of several components: graded, clamped, weighted, added up; failures are counted or stood in for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.rollout.scoring import ExactReward, FunctionReward, Graded, Scores
from headrace.rollout.scoring.rubric import Rubric, RubricPart

TASK = Task(row_index=0, row={"prompt": "p"}, prompt="p", prompt_ids_T=np.zeros(1, np.int32))
LOST = Scores(rewards=(), failure="reward_timeout: no reward for 1 s")


@dataclass(kw_only=True)
class Says:
    """Workers that answer what they were told to, one answer after the other, after a while."""

    answers: list[Scores | Callable[[tuple[str, ...]], Scores]]
    seconds: float = 0.0
    by_group: bool = False
    asked: list[tuple[str, ...]] = field(default_factory=list)

    async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
        if self.by_group or len(completions) == 1:
            return await self._once(completions)
        graded = tuple([(await self._once((text,))).get_graded(0) for text in completions])
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def _once(self, completions: tuple[str, ...]) -> Scores:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(completions)
        await asyncio.sleep(self.seconds)
        return answer if isinstance(answer, Scores) else answer(completions)

    async def score_turn(self, task: Task, text: str, history: str, turn: int, *, context: object = None) -> Scores:
        return await self.score(task, (text,))


def says(*values: float | Scores | None, **settings: Any) -> Says:
    return Says(answers=[v if isinstance(v, Scores) else Scores(rewards=(v,)) for v in values], **settings)


def section(name: str, **settings: Any) -> FunctionReward:
    return FunctionReward(name=name, ref="f.py:f", **settings)


def rubric(*components: tuple[FunctionReward, Says], spans: list[Span] | None = None) -> Rubric:
    made = [RubricPart(section=one, graders=graders) for one, graders in components]
    return Rubric(made, clock=VirtualClock(), on_span=(spans if spans is not None else []).append)


def scored(made: Rubric, *completions: str) -> Scores:
    return run_virtual(made.score(TASK, completions or ("c",)))


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0.1, 4)), min_size=1, max_size=4))
def test_a_reward_is_the_weighted_sum_of_its_clamped_components(drawn: Sequence[tuple[float, float, float]]) -> None:
    made = rubric(
        *(
            (section(f"c{n}", weight=weight, clamp=(-width, width)), says(value))
            for n, (value, weight, width) in enumerate(drawn)
        )
    )
    (reward,) = scored(made).rewards
    assert reward == pytest.approx(sum(weight * np.clip(value, -width, width) for value, weight, width in drawn))


def test_components_are_asked_at_the_same_time_and_have_a_lane_each() -> None:
    spans: list[Span] = []
    made = rubric((section("slow"), says(1.0, seconds=5)), (section("fast"), says(1.0, seconds=1)), spans=spans)
    calls = {"slow": ("",), "fast": ("",)}
    graded = Graded(reward=2.0, parts={"slow": 1.0, "fast": 1.0}, calls=calls)
    assert scored(made) == Scores(rewards=(2.0,), graded=(graded,))
    assert [(span.lane, span.end_s) for span in spans] == [("reward fast", 1.0), ("reward slow", 5.0)]


def test_a_component_alone_is_the_reward_and_its_failure_needs_no_name() -> None:
    assert scored(rubric((section("one"), says(0.5)))).get_graded(0) == Graded(reward=0.5, calls={"one": ("",)})
    assert scored(rubric((section("one"), says(LOST)))).get_graded(0).failure == LOST.failure


def test_a_component_that_fails_fails_its_completion_by_name_and_no_other() -> None:
    half = Says(answers=[lambda texts: LOST if texts == ("bad",) else Scores(rewards=(1.0,))])
    graded = scored(rubric((section("half"), half), (section("whole"), says(1.0))), "good", "bad").graded
    assert graded[0] == Graded(reward=2.0, parts={"half": 1.0, "whole": 1.0}, calls={"half": ("",), "whole": ("",)})
    assert graded[1].calls == {"half": (LOST.failure,), "whole": ("",)}
    assert graded[1].reward is None
    assert graded[1].failure == "reward_timeout: half: no reward for 1 s"


def test_an_optional_component_that_fails_counts_as_its_default_and_is_told() -> None:
    made = rubric((section("judge", weight=2, optional=True, default=0.25), says(LOST)), (section("rule"), says(1.0)))
    scores = scored(made)
    calls = {"judge": (LOST.failure,), "rule": ("",)}
    assert scores.graded == (Graded(reward=1.5, parts={"judge": 0.25, "rule": 1.0}, calls=calls),)


def test_an_optional_component_that_does_not_apply_counts_as_its_default_and_has_not_failed() -> None:
    made = rubric((section("judge", optional=True, default=0.0), says(None)), (section("rule"), says(1.0)))
    graded = scored(made).get_graded(0)
    assert (graded.reward, graded.calls["judge"]) == (1.0, ("",))


def test_what_components_log_is_kept_apart_for_each_completion() -> None:
    logs = Scores(rewards=(1.0, 0.0), metrics={"length": (3.0,)}, extra=({"gold": "a"}, {"gold": "b"}))
    single = Scores(rewards=(1.0,), metrics={"length": (5.0,)}, extra=({"gold": "z"},))
    made = rubric((section("g"), says(logs, by_group=True)), (section("s"), says(single)))
    first, second = scored(made, "x", "y").graded
    assert (first.extra, second.extra) == ({"gold": "a", "s.gold": "z"}, {"gold": "b", "s.gold": "z"})
    assert (first.metrics, second.metrics) == ({"length": (3.0, 5.0)}, {"length": (5.0,)})


def test_a_word_not_to_count_it_is_no_failure() -> None:
    assert scored(rubric((section("a"), says(None)), (section("b"), says(1.0)))).get_graded(0).reward is None
    assert scored(rubric((section("a"), says(None)), (section("b"), says(1.0)))).get_graded(0).failure == ""


def test_a_call_that_fails_is_made_again_with_pauses_that_double() -> None:
    flaky = says(LOST, LOST, LOST, 1.0)

    async def timed() -> tuple[Scores, float]:
        made = rubric((section("a", retries=3), flaky))
        return await made.score(TASK, ("c",)), VirtualClock().now()

    scores, seconds = run_virtual(timed())
    assert scores.rewards == (1.0,)
    assert seconds == 0.5 + 1 + 2
    assert len(flaky.asked) == 4
    assert scored(rubric((section("a", retries=1), says(LOST, LOST, 1.0)))).rewards == (None,)


def test_a_sum_beyond_all_numbers_is_a_failure() -> None:
    made = rubric((section("a", weight=1e308), says(10.0)), (section("b"), says(1.0)))
    assert scored(made).get_graded(0).failure == "reward_nan: the weighted sum is not finite"


def test_who_scores_groups_gets_all_completions_and_the_others_one_by_one() -> None:
    group, single = says(Scores(rewards=(1.0, 2.0)), by_group=True), says(10.0)
    made = rubric((section("g"), group), (section("s"), single))
    assert made.by_group
    assert scored(made, "a", "b").rewards == (11.0, 12.0)
    assert (group.asked, single.asked) == ([("a", "b")], [("a",), ("b",)])


@pytest.mark.parametrize(
    ("over", "shares"),
    [("mean", [0.1, 0.2, 0.3]), ("sum", [0.3, 0.6, 0.9]), ("min", [0.3, 0, 0]), ("last", [0, 0, 0.9])],
)
def test_turns_add_to_the_reward_what_is_said_of_them_together(over: str, shares: list[float]) -> None:
    made = rubric(
        (section("steps", by_turn=True, weight=2, over_turns=over), says(0.3, 0.6, 0.9)), (section("rule"), says(1.0))
    )

    async def turns() -> list[Graded]:
        return [await made.score_turn(TASK, "t", "h", turn) for turn in range(3)]

    graded = run_virtual(turns())
    assert made.by_turn
    assert made.over_turns(graded) == pytest.approx([2 * share for share in shares])
    assert made.parts_of_turns(graded) == pytest.approx({"steps": sum(shares)})
    assert made.over_turns([]) == []
    assert scored(made).rewards == (1.0,)  # the turns are not scored again at the end


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optional": True}, "optional=true without a default"),
        ({"default": 0.0}, "default=0 without optional"),
        ({"clamp": [1, 0]}, "nothing could differ"),
        ({"over_turns": "min"}, "not scored by turn"),
        ({"name": "a b"}, "name"),
        ({"retries": -1}, "retries"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExactReward(**settings)
