"""Short calls of rewards that share orders."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.launch.clients import scoring
from headrace.launch.clients.shortcalls import ShortCalls
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
        self.ending = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls = ShortCalls(
            self.send, start=self.start, max_orders=lambda: max_orders, max_completions=lambda: max_completions
        )

    def start(self, work: Coroutine[Any, Any, None]) -> bool:
        if self.ending:
            work.close()
            return False
        self.tasks.add(asyncio.create_task(work))
        return True

    async def send(self, requests: Sequence[ScoreCompletions]) -> Sequence[Scores] | None:
        self.orders.append([each.completions for each in requests])
        self.answers.append(asyncio.get_running_loop().create_future())
        if not await self.answers[-1]:
            return None
        return [Scores(rewards=tuple(float(text) for text in each.completions)) for each in requests]

    def score(self, *completions: str) -> asyncio.Task[Scores | None]:
        return asyncio.create_task(self.calls.score(request(*completions)))

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
                assert (await at.pool.score(task(), ("slow 0", deed))).of(1).failure.startswith("reward_crashed")
                await at.pool.score(task(), ("slow 0",))
            (worker,) = (slot.worker for slot in at.pool._slots)
            before = worker.num_started
            groups = await asyncio.gather(*[at.pool.score(task(), ("slow 0", "raise")) for _ in range(20)])
            assert [scores.of(0).reward for scores in groups] == [1.0] * 20
            assert all("ValueError: as told" in scores.of(1).failure for scores in groups)
            num_orders = worker.num_started - before
            # the failure of a single call stands where repetitions look for it
            assert "ValueError: as told" in (await at.pool.score(task(), ("raise",))).failure
            assert (await at.pool.score(task(), ("slow 0",))).rewards == (1.0,)
            assert num_orders == (20 if deed else 1)

    asyncio.run(main())
