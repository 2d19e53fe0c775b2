"""The report of a run, which is its dashboard as one HTML file, and the registry of the functions that write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.base.errors import RunError
from headrace.base.plugins import Registry

REPORTS: Registry[Callable[[Path], Path]] = Registry(group="headrace.reports", setting="report")
"""Functions that write a page about a run into its directory and return the path of the page. The dashboard registers
``page``, so that the core does not import it."""


def write_report(run_dir: Path) -> Path:
    """Write ``report/report.html`` under ``run_dir``, the dashboard of the run as one file, and return its path.

    For a run that is still running, was killed or lacks a file, the report contains the available data and notes on
    the missing files. Raises :class:`~headrace.base.errors.DataError` if ``run_dir`` holds no run, and
    :class:`~headrace.base.errors.RunError` if the report cannot be written.
    """
    if "page" not in REPORTS:
        raise RunError(
            "no report can be written: this installation of Headrace does not list its dashboard",
            remedy="install it again (in a checkout: pip install -e .); headrace report RUN then writes the report",
        )
    return REPORTS.load("page")(run_dir)
