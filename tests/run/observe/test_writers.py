"""Metrics reach the systems they are sent to, read back with those systems' own programs."""

import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.base.types.observation import StepRecord
from headrace.run.observe import QueuedWriter, RunFacts
from headrace.run.observe.config import ObserveConfig
from headrace.run.observe.metrics import flat
from headrace.run.observe.writers.base import MetricWriter
from headrace.run.observe.writers.prometheus import Prometheus
from tests.run.observe.synthetic import step_record

STEPS = [
    step_record(step, metrics={"loss": 0.5 - step, "lr": float("nan"), "env/maths/reward_mean": 0.25})
    for step in range(3)
]


def facts(tmp_path: Path) -> RunFacts:
    return RunFacts(run_dir=tmp_path, config={"run": {"steps": 3}, "learner": {"lr": 1e-6}})


def post(writer: MetricWriter, steps: list[StepRecord] = STEPS) -> list[str]:
    warnings: list[str] = []
    with QueuedWriter("a", writer, warnings.append) as posting:
        for step in steps:
            posting.step(step)
    return warnings


class Kept:
    """A writer that remembers, and fails where it is told to."""

    def __init__(self, *, fails_at: tuple[int, ...] = ()) -> None:
        self.written: dict[int, Mapping[str, float]] = {}
        self.closed = False
        self._fails_at = fails_at

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if step in self._fails_at:
            raise OSError("no network")
        self.written[step] = values

    def close(self) -> None:
        self.closed = True


def test_a_writer_gets_every_finite_number_of_every_step_and_is_closed() -> None:
    writer = Kept()
    assert post(writer) == []
    assert writer.closed
    assert set(writer.written) == {0, 1, 2}
    assert set(writer.written[1]) == set(flat(STEPS[1])) - {"lr"}


def test_a_writer_that_fails_is_a_warning_and_gets_the_later_steps() -> None:
    writer = Kept(fails_at=(0,))
    warnings = post(writer)
    assert set(writer.written) == {1, 2}
    assert "the writer a fails, the run continues: OSError: no network" in warnings
    assert "the writer a has lost 1 of 3 steps; metrics.jsonl has them all" in warnings


def test_a_writer_that_hangs_keeps_nobody_and_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.run.observe.writers.queued.MAX_QUEUED", 2)
    monkeypatch.setattr("headrace.run.observe.writers.queued.CLOSE_TIMEOUT_S", 0.05)
    let_go = threading.Event()

    class Hanging(Kept):
        def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
            let_go.wait(30)

    warnings = post(Hanging(), [step_record(step) for step in range(10)])
    let_go.set()
    assert "2 steps behind" in warnings[0]
    assert "has lost 10 of 10 steps" in warnings[-1]


def test_prometheus_is_told_the_newest_step_with_labels(tmp_path: Path) -> None:
    writer = Prometheus(port=19464).open(facts(tmp_path))
    for step in STEPS:
        writer.write(step.step, step.unix_s, flat(step))
    token = (tmp_path / "metrics.token").read_text()
    asked = urllib.request.Request("http://127.0.0.1:19464/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        text = answer.read().decode()
    with pytest.raises(ConfigError, match="19464"):
        Prometheus(port=19464).open(facts(tmp_path))
    writer.close()
    run = tmp_path.name
    assert f'headrace_reward_mean{{run="{run}"}} 0.402' in text
    assert f'headrace_env_reward_mean{{env="maths",run="{run}"}} 0.25' in text
    assert "# HELP headrace_wait_s The learner waited for the step's batch (s)" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(asked, timeout=10)


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    assert post(opened("tensorboard", tmp_path)) == []
    assert scalars(tmp_path / "tensorboard", "reward_mean") == [(0, 0.4), (1, 0.401), (2, 0.402)]
    assert scalars(tmp_path / "tensorboard", "env/maths/reward_mean") == [(0, 0.25), (1, 0.25), (2, 0.25)]


@pytest.mark.slow
def test_trackio_shows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is first imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert post(opened("trackio", tmp_path, project="headrace-test")) == []
    (run,) = SQLiteStorage.get_runs("headrace-test")
    logs = SQLiteStorage.get_logs("headrace-test", run)
    assert [(log["step"], log["reward_mean"]) for log in logs] == [(0, 0.4), (1, 0.401), (2, 0.402)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own use of sqlalchemy
def test_mlflow_shows_the_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    for _ in range(2):  # a resumed run continues with the same one
        assert post(opened("mlflow", tmp_path)) == []
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["learner.lr"] == "1e-06"
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert {(each.step, each.value) for each in history} == {(0, 0.4), (1, 0.401), (2, 0.402)}


@pytest.mark.slow
def test_wandb_takes_the_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert post(opened("wandb", tmp_path, mode="offline")) == []
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def opened(kind: str, tmp_path: Path, **settings: Any) -> MetricWriter:
    config = ObserveConfig(writers=({"kind": kind, **settings},))
    return config.writers[0].open(facts(tmp_path))


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]


@pytest.mark.parametrize(
    ("kind", "module"),
    [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio"), ("mlflow", "mlflow")],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError, match=module) as caught:
        opened(kind, tmp_path)
    assert f"headrace[{kind}]" in caught.value.remedy
