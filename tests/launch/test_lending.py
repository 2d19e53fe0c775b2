"""Cores that rest are lent, and borrowed only where that is measured to be faster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.launch.lending import TRIAL_UNITS, UNITS_BETWEEN_TRIALS, LentCores, make_activity_file
from headrace.launch.starts import Lending
from headrace.run.session import load_config, train
from headrace.run.session.prepare import Inputs, prepare
from tests.run.session.runs import make_run, tiny_model


class Bench:
    """Parts of a machine without cores: a unit takes as long as ``seconds`` says of its number of threads."""

    def __init__(self, directory: Path, shares: tuple[int, ...], seconds: Callable[[int], float]) -> None:
        self._board = directory / "cores"
        make_activity_file(self._board, len(shares))
        self._now = 0.0
        self._threads = [0] * len(shares)
        self._seconds = seconds
        self.parts = [
            LentCores(
                Lending(activity_file=str(self._board), place=place, shares=shares),
                lambda count, place=place: self._threads.__setitem__(place, count),
                self,
            )
            for place in range(len(shares))
        ]

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def unit(self, place: int, amount: float | None = 1.0) -> int:
        """Do one, and say with how many threads."""
        with self.parts[place].unit(amount):
            self._now += self._seconds(self._threads[place]) * (amount or 1.0)
        return self._threads[place]


def test_nothing_is_borrowed_from_a_part_that_works(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (2, 3), lambda threads: 1.0 / threads)
    assert {bench.unit(0) for _ in range(100)} == {2}


def test_what_rests_is_borrowed_where_that_is_faster_and_given_back_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (2, 3), lambda threads: 1.0 / threads)
    bench.parts[1].mark_waiting()
    tried = [bench.unit(0) for _ in range(2 * TRIAL_UNITS)]
    assert sorted(tried) == [2] * TRIAL_UNITS + [5] * TRIAL_UNITS
    assert {bench.unit(0) for _ in range(UNITS_BETWEEN_TRIALS)} == {5}
    bench.unit(1)
    assert bench.unit(0) == 2
    bench.parts[1].mark_waiting()
    assert sorted(bench.unit(0) for _ in range(2 * TRIAL_UNITS)) == [2] * TRIAL_UNITS + [5] * TRIAL_UNITS  # tried again


def test_what_is_slower_with_more_cores_or_gains_too_little_borrows_none(tmp_path: Path) -> None:
    for number, seconds in enumerate((float, lambda threads: 1.0 - 0.01 * threads)):
        directory = tmp_path / str(number)
        directory.mkdir()
        bench = Bench(directory, (1, 2), seconds)
        bench.parts[1].mark_waiting()
        for _ in range(2 * TRIAL_UNITS):
            bench.unit(0)
        assert {bench.unit(0) for _ in range(UNITS_BETWEEN_TRIALS)} == {1}


def test_units_are_compared_by_their_amount_and_odd_ones_not_at_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (1, 1), lambda threads: 1.0 / threads)
    bench.parts[1].mark_waiting()
    for number in range(2 * TRIAL_UNITS):
        bench.unit(0, amount=1000.0 if number % 2 == 0 else 1.0)  # those that borrow do more
        bench.unit(0, amount=None)
        bench.unit(0, amount=0.0)  # a batch of which nothing is trained
    assert {bench.unit(0) for _ in range(UNITS_BETWEEN_TRIALS)} == {2}


def test_cores_that_rest_are_shared_by_all_that_work(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (1, 1, 4), lambda threads: 1.0 / threads)
    bench.parts[2].mark_waiting()
    assert [max(bench.unit(place) for _ in range(2)) for place in (0, 1)] == [3, 3]


def test_a_part_that_has_not_loaded_or_was_started_again_lends_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (1, 1), lambda threads: 1.0 / threads)
    bench.parts[1].mark_waiting()
    LentCores(Lending(activity_file=str(tmp_path / "cores"), place=1, shares=(1, 1)), lambda count: None, bench)
    assert {bench.unit(0) for _ in range(50)} == {1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.deterministic=true"], "model.deterministic"),
        (["launch.kind=ray", "sync.transport=http"], "the cluster gives each part its cores"),
    ],
)
def test_where_cores_cannot_be_lent_it_is_refused_by_name(
    tmp_path: Path, model_dir: Path, settings: list[str], words: str
) -> None:
    run_file = make_run(tmp_path, model_dir)
    run_file.write_text(run_file.read_text().replace("engine_threads = 1\n", "").replace("learner_threads = 1\n", ""))
    with pytest.raises((ConfigError, ValueError), match=words):
        prepare(load_config(run_file, ["launch.lend_cores=true", *settings]), Inputs())


@pytest.mark.slow
def test_a_run_that_lends_learns_says_what_it_measured_and_is_not_replayed(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(tmp_path, model_dir, flow={"groups_per_step": 2, "group_size": 4, "max_age": 0})
    settings = ["launch.lend_cores=true", "observe.view=none", "run.steps=30"]
    summary = train(load_config(run_file, settings))
    assert summary.status == "finished"
    assert summary.mismatch_abs is not None
    assert summary.mismatch_abs < 1e-4
    for part in ("engine", "learner"):  # each has rested while the other busy_spans
        assert "with lent cores a unit of work is" in (tmp_path / "run" / "logs" / f"{part}.log").read_text()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["launch"]["lend_cores"] is True
    with pytest.raises(ConfigError, match=r"launch\.lend_cores=true"):
        train(load_config(run_file, [*settings, "run.dir=again"]), replay=tmp_path / "run")
