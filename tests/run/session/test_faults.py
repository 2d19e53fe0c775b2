"""The demo's pipeline under fire: parts are killed at random moments, and nothing is lost or trained twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from headrace.base.types.tokens import Tokens
from headrace.flow.ledger.opening import open_ledger
from headrace.run.session import load_config, train
from lab.faults.run import RECORD_TOKENS, STEPS, TrialSetup, draw_moment, measure
from lab.faults.verdict import LedgerSnapshot, Verdict, collect_answers, judge, take_snapshot
from tests.run.session.runs import forge, make_run

SOAK = 20
NOTHING_WRONG = {"lost": 0, "twice": 0, "unbalanced": 0, "broken": 0, "differ": 0, "too_old": 0}


PARTS = {"controller", "engine", "learner", "scorer", "environment"}


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("rollouts", "parts"), [(0, PARTS), (2, PARTS | {"rollout"})])
def test_runs_whose_parts_are_killed_at_random_lose_nothing_and_train_nothing_twice(
    rollouts: int, parts: set[str]
) -> None:
    made = measure(print, runs=SOAK, rollouts=rollouts)
    total, *rows = made.rows
    assert len(rows) == SOAK
    assert {row["seed"]: (row["wrong"], row["left"]) for row in rows if row["wrong"] or row["left"]} == {}
    assert set(total["kills"]) == parts
    assert total["continued"] > 0, "some answers were cut off halfway, and continued"
    assert max((row["unrecorded"] or 0 for row in rows), default=0) <= RECORD_TOKENS
    assert [target for target in made.targets if not target.holds and target.unit != "s"] == []


@pytest.mark.parametrize(("rollouts", "parts"), [(0, PARTS), (2, PARTS | {"rollout"})])
def test_moments_of_a_seed_are_always_the_same_and_reach_every_part_and_phase(
    tmp_path: Path, rollouts: int, parts: set[str]
) -> None:
    scene = TrialSetup(
        directory=tmp_path, run_file=tmp_path, sources=tmp_path, start_s=5.0, step_s=0.3, weights=tmp_path,
        rollouts=rollouts,
    )  # fmt: skip
    moments = [[draw_moment(scene, rng) for _ in range(300)] for rng in map(np.random.default_rng, (7, 7, 8))]
    assert moments[0] == moments[1] != moments[2]
    assert {(moment.part, moment.phase) for moment in moments[0]} == {
        (part, phase) for part in parts for phase in ("start", "step", "snapshot")
    }
    assert {moment.step for moment in moments[0] if moment.phase == "step"} == set(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A run file whose run has come to its end."""
    directory = tmp_path_factory.mktemp("judged")
    run_file = make_run(
        directory, model_dir, flow={"groups_per_step": 2, "group_size": 4, "max_age": 0}, run={"dir": "run", "steps": 3}
    )
    train(run_file, overrides=["observe.view=none"])
    return run_file


def verdict(run_file: Path, run_dir: Path, *before: LedgerSnapshot) -> Verdict:
    return judge(run_dir, load_config(run_file), before)


def wrong(found: Verdict) -> set[str]:
    figures = asdict(found)
    return {key for key in NOTHING_WRONG if figures[key]}


def test_a_run_that_nobody_disturbed_is_found_whole(ended: Path, tmp_path: Path) -> None:
    run_dir = ended.parent / "run"
    found = verdict(ended, run_dir, take_snapshot(run_dir, tmp_path / "snapshot"))
    assert (wrong(found), found.dropped) == (set(), {})


FORGERIES: dict[str, tuple[str, set[str]]] = {
    "a group that is forgotten": ("UPDATE groups SET state = 'running' WHERE number = 5", {"lost", "unbalanced"}),
    "a group that left its batch": ("UPDATE groups SET step = NULL WHERE number = 4", {"lost", "differ"}),
    "a group in another's batch": ("UPDATE groups SET step = 1 - step WHERE number IN (0, 2)", {"differ"}),
    "tokens that were not trained": ("UPDATE steps SET trained_tokens = 3 WHERE step = 1", {"unbalanced"}),
    "a reward that was another": ("UPDATE episodes SET reward = 2 WHERE group_number = 1 AND position = 0", {"differ"}),
    "a step that is gone": ("DELETE FROM steps WHERE step = 1", {"lost", "unbalanced", "differ"}),
    "tokens that were too old": ("""UPDATE steps SET ages = '{"2": 8}' WHERE step = 2""", {"too_old"}),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_books_that_are_wrong_are_found_out(ended: Path, tmp_path: Path, forgery: str) -> None:
    statement, expected = FORGERIES[forgery]
    run_dir = tmp_path / "run"
    shutil.copytree(ended.parent / "run", run_dir)
    assert forge(run_dir, statement) > 0
    assert wrong(verdict(ended, run_dir)) == expected


LOSSES: dict[str, Callable[[Tokens], Tokens]] = {
    "a token": lambda tokens: Tokens(
        ids_T=tokens.ids_T + 1, logprobs_T=tokens.logprobs_T, versions_T=tokens.versions_T
    ),
    "a logprob": lambda tokens: Tokens(
        ids_T=tokens.ids_T, logprobs_T=np.nextafter(tokens.logprobs_T, np.float32(1)), versions_T=tokens.versions_T
    ),
    "the rest of an answer": lambda tokens: tokens + tokens,
}


@pytest.mark.parametrize("lost", LOSSES)
def test_answers_that_are_not_what_was_recorded_are_found_out(ended: Path, lost: str) -> None:
    run_dir = ended.parent / "run"
    with closing(open_ledger(run_dir)) as ledger:
        answers = collect_answers(ledger.episodes(0))
    at, tokens = next(iter(answers.items()))
    other = {at: LOSSES[lost](tokens)}
    assert wrong(verdict(ended, run_dir, LedgerSnapshot(partial_turns=other))) == {"broken"}
    assert wrong(verdict(ended, run_dir, LedgerSnapshot(finished_answers=other))) == {"broken"}
    assert wrong(verdict(ended, run_dir, LedgerSnapshot(partial_turns=answers, finished_answers=answers))) == set()
