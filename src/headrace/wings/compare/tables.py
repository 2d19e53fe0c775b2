"""The rows of a comparison as text: cells of the table for the terminal, and the tables of ``compare.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.run.observe.words import number
from headrace.wings.compare.rows import RecipeRow


def _format_percent(value: float | None) -> str:
    """Return a fraction as a percentage; a dash for ``None`` (unknown)."""
    return "–" if value is None else f"{value:.0%}"


def _format_signed(value: float | None) -> str:
    """Return a number with its sign and two decimals; a dash for ``None`` (unknown)."""
    return "–" if value is None else f"{value:+.2f}"


def _format_kilobytes(value: float | None) -> str:
    """Return a number of bytes in kilobytes; a dash for ``None`` (unknown)."""
    return "–" if value is None else f"{value / 1e3:,.0f}"


COLUMNS: dict[str, Callable[[RecipeRow], str]] = {
    "recipe": lambda row: row.recipe + ("*" if row.resumed else ""),
    "held-out": lambda row: f"{number(row.eval_before, 2)} → {number(row.eval_after, 2)}",
    "gain/min": lambda row: _format_signed(row.gain_per_minute),
    "gain/Mtok": lambda row: _format_signed(row.gain_per_mtok),
    "s": lambda row: f"{row.seconds:.1f}",
    "generated tok/s": lambda row: number(row.generated_tok_s, 4),
    "trained tok/s": lambda row: number(row.trained_tok_s, 4),
    "engine idle": lambda row: _format_percent(row.engine_idle_frac),
    "learner idle": lambda row: _format_percent(row.learner_idle_frac),
    "age": lambda row: "–" if row.age_mean is None else f"{row.age_mean:.2f}",
    "oldest": lambda row: "–" if row.age_max is None else str(row.age_max),
    "wasted": lambda row: _format_percent(row.wasted_frac),
    "gap p99 ms": lambda row: number(row.gap_p99_ms, 2),
    "wait ms": lambda row: number(row.commit_wait_ms, 2),
    "sync stall": lambda row: _format_percent(row.exposed_sync_frac),
    "kB/version": lambda row: _format_kilobytes(row.sync_bytes),
}
"""Title of each column, and the function that returns its text for a row."""

MEANING = """\
`held-out`: mean reward on the held-out rows, before and after. `gain`: the difference, by minute of training and by
million generated tokens. `s`: from the first rollout to the last commit. `idle`: of that time. `age`: of trained tokens
in versions, the mean; `oldest`: the largest. `wasted`: generated tokens that are never trained. `gap`: how long the
engine stood still per commit. `wait`: how long a commit waited for running sequences. `sync stall`: of the learner's
time. `kB/version`: what of a version was sent, or read where it lies. `*`: broken off and resumed; the figures are
those of the last part."""
"""The meaning of the columns, in Markdown."""

SETTINGS = ("policy", "max_age", "lead", "interrupt", "transport", "codec", "loss", "correction")
"""Settings that recipes decide, in the order of the second table."""


def make_cells(rows: Sequence[RecipeRow]) -> list[list[str]]:
    """Return the cells of the table of results: the text of every column, for each row whose run has not failed."""
    return [[get(row) for get in COLUMNS.values()] for row in rows if row.status != "failed"]


def describe_failures(rows: Sequence[RecipeRow]) -> list[str]:
    """Return a line of text with the cause for each of ``rows`` whose run has failed."""
    return [f"{row.recipe} failed: {row.cause}" for row in rows if row.status == "failed"]


def make_document(base: str, rows: Sequence[RecipeRow]) -> str:
    """Return the Markdown document of a comparison with ``rows``: the table of results, the meaning of its columns, and
    the table of the settings that the recipes decide. ``base`` is the name of the run file, or "the demo"."""
    settings = [[row.recipe, *(row.settings.get(name, "–") for name in SETTINGS)] for row in rows]
    steps = max((row.steps for row in rows), default=0)
    return "\n".join([
        f"# Recipes on {base}, {steps} steps each",
        "",
        *_make_markdown_table(list(COLUMNS), make_cells(rows)),
        "",
        *(f"- {line}" for line in describe_failures(rows)),
        MEANING,
        "",
        "## What each decides",
        "",
        *_make_markdown_table(["recipe", *SETTINGS], settings),
        "",
    ])  # fmt: skip


def _make_markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table with the headings ``head`` and the rows ``lines``. The first column is
    aligned left, and all others right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(line) + " |" for line in (head, rule, *lines)]
