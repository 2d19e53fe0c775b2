"""Every policy keeps its promises in any order of events, against the real flow and the real ledger in memory: the
bound holds, nothing is lost or trained twice, the last step comes, and the books balance after every event."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.tokens import Tokens
from headrace.flow import FlowConfig, GroupBatch
from headrace.flow.ledger import ResumeState, SqliteLedger
from headrace.flow.ledger.base import Operation
from headrace.flow.policies import STALE
from tests.flow.dict_ledger import DictLedger
from tests.flow.driver import Driver

HISTORIES = 10
"""Of each policy, in the fast part."""
MANY_HISTORIES = 2_500
"""Of each policy and part, in the slow test."""
PARTS = 4
"""Of the slow test: ten thousand histories of each policy, in pieces that can run side by side."""
BASE = {"groups_per_step": 2, "group_size": 2}
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {"policy": "synchronous"},
    "one ahead": {"policy": "one_ahead"},
    "bounded": {"max_age": 2},
    "bounded, in order": {"max_age": 3, "lead": 1, "order": "strict"},
    "bounded, tuned": {"max_age": "auto", "capacity": "auto"},
    "windowed": {"policy": {"kind": "windowed", "window": 2}, "max_age": 3},
    "windowed by one batch": {"policy": "windowed", "max_age": 2, "lead": 1, "capacity": 3},
    "reject": {"policy": "unbounded", "max_age": 1, "lead": 3},
    "reject, in order": {"policy": "unbounded", "max_age": 1, "lead": 2, "order": "strict"},
    "reject tokens": {"policy": {"kind": "unbounded", "per": "token"}, "max_age": 1, "lead": 3},
    "drop oldest": {"policy": {"kind": "unbounded", "stale": "drop_oldest"}, "max_age": 2, "lead": 1},
    "wait": {"policy": {"kind": "unbounded", "stale": "wait"}, "max_age": 2, "lead": 4},
    "wait, tuned": {"policy": {"kind": "unbounded", "stale": "wait"}, "max_age": "auto", "capacity": "auto"},
}
KEEPING_ALL = [name for name in POLICIES if name != "reject tokens"]
"""Those under which a step that a crash makes again trains all of what it trained, whatever the bound was then."""
EVENTS = (
    *("admit", "start", "end_episode", "fail", "drop", "take", "train", "commit", "save", "crash"),
    *("tune", "throttle"),
)


def config_of(name: str, **changes: Any) -> FlowConfig:
    return FlowConfig(**{**BASE, **POLICIES[name], **changes})


class MemoryBooks(DictLedger):
    """Writes into a ledger in memory, which is what a crash leaves behind, and once more by hand."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.real = SqliteLedger(":memory:", group_size=config.group_size, groups_per_step=config.groups_per_step)
        weakref.finalize(self, self.real.close)  # Python 3.13 warns of a database that nobody closed

    def write(self, operation: Operation) -> None:
        super().write(operation)
        self.real.apply(operation)

    def roll_back(self, step: int) -> ResumeState:
        by_hand, real = super().roll_back(step), self.real.roll_back(step)
        ours, theirs = ([(g.number, g.state, g.step) for g in told.groups] for told in (by_hand, real))
        assert ours == theirs
        assert (by_hand.num_submitted, by_hand.num_released) == (real.num_submitted, real.num_released)
        return real


class BookedDriver(Driver):
    """Real episodes; the learner trains what the batch leaves it."""

    ledger: MemoryBooks

    def make_episode(self, key: EpisodeKey, versions: tuple[int, int], *, failed: bool) -> EpisodeGraph:
        answer = Tokens(ids_T=[1, 2], logprobs_T=[-1.0, -1.0], versions_T=list(versions))
        turns = [Turn(author="policy", tokens=answer)]
        if failed:
            return EpisodeGraph(key=key, turns=turns, status=EpisodeStatus.FAILED, cause="reward_error")
        return EpisodeGraph(key=key, turns=turns, status=EpisodeStatus.SCORED, reward=1.0)

    def report(self, batch: GroupBatch) -> StepReport:
        floor = -1 if batch.oldest_version is None else batch.oldest_version
        versions = [v for group in batch.groups for episode in group.scored for v in episode.versions()]
        masked = sum(version < floor for version in versions)
        return StepReport(
            step=batch.step,
            metrics={},
            trained_tokens=len(versions) - masked,
            dropped_tokens={STALE: masked} if masked else {},
            log_pi_N=np.zeros(0, np.float32),
            seconds=0.0,
        )

    def fail(self) -> bool:
        return self.end_episode(failures=0.7)

    def __init__(self, config: FlowConfig, *, steps: int, rng: random.Random) -> None:
        super().__init__(config, steps=steps, rng=rng, ledger=MemoryBooks(config))

    def check(self) -> None:
        super().check()
        books = self.ledger.real.conservation()
        assert books.holds
        counts = self.flow.state.counts
        assert books.groups.submitted == self.flow.state.num_submitted
        assert books.groups.trained == counts[GroupState.RELEASED] + counts[GroupState.TRAINED]
        assert books.groups.dropped == dict(self.flow.state.dropped)


def driver_of(config: FlowConfig, rng: random.Random, *, steps: int = 4) -> BookedDriver:
    return BookedDriver(config, steps=steps, rng=rng)


def ended(driver: Driver) -> None:
    driver.finish()
    driver.check_end()


@pytest.mark.parametrize("name", POLICIES)
def test_bound_and_books_hold_and_the_last_step_comes_in_any_order_of_events(name: str) -> None:
    oldest = 0
    for seed in range(HISTORIES):
        rng = random.Random(f"{name}/{seed}")
        driver = driver_of(config_of(name), rng)
        driver.random_events(rng.randrange(80), crashes=0.04)
        ended(driver)
        oldest = max(oldest, driver.max_age)
    assert oldest <= config_of(name).largest_age


@pytest.mark.parametrize("name", POLICIES)
@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(st.sampled_from(EVENTS), max_size=70), seed=st.integers(0, 2**20))
def test_bound_and_books_hold_in_histories_that_are_sought_out(name: str, events: list[str], seed: int) -> None:
    driver = driver_of(config_of(name), random.Random(seed), steps=3)
    for event in events:
        if getattr(driver, event)():
            driver.check()
    ended(driver)


def test_run_that_goes_on_under_another_policy_is_refused_at_once_or_keeps_every_promise() -> None:
    seen = Counter[bool]()
    for seed in range(300):
        rng = random.Random(f"other/{seed}")
        size = rng.choice((1, 2))
        driver = Driver(config_of(rng.choice(KEEPING_ALL), groups_per_step=size), steps=8, rng=rng)
        for _ in range(2):
            driver.random_events(rng.randrange(20, 80), crashes=0.0)
            fits = driver.go_on_under(config_of(rng.choice(KEEPING_ALL), groups_per_step=size))
            seen[fits] += 1
        ended(driver)
    assert min(seen[True], seen[False]) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", POLICIES)
def test_bound_and_books_hold_in_ten_thousand_histories(name: str, part: int) -> None:
    seen = Counter[str]()
    for seed in range(MANY_HISTORIES):
        rng = random.Random(f"many/{name}/{part}/{seed}")
        config = config_of(name, groups_per_step=rng.choice((1, 2, 2, 3)), **_any_capacity(name, rng))
        kind = Driver if seed % 8 else BookedDriver  # the database is what takes the time
        driver = kind(config, steps=rng.randrange(2, 5), rng=rng)
        driver.random_events(rng.randrange(60), crashes=0.04)
        ended(driver)
        seen.update(crashed=driver.crashed, at_bound=driver.max_age == config.largest_age)
        seen.update(driver.flow.state.dropped.keys())
    assert seen["crashed"] > MANY_HISTORIES // 10, "the histories hardly ever crash: they prove little"
    config = config_of(name)
    runs_far = config.effective_lead >= config.largest_age and config.capacity is None
    assert not runs_far or seen["at_bound"] > MANY_HISTORIES // 100, "the histories hardly ever come near the bound"
    if config_of(name).policy.drops_stale:
        assert seen[STALE] > MANY_HISTORIES // 100
    else:
        assert not seen[STALE]


def _any_capacity(name: str, rng: random.Random) -> dict[str, Any]:
    free = "capacity" not in POLICIES[name] and "capacity" not in config_of(name).policy.fixes
    return {"capacity": rng.choice((None, 3))} if free else {}


@pytest.mark.parametrize("name", [n for n in POLICIES if not config_of(n).policy.drops_stale])
def test_pacing_drops_nothing_for_its_age(name: str) -> None:
    for seed in range(4):
        driver = driver_of(config_of(name), random.Random(seed), steps=6)
        driver.finish()
        assert driver.flow.state.dropped == {}


@pytest.mark.parametrize("name", ["reject", "reject tokens", "drop oldest"])
def test_what_is_too_old_leaves_for_a_counted_reason(name: str) -> None:
    reasons, masked = Counter[str](), 0
    for seed in range(12):
        driver = driver_of(config_of(name), random.Random(seed), steps=8)
        ended(driver)
        reasons.update(driver.flow.state.dropped)
        masked += driver.ledger.real.conservation().tokens.dropped.get(STALE, 0)
    assert masked > 0
    assert set(reasons) <= {"stale", "displaced"}
    assert ("displaced" in reasons) == (name == "drop oldest")


@pytest.mark.parametrize("window", [1, 2, 3])
def test_fewer_groups_than_the_window_holds_are_trained_before_an_older_one(window: int) -> None:
    overtaken = 0
    for seed in range(40):
        config = config_of("windowed", policy={"kind": "windowed", "window": window})
        driver = Driver(config, steps=8, rng=random.Random(seed))
        driver.finish()
        step_of = {number: step for step, numbers in driver.lineage.items() for number in numbers}
        for number, step in step_of.items():
            before = sum(other > number and its < step for other, its in step_of.items())
            overtaken = max(overtaken, before)
    assert overtaken < window * config.groups_per_step
    assert (overtaken > 0) == (window > 1)
