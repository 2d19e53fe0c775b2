"""What people see of a run: files that survive, a live terminal, a report with pictures, a verdict in words.

    StepRecord ──▶ metrics.jsonl ─┐
    Span       ──▶ trace.jsonl   ─┼──▶ report/report.html and its pictures
    summary.json, config.json    ─┘
    LiveState  ──▶ terminal

Nothing here is imported by the loop; everything here reads pure data.
"""

from headrace.observe.jsonl import METRICS_FILE, TRACE_FILE, JsonlWriter, read_jsonl, read_steps
from headrace.observe.recorder import Recorder
from headrace.observe.report import run_verdict, write_report
from headrace.observe.rundata import RunData, load_run
from headrace.observe.summary import age_histogram, commit_gap_ms, observed
from headrace.observe.terminal import LiveView, PlainView, View, open_view
from headrace.observe.trace import busy_frac, fractions, idle_frac
from headrace.observe.verdict import Bound, Verdict, judge

__all__ = [
    "METRICS_FILE",
    "TRACE_FILE",
    "Bound",
    "JsonlWriter",
    "LiveView",
    "PlainView",
    "Recorder",
    "RunData",
    "Verdict",
    "View",
    "age_histogram",
    "busy_frac",
    "commit_gap_ms",
    "fractions",
    "idle_frac",
    "judge",
    "load_run",
    "observed",
    "open_view",
    "read_jsonl",
    "read_steps",
    "run_verdict",
    "write_report",
]
