"""The comparison of logprobs before the first rollout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import RunError
from headrace.session.running import first_cause
from headrace.testing import FakeLearner
from headrace.types.batch import Batch
from headrace.types.tokens import FloatColumn
from tests.control.lives import Plan, live


def test_engine_of_another_model_ends_the_run(tmp_path: Path) -> None:
    class Other(FakeLearner):
        async def logprobs(self, batch: Batch) -> FloatColumn:
            return batch.logprobs_N - np.float32(2) * batch.mask_N

    with pytest.raises(BaseExceptionGroup) as raised:
        live(Plan(run_dir=tmp_path, learner=Other))
    cause = first_cause(raised.value)
    assert isinstance(cause, RunError)
    assert "they are not the same model" in cause.problem
    assert "engine.server.urls" in cause.remedy
