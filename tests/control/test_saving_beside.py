"""Training goes on while the files of a checkpoint are written, and a crash in between costs the steps since the older
one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from headrace.base.errors import CheckpointError, ComponentDied
from headrace.learner import checkpoint
from headrace.testing import FakeLearner
from tests.control.lives import Plan, live
from tests.control.test_crash_and_resume import check_books, lives
from tests.control.test_trouble import run_to_failure


class SlowDisk(FakeLearner):
    """A learner whose state is copied at once, and whose checkpoints are on the disk four seconds later."""

    def __init__(self) -> None:
        super().__init__(token_s=0.002)
        self.trained_meanwhile: list[int] = []
        self.num_writing = 0
        self.most_writing = 0

    async def wait_until_saved(self, directory: Path) -> None:
        trained = len(self.batches)
        self.num_writing += 1
        self.most_writing = max(self.most_writing, self.num_writing)
        await asyncio.sleep(4.0)
        self.num_writing -= 1
        self.trained_meanwhile.append(len(self.batches) - trained)


def test_steps_are_trained_while_a_checkpoint_is_written_one_at_a_time(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=8, learner=SlowDisk, run={"checkpoint_every": 2}))
    assert isinstance(life.learner, SlowDisk)
    assert life.learner.trained_meanwhile[0] >= 2
    assert life.learner.most_writing == 1
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert checkpoint.read_state(newest).step == 8
    assert (newest / "weights.txt").read_text() == life.learner.weights


@pytest.mark.parametrize("seed", range(6))
def test_a_crash_while_a_checkpoint_is_written_loses_no_group(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    plan = Plan(
        run_dir=tmp_path, steps=8, learner=SlowDisk, flow={"max_age": rng.randrange(3)}, run={"checkpoint_every": 2}
    )
    lived, lineage = lives(plan, rng, crashes=4, longest_s=20.0)
    check_books(lived[-1], lineage, 8)


@pytest.mark.parametrize("error", [ComponentDied, CheckpointError])
def test_an_error_while_a_checkpoint_is_written_ends_the_run_which_goes_on_from_the_older_one(
    tmp_path: Path, error: type[ComponentDied | CheckpointError]
) -> None:
    class Failing(FakeLearner):
        async def wait_until_saved(self, directory: Path) -> None:
            if "step-000004" in directory.name:
                raise error("the disk is gone", remedy="look")

    found = run_to_failure(Plan(run_dir=tmp_path, steps=8, learner=Failing))
    assert isinstance(found, error)
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    second = live(Plan(run_dir=tmp_path, steps=8))
    assert second.began_at == 2
    assert second.summary.ledger.groups.trained == 16
