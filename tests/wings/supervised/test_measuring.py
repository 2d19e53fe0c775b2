"""Rewards and pass@k of a run on given rows are those that ``headrace eval`` gives the same weights, and training goes
on meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import EnvError, HeadraceError
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.learner.core import LearnerCore
from headrace.run.observe import evaluations, load_run
from headrace.run.session import evaluate
from headrace.run.session.exporting import export
from headrace.wings.supervised import measuring
from headrace.wings.supervised.measuring import Measurements, VersionRewards
from headrace.wings.supervised.session import sft
from tests.learner.builders import assert_same_bits
from tests.wings.supervised.material import chat_model, conversations, settings, write_rows
from tests.wings.supervised.test_runs import run_file, weights_at

REWARD = "def digits(completion, **row):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("measuring") / "model")


def table(directory: Path, *, reward: str = REWARD, samples: int = 4) -> dict:
    """The table ``[eval]`` of four sums."""
    (directory / "reward.py").write_text(reward, encoding="utf-8")
    rows = write_rows(directory / "held.jsonl", [{"prompt": f"{a}+{a}="} for a in range(4)])
    return {
        "data": {"eval_path": str(rows)},
        "env": {"reward": f"{directory / 'reward.py'}:digits"},
        "engine": {"max_new_tokens": 6},
        "run": {"eval_samples": samples},
    }


def measured_versions(run_dir: Path) -> list[int]:
    run = load_run(run_dir)
    return [version for version, _ in evaluations(run.steps, {}, run.events)]


@pytest.mark.timeout(300)
def test_rewards_of_the_versions_are_those_of_an_evaluation_and_training_goes_on(model, tmp_path, monkeypatch):
    told = table(tmp_path)
    whole = LearnerCore.train

    def train(core: LearnerCore, batch: Batch) -> StepReport:
        if batch.step == 3:
            psutil.wait_procs(measuring_processes(os.getpid()))
        return whole(core, batch)

    monkeypatch.setattr(LearnerCore, "train", train)
    summary = sft(settings(model, tmp_path / "run", run={"eval_every": 4}, eval=told), data=conversations(32))
    assert (summary.status, summary.steps) == ("finished", 8)
    assert measured_versions(tmp_path / "run") == [0, 4, 8]
    after = load_run(tmp_path / "run").steps[3]
    assert (after.eval_version, after.eval_accuracy) == (0, summary.rewards_first["reward"])
    assert after.metrics["eval_pass/4"] == summary.rewards_first["pass@4"]
    export(tmp_path / "run", tmp_path / "out")
    expected = evaluate({**told, "model": {"path": str(tmp_path / "out")}})
    pass_at = {f"pass@{k}": each.value for k, each in expected.pass_at.items()}
    assert summary.rewards_last == {"reward": expected.mean_reward, **pass_at}
    assert not list((tmp_path / "run" / "measured").glob("step-*"))


def measuring_processes(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    found = [each for each in children if "measuring" in " ".join(each.cmdline())]
    assert found
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_measuring_changes_no_weight(model, tmp_path):
    for name, sections in (("with", {"eval": table(tmp_path, samples=1)}), ("without", {})):
        sft(settings(model, tmp_path / name, **sections), data=conversations(8))
    assert_same_bits(weights_at(tmp_path / "with", 2), weights_at(tmp_path / "without", 2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_killed_run_has_not_measured_is_measured_when_it_goes_on_and_nothing_stays(model, tmp_path):
    slow = table(tmp_path, reward=f"import time\ntime.sleep(60)\n{REWARD}")
    rows = write_rows(tmp_path / "rows.jsonl", conversations(8))
    run = {"eval_every": 1, "rows_per_step": 4}
    file = run_file(tmp_path / "files", model, tmp_path / "run", rows, run=run)
    with file.open("a", encoding="utf-8") as more:
        for name, section in slow.items():
            more.write(f"[eval.{name}]\n" + "".join(f"{key} = {value!r}\n" for key, value in section.items()))
    program = "from headrace.run.cli import main; main()"
    call = [sys.executable, "-c", program, "sft", str(file), "--set", "observe.view=plain"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 2/2") for line in process.stdout)
        measuring_processes(process.pid)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    assert (tmp_path / "run" / "measured" / "step-1").is_dir()
    assert not psutil.wait_procs(children, timeout=60)[1]
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    summary = sft(file, resume=True)
    assert summary.status == "finished"
    assert measured_versions(tmp_path / "run")[-2:] == [1, 2]


def test_wrong_tables_are_refused_before_the_first_step(model, tmp_path):
    told = table(tmp_path)
    for name, section, words in (
        ("env", {"reward": f"{tmp_path / 'reward.py'}:letters"}, "letters"),
        ("data", {"eval_path": str(tmp_path / "nowhere.jsonl")}, "nowhere.jsonl does not exist"),
        ("data", {"eval_path": told["data"]["eval_path"], "prompt_column": "question"}, "no column 'question'"),
        ("engine", {"max_tokens": 3}, "max_tokens"),
    ):
        with pytest.raises(HeadraceError, match=rf"\[eval\]: .*{words}"):
            sft(settings(model, tmp_path / "run", eval={**told, name: section}), data=conversations(4))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_measurement_that_fails_ends_the_run_and_names_its_log(model, tmp_path):
    found = Measurements(table(tmp_path, reward=f"raise OSError('gone')\n{REWARD}"), tmp_path / "run", str(model))
    found.begin(0)
    with pytest.raises(EnvError, match=r"version 0 could not be measured: .*gone") as failed:
        found.finish()
    assert measuring.LOG in failed.value.remedy


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_waits_for_measurements_that_pile_up(model, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "export", lambda run, out: shutil.copytree(model, out))
    found = Measurements(table(tmp_path, samples=1), tmp_path / "run", str(model))
    for version in range(4):
        found.begin(version)
    assert [each.version for each in found.take()] == [0]
    found.finish()
    assert [each.version for each in found.take()] == [1, 2, 3]


def test_versions_that_an_earlier_life_left_are_measured_once_and_first(model, tmp_path, monkeypatch):
    class Recorded:
        has_ended = True

        def __init__(self, tree, place, version):
            self.version = version
            assert tree["model"]["path"] == (str(place / f"step-{version}") if version else str(model))

        def result(self):
            return VersionRewards(version=self.version, mean_reward=0.5, pass_at={})

    def exported(run: Path, out: Path) -> None:
        assert not out.exists()
        out.mkdir(parents=True)

    monkeypatch.setattr(measuring, "_MeasuringProcess", Recorded)
    monkeypatch.setattr(measuring, "export", exported)
    for version in (0, 3):
        (tmp_path / "measured" / f"step-{version}").mkdir(parents=True)
    found = Measurements({}, tmp_path, str(model))
    for version in (0, 3, 6):
        found.begin(version)
    found.finish()
    assert [each.version for each in found.take()] == [0, 3, 6]
    assert not list((tmp_path / "measured").iterdir())
