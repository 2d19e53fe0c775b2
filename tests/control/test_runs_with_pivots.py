"""Whole runs whose failed episodes are resampled from within, on fakes in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.algo.config import AlgoConfig
from headrace.base.errors import RequestError
from headrace.base.types.episode import AttemptKind, EpisodeGraph, Turn
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control import Components
from headrace.control.credit import credit, make_segmenter
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.rollout.environments import AttemptOutcome, OpenEpisode
from headrace.rollout.scoring import Graded
from headrace.testing import FakeEngine, FakeLearner, FakeScorer
from tests.control.lives import Life, Plan, live


class Forkable(FakeEngine):
    """Forks what it remembers, refuses forks of other weights, keeps pinned versions; ids are drawn by seed."""

    def __init__(self, *, memory: int = 10_000, **settings: Any) -> None:
        super().__init__(length=lambda seed: 20 + seed % 23, token_s=0.01, **settings)
        self.forked = self.refused = 0
        self._numbers, self._ended, self._memory = itertools.count(), {}, memory

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        number, version = next(self._numbers), self.stats().version
        if options.fork is not None:
            if self._ended.get(options.fork.parent) != version:
                self.refused += 1
                raise RequestError(f"fork of {options.fork.parent}", remedy="send a prompt")
            self.forked += 1
        rng = np.random.default_rng(sampling.seed)
        ids_T, entropies_T = rng.integers(1, 9, 2048).astype(np.int32), rng.random(2048).astype(np.float32)
        at = 0 if options.answer_ids_T is None else len(options.answer_ids_T)
        if options.pinned and at:  # what a fork would sample
            sampling = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - at)
            options, at = msgspec.structs.replace(options, answer_ids_T=None), 0
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            count = len(chunk.tokens)
            tokens = msgspec.structs.replace(chunk.tokens, ids_T=ids_T[at : at + count])
            if options.pinned:
                tokens = msgspec.structs.replace(tokens, versions_T=np.full(count, version, np.int32))
            if sampling.record_entropy:
                tokens = msgspec.structs.replace(tokens, entropies_T=entropies_T[at : at + count])
            at += count
            yield msgspec.structs.replace(chunk, tokens=tokens, request_id=number)
        self._ended[number] = self.stats().version
        if len(self._ended) > self._memory:
            del self._ended[next(iter(self._ended))]


def run(
    run_dir: Path,
    *,
    change: Callable[[Components], Components] = lambda parts: parts,
    algo: AlgoConfig | None = None,
    crash_at: float | None = None,
    **settings: Any,
) -> tuple[Life, list[ScoredGroup]]:
    """A run with pivots, and the groups it trained."""
    trained: list[ScoredGroup] = []
    run_dir.mkdir(exist_ok=True)

    def advantages(groups: Sequence[ScoredGroup]) -> Sequence[Any]:
        trained.extend(groups)
        return credit(algo or AlgoConfig(), groups)

    flow = {"pivots": {"gap": 6, "branches": 3, "per_episode": 2}, **settings.pop("flow", {})}
    plan = Plan(
        run_dir=run_dir,
        engine=settings.pop("engine", Forkable),
        learner=lambda: FakeLearner(token_s=0.0005),
        scorer=settings.pop("scorer", lambda: FakeScorer(seconds=0.05, reward=lambda text: float(len(text) % 2))),
        parts=lambda parts: change(replace(parts, advantages=advantages)),
        flow=flow,
        **settings,
    )
    return live(plan, crash_at=crash_at), trained


def branches(episode: EpisodeGraph) -> dict[int, dict[int, list[Turn]]]:
    """By pivot and number."""
    found: dict[int, dict[int, list[Turn]]] = {}
    for turn in episode.turns:
        if turn.branch is not None:
            found.setdefault(turn.branch.pivot, {}).setdefault(turn.branch.number, []).append(turn)
    return found


def metric(life: Life, name: str) -> float:
    return sum(step.metrics.get(f"pivots/{name}", 0.0) for step in life.seen.steps)


@pytest.mark.parametrize("max_age", [0, 3])
def test_failed_episodes_get_branches_of_one_version_and_the_others_get_none(tmp_path: Path, max_age: int) -> None:
    life, trained = run(tmp_path, flow={"max_age": max_age}, steps=5)
    assert life.ended
    failed = [e for group in trained for e in group.scored if e.reward == 0.0]
    assert failed
    assert not any(branches(e) for group in trained for e in group.scored if e.reward == 1.0)
    for episode in failed:
        grown = branches(episode)
        assert sorted(grown) == [0, 1]
        for by_number in grown.values():
            (versions,) = {tuple(set(t.tokens.versions_T.tolist())) for (t,) in by_number.values()}
            assert len(versions) == 1
            assert len({turn.parent for (turn,) in by_number.values()}) == 1
            assert len({tuple(turn.tokens.ids_T[:4].tolist()) for (turn,) in by_number.values()}) == 3
            for (turn,) in by_number.values():
                kept = sum(len(episode.turns[i].tokens) for i in episode.path(turn.parent or 0)[1:])
                assert turn.branch is not None
                assert turn.branch.reward == (kept + len(turn.tokens)) % 2  # the whole answer was scored
    engine = life.engine
    assert isinstance(engine, Forkable)
    assert metric(life, "branches") == 3 * metric(life, "chosen")
    assert metric(life, "by_prefix") <= engine.refused
    if max_age == 0:
        assert engine.refused == 0 < engine.forked
        assert not life.summary.warnings
    assert life.summary.ledger.tokens.trained == sum(batch.num_loss_tokens for batch in life.learner.batches)
    sampled = sum(e.num_sampled for group in trained for e in group.scored)
    assert life.summary.ledger.tokens.trained == sampled  # every branch token is trained once, and counted


def test_a_fork_that_is_refused_goes_on_from_its_tokens_and_is_told_and_counted(tmp_path: Path) -> None:
    life, trained = run(tmp_path, engine=lambda: Forkable(memory=0), steps=2, flow={"max_age": 0})
    assert life.ended
    engine = life.engine
    assert isinstance(engine, Forkable)
    assert engine.forked == 0 < engine.refused
    assert metric(life, "by_prefix") == metric(life, "branches") > 0
    (warning,) = [w for w in life.summary.warnings if "tokens of their prefix" in w]
    assert "times" in warning
    assert any(branches(episode) for group in trained for episode in group.scored)


def test_equal_runs_choose_equal_pivots_and_end_with_equal_weights(tmp_path: Path) -> None:
    first, _ = run(tmp_path / "a", flow={"max_age": 0}, steps=6)
    second, _ = run(tmp_path / "b", flow={"max_age": 0}, steps=6)
    assert first.learner.weights == second.learner.weights


@pytest.mark.parametrize("crash_at", [1.3, 2.9, 4.1])
def test_a_synchronous_run_that_crashes_among_branches_comes_to_the_same_weights(
    tmp_path: Path, crash_at: float
) -> None:
    whole, _ = run(tmp_path / "whole", flow={"max_age": 0}, steps=6)
    broken, _ = run(tmp_path / "broken", flow={"max_age": 0}, steps=6, crash_at=crash_at)
    assert not broken.ended
    again, _ = run(tmp_path / "broken", flow={"max_age": 0}, steps=6)
    assert again.ended
    assert again.learner.weights == whole.learner.weights


def test_branches_that_fail_are_counted_by_reason_and_carry_no_loss(tmp_path: Path) -> None:
    calls = itertools.count()

    def reward(text: str) -> float | None:
        return None if next(calls) % 7 in (3, 4) else float(len(text) % 2)

    life, trained = run(tmp_path, scorer=lambda: FakeScorer(seconds=0.05, reward=reward), steps=4)
    assert life.ended
    lost = [t for g in trained for e in g.scored for t in e.turns if t.branch and t.branch.reward is None]
    assert {turn.untrained for turn in lost} == {"branch_failed", "branch_alone"}
    dropped = life.summary.ledger.tokens.dropped
    for reason in ("branch_failed", "branch_alone"):
        assert metric(life, reason) > 0
        expected = sum(len(turn.tokens) for turn in lost if turn.untrained == reason)
        assert dropped[reason] == expected
    assert any("branches carry no loss: reward_none" in warning for warning in life.summary.warnings)


class TwoAnswers:
    """Asks twice, with a token in between that says how long the first answer was; ``differs`` changes its question."""

    begins_with_prompt = True

    def __init__(self, *, differs: bool = False, breaks: bool = False, earns: float | None = None) -> None:
        self._differs, self._breaks, self._attempts = differs, breaks, itertools.count()
        self._earns = earns

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        first = await episode.sample(task.prompt_ids_T)
        said = [700 + len(first.token_ids)] + ([next(self._attempts)] if self._differs else [])
        prompt_T = np.concatenate([task.prompt_ids_T, np.array(first.token_ids, np.int32), np.array(said, np.int32)])
        second = await episode.sample(prompt_T)
        if self._breaks and next(self._attempts) % 3 == 2:
            raise RuntimeError("the tool broke")
        earned = float((len(first.token_ids) + len(second.token_ids)) % 2)
        return AttemptOutcome(reward=earned if self._earns is None else self._earns)


def test_an_environment_goes_on_behind_a_branch_of_an_earlier_turn(tmp_path: Path) -> None:
    life, trained = run(tmp_path, change=lambda parts: replace(parts, env=TwoAnswers()), steps=4)
    assert life.ended
    grown = [one for g in trained for e in g.scored for p in branches(e).values() for one in p.values()]
    assert {len(turns) for turns in grown} == {1, 3}  # in the second answer; in the first, and all behind it
    for turns in grown:
        if len(turns) == 3:
            assert [turn.author for turn in turns] == ["policy", "user", "policy"]
    sampled = sum(e.num_sampled for group in trained for e in group.scored)
    assert life.summary.ledger.tokens.trained == sampled
    assert not metric(life, "branch_env_differs")


@pytest.mark.parametrize(
    ("pivots", "kinds"),
    [({"gap": 6, "branches": 3}, {AttemptKind.ORIGIN, AttemptKind.BRANCH}), (None, {AttemptKind.ALONE})],
)
def test_an_environment_is_told_what_may_branch_and_what_is_a_branch(
    tmp_path: Path, pivots: dict[str, int] | None, kinds: set[AttemptKind]
) -> None:
    told: list[tuple[AttemptKind, int]] = []

    class RecordingKinds(TwoAnswers):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            told.append((episode.attempt_kind, episode.seed))
            return await super().run(task, episode)

    life, _ = run(tmp_path, change=lambda parts: replace(parts, env=RecordingKinds()), flow={"pivots": pivots}, steps=2)
    assert life.ended
    assert {kind for kind, _ in told} == kinds
    seeds = {kind: {seed for each, seed in told if each is kind} for kind in kinds}
    assert seeds.get(AttemptKind.BRANCH, set()) <= seeds.get(AttemptKind.ORIGIN, set())


class SayingTheSame(Forkable):
    """Answers every prompt of an episode with the same tokens."""

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        if options.fork is None and options.answer_ids_T is None:
            sampling = msgspec.structs.replace(sampling, seed=int(prompt_ids_T[0]))
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            yield chunk


def test_a_pivot_lies_in_its_own_answer_although_an_earlier_one_says_the_same(tmp_path: Path) -> None:
    life, trained = run(
        tmp_path,
        engine=SayingTheSame,
        change=lambda parts: replace(parts, env=TwoAnswers(earns=0.0)),
        flow={"pivots": {"gap": 6, "branches": 3, "per_episode": 8}},
        steps=2,
    )
    assert life.ended
    assert not metric(life, "branch_env_differs")
    grown = [one for g in trained for e in g.scored for p in branches(e).values() for one in p.values()]
    assert {len(turns) for turns in grown} == {1, 3}


def test_an_environment_that_does_not_repeat_itself_has_no_branches_there_and_is_told(tmp_path: Path) -> None:
    life, trained = run(tmp_path, change=lambda parts: replace(parts, env=TwoAnswers(differs=True)), steps=4)
    assert life.ended
    assert metric(life, "branch_env_differs") > 0
    assert any("branch_env_differs" in warning for warning in life.summary.warnings)
    grown = [turn for g in trained for e in g.scored for turn in e.turns if turn.branch is not None]
    assert grown  # of first answers


def test_an_environment_that_breaks_in_a_branch_costs_that_branch_only(tmp_path: Path) -> None:
    life, trained = run(tmp_path, change=lambda parts: replace(parts, env=TwoAnswers(breaks=True)), steps=4)
    assert life.ended
    lost = [t for g in trained for e in g.scored for t in e.turns if t.branch and t.branch.reward is None]
    assert {turn.untrained for turn in lost} <= {"branch_failed", "branch_alone"}
    assert metric(life, "branch_failed") > 0
    assert any("the tool broke" in warning for warning in life.summary.warnings)


class BySegment:
    """Grades a text by its length."""

    labels = ("rule", "steps")

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def score_turn(self, task: Task, text: str, history: str, turn: int, *, context: object = None) -> Graded:
        self.asked.append((text, history))
        return Graded(reward=float(len(text)), parts={"steps": float(len(text))})

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        return [1000.0 for _ in turns]

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        return {"steps": sum(turn.reward or 0.0 for turn in turns)}


def test_segments_at_entropy_spikes_are_graded_one_by_one_and_do_not_count_in_the_reward(tmp_path: Path) -> None:
    algo, scorer = AlgoConfig(advantage={"kind": "prpo", "spikes": 3, "gap": 4}), BySegment()

    def change(parts: Components) -> Components:
        sampling = msgspec.structs.replace(parts.sampling, record_entropy=True)
        return replace(parts, sampling=sampling, turn_scorer=scorer, segments=make_segmenter(algo))

    life, trained = run(tmp_path, change=change, algo=algo, flow={"pivots": None}, steps=3)
    assert life.ended
    for episode in (episode for group in trained for episode in group.scored):
        segments = [turn for turn in episode.turns if turn.stop_reason is not None]
        assert 2 <= len(segments) <= 4
        assert episode.reward == sum(len(turn.tokens) for turn in segments) % 2
        assert [turn.process for turn in segments] == [float(len(turn.tokens)) for turn in segments]
        entropies_T = np.concatenate([turn.tokens.entropies_T for turn in segments])
        cuts = np.cumsum([len(turn.tokens) for turn in segments])[:-1]
        assert all(np.diff([0, *cuts])[1:] >= 4)
        assert float(entropies_T[cuts].min()) >= float(np.sort(entropies_T)[-20])
        assert episode.parts["steps"] == sum(len(turn.tokens) for turn in segments)
    texts = {(len(text), len(history)) for text, history in scorer.asked}
    assert any(history > 1 for _, history in texts)  # later segments are read behind the earlier ones
    assert life.summary.ledger.tokens.trained == sum(e.num_sampled for group in trained for e in group.scored)
