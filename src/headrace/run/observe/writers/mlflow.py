"""The writer of metrics for MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, missing_package

if TYPE_CHECKING:
    from mlflow import MlflowClient

AT_ONCE = 1000
"""The largest number of metrics that MLflow accepts in one call."""


class Mlflow(WriterSection):
    """Metrics as a run of an experiment on an MLflow tracking server."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str = ""
    """The address of the server, ``http://...``, or ``sqlite:///...`` for a database; empty: a database in the run
    directory."""
    experiment: str = "headrace"
    """The name of the experiment, which is created where there is none."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Return the writer of ``run``. Raises :class:`~headrace.base.errors.ConfigError` where the package is not
        installed."""
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise missing_package("mlflow", "mlflow") from None
        client = MlflowClient(tracking_uri=self.tracking_uri or f"sqlite:///{run.run_dir.resolve()}/mlflow.db")
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        known = client.search_runs([experiment], f"tags.headrace_run = '{run.key}'", max_results=1)
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return _MlflowWriter(client, known[0].info.run_id)
        begun = client.create_run(experiment, run_name=run.name, tags={"headrace_run": run.key})
        for name, value in islice(_params(run.config), 500):
            client.log_param(begun.info.run_id, name, value[:500])
        return _MlflowWriter(client, begun.info.run_id)


def _params(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the settings by their dotted names; ``prefix`` stands before each."""
    flat: list[tuple[str, str]] = []
    for key, value in tree.items():
        flat += _params(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", str(value))]
    return flat


class _MlflowWriter:
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Write the values of a step to MLflow, in batches of :data:`AT_ONCE`."""
        from mlflow.entities import Metric

        metrics = [Metric(_key(name), value, int(unix_s * 1000), step) for name, value in values.items()]
        for first in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + AT_ONCE])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _key(name: str) -> str:
    """Return a metric's name with ``_`` for the characters that MLflow does not accept."""
    return "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)
