"""The scheduler decides over numbers alone: these tests have no model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.rows import Rows
from headrace.engine.native.scheduler import Schedule, Scheduler
from headrace.engine.native.sequence import Sequence


@dataclass
class Machine:
    """A scheduler whose "model" samples the length of the sequence."""

    num_rows: int = 4
    num_blocks: int = 8
    budget: int = 32
    ended: list[int] = field(default_factory=list)
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.rows = Rows(self.num_rows, 128)
        self.pool = BlockPool(self.num_blocks)
        self.scheduler = Scheduler(
            self.rows, self.pool, max_step_tokens=self.budget, before_change=lambda _: None, may_pin=lambda: True
        )
        self.scheduler.version = 0
        self.sampled: dict[int, list[int]] = {}

    def add(self, prompt: list[int], num_new: int, priority: int = 0) -> int:
        sampling = Sampling(max_new_tokens=num_new)
        ids = np.array(prompt, np.int32)
        number, self.arrivals = self.arrivals, self.arrivals + 1
        request = GenerateRequest(request_id=number, prompt_ids_T=ids, sampling=sampling, priority=priority)
        self.scheduler.add(
            Sequence(
                request=request, given_ids_T=ids, num_prompt=len(ids), arrival=number, deadline_s=np.inf
            )
        )  # fmt: skip
        return number

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        rows, rows_R = self.rows, schedule.rows_R
        complete = rows.computed_R[rows_R] + schedule.counts_R == rows.length_R[rows_R]
        rows.computed_R[rows_R] += schedule.counts_R
        drawn = rows_R[complete]
        rows.record(drawn, rows.length_R[drawn], np.zeros(len(drawn), np.float32), 0)
        full = drawn[rows.full(drawn)]
        for row in full.tolist():
            sequence = rows.sequences[row]
            self.ended.append(sequence.request.request_id)
            self.sampled[sequence.request.request_id] = rows.get_ids(row)[len(sequence.given_ids_T) :].tolist()
        self.scheduler.remove(full)
        self.pool.check([rows.table(row) for row in range(rows.count)])
        return schedule

    def running(self) -> list[int]:
        return [sequence.request.request_id for sequence in self.rows.sequences]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2), st.booleans()), min_size=1, max_size=14
)


@given(REQUESTS, st.integers(1, 5), st.integers(7, 14), st.integers(1, 70))
def test_every_request_ends_with_all_its_tokens_whatever_the_sizes(
    requests: list[tuple[int, int, int, bool]], num_rows: int, num_blocks: int, budget: int
) -> None:
    machine = Machine(num_rows=num_rows, num_blocks=num_blocks, budget=budget)
    for number, (length, num_new, priority, shared) in enumerate(requests):
        machine.add([1] * length if shared else [100 + number] * length, num_new, priority)
    for _ in range(20_000):
        if machine.scheduler.idle:
            break
        schedule = machine.step()
        assert len(schedule.rows_R) > 0, "a step that does nothing"
        num_pieces = int(schedule.counts_R[schedule.num_decode :].sum())
        assert schedule.num_decode + num_pieces <= max(budget, schedule.num_decode)
        assert (schedule.counts_R[: schedule.num_decode] == 1).all()
    assert sorted(machine.ended) == list(range(len(requests)))
    for number, (length, num_new, _, _) in enumerate(requests):
        assert machine.sampled[number] == list(range(length, length + num_new))


@given(REQUESTS)
def test_the_sequence_of_the_first_rank_moves_in_every_step(requests: list[tuple[int, int, int, bool]]) -> None:
    machine = Machine(num_blocks=7, budget=5)
    for length, num_new, priority, _ in requests:
        machine.add([1] * length, num_new, priority)
    while not machine.scheduler.idle:
        scheduled = machine.step()
        left = [sequence.rank for sequence in machine.rows.sequences]
        if left and scheduled.num_decode < 5:
            first = machine.rows.sort_by_rank(np.arange(machine.rows.count))[0]
            assert machine.rows.computed_R[first] > 0


def test_higher_priority_joins_first_and_equals_join_in_order() -> None:
    machine = Machine(num_rows=1)
    for priority in (0, 2, 1, 2, 0):
        machine.add([1], 2, priority)
    while not machine.scheduler.idle:
        machine.step()
    assert machine.ended == [1, 3, 2, 0, 4]


def test_who_is_preempted_is_the_last_of_the_lowest_priority_and_comes_back_first() -> None:
    machine = Machine(num_rows=3, num_blocks=6, budget=100)
    high = machine.add([1] * 15, 40, priority=1)
    first, second = machine.add([2] * 15, 40), machine.add([3] * 15, 40)
    late = machine.add([4] * 15, 2)
    while machine.scheduler.num_preempted == 0:
        machine.step()
    assert machine.running() == [high, first]
    while not machine.scheduler.idle:
        machine.step()
    assert machine.ended.index(second) > machine.ended.index(first)
    assert machine.ended.index(high) == 0
    assert machine.sampled[second] == list(range(15, 55))
    assert len(machine.sampled[late]) == 2


def test_decoding_goes_first_and_prompts_get_the_rest_of_the_budget() -> None:
    machine = Machine(num_rows=4, num_blocks=30, budget=20)
    machine.add([1] * 3, 30)
    machine.add([2] * 3, 30)
    machine.step()
    machine.add([3] * 50, 5)
    pieces = [machine.step() for _ in range(3)]
    assert [(one.num_decode, one.counts_R.tolist()) for one in pieces] == [
        (2, [1, 1, 18]), (2, [1, 1, 18]), (2, [1, 1, 14]),
    ]  # fmt: skip


def test_siblings_that_join_in_one_step_compute_their_prompt_once() -> None:
    machine = Machine(num_rows=4, num_blocks=20, budget=200)
    for _ in range(4):
        machine.add(list(range(40)), 3)
    assert machine.step().counts_R.tolist() == [40]
    siblings = machine.step()
    assert siblings.counts_R.tolist() == [1, 1, 1, 1]
    assert len({source for source, _ in siblings.copies}) == 1
    assert len({target for _, target in siblings.copies}) == 3
    assert machine.scheduler.cached_tokens == 3 * 39
    assert machine.scheduler.prompt_tokens == 4 * 40


def test_siblings_of_whole_blocks_join_in_one_step() -> None:
    machine = Machine(num_rows=4, num_blocks=20, budget=200)
    for _ in range(4):
        machine.add(list(range(33)), 3)
    assert machine.step().counts_R.tolist() == [33, 1, 1, 1]
    assert machine.scheduler.cached_tokens == 3 * 32


def test_siblings_of_one_that_has_ended_or_lost_its_row_do_not_wait_for_another() -> None:
    machine = Machine(num_rows=4, num_blocks=20, budget=200)
    for _ in range(3):
        machine.add(list(range(40)), 3)
    machine.step()
    machine.scheduler.withdraw(machine.rows.sequences[:1])
    assert machine.step().counts_R.tolist() == [8, 8]
    while not machine.scheduler.idle:
        machine.step()
    assert len(machine.ended) == 2


def test_no_more_step_aside_for_a_sibling_than_there_are_rows() -> None:
    machine = Machine(num_rows=3, num_blocks=60, budget=200)
    added = [machine.add(list(range(40)), 3) for _ in range(6)]
    machine.step()
    assert machine.running() == added[:1]
    assert len(machine.scheduler._deferred) == 2
    machine.step()
    assert machine.running() == added[:3]
    while not machine.scheduler.idle:
        machine.step()
    assert sorted(machine.ended) == added


def test_held_sequences_wait_until_the_queue_is_opened() -> None:
    machine = Machine(num_rows=1, num_blocks=20)
    running, waiting = machine.add([1], 3), machine.add([2], 3)
    machine.step()
    machine.scheduler.hold(include_waiting=False)
    later = machine.add([3], 3, priority=9)
    while not machine.scheduler.idle:
        machine.step()
    assert machine.ended == [running, waiting]
    machine.scheduler.open()
    machine.step()
    assert machine.running() == [later]
