"""What all pictures share: two themes, one size of paper, units of time."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib
from matplotlib.figure import Figure

from headrace.run.observe.rundata import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours: those of Okabe and Ito, which the colour-blind tell apart, lightened for a dark page."""

    paper: str
    ink: str
    faint: str
    grid: str
    blue: str
    orange: str
    green: str
    purple: str
    sky: str
    red: str
    wait: str
    brown: str
    pale: str
    slate: str


LIGHT = Theme(
    paper="#ffffff", ink="#1b2330", faint="#5b6675", grid="#e3e7ec", blue="#0072B2", orange="#E69F00", green="#009E73",
    purple="#CC79A7", sky="#56B4E9", red="#D55E00", wait="#dfe3e8", brown="#B07A00", pale="#B9DDF5", slate="#A9B4C0",
)  # fmt: skip
DARK = Theme(
    paper="#171c24", ink="#e8ecf1", faint="#9aa7b6", grid="#2b3440", blue="#4ba3e3", orange="#F0B429", green="#2bc49a",
    purple="#e08fbd", sky="#8fd0f5", red="#f07a35", wait="#39434f", brown="#C08F2A", pale="#5f8aa6", slate="#66727f",
)  # fmt: skip

R = TypeVar("R")
Draw = Callable[[Figure, RunData, Theme], None]
"""A picture: draws a run on an empty figure."""


def render(draw: Callable[[Figure, R, Theme], None], run: R, theme: Theme, height: float) -> bytes:
    """The PNG of one picture, ``height`` inches high and 9.6 wide."""
    style: dict[str, Any] = {
        "font.family": "DejaVu Sans", "font.size": 9.5, "text.color": theme.ink, "text.parse_math": False,
        "axes.facecolor": theme.paper, "axes.edgecolor": theme.grid, "axes.labelcolor": theme.faint,
        "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "grid.color": theme.grid, "grid.linewidth": 0.8, "xtick.color": theme.faint, "ytick.color": theme.faint,
        "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "figure.facecolor": theme.paper,
        "figure.constrained_layout.h_pad": 0.1, "figure.constrained_layout.w_pad": 0.08,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, height), dpi=160, layout="constrained")
        draw(figure, run, theme)
        png = io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": "headrace"})
    return png.getvalue()


def time_unit(seconds: float) -> tuple[float, str]:
    """How many seconds the unit has in which a span of time is best shown, and its name.

    >>> time_unit(90), time_unit(3000)
    ((1.0, 'seconds'), (60.0, 'minutes'))
    """
    if seconds < 240:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


def say(axes: Any, text: str, theme: Theme) -> None:
    """Words where there is nothing to draw."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=theme.faint, fontsize=12)
