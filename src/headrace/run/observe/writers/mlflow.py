"""The writer of metrics for MLflow, an experiment tracker: the run becomes one MLflow run, which a resumed run
continues."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Literal

from headrace.base.config import leaves
from headrace.run.observe.writers.base import MetricWriter, RunFacts, WriterSection, make_missing_package_error

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_METRICS_AT_ONCE = 1000
"""The maximum number of metrics that MLflow accepts in one call."""


class Mlflow(WriterSection):
    """The settings of the writer ``mlflow``: the metrics of the run become a run of an experiment on an MLflow tracking
    server, or in a database file."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str = ""
    """The address of the server, ``http://...``, or ``sqlite:///...`` for a database; empty: a database in the run
    directory."""
    experiment: str = "headrace"
    """The name of the experiment, which is created if there is none."""

    def open(self, run: RunFacts) -> MetricWriter:
        """Create the MLflow run of ``run``, with the settings as parameters, and return the writer that logs to it. For
        a resumed run, open the MLflow run with its tag again. Raises :class:`~headrace.base.errors.ConfigError` if the
        package is not installed."""
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise make_missing_package_error("mlflow", "mlflow") from None
        client = MlflowClient(tracking_uri=self.tracking_uri or f"sqlite:///{run.run_dir.resolve()}/mlflow.db")
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        known = client.search_runs([experiment], f"tags.headrace_run = '{run.key}'", max_results=1)
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return _MlflowWriter(client, known[0].info.run_id)
        created = client.create_run(experiment, run_name=run.name, tags={"headrace_run": run.key})
        for name, value in islice(leaves(run.config).items(), 500):
            client.log_param(created.info.run_id, name, str(value)[:500])
        return _MlflowWriter(client, created.info.run_id)


class _MlflowWriter:
    """The writer that :meth:`Mlflow.open` returns: it logs each step to one MLflow run."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        """Create a writer to the MLflow run with the id ``run_id``, which it reaches through ``client``."""
        self._client = client
        self._run_id = run_id

    def write(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step, in calls of at most :data:`MAX_METRICS_AT_ONCE`. ``unix_s`` is when the
        step ended, in seconds since 1970."""
        from mlflow.entities import Metric

        metrics = [Metric(_make_metric_name(name), value, int(unix_s * 1000), step) for name, value in values.items()]
        for first in range(0, len(metrics), MAX_METRICS_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS_AT_ONCE])

    def close(self) -> None:
        """Mark the MLflow run as ended on the server."""
        self._client.set_terminated(self._run_id)


def _make_metric_name(name: str) -> str:
    """Return the name of a metric for MLflow: ``name`` with ``_`` in place of each character that MLflow does not
    accept."""
    return "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)
