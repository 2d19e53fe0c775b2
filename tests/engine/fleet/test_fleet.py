"""Several engines as one: nothing is lost, nothing is sampled twice, and everybody has the weights that they say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import DeadlineError, EngineFull, RequestError, SequenceFailed
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.engine import RequestOptions
from headrace.engine.fleet import Fleet
from headrace.engine.fleet.routed import MAX_DEATHS_WITHOUT_TOKEN
from headrace.engine.fleet.router import EngineState
from tests.engine.fleet.mortal import (
    FLUSH,
    PROMPT,
    TOKEN_S,
    Mortal,
    TogetherMortal,
    bring,
    in_virtual_time,
    kill,
    make_fleet,
    sample,
    sample_siblings,
    update,
)


async def refused(work: Coroutine[Any, Any, Any], match: str) -> None:
    with pytest.raises(SequenceFailed, match=match):
        await work


@in_virtual_time
async def test_sequences_of_a_dead_engine_go_on_elsewhere_from_what_was_streamed() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(sample(fleet, seed)) for seed in range(30)]
        await asyncio.sleep(2.5 * FLUSH * TOKEN_S)
        carried = kill(fleet, engines["a"])
    assert carried > 5
    assert sum(len(answer) for answer in (task.result() for task in answers)) == 30 * 5
    moved = [options for options in engines["b"].asked if options.answer_ids_T is not None]
    assert len(moved) == carried
    assert {len(options.answer_ids_T) for options in moved} == {2 * FLUSH}
    assert sum(engine.made for engine in engines.values()) == 30 * 40, "nothing that was streamed is made again"


@in_virtual_time
async def test_engine_that_is_retired_ends_what_it_has_commits_with_the_others_and_gets_nothing_new() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        for seed in range(10):
            group.create_task(sample(fleet, seed))
        await asyncio.sleep(1.5 * FLUSH * TOKEN_S)
        asked = len(engines["a"].asked)
        fleet.retire("a")
        await bring(fleet, 1)
        late = [group.create_task(sample(fleet, seed)) for seed in range(10, 20)]
        await late[0]
        assert not fleet.serves("a")
        assert engines["a"].commits == [0, 1], "its sequences may need the memory of the version before"
    assert len(engines["a"].asked) == asked > 0
    assert fleet.load("a") == 0
    assert fleet.remove("a") == 0


@in_virtual_time
async def test_fork_of_a_request_of_an_engine_that_is_being_removed_is_refused_by_name() -> None:
    fleet, _ = make_fleet("a", "b")
    await bring(fleet, 0)
    (chunk, *_) = await sample(fleet, 0)
    fleet.retire("a")
    with pytest.raises(RequestError, match="was with a, which is being removed"):
        await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=chunk.request_id, at=0)))


@in_virtual_time
async def test_shard_knows_which_engine_its_controller_is_removing() -> None:
    fleet, _ = make_fleet("a", "b")
    await bring(fleet, 0)
    (chunk, *_) = await sample(fleet, 0)
    fleet.mirror("a", EngineState.LEAVING, 0, paused=False)
    with pytest.raises(RequestError, match="was with a, which is being removed"):
        await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=chunk.request_id, at=0)))


@in_virtual_time
async def test_request_whose_engines_are_removed_again_and_again_is_not_taken_for_the_cause() -> None:
    fleet, _ = make_fleet("keeper")
    await bring(fleet, 0)
    kind = TogetherMortal
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(sample(fleet, 0, options=RequestOptions(session="s")))
        for number in range(2 * MAX_DEATHS_WITHOUT_TOKEN):
            await asyncio.sleep(0.5 * FLUSH * TOKEN_S)
            name = str(number)
            fleet.add(name, kind(name))
            await fleet.stage(update(0))
            await fleet.commit(0)
            (there,) = [other for other in fleet.names if other != name]
            engine = fleet._members[there].engine
            fleet.retire(there)
            assert isinstance(engine, Mortal)
            kill(fleet, engine)
    assert len(answer.result()) == 5


@in_virtual_time
async def test_busy_time_never_decreases_when_the_number_of_engines_changes() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    for engine, busy_s in zip(engines.values(), (4.0, 2.0), strict=True):
        engine._count(busy_s=busy_s, prefill_s=busy_s / 2)
    assert (fleet.stats().busy_s, fleet.stats().prefill_s) == (3.0, 1.5)
    fleet.resize(3)
    assert (fleet.stats().busy_s, fleet.stats().prefill_s) == (3.0, 1.5)
    engines["a"]._count(busy_s=3.0)
    assert fleet.stats().busy_s == 4.0
    kill(fleet, engines["b"])
    fleet.resize(1)
    assert (fleet.stats().busy_s, fleet.stats().prefill_s) == (4.0, 1.5)
    engines["a"]._count(busy_s=1.0)
    assert fleet.stats().busy_s == 5.0


@in_virtual_time
async def test_siblings_are_asked_for_in_one_call_and_go_on_one_by_one_where_their_engine_dies() -> None:
    fleet, engines = make_fleet("a", "b", kind=TogetherMortal)
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        group.create_task(sample_siblings(fleet, range(4)))
        await asyncio.sleep(2.5 * FLUSH * TOKEN_S)
        assert (engines["a"].num_calls, engines["b"].num_calls) == (1, 0)
        assert kill(fleet, engines["a"]) == 4
    assert [len(options.answer_ids_T) for options in engines["b"].asked] == [2 * FLUSH] * 4
    assert sum(engine.made for engine in engines.values()) == 4 * 40, "nothing that was streamed is made again"
    assert fleet.load("b") == 0


@in_virtual_time
async def test_siblings_for_which_an_engine_has_no_room_are_sampled_by_others_or_refused_alone() -> None:
    fleet, engines = make_fleet("a", "b", kind=TogetherMortal)
    engines["a"].room, engines["b"].room = 2, 3
    await bring(fleet, 0)
    await sample_siblings(fleet, range(5))
    assert (engines["a"].made, engines["b"].made) == (2 * 40, 3 * 40)
    with pytest.raises(ExceptionGroup, match="unhandled") as refusal:
        await sample_siblings(fleet, range(6))
    assert refusal.group_contains(EngineFull)
    assert fleet.load("a") == fleet.load("b") == 0


@in_virtual_time
async def test_call_for_siblings_that_is_cancelled_withdraws_them() -> None:
    fleet, engines = make_fleet("a", kind=TogetherMortal)
    await bring(fleet, 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5 * FLUSH * TOKEN_S):
            await sample_siblings(fleet, range(3))
    assert (engines["a"].running, fleet.load("a")) == (0, 0)


@in_virtual_time
async def test_a_prompt_goes_to_the_engine_that_has_computed_it() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    for seed in range(6):
        await sample(fleet, seed)
    assert sorted(len(engine.asked) for engine in engines.values()) == [0, 6]


@in_virtual_time
async def test_sequences_of_the_only_engine_wait_for_its_successor_and_its_weights() -> None:
    fleet, engines = make_fleet("engine")
    await bring(fleet, 3)
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(sample(fleet, seed)) for seed in range(4)]
        await asyncio.sleep(1.5 * FLUSH * TOKEN_S)
        assert kill(fleet, engines["engine"]) == 4
        late = group.create_task(sample(fleet, 9))
        await asyncio.sleep(60.0)
        successor = Mortal("engine")
        fleet.add("engine", successor)
        await fleet.wait_for_lagging()
        assert successor.asked == []
        await bring(fleet, 3)
        await fleet.wait_until_serving("engine")
    assert len(successor.asked) == 5
    assert len(late.result()) == 5
    assert all(task.done() for task in answers)


@in_virtual_time
async def test_versions_of_a_sequence_that_moved_are_those_that_sampled_its_tokens() -> None:
    fleet, engines = make_fleet("a", "b", rolling=1)
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sample(fleet, 1))
        await asyncio.sleep(2.5 * FLUSH * TOKEN_S)
        await bring(fleet, 1)
        kill(fleet, engines["a"])
    versions = Tokens.concat([chunk.tokens for chunk in task.result()]).versions_T.tolist()
    assert versions == [0] * 2 * FLUSH + [1] * 3 * FLUSH


@in_virtual_time
async def test_request_that_kills_every_engine_fails_and_the_others_go_on() -> None:
    fleet, engines = make_fleet("a")
    await bring(fleet, 0)
    words = "5 engines died one after the other .* not one token of it; the last: a was killed"
    async with asyncio.TaskGroup() as group:
        poisoned = group.create_task(refused(sample(fleet, 1), words))
        for life in range(MAX_DEATHS_WITHOUT_TOKEN):
            await asyncio.sleep(0.5 * FLUSH * TOKEN_S)
            kill(fleet, engines["a"])
            engines["a"] = Mortal("a")
            fleet.add("a", engines["a"])
            await bring(fleet, 0)
            assert poisoned.done() == (life == MAX_DEATHS_WITHOUT_TOKEN - 1)
        await sample(fleet, 2)


@in_virtual_time
async def test_engine_that_is_full_is_passed_over_and_where_all_are_the_request_is_refused() -> None:
    fleet, engines = make_fleet("a", "b")
    engines["a"].room, engines["b"].room = 1, 2
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sample(fleet, seed)) for seed in range(3)]
        await asyncio.sleep(0.5 * FLUSH * TOKEN_S)
        with pytest.raises(EngineFull):
            await sample(fleet, 3)
    assert all(len(task.result()) == 5 for task in tasks)
    await sample(fleet, 4)


@in_virtual_time
async def test_sequence_pinned_to_a_version_goes_on_only_where_that_version_is() -> None:
    fleet, engines = make_fleet("a", "b", "c")
    await bring(fleet, 0)
    pinned = RequestOptions(pinned=True, session="p")
    async with asyncio.TaskGroup() as group:
        words = "pinned to version 0, its engine is gone"
        group.create_task(refused(sample(fleet, 1, options=pinned), words))
        await asyncio.sleep(1.5 * FLUSH * TOKEN_S)
        kill(fleet, engines["a"])
        await asyncio.sleep(FLUSH * TOKEN_S)
        await bring(fleet, 1)
        assert len(engines["b"].asked) == 1
        kill(fleet, engines["b"])


@in_virtual_time
async def test_fork_goes_where_its_parent_is_and_is_refused_when_that_is_gone() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    parent = (await sample(fleet, 1))[0].request_id
    await sample(fleet, 2)
    await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=parent, at=4)))
    asked = engines["a"].asked[-1].fork
    assert asked is not None
    assert (asked.parent, asked.at) == (0, 4), "in the words of that engine"
    kill(fleet, engines["a"])
    with pytest.raises(RequestError, match=f"a fork of request {parent}, which was with a, which is gone"):
        await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=parent, at=4)))
    with pytest.raises(RequestError, match="a fork of request 999, which is not among the last requests"):
        await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=999, at=0)))


@in_virtual_time
async def test_fork_whose_engine_dies_under_it_fails_in_words() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    parent = (await sample(fleet, 1))[0].request_id
    async with asyncio.TaskGroup() as group:
        fork = sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=parent, at=4)))
        group.create_task(refused(fork, "it was a fork, and what it began with is gone"))
        await asyncio.sleep(0.5 * FLUSH * TOKEN_S)
        kill(fleet, engines["a"])


@in_virtual_time
async def test_deadline_of_a_request_runs_on_while_it_moves() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        group.create_task(sample(fleet, 1, options=RequestOptions(deadline_s=10.0)))
        await asyncio.sleep(1.5 * FLUSH * TOKEN_S)
        kill(fleet, engines["a"])
    assert engines["b"].asked[0].deadline_s == pytest.approx(10.0 - 1.5 * FLUSH * TOKEN_S)


@in_virtual_time
async def test_reader_that_leaves_early_frees_its_place_and_withdraws_the_request() -> None:
    fleet, engines = make_fleet("a")
    await bring(fleet, 0)
    stream: Any = fleet.generate(PROMPT, Sampling(max_new_tokens=40, seed=1))
    await anext(stream)
    assert (engines["a"].running, fleet._router.load("a")) == (1, 1)
    await stream.aclose()
    assert (engines["a"].running, fleet._router.load("a")) == (0, 0)


@in_virtual_time
async def test_engine_that_says_nothing_while_it_has_sequences_is_ended() -> None:
    ended: list[tuple[str, str]] = []
    fleet, engines = make_fleet("a", "b", end=lambda name, why, remedy: ended.append((name, why)))
    await bring(fleet, 0)
    engines["a"].pace = 1e6
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(fleet.watch(5.0))
        await asyncio.sleep(100.0)
        assert ended == [], "an idle one may be silent"
        tasks = [group.create_task(sample(fleet, seed, 2000)) for seed in range(30)]
        await asyncio.sleep(8.0)
        assert [name for name, _ in ended] == ["a"]
        assert "a has said nothing for 5 s and has" in ended[0][1]
        engines["a"].die()  # as its supervisor makes it
        for task in tasks:
            await task
        watching.cancel()
    assert engines["b"].made == 30 * 2000


@in_virtual_time
async def test_engine_that_others_ask_is_judged_by_the_counters_that_it_reports() -> None:
    ended: list[str] = []
    fleet, engines = make_fleet("a", "b", end=lambda name, why, remedy: ended.append(name))
    fleet.follow(lambda name: None)
    await bring(fleet, 0)
    silent = EngineStats(version=0, running=3)
    engines["a"].stats = lambda: silent  # type: ignore[method-assign]
    engines["b"].stats = lambda: EngineStats(version=0, running=3)  # type: ignore[method-assign]
    assert fleet.load("a") == 3
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(fleet.watch(5.0))
        await asyncio.sleep(20.0)
        watching.cancel()
    assert ended == ["a"]
    assert fleet.remove("a") == 3, "these are what others continue"


@in_virtual_time
async def test_engine_that_does_not_answer_in_time_is_ended_where_somebody_can_and_an_error_where_nobody_can() -> None:
    class Late(Mortal):
        async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> Any:
            raise DeadlineError("late has not answered for 60 s: commit version 0", remedy="look at its log")

    ended: list[str] = []
    for end in (lambda name, why, remedy: ended.append(f"{name}: {why}; {remedy}"), None):
        fleet = Fleet(VirtualClock(), size=2, end=end)
        fleet.add("late", Late("late"))
        fleet.add("good", Mortal("good"))
        await fleet.stage(update(0))
        if end is None:
            with pytest.raises(DeadlineError, match="late has not answered"):
                await fleet.commit(0)
        else:
            await fleet.commit(0)
            await sample(fleet, 1)
    assert ended == ["late: late has not answered for 60 s: commit version 0; look at its log"]


@in_virtual_time
async def test_counters_outlive_the_engine_that_counted() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    await asyncio.gather(*(sample(fleet, seed) for seed in range(6)))
    assert (fleet.stats().generated_tokens, fleet.stats().version) == (240, 0)
    kill(fleet, engines["a"])
    assert fleet.stats().generated_tokens == 240
    fleet.add("a", Mortal("a"))
    assert fleet.stats().generated_tokens == 240


@in_virtual_time
async def test_scores_are_made_again_where_their_engine_dies() -> None:
    class Deadly(Mortal):
        async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> Any:
            self.die()
            raise self._death()

    fleet = Fleet(VirtualClock(), size=2)
    fleet.add("a", Deadly("a"))
    fleet.add("b", Mortal("b"))
    await bring(fleet, 0)
    tokens = Tokens.observed([1, 2])
    assert (await fleet.score(tokens)).tolist() == tokens.logprobs_T.tolist()


@in_virtual_time
async def test_engine_that_comes_while_all_stand_still_stands_still_too() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    await fleet.pause()
    late = Mortal("b")
    kill(fleet, engines["b"])
    fleet.add("b", late)
    await bring(fleet, 0)
    assert not late._not_paused.is_set()
    await fleet.resume()
    assert late._not_paused.is_set()


@in_virtual_time
async def test_commit_with_sleep_wakes_all_and_the_death_of_one_that_falls_asleep_is_that_of_one() -> None:
    class Deadly(Mortal):
        async def pause(self, *, release: bool = False) -> None:
            raise self._death()

    fleet, left = Fleet(VirtualClock(), size=2), Mortal("b")
    fleet.add("a", Deadly("a"))
    fleet.add("b", left)
    await bring(fleet, 0)
    await fleet.pause(release=True)
    assert not left._not_paused.is_set()
    await fleet.stage(update(1))
    report = await fleet.commit(1, Interrupt.SLEEP)
    assert (report.version, left._not_paused.is_set()) == (1, True)


@pytest.mark.parametrize("kind", [Mortal, TogetherMortal])
@pytest.mark.parametrize("seed", range(12))
def test_no_sequence_is_lost_whatever_dies_joins_and_commits_at_random(seed: int, kind: type[Mortal]) -> None:
    async def main() -> None:
        rng = np.random.default_rng(seed)
        names = [f"engine-{place}" for place in range(4)]
        fleet, engines = make_fleet(*names, kind=kind, rolling=int(rng.integers(1, 4)))
        await bring(fleet, 0)
        made, kills = 0, 0

        async def trouble() -> None:
            nonlocal made, kills
            version = 0
            while True:
                await asyncio.sleep(float(rng.exponential(0.05)))
                name = str(rng.choice(names))
                if rng.random() < 0.4 and not all(engine.dead.is_set() for engine in engines.values()):
                    version += 1
                    await bring(fleet, version)
                elif engines[name].dead.is_set():
                    engines[name] = kind(name, commit_s=float(rng.random() * 0.05))
                    fleet.add(name, engines[name])
                    await bring(fleet, version)
                else:
                    kill(fleet, engines[name])
                    kills += 1
                    made += engines[name].made

        async with asyncio.TaskGroup() as group:
            troubling = group.create_task(trouble())
            lengths, tasks = rng.integers(1, 200, size=80).tolist(), []
            for number, length in enumerate(lengths):
                options = RequestOptions(session=str(number % 7))
                if kind is Mortal:
                    tasks.append(group.create_task(sample(fleet, number, length, options)))
                else:  # groups of up to four, with the lengths of as many sequences
                    seeds = range(4 * number, 4 * number + 1 + number % 4)
                    tasks.append(group.create_task(sample_siblings(fleet, seeds, length, options.session)))
                await asyncio.sleep(float(rng.exponential(0.02)))
            await asyncio.wait(tasks)
            troubling.cancel()
        made += sum(engine.made for engine in engines.values() if not engine.dead.is_set())
        assert kills > 3
        sizes = [1 if kind is Mortal else 1 + number % 4 for number in range(len(lengths))]
        assert made == int(np.dot(lengths, sizes)), "what was streamed is never made again"

    run_virtual(main())
