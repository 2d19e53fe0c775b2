"""Writes the results of a comparison into its directory."""

from __future__ import annotations

import msgspec

from headrace.base.errors import RunError
from headrace.run.session.directory import write_json
from headrace.wings.bench.base import Report, report
from headrace.wings.compare.picture import compare_svg
from headrace.wings.compare.running import RecipeComparison
from headrace.wings.compare.tables import markdown


def report_of(made: RecipeComparison) -> Report:
    """Return the rows together with a description of the machine they were measured on."""
    return report([msgspec.to_builtins(row) for row in made.rows], [])


def write(made: RecipeComparison) -> None:
    """Write ``compare.json``, ``compare.md`` and ``compare.svg`` into the directory of a comparison.

    Raises :class:`~headrace.base.errors.RunError` if a file cannot be written.
    """
    try:
        write_json(made.directory / "compare.json", report_of(made))
        (made.directory / "compare.md").write_text(markdown(made.base, made.rows), encoding="utf-8")
        (made.directory / "compare.svg").write_bytes(compare_svg(made.rows))
    except OSError as error:
        remedy = "make room on that disk; the runs themselves are not affected, and the same command continues"
        raise RunError(f"{made.directory} cannot be written: {error.strerror}", remedy=remedy) from None
