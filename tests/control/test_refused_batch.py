"""A batch that the learner refuses is back in the buffer: with corrected settings ``--resume`` trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.control.recovery import find_starting_point
from headrace.learner.intake import refuse_unfit
from headrace.testing import FakeLearner
from tests.control.lives import Plan, list_groups, live
from tests.control.test_trouble import run_to_failure

ROOMY, VOCAB_SIZE = 100_000, 2**31 - 1


class Refusing(FakeLearner):
    """Looks at every batch as a real one does; what is refused is kept in ``refused``."""

    def __init__(self, budget: Callable[[int], int]) -> None:
        super().__init__(token_s=0.002)
        self.refused: Batch | None = None
        self._budget = budget

    async def train(self, batch: Batch) -> StepReport:
        try:
            refuse_unfit(batch, VOCAB_SIZE, None, self._budget(batch.step))
        except RunError:
            self.refused = self.refused or batch
            raise
        return await super().train(batch)


@pytest.mark.parametrize("refused_step", [0, 3])
def test_refused_batch_is_ready_again_and_trained_by_the_next_life(tmp_path: Path, refused_step: int) -> None:
    first = Refusing(lambda step: 1 if step == refused_step else ROOMY)
    second = Refusing(lambda _: ROOMY)
    plan = Plan(run_dir=tmp_path, steps=6, learner=lambda: first, run={"checkpoint_every": 1})
    assert "learner.tokens_per_microbatch=1; nothing was changed" in str(run_to_failure(plan))
    assert first.refused is not None
    groups = set(list_groups(first.refused))
    book = plan.open_ledger()
    try:
        resumed = book.roll_back(find_starting_point(tmp_path).step)
        assert book.conservation().holds
    finally:
        book.close()
    states = {group.number: group.state for group in resumed.groups}
    assert {states[group] for group in groups} == {GroupState.READY}

    life = live(replace(plan, learner=lambda: second))
    (trained,) = [batch for batch in second.batches if batch.step == refused_step]
    assert trained.ids_N.tobytes() == first.refused.ids_N.tobytes()
    assert trained.logprobs_N.tobytes() == first.refused.logprobs_N.tobytes()
    assert second.batches[-1].step == 5
    assert life.summary.ledger.groups.trained == 12
