"""The whole report as one picture, to show where a page cannot go."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import RunError, visible
from headrace.run.observe.report import REPORT_DIR
from headrace.run.observe.rundata import RunData, load_run
from headrace.run.observe.words import duration, number, plural

DPI = 160
GAP = 40
"""Pixels between the pictures, and around them."""
HEAD = 172
"""Pixels of the words above them, the verdict aside."""
ROW = 48
"""Pixels of a line of the verdict."""
LINE = 180
"""Characters of one line of the verdict."""


def write_poster(run_dir: Path) -> Path:
    """Write ``report/report.png`` from the pictures that :func:`~headrace.run.observe.report.write_report` has left;
    the
    path of it.

    Raises :class:`~headrace.base.errors.RunError` where they are not there or it cannot be written.
    """
    run = load_run(run_dir)
    directory = run_dir / REPORT_DIR
    target = directory / "report.png"
    try:
        _draw(run, directory, target)
    except OSError as error:
        raise RunError(
            f"{target} cannot be made: {error}", remedy=f"write the report first: headrace report {run_dir}"
        ) from None
    return target


def _draw(run: RunData, directory: Path, target: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    from headrace.run.observe.pictures import LIGHT, PICTURES

    pictures = [imread(directory / f"{name}.png") for name in PICTURES]
    columns = (pictures[0::2], pictures[1::2])
    verdict = _verdict(run)
    head = HEAD + ROW * len(verdict)
    width = 2 * max(picture.shape[1] for picture in pictures) + 3 * GAP
    height = head + max(sum(picture.shape[0] + GAP for picture in column) for column in columns)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="#f4f6f8")
    _head(figure, run, verdict, LIGHT)
    for place, column in enumerate(columns):
        top = height - head
        for picture in column:
            figure.figimage(picture, GAP + place * (width - GAP) // 2, top - picture.shape[0])
            top -= picture.shape[0] + GAP
    figure.savefig(target, format="png", metadata={"Software": "headrace"})


def _verdict(run: RunData) -> list[str]:
    words = run.verdict or "No verdict yet: no step, or no trace of one."
    return textwrap.wrap(visible(words), LINE)


def _head(figure: Any, run: RunData, verdict: Sequence[str], theme: Any) -> None:
    width, height = (size * DPI for size in figure.get_size_inches())

    def say(text: str, down: int, **style: Any) -> None:
        figure.text(GAP / width, 1 - down / height, text, va="top", parse_math=False, **style)

    say(run.name, 34, fontsize=22, fontweight="bold", color=theme.ink)
    for place, line in enumerate(verdict):
        say(line, 98 + ROW * place, fontsize=14, color=theme.ink)
    say(_figures(run), 108 + ROW * len(verdict), fontsize=12, color=theme.faint)


def _figures(run: RunData) -> str:
    get = run.measured
    parts = [
        f"{plural(len(run.steps), 'step')} in {duration(get('wall_s'))}" if run.steps else "no step",
        f"held out {number(get('eval_before'))} → {number(get('eval_after'))}",
        f"training reward {number(get('reward_first'))} → {number(get('reward_last'))}",
        f"{number(get('generated_tok_s'))} tok/s generated, {number(get('trained_tok_s'))} tok/s trained",
        f"oldest trained token {plural(get('max_token_age'), 'version')}",
    ]
    return "   ·   ".join(parts)
