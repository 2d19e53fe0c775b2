"""Reads the directory of a run for a calibration."""

from __future__ import annotations

from pathlib import Path

from headrace.flow.ledger.browse import Browser
from headrace.run.observe.rundata import load_run
from headrace.wings.plan.calibration import RunRecording, calibrate
from headrace.wings.plan.system import Measured


def calibrated(*run_dirs: Path) -> Measured:
    """What these runs say of engine, learner and sync."""
    return calibrate([recording(each) for each in run_dirs])


def recording(run_dir: Path) -> RunRecording:
    """:class:`~headrace.base.errors.DataError` where there is no run."""
    run = load_run(run_dir)
    browser = Browser.of_run(run_dir)
    try:
        lengths = browser.lengths().submitted
    finally:
        browser.close()
    return RunRecording(name=str(run_dir), steps=run.session, spans=run.spans, lengths=lengths, config=run.config)
