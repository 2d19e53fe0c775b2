"""Hostile and broken rewards: the stage continues, and each is counted for what it did."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from headrace.run.session import load_config, train
from tests.launch.workers import KEEP, parts_here
from tests.rollout.scoring.hostile import CAUSES, EITHER, REWARD, judged
from tests.run.session.runs import make_run, tiny_model

DEEDS = [*CAUSES, *EITHER]


@pytest.mark.slow
def test_each_hostile_reward_is_counted_for_what_it_did_and_the_others_are_scored(tmp_path: Path) -> None:
    before = parts_here()
    quick = [deed for deed in DEEDS if CAUSES.get(deed) != "reward_crashed" and deed not in EITHER]
    deeds = [*quick, "quit", "accuse", "everybody", "daemon", "fork", "eat", "fine 1", "fine 2"]
    counted = judged(tmp_path, deeds)
    assert counted.total() == len(deeds)
    assert counted[""] == 4
    assert not parts_here() - before
    assert all(log.stat().st_size < 2 * KEEP.log_bytes for log in tmp_path.glob("scorer-*.log"))


@pytest.mark.slow
def test_a_run_whose_rewards_are_hostile_comes_to_its_end_and_its_books_say_why(tmp_path: Path) -> None:
    deeds = ["learn", "raise", "learn", "nan", "learn", "quit", "learn", "hang", "learn", "fork", "learn", "parents"]
    lines = [json.dumps({"prompt": f"{a}+{a + 1}=", "deed": deed}) + "\n" for a, deed in enumerate(deeds)]
    run_file = make_run(
        tmp_path,
        tiny_model(tmp_path / "made"),
        reward=REWARD,
        rows="".join(lines),
        env={"reward_timeout_s": 5, "reward_processes": 40},
        data={"shuffle": False},
        flow={"group_size": 2, "max_age": 3},
        run={"steps": 4},
    )
    summary = train(load_config(run_file))
    assert summary.status == "finished"
    groups = summary.ledger.groups
    assert groups.submitted == groups.trained + sum(groups.dropped.values()) + groups.in_flight
    assert {"reward_error", "reward_nan", "reward_crashed"} <= groups.dropped.keys()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_hostile_rewards_are_counted(tmp_path: Path) -> None:
    deeds = [f"{deed} {number}" for number in range(9) for deed in DEEDS]
    counted = judged(tmp_path, deeds)
    assert counted.total() == len(deeds) >= 250
    assert counted[""] == 18
    assert Counter(reason for reason in counted if reason).keys() == {
        "reward_error", "reward_nan", "reward_timeout", "reward_crashed"
    }  # fmt: skip
