"""Teachers are asked as often as they may be, about every token that carries loss, and cost an episode at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import ComponentDied, RequestError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, StopReason, Turn
from headrace.base.types.task import Task
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN, NOT_SAMPLED
from headrace.control import Components
from headrace.control.teaching import CALLS_AT_ONCE, TeacherCallConfig, TeacherClient, Teachers, Teaching
from headrace.run.session.running import first_cause
from headrace.testing import FakeEngine
from tests.control.lives import Plan, live


class Reader(FakeEngine):
    """Says of every token the sum of all ids up to it: what it read shows in what it says."""

    def __init__(
        self, *, seconds: float = 1.0, fails: Callable[[int], Exception | float | None] = lambda _: None
    ) -> None:
        """``fails``: by the number of the call, what is raised, or how long it takes."""
        super().__init__()
        self.seconds, self.fails = seconds, fails
        self.asked: list[list[int]] = []
        self.at_once = self.most_at_once = 0

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        self.asked.append(tokens.ids_T.tolist())
        trouble = self.fails(len(self.asked) - 1)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(trouble if isinstance(trouble, float) else self.seconds)
        finally:
            self.at_once -= 1
        if isinstance(trouble, Exception):
            raise trouble
        sums_T = np.cumsum(tokens.ids_T).astype(np.float32)
        ids_TK = np.repeat(tokens.ids_T[:, None], num, axis=1).astype(np.int32)
        return TopScores(logprobs_T=-sums_T, ids_TK=ids_TK, logs_TK=-ids_TK.astype(np.float32))


def task_of(row: int = 0, **columns: Any) -> Task:
    return Task(row_index=row, row=columns, prompt="", prompt_ids_T=np.array([1, 2], np.int32))


def sampled(ids: Sequence[int], parent: int, untrained: str = "") -> Turn:
    tokens = Tokens(ids_T=ids, logprobs_T=-np.ones(len(ids)), versions_T=np.full(len(ids), 3))
    return Turn(author="policy", tokens=tokens, parent=parent, stop_reason=StopReason.STOP, untrained=untrained)


def graph(*turns: Turn) -> EpisodeGraph:
    prompt = Turn(author="task", tokens=Tokens.observed([1, 2]))
    return EpisodeGraph(key=EpisodeKey(0, 0), turns=[prompt, *turns])


def call_config(**changes: Any) -> TeacherCallConfig:
    return TeacherCallConfig(**{"version": FROZEN, "num_entries": 2, **changes})


def taught(episode: EpisodeGraph, task: Task, teachers: dict[str, tuple[FakeEngine, TeacherCallConfig]]) -> str:
    """Ask, add, and say why it failed."""

    async def test() -> str:
        by_name = {
            name: TeacherClient(engine=engine, name=name, config=asked) for name, (engine, asked) in teachers.items()
        }
        async with asyncio.TaskGroup() as group:
            everyone = Teachers(by_name=by_name, column="teacher", temperature=1.0)
            teaching = Teaching(everyone, group, nullcontext)
            teaching.start(task, episode)
            return await teaching.finish(episode)

    return run_virtual(test())


def said(episode: EpisodeGraph) -> list[list[float] | None]:
    found = [turn.tokens.teacher_scores for turn in episode.turns]
    return [None if one is None else (-one.logprobs_T).tolist() for one in found]


def test_every_turn_that_carries_loss_is_taught_once_in_its_own_place() -> None:
    given = Turn(author="user", tokens=Tokens.observed([100]), parent=1)
    episode = graph(sampled([3, 4], 0), given, sampled([5], 2), sampled([6], 1), sampled([7], 2, untrained="frozen"))
    engine = Reader()
    ids = [turn.tokens.ids_T for turn in episode.turns]
    assert taught(episode, task_of(), {"": (engine, call_config())}) == ""
    assert said(episode) == [None, [6, 10], None, [115], [16], None]
    assert engine.asked == [[1, 2, 3, 4, 100, 5], [1, 2, 3, 4, 6]]
    lesson = episode.turns[3].tokens.teacher_scores
    assert lesson is not None
    assert (lesson.versions_T.tolist(), lesson.ids_TK.tolist()) == ([FROZEN], [[5, 5]])
    assert all(turn.tokens.ids_T is before for turn, before in zip(episode.turns, ids, strict=True))


def test_a_teacher_with_a_prompt_of_its_own_reads_that_before_the_same_answer() -> None:
    episode, engine = graph(sampled([3, 4], 0)), Reader()
    prompts = [np.array([9], np.int32), np.array([1, 2, 50, 60], np.int32)]
    assert taught(episode, task_of(row=1), {"": (engine, call_config(prompts=prompts))}) == ""
    assert engine.asked == [[1, 2, 50, 60, 3, 4]]
    assert said(episode) == [None, [116, 120]]


def test_an_episode_that_was_asked_something_else_cannot_be_read_with_another_prompt() -> None:
    episode, engine = graph(sampled([3], 0)), Reader()
    episode.turns[0] = msgspec.structs.replace(episode.turns[0], tokens=Tokens.observed([1, 2, 2]))
    failure = taught(episode, task_of(), {"": (engine, call_config(prompts=[np.array([9], np.int32)]))})
    assert failure.startswith("teacher_error: the episode does not begin")
    assert not engine.asked


def test_rows_name_their_teachers() -> None:
    one, two = Reader(), Reader()
    both = {"math": (one, call_config()), "code": (two, call_config(version=0))}
    episode = graph(sampled([3], 0))
    assert taught(episode, task_of(teacher="code"), both) == ""
    assert (len(one.asked), len(two.asked)) == (0, 1)
    assert episode.turns[1].tokens.teacher_scores is not None
    assert episode.turns[1].tokens.teacher_scores.versions_T.tolist() == [0]
    assert [turn.teacher for turn in episode.turns] == ["", "code"]


@pytest.mark.parametrize(
    ("trouble", "failure"),
    [
        (ComponentDied("the teacher ended with signal 9", remedy="none"), "teacher_died: the teacher ended"),
        (11.0, "teacher_timeout: no answer for 10 s"),
    ],
)
def test_a_call_that_fails_is_made_again_and_costs_its_episode_only_then(trouble: Any, failure: str) -> None:
    engine = Reader(fails=lambda call: trouble if call < 2 else None)
    episode = graph(sampled([3], 0))
    assert taught(episode, task_of(), {"": (engine, call_config(timeout_s=10.0))}) == ""
    assert len(engine.asked) == 3
    engine = Reader(fails=lambda _: trouble)
    episode = graph(sampled([3], 0))
    assert taught(episode, task_of(), {"": (engine, call_config(timeout_s=10.0))}).startswith(failure)
    assert len(engine.asked) == 3
    assert episode.turns[1].tokens.teacher_scores is None


def test_what_no_other_call_could_mend_is_not_asked_again() -> None:
    engine = Reader(fails=lambda _: RequestError("tokens to score: too long", remedy="none"))
    failure = taught(graph(sampled([3], 0)), task_of(), {"": (engine, call_config())})
    assert failure == "teacher_error: tokens to score: too long"
    assert len(engine.asked) == 1


def with_teacher(engine: FakeEngine, **changes: Any) -> Callable[[Components], Components]:
    def change(parts: Components) -> Components:
        one = TeacherClient(engine=engine, name="", config=call_config(**changes))
        return replace(parts, teachers=Teachers(by_name={"": one}, column="teacher", temperature=1.0))

    return change


def test_a_run_goes_on_while_its_teacher_is_asked_and_every_trained_token_was_taught(tmp_path: Path) -> None:
    engine = Reader(seconds=0.05)
    summary = live(Plan(run_dir=tmp_path, flow={"max_age": 4, "lead": 4}, parts=with_teacher(engine))).summary
    assert summary.status == "finished"
    assert 1 < engine.most_at_once <= CALLS_AT_ONCE
    assert not summary.ledger.episodes.dropped


def test_a_teacher_that_is_too_slow_for_some_costs_those_and_is_counted(tmp_path: Path) -> None:
    engine = Reader(seconds=0.01, fails=lambda call: 100.0 if call % 16 == 3 else None)
    plan = Plan(run_dir=tmp_path, flow={"min_episodes": 2}, parts=with_teacher(engine, timeout_s=5.0, retries=0))
    summary = live(plan).summary
    assert summary.status == "finished"
    assert summary.ledger.episodes.dropped == {"teacher_timeout": 3}
    assert any("teacher_timeout" in warning for warning in summary.warnings)


def test_a_dead_teacher_ends_the_run_like_rewards_that_always_fail(tmp_path: Path) -> None:
    dead = ComponentDied("the teacher ended with signal 9", remedy="look at its log")
    engine = Reader(fails=lambda _: dead)
    with pytest.raises(BaseExceptionGroup) as caught:
        live(Plan(run_dir=tmp_path, parts=with_teacher(engine, retries=1)))
    assert "teacher_died: the teacher ended with signal 9" in str(first_cause(caught.value))


def test_tokens_that_nobody_was_asked_about_are_known_as_such() -> None:
    episode = graph(sampled([3], 0))
    tokens = Tokens.concat([turn.tokens for turn in episode.turns])
    assert tokens.teacher_scores is None
    assert (tokens.versions_T == NOT_SAMPLED).tolist() == [True, True, False]
