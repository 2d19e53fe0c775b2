"""The fakes keep the contracts of the real parts: otherwise what they prove would mean nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import RequestError, WeightsError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey, StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import WeightUpdate
from headrace.engine import TokenChunk
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, fake_parts, lognormal_lengths

PROMPT = np.array([1], np.int32)


async def bring(learner: FakeLearner, engine: FakeEngine, version: int) -> WeightUpdate:
    update = await learner.wait_until_published(await learner.snapshot(version, version % 2))
    await engine.stage(update)
    await engine.commit(version)
    return update


def batch(step: int) -> Batch:
    tokens = Tokens(ids_T=[step, 2], logprobs_T=[-1.0, -1.0], versions_T=[step, step])
    sample = TrainSample(key=EpisodeKey(0, 0), spans=(tokens,), mask_T=tokens.sampled_T, advantage=1.0)
    return Batch.collate(step, [sample])


async def whole(engine: FakeEngine, sampling: Sampling) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(PROMPT, sampling)]


def test_engine_without_weights_refuses() -> None:
    with pytest.raises(RequestError, match="no weights"):
        run_virtual(whole(FakeEngine(), Sampling(max_new_tokens=4)))


def test_engine_ends_each_sequence_once_with_its_reason() -> None:
    async def main() -> list[list[TokenChunk]]:
        engine = FakeEngine(length=lambda seed: seed)
        await bring(FakeLearner(), engine, 0)
        return [await whole(engine, Sampling(max_new_tokens=40, seed=seed)) for seed in (33, 40, 90)]

    for chunks, total, reason in zip(
        run_virtual(main()), (33, 40, 40), (StopReason.STOP, StopReason.STOP, StopReason.LENGTH), strict=True
    ):
        assert sum(len(chunk.tokens) for chunk in chunks) == total
        assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]


def test_engine_stamps_the_version_that_was_committed_when_the_chunk_began() -> None:
    async def main() -> tuple[list[int], float]:
        engine, learner = FakeEngine(token_s=1.0, length=lambda _: 48), FakeLearner()
        await bring(learner, engine, 0)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(whole(engine, Sampling(max_new_tokens=48)))
            await asyncio.sleep(20)
            await bring(learner, engine, 1)
        return [version for chunk in answer.result() for version in chunk.tokens.versions_T], VirtualClock().now()

    versions, seconds = run_virtual(main())
    assert versions == [0] * 32 + [1] * 16
    assert seconds == pytest.approx(49, abs=0.1)


def test_engine_refuses_old_versions_and_commits_only_what_is_staged() -> None:
    async def main() -> None:
        engine, learner = FakeEngine(), FakeLearner()
        update = await bring(learner, engine, 3)
        with pytest.raises(WeightsError, match="old"):
            await engine.stage(update)
        with pytest.raises(WeightsError, match="not staged"):
            await engine.commit(4)

    run_virtual(main())


def test_learner_makes_its_orders_one_after_the_other_in_the_order_given() -> None:
    async def main() -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        learner = FakeLearner(token_s=1.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(learner.train(batch(0)))
            first = group.create_task(learner.snapshot(1, 0))
            group.create_task(learner.train(batch(1)))
            second = group.create_task(learner.snapshot(2, 1))
        updates = [await learner.wait_until_published(task.result()) for task in (first, second)]
        return [b.step for b in learner.batches], updates[0].checksums, updates[1].checksums

    steps, first, second = run_virtual(main())
    assert steps == [0, 1]
    assert first != second, "the first snapshot holds the weights of the second"


def test_learner_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    async def main() -> tuple[str, str]:
        learner, later = FakeLearner(), FakeLearner()
        await learner.train(batch(0))
        await learner.save(tmp_path)
        later.restore(tmp_path)
        await learner.train(batch(1))
        await later.train(batch(1))
        return learner.weights, later.weights

    undisturbed, resumed = run_virtual(main())
    assert undisturbed == resumed != "0" * 32


def test_lengths_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    length = lognormal_lengths(mean=100, cv=1.0, cap=100_000)
    drawn = np.array([length(seed) for seed in range(6000)])
    assert drawn.mean() == pytest.approx(100, rel=0.08)
    assert drawn.std() / drawn.mean() == pytest.approx(1.0, rel=0.15)
    assert max(lognormal_lengths(mean=100, cv=3.0, cap=50)(seed) for seed in range(50)) == 50


def test_scorer_takes_its_time_and_rewards_each_completion() -> None:
    async def main() -> tuple[tuple[float | None, ...], float]:
        parts = fake_parts(Path("/nowhere"), scorer=FakeScorer(seconds=2.5, reward=lambda text: float(len(text))))
        scores = await parts.scorer.score(parts.tasks[0], ("a", "bcd"))
        return scores.rewards, VirtualClock().now()

    assert run_virtual(main()) == ((1.0, 3.0), 2.5)
