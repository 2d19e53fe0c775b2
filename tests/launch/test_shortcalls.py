"""Short calls of rewards that share orders."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.base.types.messages.controller import CallScores, Scored
from headrace.base.types.messages.scorer import ScoreCompletions, ScoreTogether
from headrace.launch.clients import scoring, shortcalls
from headrace.launch.clients.shortcalls import MAX_BYTES, ShortCalls
from headrace.rollout.scoring import Scores
from tests.launch.test_scorer_pool import DEEDS
from tests.launch.workers import running_pool, task


def request(*completions: str) -> ScoreCompletions:
    return ScoreCompletions(call=0, prompt="p", completions=completions, row={})


class Worker:
    """It records the orders, and answers each when it is told to. The reward of a completion is its number."""

    def __init__(self, *, max_orders: int = 1, max_completions: int = 100) -> None:
        self.orders: list[list[tuple[str, ...]]] = []
        self.answers: list[asyncio.Future[bool]] = []
        self.sent = [asyncio.Event() for _ in range(8)]
        self.ending = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.max_completions = max_completions
        self.calls = ShortCalls(
            self.send, start=self.start, max_orders=lambda: max_orders, max_completions=lambda: self.max_completions
        )

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        if self.ending:
            work.close()
            return None
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def send(self, requests: Sequence[ScoreCompletions]) -> Sequence[Scores] | None:
        self.sent[len(self.orders)].set()
        self.orders.append([each.completions for each in requests])
        self.answers.append(asyncio.get_running_loop().create_future())
        if not await self.answers[-1]:
            return None
        return [Scores(rewards=tuple(float(text) for text in each.completions)) for each in requests]

    def score(self, *completions: str, num_bytes: int = 0) -> asyncio.Task[Scores | None]:
        return asyncio.create_task(self.calls.score(request(*completions), num_bytes))

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)


def test_calls_of_one_moment_share_an_order_and_later_ones_the_next() -> None:
    async def main() -> None:
        worker = Worker()
        first = [worker.score("1", "2"), worker.score("3")]
        await worker.settle()
        later = [worker.score("4"), worker.score("5", "6")]
        await worker.settle()
        assert worker.orders == [[("1", "2"), ("3",)]]
        worker.answers[0].set_result(True)
        await worker.settle()
        assert worker.orders[1:] == [[("4",), ("5", "6")]]
        worker.answers[1].set_result(True)
        scores = await asyncio.gather(*first, *later)
        assert [each and each.rewards for each in scores] == [(1.0, 2.0), (3.0,), (4.0,), (5.0, 6.0)]

    asyncio.run(main())


def test_an_order_has_no_more_completions_than_allowed_but_one_request_in_any_case() -> None:
    async def main() -> None:
        worker = Worker(max_orders=2, max_completions=3)
        calls = [worker.score("1", "2", "3", "4"), worker.score("5", "6"), worker.score("7"), worker.score("8")]
        await worker.settle()
        assert worker.orders == [[("1", "2", "3", "4")], [("5", "6"), ("7",)]]
        worker.answers[1].set_result(True)
        await worker.settle()
        assert worker.orders[2:] == [[("8",)]]
        for answer in (worker.answers[0], worker.answers[2]):
            answer.set_result(True)
        assert None not in await asyncio.gather(*calls)

    asyncio.run(main())


def test_an_order_of_several_requests_has_a_limit_of_bytes() -> None:
    async def main() -> None:
        worker = Worker(max_orders=3)
        calls = [worker.score("1", num_bytes=MAX_BYTES + 1)]
        calls += [worker.score(str(each), num_bytes=MAX_BYTES // 2) for each in range(2, 5)]
        await worker.settle()
        assert worker.orders == [[("1",)], [("2",), ("3",)], [("4",)]]
        for answer in worker.answers:
            answer.set_result(True)
        assert None not in await asyncio.gather(*calls)

    asyncio.run(main())


def test_calls_wait_for_no_order_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcalls, "LONG_S", 0.01)

    async def main() -> None:
        worker = Worker()
        hanging = worker.score("1")
        await worker.settle()
        waiting = worker.score("2")
        async with asyncio.timeout(60):
            await worker.sent[1].wait()
        worker.answers[1].set_result(True)
        assert (await waiting) == Scores(rewards=(2.0,))
        worker.answers[0].set_result(False)
        assert await hanging is None

    asyncio.run(main())


def test_calls_that_are_not_short_any_more_have_no_joint_order() -> None:
    async def main() -> None:
        worker = Worker()
        sent = worker.score("1")
        await worker.settle()
        waiting = [worker.score("2"), worker.score("3")]
        await worker.settle()
        worker.max_completions = 0
        worker.answers[0].set_result(True)
        assert await asyncio.gather(*waiting) == [None, None]
        assert await sent is not None
        assert len(worker.orders) == 1

    asyncio.run(main())


def test_calls_of_a_lost_order_have_no_scores_and_the_next_order_goes_out() -> None:
    async def main() -> None:
        worker = Worker()
        lost = [worker.score("1"), worker.score("2")]
        await worker.settle()
        cancelled, next_one = worker.score("3"), worker.score("4")
        await worker.settle()
        cancelled.cancel()
        worker.answers[0].set_result(False)
        assert await asyncio.gather(*lost) == [None, None]
        await worker.settle()
        assert worker.orders[1:] == [[("4",)]]
        worker.answers[1].set_result(True)
        assert (await next_one) == Scores(rewards=(4.0,))

    asyncio.run(main())


def test_an_order_that_is_cancelled_or_cannot_begin_leaves_no_caller_waiting() -> None:
    async def main() -> None:
        worker = Worker()
        sent = worker.score("1")
        await worker.settle()
        waiting = worker.score("2")
        await worker.settle()
        worker.ending = True
        for order in worker.tasks:
            order.cancel()
        assert await asyncio.gather(sent, waiting, worker.score("3")) == [None, None, None]
        worker.ending = False
        new = worker.score("4")
        await asyncio.sleep(0)  # the order is planned
        await asyncio.sleep(0)  # its task is there
        assert len(worker.tasks) == 2
        for order in worker.tasks:  # the new one before it has run
            order.cancel()
        assert await new is None

    asyncio.run(main())


@pytest.mark.parametrize("deed", ["", "exit"])
def test_groups_that_end_together_are_scored_in_few_orders_until_an_order_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    monkeypatch.setattr(scoring, "SHORT_S", 10.0)  # on a busy machine too, all calls are short

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            await at.pool.score(task(), ("slow 0",))  # its time is not known before
            if deed:
                assert (
                    (await at.pool.score(task(), ("slow 0", deed))).get_graded(1).failure.startswith("reward_crashed")
                )
                await at.pool.score(task(), ("slow 0",))
            (worker,) = (slot.worker for slot in at.pool._slots)
            before = worker.num_started
            groups = await asyncio.gather(*[at.pool.score(task(), ("slow 0", "raise")) for _ in range(20)])
            assert [scores.get_graded(0).reward for scores in groups] == [1.0] * 20
            assert all("ValueError: as told" in scores.get_graded(1).failure for scores in groups)
            num_orders = worker.num_started - before
            # the failure of a single call stands where repetitions look for it
            assert "ValueError: as told" in (await at.pool.score(task(), ("raise",))).failure
            assert (await at.pool.score(task(), ("slow 0",))).rewards == (1.0,)
            assert num_orders == (20 if deed else 1)

    asyncio.run(main())


def test_a_group_is_scored_while_calls_of_others_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SHORT_S", 10.0)

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=40.0) as at:
            await at.pool.score(task(), ("slow 0",))
            hanging = []
            for _ in range(scoring.ORDERS_PER_WORKER):
                hanging.append(asyncio.create_task(at.pool.score(task(), ("hang", "slow 0"))))
                await asyncio.sleep(0.05)
            assert (await at.pool.score(task(), ("slow 0", "slow 0"))).rewards == (1.0, 1.0)
            assert not any(each.done() for each in hanging)
            for each in hanging:
                each.cancel()

    asyncio.run(main())


def test_a_joined_order_whose_worker_was_replaced_for_another_reason_is_made_again_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SHORT_S", 10.0)

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            await at.pool.score(task(), ("slow 0",))
            (worker,) = (slot.worker for slot in at.pool._slots)
            groups = [asyncio.create_task(at.pool.score(task(), ("slow 0.3", "slow 0.3"))) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert len(worker.calls) == 1  # their order
            await worker.replace()
            assert [(await each).rewards for each in groups] == [(1.0, 1.0)] * 2
            (successor,) = (slot.worker for slot in at.pool._slots)
            assert (successor.num_started, at.pool._num_unshared) == (1, 0)

    asyncio.run(main())


def test_calls_of_which_few_fit_into_an_order_are_made_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "SHORT_S", 10.0)
    monkeypatch.setattr(scoring, "MIN_SHARED", scoring.MAX_TOGETHER + 1)

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            await at.pool.score(task(), ("slow 0",))
            (worker,) = (slot.worker for slot in at.pool._slots)
            before = worker.num_started
            await asyncio.gather(*[at.pool.score(task(), ("slow 0", "slow 0")) for _ in range(5)])
            assert worker.num_started - before == 5

    asyncio.run(main())


def test_a_worker_that_answers_with_too_few_rewards_is_replaced_and_the_pool_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = scoring._answers_all
    answers = iter([False])
    monkeypatch.setattr(scoring, "_answers_all", lambda *given: next(answers, True) and complete(*given))

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            assert (await at.pool.score(task(), ("slow 0",))).rewards == (1.0,)
            assert len(at.children) > 1
            assert any("another number of rewards" in warning for warning in at.warnings), at.warnings

    asyncio.run(main())


def test_an_answer_has_a_reward_or_an_error_for_each_completion() -> None:
    fine, failed, short = CallScores(rewards=(1.0,)), CallScores(rewards=(), error="no"), CallScores(rewards=())
    together = ScoreTogether(call=0, requests=(request("1", "2"), request("3")))
    assert scoring._answers_all(Scored(call=0, calls=(fine, failed, fine)), together)
    assert not scoring._answers_all(Scored(call=0, calls=(fine, failed)), together)
    assert not scoring._answers_all(Scored(call=0, calls=(fine, short, fine)), together)
    assert scoring._answers_all(Scored(call=0, calls=(CallScores(rewards=(1.0, None)),)), request("1", "2"))
    assert not scoring._answers_all(Scored(call=0, calls=()), request("1"))
