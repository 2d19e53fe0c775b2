"""``headrace ledger``: the books, who survives, and the run made again from its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.flow.ledger import Lengths, SqliteLedger
from headrace.flow.ledger.base import EndEpisode, Move
from headrace.flow.ledger.survivors import survivors
from headrace.run.cli.app import app
from headrace.testing.ledgers import ended_episode, start_group, train_group
from tests.run.session.runs import forge, make_run, tiny_model, verb


def a_run_without_long_answers(run_dir: Path) -> None:
    """Long answers are dropped for being late."""
    ledger = SqliteLedger(run_dir / "ledger.sqlite", group_size=2, groups_per_step=1)
    for operation in train_group(0):
        ledger.apply(operation)
    for number in range(1, 20):
        for operation in start_group(number):
            ledger.apply(operation)
        ledger.apply(EndEpisode(episode=ended_episode(number, 0, tokens=50), at_s=0.0))
        ledger.apply(Move(numbers=(number,), state=GroupState.DROPPED, reason="stale", at_s=0.0))
    ledger.close()


def test_books_and_survivor_bias_are_printed(tmp_path: Path) -> None:
    a_run_without_long_answers(tmp_path)
    printed = verb("ledger", tmp_path)
    assert "the books balance" in printed
    assert "stale" in printed
    told = json.loads(verb("ledger", tmp_path, "--json"))
    assert told["holds"]
    assert told["conservation"]["tokens"] == {
        "submitted": 958, "trained": 8, "dropped": {"stale": 950}, "in_flight": 0
    }  # fmt: skip
    assert told["survivors"]["quantiles"]["0.5"] == [50.0, 4.0]


def test_directory_without_a_ledger_is_refused_with_what_it_has_instead(tmp_path: Path) -> None:
    def refused(directory: Path) -> HeadraceError:
        error = CliRunner().invoke(app, ["ledger", str(directory)]).exception
        assert isinstance(error, HeadraceError)
        return error

    assert "there is no directory" in refused(tmp_path / "nowhere").problem
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert "holds no run" in refused(tmp_path / "runs").problem
    (tmp_path / "runs" / "first" / "ledger.sqlite").touch()
    assert refused(tmp_path / "runs").remedy == "give one of its runs: first"
    (tmp_path / "runs" / "first" / "ledger.sqlite").unlink()
    (tmp_path / "runs" / "first" / "config.json").write_text("{}")
    lost = refused(tmp_path / "runs" / "first")
    assert "ledger.sqlite is missing, or it was kept in memory" in lost.problem
    assert "put ledger.sqlite back from a copy" in lost.remedy


def test_lengths_that_are_thrown_away_show_and_equal_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    all_of_them = rng.lognormal(5, 1, 4000).astype(int)
    kept = all_of_them[rng.random(4000) < 0.5]
    short = all_of_them[all_of_them < np.quantile(all_of_them, 0.8)]
    fair = survivors(Lengths(submitted=tuple(all_of_them.tolist()), trained=tuple(kept.tolist())))
    unfair = survivors(Lengths(submitted=tuple(all_of_them.tolist()), trained=tuple(short.tolist())))
    assert fair is not None
    assert not fair.biased
    assert unfair is not None
    assert unfair.biased
    assert unfair.ks == pytest.approx(0.2, abs=0.01)
    assert survivors(Lengths(submitted=(4,), trained=())) is None


def test_trained_lengths_are_compared_with_those_that_were_not_trained() -> None:
    lengths = np.arange(1000)
    short = lengths[(lengths < 460) | (lengths >= 540)]
    found = survivors(Lengths(submitted=tuple(lengths.tolist()), trained=tuple(short.tolist())))
    assert found is not None
    assert found.ks < 0.05  # nobody would see it beside all that were submitted
    assert found.biased
    rng, seen = np.random.default_rng(0), 0
    for _ in range(200):
        kept = np.sort(lengths[rng.random(1000) < 0.9])
        fair = survivors(Lengths(submitted=tuple(lengths.tolist()), trained=tuple(kept.tolist())))
        seen += fair is not None and fair.biased
    assert seen <= 8


def test_lengths_of_groups_in_flight_are_left_aside(tmp_path: Path) -> None:
    a_run_without_long_answers(tmp_path)
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    before = ledger.lengths()
    number = ledger.conservation().groups.submitted
    ledger.apply(*start_group(number), EndEpisode(episode=ended_episode(number, 0, tokens=2), at_s=0.0))
    assert ledger.lengths() == before
    ledger.close()


def test_withdrawn_episodes_have_no_length(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", group_size=3, groups_per_step=1)
    withdrawn = replace(ended_episode(0, 2, tokens=1), status=EpisodeStatus.LEFT_OUT, cause="redundant", reward=None)
    for operation in train_group(0):
        if isinstance(operation, Move) and operation.state is GroupState.SCORED:
            ledger.apply(EndEpisode(episode=withdrawn, at_s=0.0))
        ledger.apply(operation)
    assert ledger.lengths() == Lengths(submitted=(4, 4), trained=(4, 4), num_withdrawn=1)
    ledger.close()
    assert "1 more were withdrawn" in verb("ledger", tmp_path)


@pytest.mark.timeout(120)
def test_run_made_again_from_its_ledger_has_the_same_weights_until_the_record_is_changed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run_file = make_run(
        tmp_path / "work", model, observe={"view": "none"}, flow={"groups_per_step": 2, "group_size": 4}
    )
    run_dir = tmp_path / "work" / "run"
    verb("train", run_file)
    told = json.loads(verb("ledger", run_dir, "--replay", "--json"))
    assert (told["agree"], told["differ"], told["first_difference"]) == ([0, 1, 2, 3], [], None)
    other_rewards = (
        "UPDATE episodes SET reward = 1 - reward WHERE group_number IN (SELECT number FROM groups WHERE step = 1)"
    )
    assert forge(run_dir, other_rewards) > 0
    changed = CliRunner().invoke(app, ["ledger", str(run_dir), "--replay", "--json"])
    assert changed.exit_code == 1
    assert json.loads(changed.stdout)["first_difference"] == 2
