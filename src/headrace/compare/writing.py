"""What a comparison leaves in its directory."""

from __future__ import annotations

import msgspec

from headrace.bench.base import Report, report
from headrace.compare.picture import compare_png
from headrace.compare.running import RecipeComparison
from headrace.compare.tables import markdown
from headrace.errors import RunError
from headrace.session.directory import write_json


def report_of(made: RecipeComparison) -> Report:
    """The rows with the machine they were measured on."""
    return report([msgspec.to_builtins(row) for row in made.rows], [])


def write(made: RecipeComparison) -> None:
    """``compare.json``, ``compare.md`` and ``compare.png``. Raises :class:`~headrace.errors.RunError` where they cannot
    be written."""
    try:
        write_json(made.directory / "compare.json", report_of(made))
        (made.directory / "compare.md").write_text(markdown(made.base, made.rows), encoding="utf-8")
        (made.directory / "compare.png").write_bytes(compare_png(made.rows))
    except OSError as error:
        remedy = "make room on that disk; the runs themselves are not affected, and the same command goes on"
        raise RunError(f"{made.directory} cannot be written: {error.strerror}", remedy=remedy) from None
