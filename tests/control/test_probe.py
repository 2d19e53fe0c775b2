"""The comparison of logprobs before the first rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.tokens import FloatColumn
from headrace.control import ControlSettings
from headrace.run.session.running import first_cause
from headrace.testing import FakeLearner
from tests.control.lives import Plan, RecordingObserver, live


def off_by(gap: float) -> type[FakeLearner]:
    class Other(FakeLearner):
        async def logprobs(self, batch: Batch) -> FloatColumn:
            return batch.logprobs_N - np.float32(gap) * batch.mask_N

    return Other


@dataclass(kw_only=True)
class Explained(Plan):
    """A run whose number formats explain so much."""

    largest_gap: float

    def settings(self) -> ControlSettings:
        return replace(super().settings(), largest_gap=self.largest_gap)


def refusal(plan: Plan) -> RunError:
    with pytest.raises(BaseExceptionGroup) as raised:
        live(plan)
    cause = first_cause(raised.value)
    assert isinstance(cause, RunError)
    return cause


@pytest.mark.parametrize("gap", [2.0, 0.5, float("nan")])
def test_engine_of_another_model_ends_the_run(gap: float, tmp_path: Path) -> None:
    cause = refusal(Plan(run_dir=tmp_path, learner=off_by(gap)))
    assert "they do not compute the same model" in cause.problem
    assert "rounding explains 0.1" in cause.problem
    assert "of sequence" in cause.problem
    assert "engine.server.urls" in cause.remedy
    assert "run.max_start_gap" in cause.remedy


@pytest.mark.parametrize(("largest", "gap"), [(0.0, 1e-5), (1e-3, 0.01)])
def test_what_a_precise_run_does_not_explain_ends_it(largest: float, gap: float, tmp_path: Path) -> None:
    plan: dict[str, Any] = {"run_dir": tmp_path, "largest_gap": largest}
    assert f"rounding explains {largest:.2g}" in refusal(Explained(learner=off_by(gap), **plan)).problem


@pytest.mark.parametrize(("largest", "gap"), [(0.0, 0.0), (1e-3, 1e-4), (0.1, 0.03)])
def test_what_rounding_explains_does_not(largest: float, gap: float, tmp_path: Path) -> None:
    life = live(Explained(run_dir=tmp_path, learner=off_by(gap), largest_gap=largest))
    assert life.ended
    assert not life.seen.texts("warning")


def test_gap_that_the_run_file_allows_is_warned_of(tmp_path: Path) -> None:
    seen = RecordingObserver()
    life = live(Plan(run_dir=tmp_path, learner=off_by(0.5), run={"max_start_gap": 0.6}), seen=seen)
    assert life.ended
    assert "run.max_start_gap=0.6 lets it pass" in seen.texts("warning")
    assert life.summary.mismatch_abs == pytest.approx(0.5)
    assert life.summary.mismatch_kl == pytest.approx(np.expm1(-0.5) + 0.5)
