"""A run that ends at any moment continues as if it had not: no group lost, none trained twice, the same weights."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import CheckpointError, ConfigError
from headrace.base.types.batch import Batch
from headrace.control.recovery import StartingPoint, find_starting_point
from headrace.run.session.running import first_cause
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, lognormal_lengths
from tests.control.lives import Life, Plan, list_groups, live

BEFORE_S = 2.0
"""The comparison of engine and learner, which stands before training, takes a little longer."""


def sometimes(text: str) -> float | None:
    """A reward that fails for one completion in five."""
    return None if len(text) % 5 == 0 else float(len(text) % 2)


def lives(plan: Plan, rng: random.Random, *, crashes: int, longest_s: float) -> tuple[list[Life], dict[int, Batch]]:
    """Lives until the run is over, and the batch of every step that the final weights contain."""
    lineage: dict[int, Batch] = {}
    lived: list[Life] = []
    while not lived or not lived[-1].ended:
        crash_at = rng.uniform(BEFORE_S, longest_s) if len(lived) < crashes else None
        life = live(plan, crash_at=crash_at)
        lineage = {step: batch for step, batch in lineage.items() if step < life.began_at}
        lineage |= {batch.step: batch for batch in life.learner.batches}
        lived.append(life)
    return lived, lineage


def check_books(life: Life, lineage: dict[int, Batch], steps: int) -> None:
    assert sorted(lineage) == list(range(steps))
    trained = [list_groups(lineage[step]) for step in range(steps)]
    assert all(len(groups) == 2 for groups in trained)
    numbers = [group for groups in trained for group in groups]
    assert len(set(numbers)) == len(numbers) == 2 * steps
    groups, tokens = life.summary.ledger.groups, life.summary.ledger.tokens
    assert groups.trained == 2 * steps
    assert groups.submitted == groups.trained + sum(groups.dropped.values())
    assert tokens.trained == sum(batch.num_loss_tokens for batch in lineage.values())
    assert tokens.in_flight == groups.in_flight == 0
    assert weights_of(lineage) == life.learner.weights, "the final weights are not those of the final lineage"


def weights_of(lineage: dict[int, Batch]) -> str:
    learner = FakeLearner(token_s=0.0)

    async def main() -> None:
        for step in sorted(lineage):
            await learner.train(lineage[step])

    run_virtual(main())
    return learner.weights


@pytest.mark.parametrize("seed", range(24))
def test_every_group_is_trained_once_whenever_the_run_crashes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    max_age = rng.randrange(4)
    plan = Plan(
        run_dir=tmp_path,
        steps=8,
        flow={"max_age": max_age, "lead": rng.randrange(max_age + 1), "order": rng.choice(["strict", "ready_first"])},
        run={"checkpoint_every": rng.choice([1, 3, 20])},
        scorer=lambda: FakeScorer(seconds=0.3, reward=sometimes),
    )
    lived, lineage = lives(plan, rng, crashes=4, longest_s=12.0)
    check_books(lived[-1], lineage, 8)
    assert max(int(batch.ages().max()) for batch in lineage.values()) <= max_age
    assert min(int(batch.ages().min()) for batch in lineage.values()) >= 0


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_synchronous_run_ends_with_the_weights_of_the_undisturbed_one(
    tmp_path: Path, seed: int, by_group: bool
) -> None:
    def plan(name: str) -> Plan:
        (tmp_path / name).mkdir()
        return Plan(
            run_dir=tmp_path / name,
            steps=6,
            flow={"max_age": 0, "order": "strict"},
            run={"checkpoint_every": 2},
            scorer=lambda: FakeScorer(seconds=0.3, reward=sometimes, by_group=by_group),
        )

    undisturbed = live(plan("undisturbed"))
    lived, lineage = lives(plan("disturbed"), random.Random(seed), crashes=5, longest_s=14.0)
    check_books(lived[-1], lineage, 6)
    assert any(life.began_at for life in lived)
    assert lived[-1].learner.weights == undisturbed.learner.weights
    assert not any("other weights" in warning for life in lived for warning in life.summary.warnings)


def test_steps_after_the_checkpoint_are_replayed_with_the_same_batches(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, steps=8, run={"checkpoint_every": 50}, flow={"max_age": 2})
    first = live(plan, crash_at=8.0)
    second = live(plan)
    assert len(first.learner.batches) >= 2
    for before, after in zip(first.learner.batches, second.learner.batches, strict=False):
        assert list_groups(before) == list_groups(after)
        assert before.ids_N.tobytes() == after.ids_N.tobytes()
        assert before.versions_N.tobytes() == after.versions_N.tobytes()
    assert "resumed at step 0" in second.seen.texts()
    assert not second.summary.warnings


@pytest.mark.parametrize("crash_at", [6.0, 6.5, 7.0, 7.5, 8.0])
def test_what_had_been_generated_before_a_crash_is_not_asked_again(tmp_path: Path, crash_at: float) -> None:
    plan = Plan(run_dir=tmp_path, steps=8, run={"checkpoint_every": 50}, flow={"max_age": 2})
    first = live(plan, crash_at=crash_at)
    second = live(plan)
    kept = first.summary.ledger.tokens.submitted
    assert kept > 0
    assert second.summary.tokens_generated == second.summary.ledger.tokens.submitted - kept


@pytest.mark.parametrize("stop_at", [0.0, 2.0, 5.0, 7.0, 9.0])
def test_stopped_run_has_a_checkpoint_and_goes_on(tmp_path: Path, stop_at: float) -> None:
    plan = Plan(run_dir=tmp_path, steps=12, run={"checkpoint_every": 50}, flow={"max_age": 2})
    first = live(plan, stop_at=stop_at)
    assert (first.summary.status, first.ended) == ("stopped", True)
    assert first.summary.steps < 12
    assert find_starting_point(tmp_path).step == first.summary.steps
    second = live(plan)
    assert second.began_at == first.summary.steps
    assert second.summary.status == "finished"
    lineage = {batch.step: batch for batch in [*first.learner.batches, *second.learner.batches]}
    check_books(second, lineage, 12)
    assert len(first.learner.batches) + len(second.learner.batches) == 12, "a step was made twice"


def test_run_goes_on_beyond_its_last_step_when_more_are_asked_for(tmp_path: Path) -> None:
    first = live(Plan(run_dir=tmp_path, steps=4))
    second = live(Plan(run_dir=tmp_path, steps=7))
    assert [batch.step for batch in first.learner.batches + second.learner.batches] == list(range(7))
    assert second.summary.ledger.groups.trained == 14


def test_other_weights_after_a_restart_are_told(tmp_path: Path) -> None:
    class Rounding(FakeLearner):
        """Computes something else than its earlier life."""

        def _learn(self, batch: Batch) -> None:
            super()._learn(batch)
            self.weights = self.weights[::-1]

    live(Plan(run_dir=tmp_path, steps=8, run={"checkpoint_every": 50}), crash_at=8.0)
    second = live(
        Plan(run_dir=tmp_path, steps=8, run={"checkpoint_every": 50}, learner=lambda: Rounding(token_s=0.002))
    )
    assert any("version 1 has other weights than before the restart" in text for text in second.summary.warnings)


def test_ledger_and_checkpoint_of_different_moments_are_refused(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, steps=6)
    live(plan)
    for part in tmp_path.glob("ledger.sqlite*"):
        part.unlink()
    with pytest.raises(BaseExceptionGroup) as caught:
        live(Plan(run_dir=tmp_path, steps=8))
    assert isinstance(first_cause(caught.value), CheckpointError)
    assert "step 6, but the ledger knows 0 trained groups" in str(first_cause(caught.value))


def test_group_keeps_its_row_when_the_order_of_rows_changes(tmp_path: Path) -> None:
    """What a group has kept and what is asked again are attempts at one task."""

    def plan(shift: int) -> Plan:
        class Shifted(Plan):
            def settings(self):  # type: ignore[no-untyped-def]
                found = super().settings()
                return type(found)(run=found.run, flow=found.flow, order=lambda number: (number + shift) % 500)

        return Shifted(
            run_dir=tmp_path,
            steps=5,
            engine=lambda: FakeEngine(length=lognormal_lengths(60, 2.0, 500)),
            run={"checkpoint_every": 50},
        )

    first = live(plan(0), crash_at=6.0)
    assert first.summary.ledger.tokens.in_flight > 0
    second = live(plan(100))
    for batch in second.learner.batches:
        assert len(list_groups(batch)) == 2, "a group has two rows"


def test_snapshots_are_taken_when_due_once_each_and_the_newest_are_kept(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=7, run={"checkpoint_every": 2, "keep_checkpoints": 3}))
    told = [event.text for event in life.seen.events if event.text.startswith("checkpoint")]
    assert told == [f"checkpoint step-{step:06d}" for step in (2, 4, 6, 7)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000006",
        "step-000007",
    ]


def test_last_snapshot_is_not_written_twice(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=4, run={"checkpoint_every": 2}))
    assert sum(event.text.startswith("checkpoint") for event in life.seen.events) == 2
    stopped_at_once = live(Plan(run_dir=tmp_path, steps=8), stop_at=0.0)
    assert stopped_at_once.summary.status == "stopped"
    assert "checkpoint" not in stopped_at_once.seen.texts()


def test_run_without_a_snapshot_begins_at_step_zero(tmp_path: Path) -> None:
    assert find_starting_point(tmp_path) == StartingPoint(step=0, snapshot=None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400))
def test_every_group_is_trained_once_in_a_long_soak_of_crashes(tmp_path: Path, seed: int) -> None:
    test_every_group_is_trained_once_whenever_the_run_crashes(tmp_path, seed + 1000)


def test_run_that_holds_old_tokens_says_which_bound_lets_it_go_on(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, steps=12, flow={"max_age": 3})
    live(plan, crash_at=6.0)
    with pytest.raises(BaseExceptionGroup) as caught:
        live(replace(plan, flow={"max_age": 0}))
    error = first_cause(caught.value)
    assert isinstance(error, ConfigError)
    needed = int(error.remedy.split(">= ")[1].split(",")[0])
    assert 0 < needed <= 3
    if needed > 1:
        with pytest.raises(BaseExceptionGroup):
            live(replace(plan, flow={"max_age": needed - 1}))
    assert live(replace(plan, flow={"max_age": needed})).summary.status == "finished"
