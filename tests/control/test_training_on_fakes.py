"""Whole runs on fakes: the bound, the serial loop, what is trained, what is reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.base.types.observation import LiveState
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.control.controller import Controller
from headrace.control.turns import REWARD_NONE
from headrace.learner.base import Publication
from headrace.rollout.runner import episode_seed
from headrace.rollout.scoring import Scores
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, lognormal_lengths
from tests.control.lives import Life, Plan, RecordingObserver, list_groups, live, run_to_failure, with_eval

LENGTH = lognormal_lengths(40, 1.0, 300)
BOUNDS = [(max_age, lead) for max_age in range(4) for lead in (0, max_age)]


@pytest.mark.parametrize("order", ["strict", "ready_first"])
@pytest.mark.parametrize(("max_age", "lead"), dict.fromkeys(BOUNDS))
def test_no_token_is_trained_at_an_age_above_the_bound(tmp_path: Path, max_age: int, lead: int, order: str) -> None:
    life = live(Plan(run_dir=tmp_path, steps=12, flow={"max_age": max_age, "lead": lead, "order": order}))
    ages = Counter[int]()
    for batch in life.learner.batches:
        ages.update(batch.ages().tolist())
    assert min(ages) >= 0
    assert max(ages) <= max_age
    assert life.summary.age_histogram == dict(sorted(ages.items()))
    assert life.summary.max_token_age == max(ages)
    if lead:
        assert max(ages) > 0, "nothing ran ahead"


class Forgetful(FakeEngine):
    """An engine that goes on sampling with its first weights, and says so."""

    async def generate(self, *given: Any, **named: Any) -> AsyncIterator[TokenChunk]:
        async for chunk in super().generate(*given, **named):
            tokens = msgspec.structs.replace(chunk.tokens, versions_T=np.zeros_like(chunk.tokens.versions_T))
            yield msgspec.structs.replace(chunk, tokens=tokens)


def test_a_token_above_the_bound_ends_the_run_before_it_is_trained(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, engine=lambda: Forgetful(length=LENGTH), flow={"max_age": 1})
    error = run_to_failure(plan)
    assert isinstance(error, RunError)
    assert error.problem == "step 2 would train a token of age 2, and flow.max_age=1"
    assert error.remedy == "set flow.max_age=2, then --resume"


def serial_loop(steps: int, groups: int, size: int) -> FakeLearner:
    """Generate, score, train, and again: one line after the other, nothing at the same time."""
    learner = FakeLearner(token_s=0.0)

    async def main() -> None:
        for step in range(steps):
            samples = []
            for group in range(step * groups, (step + 1) * groups):
                lengths = [LENGTH(episode_seed(0, EpisodeKey(group, place))) for place in range(size)]
                rewards = [float(length % 2) for length in lengths]
                for place, length in enumerate(lengths):
                    answer = Tokens(ids_T=[step] * length, logprobs_T=[-1.0] * length, versions_T=[step] * length)
                    tokens = Tokens.observed([group]) + answer
                    advantage = rewards[place] - sum(rewards) / size
                    key = EpisodeKey(group, place)
                    samples.append(TrainSample(key=key, spans=(tokens,), mask_T=tokens.sampled_T, advantage=advantage))
            await learner.train(Batch.collate(step, samples))

    run_virtual(main())
    return learner


@pytest.mark.parametrize("order", ["strict", "ready_first"])
@pytest.mark.parametrize("by_group", [True, False])
def test_without_age_the_weights_are_those_of_a_plain_serial_loop(tmp_path: Path, order: str, by_group: bool) -> None:
    plan = Plan(
        run_dir=tmp_path,
        steps=7,
        flow={"max_age": 0, "order": order},
        scorer=lambda: FakeScorer(seconds=0.3, by_group=by_group),
    )
    life = live(plan)
    serial = serial_loop(7, 2, 3)
    assert life.learner.weights == serial.weights
    assert life.learner.weights != serial_loop(6, 2, 3).weights


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_every_group_submitted_is_trained_exactly_once(tmp_path: Path, max_age: int) -> None:
    life = live(Plan(run_dir=tmp_path, steps=10, flow={"max_age": max_age}))
    trained = [group for batch in life.learner.batches for group in list_groups(batch)]
    assert sorted(trained) == list(range(20))
    groups, episodes, tokens = life.summary.ledger.groups, life.summary.ledger.episodes, life.summary.ledger.tokens
    assert (groups.submitted, groups.trained, groups.dropped, groups.in_flight) == (20, 20, {}, 0)
    assert (episodes.submitted, episodes.trained, episodes.in_flight) == (60, 60, 0)
    assert tokens.submitted == tokens.trained == life.summary.tokens_trained == life.summary.tokens_generated


def test_strict_order_trains_groups_as_they_were_admitted(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=10, flow={"max_age": 3, "order": "strict"}))
    assert [list_groups(batch) for batch in life.learner.batches] == [[2 * step, 2 * step + 1] for step in range(10)]


def test_overlap_takes_less_time_than_taking_turns(tmp_path: Path) -> None:
    def seconds(max_age: int) -> float:
        directory = tmp_path / str(max_age)
        directory.mkdir()
        plan = Plan(run_dir=directory, steps=20, flow={"max_age": max_age}, learner=lambda: FakeLearner(token_s=0.01))
        return live(plan).summary.wall_s

    assert seconds(2) < 0.75 * seconds(0)


def ks_distance(left: list[int], right: list[int]) -> float:
    """The greatest gap between two empirical distributions (Kolmogorov and Smirnov)."""
    grid = np.unique([*left, *right])
    shares = [np.searchsorted(np.sort(sample), grid, side="right") / len(sample) for sample in (left, right)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("order", ["strict", "ready_first"])
def test_lengths_that_are_trained_are_distributed_like_those_submitted(tmp_path: Path, order: str) -> None:
    plan = Plan(run_dir=tmp_path, steps=40, flow={"groups_per_step": 4, "group_size": 4, "max_age": 3, "order": order})
    life = live(plan)
    trained = [int(length) - 1 for batch in life.learner.batches[:30] for length in batch.lengths_S]
    submitted = [LENGTH(episode_seed(1, EpisodeKey(group, 0))) for group in range(5000)]
    limit = 1.95 * np.sqrt((len(trained) + len(submitted)) / (len(trained) * len(submitted)))  # at 0.1 %
    assert ks_distance(trained, submitted) < limit
    assert ks_distance([length for length in trained if length < 80], submitted) > limit, "the test sees no bias"


def test_failed_rewards_are_filled_up_to_whole_batches(tmp_path: Path) -> None:
    plan = Plan(
        run_dir=tmp_path,
        steps=8,
        scorer=lambda: FakeScorer(
            seconds=0.2, reward=lambda text: None if len(text) % 3 == 0 else float(len(text) % 2)
        ),
    )
    life = live(plan)
    assert all(len(list_groups(batch)) == 2 for batch in life.learner.batches)
    assert len(life.learner.batches) == 8
    groups = life.summary.ledger.groups
    assert groups.dropped["reward_none"] > 0
    assert groups.submitted == 16 + groups.dropped["reward_none"]
    assert life.summary.ledger.episodes.dropped["reward_none"] > groups.dropped["reward_none"]
    assert life.summary.ledger.tokens.in_flight == 0
    assert life.summary.warnings == [f"episodes fail: {REWARD_NONE} (20 times)"]


def test_summary_says_what_the_run_came_to(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=5, parts=with_eval(4)))
    said = life.summary
    assert (said.status, said.cause, said.steps, said.versions) == ("finished", "", 5, [0, 5])
    assert 0 <= said.eval_before <= 1
    assert 0 <= said.eval_after <= 1
    assert said.reward_first == life.seen.steps[0].reward_mean
    assert said.reward_last == life.seen.steps[-1].reward_mean
    assert said.tokens_trained == sum(batch.num_loss_tokens for batch in life.learner.batches)
    assert said.trained_tok_s == pytest.approx(said.tokens_trained / said.wall_s)
    assert 0 < said.learner_idle_frac < 1
    assert (said.mismatch_kl, said.mismatch_abs, said.sequences_restarted) == (0.0, 0.0, 0)
    assert said.run_dir == str(tmp_path)
    assert said.wall_s < life.seconds


def test_every_step_is_told_once_with_its_figures(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=6))
    records = life.seen.steps
    assert [record.step for record in records] == list(range(6))
    assert [record.version for record in records] == list(range(1, 7))
    assert [record.trained_tokens for record in records] == [batch.num_loss_tokens for batch in life.learner.batches]
    assert all(sum(record.ages.values()) == record.trained_tokens for record in records)
    assert all(a.clock_s < b.clock_s for a, b in pairwise(records))
    assert all(record.reward_min <= record.reward_mean <= record.reward_max for record in records)


def test_spans_tell_what_every_lane_did_and_when(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=4))
    named = Counter((span.lane, span.name) for span in life.seen.all_spans)
    assert named["rollout", "episode"] == 4 * 2 * 3
    assert 1 <= named["scoring", "score"] <= 4 * 2 * 3, "scores at the same time share a span"
    assert named["sync", "publish"] == named["sync", "stage"] == named["sync", "commit"] == 5
    assert named["learner", "wait batch"] >= 1
    assert all(0 <= span.start_s <= span.end_s <= life.seconds for span in life.seen.all_spans)


def test_weights_are_published_before_the_first_rollout_and_versions_commit_in_order(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=6))
    assert life.engine.commits == list(range(7))


def test_evaluation_goes_on_beside_training(tmp_path: Path) -> None:
    def life(eval_every: int) -> Life:
        directory = tmp_path / str(eval_every)
        directory.mkdir()
        return live(Plan(run_dir=directory, steps=12, run={"eval_every": eval_every}, parts=with_eval(3)))

    without, with_evaluations = life(0), life(4)
    evaluated = list(with_evaluations.controller.state.metrics.totals.evals)
    assert evaluated[0] == 0
    assert evaluated[-1] == 12
    assert any(0 < version < 12 for version in evaluated)
    assert with_evaluations.summary.wall_s == pytest.approx(without.summary.wall_s)
    assert with_evaluations.learner.weights == without.learner.weights
    assert with_evaluations.summary.tokens_generated == without.summary.tokens_generated
    assert with_evaluations.summary.ledger == without.summary.ledger


def test_a_version_that_was_evaluated_while_training_ended_is_not_evaluated_again(tmp_path, monkeypatch) -> None:
    whole = Controller._train

    async def train(self: Controller) -> None:
        await whole(self)
        await self._evaluate("training")

    monkeypatch.setattr(Controller, "_train", train)
    life = live(Plan(run_dir=tmp_path, steps=3, parts=with_eval(3)))
    told = [event.text for event in life.seen.events if event.text.startswith("held-out mean reward")]
    assert [line.rsplit(" ", 1)[1] for line in told] == ["0", "3"]
    assert life.summary.eval_after is not None


def test_live_picture_can_be_taken_at_any_moment(tmp_path: Path) -> None:
    watcher = RecordingObserver()
    pictures: list[LiveState] = []

    class Painter(FakeScorer):
        async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
            pictures.append(watcher.controller.live())
            return await super().score(task, completions)

    live(Plan(run_dir=tmp_path, steps=6, scorer=Painter), seen=watcher)
    assert {wait.loop for wait in pictures[-1].waits} == {"rollout", "scoring", "learner", "sync"}
    assert all(picture.steps_total == 6 and 0 <= picture.steps_done <= 6 for picture in pictures)
    assert pictures[-1].wall_s > pictures[0].wall_s
    assert len(pictures[-1].rewards) > len(pictures[0].rewards) == 0
    assert pictures[-1].sample.startswith("x")


def test_engine_that_is_slow_to_commit_holds_the_next_copy_back_and_nothing_else(tmp_path: Path) -> None:
    class SlowCommits(FakeEngine):
        async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
            await asyncio.sleep(5.0)
            return await super().commit(version, mode)

    life = live(Plan(run_dir=tmp_path, steps=8, flow={"max_age": 3}, engine=lambda: SlowCommits(length=LENGTH)))
    assert life.summary.ledger.groups.trained == 16
    assert life.summary.exposed_sync_frac > 0.1
    assert any(span.name == "wait sync" for span in life.seen.all_spans)


def test_learner_never_copies_into_the_buffer_that_the_engine_reads(tmp_path: Path) -> None:
    in_use: list[int] = []

    class Reader(FakeEngine):
        async def stage(self, update: WeightUpdate) -> float:
            self.next_slot = update.slot
            return await super().stage(update)

        async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
            report = await super().commit(version, mode)
            in_use[:] = [self.next_slot]
            return report

    class Writer(FakeLearner):
        async def snapshot(self, version: int, slot: int) -> Publication:
            assert slot not in in_use
            copied = await super().snapshot(version, slot)
            assert slot not in in_use
            return copied

    life = live(Plan(run_dir=tmp_path, steps=10, flow={"max_age": 2}, engine=Reader, learner=Writer))
    assert life.engine.commits == list(range(11))
