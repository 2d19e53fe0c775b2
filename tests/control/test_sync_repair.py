"""An update that the engine cannot use as it came is sent again, whole."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from headrace.base.errors import NeedsFull, StallError, WeightsError
from headrace.base.types.weights import WeightUpdate
from headrace.learner.base import Publication
from headrace.run.session.running import first_cause
from headrace.testing import FakeEngine, FakeLearner
from tests.control.lives import Plan, live


class NoisyEngine(FakeEngine):
    """Every second version is damaged on its first way."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: list[int] = []

    async def stage(self, update: WeightUpdate) -> float:
        if update.version % 2 and update.version not in self.damaged:
            self.damaged.append(update.version)
            raise NeedsFull(f"version {update.version}: tensor w hashes to 1", remedy="send it again, whole")
        return await super().stage(update)


class AgainLearner(FakeLearner):
    def __init__(self) -> None:
        super().__init__()
        self.again: list[int] = []

    async def resend(self, publication: Publication) -> WeightUpdate:
        self.again.append(publication.version)
        return await super().resend(publication)


class HungLearner(FakeLearner):
    async def resend(self, publication: Publication) -> WeightUpdate:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


class SpoiltLearner(FakeLearner):
    async def resend(self, publication: Publication) -> WeightUpdate:
        raise WeightsError("version 1 has changed in the learner's buffer", remedy="publish a newer version")


def test_damaged_versions_are_sent_again_whole_and_training_goes_on(tmp_path: Path) -> None:
    learners: list[AgainLearner] = []
    engines: list[NoisyEngine] = []

    def learner() -> AgainLearner:
        learners.append(AgainLearner())
        return learners[-1]

    def engine() -> NoisyEngine:
        engines.append(NoisyEngine())
        return engines[-1]

    life = live(Plan(run_dir=tmp_path, run={"steps": 4}, learner=learner, engine=engine))
    assert learners[-1].again == engines[-1].damaged == [1, 3]
    assert engines[-1].commits == [0, 1, 2, 3, 4]
    assert any("weights sent again, whole: version 1: tensor w" in warning for warning in life.summary.warnings)


def test_version_that_cannot_be_sent_again_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into below
        live(Plan(run_dir=tmp_path, learner=SpoiltLearner, engine=NoisyEngine))
    cause = first_cause(caught.value)
    assert isinstance(cause, WeightsError)
    assert "has changed in the learner's buffer" in str(cause)


def test_learner_that_does_not_send_a_version_again_is_the_one_that_the_run_waits_for(tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into below
        live(Plan(run_dir=tmp_path, run={"stall_timeout_s": 20.0}, learner=HungLearner, engine=NoisyEngine))
    cause = first_cause(caught.value)
    assert isinstance(cause, StallError)
    assert re.search(r"  sync +waits \d+ s for version 1, sent again, which learner brings", cause.problem)
