"""Whole runs on fakes whose engines die, come and go: the bound, the books, and who gets which version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.clock import VirtualClock
from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.weights import Interrupt, WeightUpdate
from headrace.control import Components
from headrace.engine.fleet import Fleet
from headrace.learner.base import Publication
from headrace.run.session.running import first_cause
from headrace.testing import FakeLearner, lognormal_lengths
from tests.control.lives import Life, Plan, live
from tests.engine.fleet.mortal import Mortal

LENGTH = lognormal_lengths(40, 1.0, 300)
Deaths = Sequence[tuple[float, str]]


class Addressed(Mortal):
    """Takes only what was sent to it."""

    async def stage(self, update: WeightUpdate) -> float:
        if self.name not in update.to:
            raise NeedsFull(f"version {update.version} was sent to {update.to}", remedy="send it again")
        return await super().stage(update)


class Sender(FakeLearner):
    """Sends to the engines that are there when it is told to, and again to those that lack it."""

    fleet: Fleet

    def __init__(self, *, token_s: float = 0.002) -> None:
        super().__init__(token_s=token_s)
        self.again: list[tuple[int, tuple[str, ...]]] = []
        self._to: dict[int, tuple[str, ...]] = {}
        self.busy = False

    async def train(self, batch: Batch) -> StepReport:
        self.busy = True
        report = await super().train(batch)
        self.busy = False
        return report

    async def snapshot(self, version: int, slot: int) -> Publication:
        self._to[version] = self.fleet.names
        return await super().snapshot(version, slot)

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        update, to = await super().wait_until_published(publication), self._to[publication.version]
        if not set(to) & set(self.fleet.names):
            raise WeightsError(f"version {publication.version} could not be sent to {to}", remedy="look at them")
        return replaced(update, to)

    async def resend(self, publication: Publication) -> WeightUpdate:
        in_use = publication.version <= self.fleet.version
        assert not (self.busy and in_use), "an engine that comes late would wait for a step"
        to = self.fleet.engines_without(publication.version)
        self.again.append((publication.version, to))
        return replaced(await super().wait_until_published(publication), to)


def replaced(update: WeightUpdate, to: tuple[str, ...]) -> WeightUpdate:
    import msgspec

    return msgspec.structs.replace(update, to=to)


def with_fleet(
    names: Sequence[str],
    deaths: Deaths = (),
    *,
    kind: type[Mortal] = Mortal,
    away_s: float = 3.0,
    interrupt: Interrupt = Interrupt.INFLIGHT,
) -> Callable[[Components], Components]:
    """``deaths``: when which engine dies; each comes back after ``away_s``."""

    def change(parts: Components) -> Components:
        loop, fleet = asyncio.get_running_loop(), Fleet(VirtualClock(), size=len(names))
        engines: dict[str, Mortal] = {}

        def come(name: str) -> None:
            engines[name] = kind(name, length=LENGTH, commit_s=0.02)
            fleet.add(name, engines[name], address=name)

        def die(name: str) -> None:
            if not engines[name].dead.is_set():
                engines[name].die()
                fleet.remove(name)
                loop.call_later(away_s, come, name)

        for name in names:
            come(name)
        for at_s, name in deaths:
            loop.call_later(at_s, die, name)
        if isinstance(parts.learner, Sender):
            parts.learner.fleet = fleet
        return replace(parts, engine=fleet, engine_set=fleet, interrupt=interrupt)

    return change


def whole(life: Life, groups: int) -> None:
    """Nothing was lost, nothing trained twice, and no token was too old."""
    books = life.summary.ledger
    assert (books.groups.submitted, books.groups.trained, books.groups.in_flight) == (groups, groups, 0)
    assert (books.episodes.submitted, books.episodes.trained, books.episodes.in_flight) == (3 * groups, 3 * groups, 0)
    assert books.tokens.submitted == books.tokens.trained == life.summary.tokens_trained
    assert life.summary.versions == [0, groups // 2]


@pytest.mark.parametrize("interrupt", [Interrupt.INFLIGHT, Interrupt.DRAIN])
@pytest.mark.parametrize("max_age", [0, 2])
def test_run_whose_engines_die_and_come_back_trains_everything_within_its_bound(
    tmp_path: Path, max_age: int, interrupt: Interrupt
) -> None:
    deaths = [(0.7 + 2.9 * number, f"engine-{number % 2}") for number in range(12)]
    parts = with_fleet(["engine-0", "engine-1"], deaths, interrupt=interrupt)
    life = live(Plan(run_dir=tmp_path, steps=12, flow={"max_age": max_age}, parts=parts))
    whole(life, 24)
    assert life.summary.max_token_age <= max_age
    assert life.summary.tokens_generated == life.summary.tokens_trained, "nothing is sampled twice"


def test_run_with_one_engine_outlives_its_deaths_at_any_moment(tmp_path: Path) -> None:
    for number in range(25):
        directory = tmp_path / str(number)
        directory.mkdir()
        parts = with_fleet(["engine"], [(0.013 + 0.137 * number, "engine")], away_s=2.0)
        whole(live(Plan(run_dir=directory, steps=3, parts=parts)), 6)


def sent_anew(run_dir: Path, names: list[str], at_s: float) -> int:
    """How often weights were sent again in a run that loses the first engine at that time."""
    learner = Sender()
    run_dir.mkdir()
    parts = with_fleet(names, [(at_s, names[0])], kind=Addressed, away_s=0.5)
    whole(live(Plan(run_dir=run_dir, steps=4, learner=lambda: learner, parts=parts)), 8)
    return len(learner.again)


@pytest.mark.parametrize("names", [["engine"], ["engine-0", "engine-1"]])
def test_engines_that_weights_are_sent_to_get_them_whoever_dies_when(tmp_path: Path, names: list[str]) -> None:
    times = [sent_anew(tmp_path / str(number), names, 0.013 + 0.137 * number) for number in range(50)]  # to its end
    assert 1 <= max(times) <= 3


def test_engine_that_comes_late_gets_the_newest_version_while_nothing_is_published(tmp_path: Path) -> None:
    life = live(
        Plan(
            run_dir=tmp_path,
            steps=2,
            learner=lambda: FakeLearner(token_s=1.0),  # a step takes minutes
            parts=with_fleet(["engine-0", "engine-1"], [(1.0, "engine-0"), (6.0, "engine-1")]),
        )
    )
    whole(life, 4)


def test_version_that_no_engine_can_ever_use_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    class Never(Mortal):
        async def stage(self, update: WeightUpdate) -> float:
            raise NeedsFull(f"version {update.version} hashes to 1", remedy="send it again")

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into below
        live(Plan(run_dir=tmp_path, parts=with_fleet(["engine-0", "engine-1"], kind=Never)))
    cause = first_cause(caught.value)
    assert isinstance(cause, NeedsFull)
    assert "engine-0: version 0 hashes to 1" in str(cause)
