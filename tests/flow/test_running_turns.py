"""Tokens of running turns reach the ledger before more of them could be lost than was agreed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.base.clock import RealClock, run_virtual
from headrace.base.types.episode import EpisodeKey
from headrace.flow.ledger.base import Operation, Stream
from headrace.flow.ledger.streams import RunningTurns
from headrace.testing.ledgers import sampled_tokens, turn_part


class Written(list[Operation]):
    """A writer that remembers."""

    def write(self, operation: Operation) -> None:
        self.append(operation)


def recorded(feed: Callable[[RunningTurns], None], *, most: int) -> list[list[tuple[int, int, int]]]:
    """Group, place and tokens of the parts of each transaction; each line of ``feed`` in one turn of the loop."""
    written = Written()

    async def main() -> None:
        feed(RunningTurns(written.write, RealClock(), max_unrecorded=most))

    run_virtual(main())
    assert all(isinstance(operation, Stream) for operation in written)
    return [[(*each.key, len(each.tokens)) for each in operation.parts] for operation in written]


@pytest.mark.parametrize(("most", "chunk"), [(256, 64), (100, 64), (10, 64), (64, 1), (7, 3)])
def test_never_more_is_lost_than_agreed_or_than_one_chunk(most: int, chunk: int) -> None:
    written = Written()
    lost: list[int] = []

    async def main() -> None:
        running = RunningTurns(written.write, RealClock(), max_unrecorded=most)
        for number in range(1, 40):
            running.add(turn_part(0, 0, sampled_tokens(chunk)))
            await asyncio.sleep(0.1)
            safe = sum(len(each.tokens) for operation in written for each in operation.parts)
            lost.append(number * chunk - safe + chunk)  # and as much again in the engine

    run_virtual(main())
    assert max(lost) <= max(most, chunk)
    if most >= 4 * chunk:
        assert len(written) <= 40 * chunk / (most / 2), "it records far too often"


def test_turns_that_are_due_together_are_one_transaction() -> None:
    def feed(running: RunningTurns) -> None:
        for place in range(5):
            running.add(turn_part(3, place, sampled_tokens(90 if place != 2 else 10)))

    assert recorded(feed, most=100) == [[(3, 0, 90), (3, 1, 90), (3, 3, 90), (3, 4, 90)]]


def test_short_answers_and_ended_ones_cost_nothing() -> None:
    def feed(running: RunningTurns) -> None:
        running.add(turn_part(0, 0, sampled_tokens(30)))
        running.add(turn_part(0, 1, sampled_tokens(90)))
        running.forget(EpisodeKey(0, 1))

    assert recorded(feed, most=100) == []


def test_nothing_is_recorded_where_that_was_asked() -> None:
    def feed(running: RunningTurns) -> None:
        running.add(turn_part(0, 0, sampled_tokens(3000)))
        running.record_all()

    assert recorded(feed, most=0) == []


def test_the_end_of_a_run_records_whatever_has_arrived() -> None:
    def feed(running: RunningTurns) -> None:
        running.add(turn_part(0, 0, sampled_tokens(30)))
        running.add(turn_part(0, 0, sampled_tokens(5)))
        running.add(turn_part(0, 0, sampled_tokens(2), turn=1))
        running.record_all()
        running.record_all()

    assert recorded(feed, most=100) == [[(0, 0, 35), (0, 0, 2)]]


def test_answer_that_begins_again_voids_what_was_recorded_of_it() -> None:
    written = Written()

    async def main() -> None:
        running = RunningTurns(written.write, RealClock(), max_unrecorded=10)
        running.add(turn_part(0, 0, sampled_tokens(8)))
        await asyncio.sleep(0.1)
        running.add(turn_part(0, 0, sampled_tokens(3)))
        running.add(turn_part(0, 0, sampled_tokens(4), lost="restarted"))
        await asyncio.sleep(0.1)

    run_virtual(main())
    assert [(len(each.tokens), each.lost) for operation in written for each in operation.parts] == [
        (8, ""),
        (4, "restarted"),
    ]
