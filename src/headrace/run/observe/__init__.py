"""The observation of a run: its record files, the terminal view, the dashboard's data, alarms, and the verdict.

    StepRecord ──▶ metrics.jsonl ─┬──▶ writers: TensorBoard, W&B, trackio, MLflow, Prometheus
               ──▶ alarms ──▶ Event
    Span       ──▶ trace.jsonl   ─┼──▶ the dashboard, also as report/report.html; a trace for Perfetto
    summary.json, config.json    ─┘
    LiveState  ──▶ terminal, live.json
    StepRecord and Span ──▶ account ──▶ verdict

The control loops import nothing from this package. Its modules read plain records, such as :class:`StepRecord`.
"""

from headrace.run.observe.account import Accountant
from headrace.run.observe.advice import VerdictSettings, make_verdict_settings
from headrace.run.observe.alarms import AlarmWatch, Raised
from headrace.run.observe.jsonl import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, JsonlWriter, Recorder
from headrace.run.observe.looptime import WatchedLoop
from headrace.run.observe.report import write_report
from headrace.run.observe.rundata import RunData, describe_run, load_run, run_name
from headrace.run.observe.summary import age_histogram, evaluations, summarize_steps
from headrace.run.observe.system import SystemWatch
from headrace.run.observe.terminal import open_view
from headrace.run.observe.writers import QueuedWriter, RunFacts

__all__ = [
    "EVENTS_FILE",
    "LIVE_FILE",
    "METRICS_FILE",
    "TRACE_FILE",
    "Accountant",
    "AlarmWatch",
    "JsonlWriter",
    "QueuedWriter",
    "Raised",
    "Recorder",
    "RunData",
    "RunFacts",
    "SystemWatch",
    "VerdictSettings",
    "WatchedLoop",
    "age_histogram",
    "describe_run",
    "evaluations",
    "load_run",
    "make_verdict_settings",
    "open_view",
    "run_name",
    "summarize_steps",
    "write_report",
]
