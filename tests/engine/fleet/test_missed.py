"""Engines that live and that new weights do not reach: the others continue, and they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import NeedsFull, RequestError, WeightsError
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt, WeightUpdate
from headrace.control import Components
from headrace.engine import RequestOptions
from headrace.learner.base import Publication
from headrace.run.session.running import first_cause
from headrace.testing import FakeLearner
from tests.control.lives import Plan, live
from tests.engine.fleet.mortal import FLUSH, TOKEN_S, Mortal, bring, in_virtual_time, kill, make_fleet, sample
from tests.engine.fleet.test_runs_on_fakes import Addressed, Deaths, Sender, whole, with_fleet

Times = Sequence[tuple[float, float]]


@in_virtual_time
async def test_engine_that_a_version_misses_ends_what_it_has_and_serves_again_with_the_next() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        before = [group.create_task(sample(fleet, seed)) for seed in range(30)]
        await asyncio.sleep(1.5 * FLUSH * TOKEN_S)
        had = len(engines["b"].asked)
        assert had > 5
        await bring(fleet, 1, missed_by="b")
        assert (fleet.version, engines["a"].commits, engines["b"].commits) == (1, [0, 1], [0])
        for seed in range(100, 110):
            await sample(fleet, seed)
    old = sum(set(Tokens.concat([c.tokens for c in task.result()]).versions_T.tolist()) == {0} for task in before)
    assert (old, len(engines["b"].asked)) == (had, had), "what it had continued there to its end, and nothing new came"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fleet.wait_for_lagging(), 1.0)
    await bring(fleet, 2)
    await asyncio.wait_for(fleet.wait_until_serving("b"), 1.0)
    assert engines["b"].commits == [0, 2]
    async with asyncio.TaskGroup() as group:
        for seed in range(200, 230):
            group.create_task(sample(fleet, seed))
    assert len(engines["b"].asked) > had


@in_virtual_time
async def test_fork_of_what_such_an_engine_has_is_refused() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    (parent,) = {chunk.request_id for chunk in await sample(fleet, 1)}
    (home,) = [name for name, engine in engines.items() if engine.asked]
    await bring(fleet, 1, missed_by=home)
    with pytest.raises(RequestError, match=f"was with {home}, which has not the newest weights"):
        await sample(fleet, 1, options=RequestOptions(fork=ForkRequest(parent=parent, at=4)))


@in_virtual_time
async def test_such_an_engine_is_woken_with_the_others() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    await fleet.pause(release=True)
    await bring(fleet, 1, Interrupt.SLEEP, missed_by="b")
    assert all(engine._not_paused.is_set() for engine in engines.values())


@in_virtual_time
async def test_version_whose_other_engines_die_waits_for_their_successors() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    async with asyncio.TaskGroup() as group:
        bringing = group.create_task(bring(fleet, 1, missed_by="b"))
        await asyncio.sleep(0)
        kill(fleet, engines["a"])
        await asyncio.sleep(30.0)
        assert (fleet.version, bringing.done()) == (0, False)
        fleet.add("a", Mortal("a"))
    assert fleet.version == 1


class Parted(Sender):
    """Does not reach ``far``, an engine or all of them, at these times."""

    def __init__(self, far: Sequence[str], times: Times) -> None:
        super().__init__()
        self._far, self._times = far, times

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        return self._sent(await super().wait_until_published(publication))

    async def resend(self, publication: Publication) -> WeightUpdate:
        return self._sent(await super().resend(publication))

    def _sent(self, update: WeightUpdate) -> WeightUpdate:
        now_s = asyncio.get_running_loop().time()
        away = self._far if any(start_s <= now_s < end_s for start_s, end_s in self._times) else ()
        missed = {
            name: f"version {update.version} could not be uploaded to {name}" for name in update.to if name in away
        }
        if missed and len(missed) == len(update.to):
            raise WeightsError(" and ".join(missed.values()), remedy="look at the network")
        to = tuple(name for name in update.to if name not in missed)
        return msgspec.structs.replace(update, to=to, missed_by=missed)


NAMES = ["engine-0", "engine-1"]


def parted(run_dir: Path, times: Times, deaths: Deaths = (), max_age: int = 1) -> Parted:
    """A run of 12 steps whose second engine cannot be reached at these times, to its end."""
    learner = Parted(["engine-1"], times)
    run_dir.mkdir()
    parts = with_fleet(NAMES, deaths, kind=Addressed, away_s=0.5)
    life = live(Plan(run_dir=run_dir, steps=12, flow={"max_age": max_age}, learner=lambda: learner, parts=parts))
    whole(life, 24)
    assert life.summary.max_token_age <= max_age
    return learner


@pytest.mark.parametrize("max_age", [0, 2])
def test_run_goes_on_without_an_engine_that_the_learner_cannot_reach_and_takes_it_back(
    tmp_path: Path, max_age: int
) -> None:
    learner = parted(tmp_path / "run", [(2.0, 9.0)], max_age=max_age)
    assert [again for again in learner.again if again[1]] == [], "nobody waits for an engine that is known to be away"
    served = {name: member.engine for name, member in learner.fleet._members.items()}
    commits = {name: engine.commits for name, engine in served.items() if isinstance(engine, Mortal)}
    assert commits["engine-0"] == list(range(13))
    left_out = sorted(set(range(13)) - set(commits["engine-1"]))
    assert len(left_out) > 2
    assert left_out == list(range(left_out[0], left_out[-1] + 1)), "away once"
    assert commits["engine-1"][-1] == 12


def test_run_outlives_whoever_dies_while_another_cannot_be_reached(tmp_path: Path) -> None:
    for number in range(10):
        deaths = [(0.5 + 0.741 * number, "engine-0"), (1.5 + 0.293 * number, "engine-1")]
        parted(tmp_path / str(number), [(1.0, 4.0 + 0.4 * number)], deaths)


@pytest.mark.parametrize("names", [NAMES, ["engine"]])
def test_run_none_of_whose_engines_can_be_reached_ends_with_the_reason(tmp_path: Path, names: list[str]) -> None:
    learner = Parted(names, [(2.0, 1e9)])
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into below
        live(Plan(run_dir=tmp_path, steps=12, learner=lambda: learner, parts=with_fleet(names, kind=Addressed)))
    cause = first_cause(caught.value)
    assert isinstance(cause, WeightsError)
    assert f"could not be uploaded to {names[0]}" in str(cause)
    assert len(learner.again) == 4


class Blind(Mortal):
    """Cannot read where the weights lie, for a while."""

    async def stage(self, update: WeightUpdate) -> float:
        if self.name == "engine-1" and 2.0 <= asyncio.get_running_loop().time() < 9.0:
            raise NeedsFull(f"version {update.version} cannot be read", remedy="let the engine reach the folder")
        return await super().stage(update)


def test_run_goes_on_without_an_engine_that_cannot_fetch_what_the_others_can(tmp_path: Path) -> None:
    fleets: list[Any] = []

    def parts(given: Components) -> Components:
        made = with_fleet(NAMES, kind=Blind)(given)
        fleets.append(made.engine)
        return made

    life = live(Plan(run_dir=tmp_path, steps=12, learner=lambda: FakeLearner(token_s=0.002), parts=parts))
    whole(life, 24)
    commits = {name: member.engine.commits for name, member in fleets[0]._members.items()}
    assert commits["engine-0"] == list(range(13))
    assert 2 < len(commits["engine-1"]) < 12
    assert commits["engine-1"][-1] == 12
