"""Which engine serves which sequence, whatever comes, goes and commits in whatever order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.fleet.router import MEMORY, EngineState, Router, RouteRequest, allowed_load, prefix_keys

NAMES = ["a", "b", "c", "d"]


def serving(*names: str, version: int = 0) -> Router:
    router = Router()
    for name in names:
        router.add(name)
        router.use(name, version)
    return router


def prompt(*ids: int, length: int = 0) -> RouteRequest:
    return RouteRequest(prefixes=prefix_keys(np.array([*ids, *range(length)], np.int32)))


class Histories(RuleBasedStateMachine):
    """Joins, deaths, commits and sequences in any order, beside books that are kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.places: dict[int, str | None] = {}
        """Of every sequence that has not ended; ``None``: it waits."""
        self.begun = 0
        self.ended = 0
        self.versions: dict[str, int] = {}
        self.sessions: dict[str, str] = {}

    @initialize()
    def begin(self) -> None:
        self.join("a")
        self.commit("a", 0)

    def join(self, name: str) -> None:
        self.router.add(name)
        self.versions[name] = -1

    def commit(self, name: str, version: int) -> None:
        self.router.use(name, version)
        self.versions[name] = version

    def serving(self) -> list[str]:
        return [name for name, version in self.versions.items() if version >= 0]

    def load(self) -> Counter[str]:
        return Counter(place for place in self.places.values() if place is not None)

    def place(self, number: int, wish: RouteRequest) -> None:
        before, held = self.load(), {n for n in self.serving() if self.router.state(n) is EngineState.HELD}
        able = [name for name in self.serving() if wish.version in (None, self.versions[name])]
        able = [name for name in able if name not in held] or able
        name = self.router.assign(number, wish)
        assert (name is None) == (not able)
        self.places[number] = name
        if name is None:
            return
        assert name in able
        least = min(before[each] for each in able)
        assert before[name] <= allowed_load(least)
        known = self.sessions.get(wish.session)
        if wish.session and known in able and before[known] <= allowed_load(least):
            assert name == known, "its session is there, and there is room"
        if wish.session:
            self.sessions[wish.session] = name

    @rule(name=st.sampled_from(NAMES))
    def engine_joins(self, name: str) -> None:
        if name not in self.versions:
            self.join(name)

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 3))
    def engine_commits(self, name: str, version: int) -> None:
        if name in self.versions:
            self.commit(name, max(version, self.versions[name]))

    @rule(name=st.sampled_from(NAMES), held=st.booleans())
    def engine_is_held_or_released(self, name: str, held: bool) -> None:
        if name in self.versions and held:
            self.router.hold(name)
        elif not held:
            self.router.release(name)

    @rule(name=st.sampled_from(NAMES))
    def engine_dies(self, name: str) -> None:
        if name not in self.versions:
            return
        del self.versions[name]
        homeless = self.router.remove(name)
        assert sorted(homeless) == sorted(n for n, place in self.places.items() if place == name)
        for number in homeless:
            self.places[number] = None
            self.place(number, RouteRequest())

    @rule(
        session=st.sampled_from(["", "x", "y"]),
        group=st.integers(0, 5),
        version=st.one_of(st.none(), st.integers(0, 3)),
        siblings=st.integers(1, 12),
    )
    def sequences_come(self, session: str, group: int, version: int | None, siblings: int) -> None:
        keys = prefix_keys(np.array([group], np.int32))
        for _ in range(siblings):
            self.begun += 1
            self.place(self.begun, RouteRequest(session=session, prefixes=keys, version=version))

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def sequence_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.places)))
        self.router.end(number)
        self.router.end(number)
        del self.places[number]
        self.ended += 1

    @rule()
    def those_that_wait_try_again(self) -> None:
        for number in [number for number, place in self.places.items() if place is None]:
            self.place(number, RouteRequest())

    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self) -> None:
        assert len(self.places) == self.begun - self.ended
        for number, place in self.places.items():
            assert self.router.where(number) == place
        load = self.load()
        assert {name: self.router.load(name) for name in self.router.names} == {n: load[n] for n in self.versions}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_siblings_share_an_engine_until_it_has_clearly_more_to_do() -> None:
    router, siblings = serving("a", "b"), prompt(7, length=40)
    places = [router.assign(number, siblings) for number in range(24)]
    assert places[:9] == ["a"] * 9
    more, fewer = max(map(places.count, "ab")), min(map(places.count, "ab"))
    assert 0 < fewer < more <= allowed_load(fewer) + 1


def test_groups_spread_and_a_longer_prompt_follows_its_beginning() -> None:
    router = serving("a", "b", "c")
    first = {group: router.assign(group, prompt(group, length=64)) for group in range(3)}
    assert sorted(first.values()) == ["a", "b", "c"]
    grown = {group: router.assign(10 + group, prompt(group, length=90)) for group in range(3)}
    assert grown == first


def test_what_was_computed_under_other_weights_draws_nobody() -> None:
    router = serving("a", "b")
    assert router.assign(0, prompt(1, length=64)) == "a"
    router.use("a", 1)
    assert router.assign(1, prompt(1, length=64)) == "b", "the least loaded"


def test_a_session_stays_where_it_was_through_commits() -> None:
    router = serving("a", "b")
    assert router.assign(0, RouteRequest(session="s")) == "a"
    router.end(0)
    router.use("a", 1)
    router.use("b", 1)
    assert [router.assign(1 + turn, RouteRequest(session="s")) for turn in range(3)] == ["a"] * 3


def test_a_slow_engine_gets_no_more_than_its_share_of_waiting_sequences() -> None:
    router, served, numbers = serving("slow", "fast", "quick"), Counter[str](), iter(range(100_000))
    running: dict[str, list[int]] = {"slow": [], "fast": [], "quick": []}
    for tick in range(600):
        for number in (next(numbers), next(numbers)):
            place = router.assign(number)
            assert place is not None
            running[place].append(number)
        for name, every in (("slow", 50), ("fast", 1), ("quick", 1)):
            if tick % every == 0 and running[name]:
                router.end(running[name].pop(0))
                served[name] += 1
    assert max(map(len, running.values())) - min(map(len, running.values())) <= 1
    assert served["fast"] > 500
    assert served["quick"] > 500


def test_engine_that_is_held_gets_something_only_where_there_is_no_other() -> None:
    router = serving("a", "b")
    router.hold("a")
    assert [router.assign(number) for number in range(3)] == ["b"] * 3
    router.hold("b")
    assert router.assign(3) == "a"
    router.release("a")
    assert router.state("a") is EngineState.SERVING


def test_engine_that_leaves_keeps_what_it_has_and_gets_nothing_new_whatever_happens() -> None:
    router = serving("a", "b")
    assert router.assign(0, RouteRequest(session="s")) == "a"
    router.retire("a")
    router.set_aside("a")
    router.use("a", 1)
    router.hold("a")
    router.release("a")
    assert router.state("a") is EngineState.LEAVING
    assert router.assign(1, RouteRequest(session="s")) == "b"
    assert router.assign(2, RouteRequest(only="a")) is None
    assert (router.where(0), router.takes_sequences("a"), router.takes_sequences("b")) == ("a", False, True)
    router.remove("b")
    assert not router.has_serving_engine
    assert router.remove("a") == (0,)


def test_engine_without_weights_serves_nothing() -> None:
    router = Router()
    router.add("a")
    assert not router.has_serving_engine
    assert router.assign(0) is None
    router.use("a", 4)
    assert router.assign(0) == "a"
    with pytest.raises(ValueError, match="has a place"):
        router.assign(0)
    with pytest.raises(ValueError, match="is there already"):
        router.add("a")


def test_sequence_of_one_version_goes_to_an_engine_that_has_it_or_to_none() -> None:
    router = serving("a", "b")
    router.use("b", 1)
    assert router.assign(0, RouteRequest(version=1)) == "b"
    assert router.assign(1, RouteRequest(version=0)) == "a"
    assert router.assign(2, RouteRequest(version=2)) is None
    assert router.assign(2, RouteRequest(only="b")) == "b"
    assert router.assign(3, avoid={"a", "b"}) is None


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1024, 1025, 9000, 40_000])
def test_prompts_share_the_names_of_what_they_share(length: int) -> None:
    ids = np.arange(length, dtype=np.int32)
    keys = prefix_keys(ids)
    assert len(set(keys)) == len(keys) <= 100
    longer = prefix_keys(np.append(ids, 5))
    assert longer[: len(keys) - 1] == keys[:-1]
    other = ids.copy()
    if length:
        other[0] += 1
        assert not set(prefix_keys(other)) & set(keys)


def test_memory_of_prompts_and_sessions_is_bounded() -> None:
    router = serving("a")
    for number in range(MEMORY + 10):
        router.assign(number, RouteRequest(session=str(number), prefixes=(number,)))
        router.end(number)
    assert len(router._sessions) == len(router._prefixes) == MEMORY
