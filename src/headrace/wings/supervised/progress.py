"""The progress of a run on given rows in the terminal: one line that is redrawn, or one plain line per step."""

from __future__ import annotations

import sys
from typing import Literal, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from headrace.base.errors import visible
from headrace.base.lasting import LossTolerantStream
from headrace.base.types.observation import Event, StepRecord
from headrace.run.observe.terminal import TerminalView
from headrace.run.observe.words import duration, number


def open_progress(view: Literal["auto", "plain", "none"], num_steps: int) -> TerminalView:
    """Return the display for the setting ``view``: ``auto`` for a progress bar on a terminal and plain lines elsewhere,
    ``plain`` for plain lines, ``none`` for no output. ``num_steps`` is the number of steps of the whole run."""
    if view == "none":
        return TerminalView()
    stream = LossTolerantStream(sys.stdout)
    console = Console(file=stream, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
    if view == "auto" and sys.stdout.isatty() and not console.is_dumb_terminal:
        return BarView(console, num_steps)
    return LineView(stream, num_steps)  # type: ignore[arg-type]


def format_figures(record: StepRecord) -> str:
    """Return the main figures of the step ``record`` on one line, for people; missing figures are left out."""
    metrics = record.metrics
    named = [("loss", "loss"), ("lr", "lr"), ("grad_norm", "grad norm")]
    named += [(name, name.replace("_", " ")) for name in metrics if name.endswith("_accuracy")]
    named += [("eval/loss", "eval loss"), ("trained_tok_s", "tok/s")]
    return "  ".join(
        f"{words} {_format_figure(metrics[name])}" for name, words in named if metrics.get(name) is not None
    )


def _format_figure(value: float | None) -> str:
    """Return a figure as text; a value below 0.001, such as a learning rate, with three significant digits."""
    return number(value) if value is None or value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


class LineView(TerminalView):
    """A display of one line per step and per event, for files and pipes."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        """Create a display that writes to ``stream``; the run has ``num_steps`` steps."""
        self._stream = stream
        self._num_steps = num_steps

    def step(self, record: StepRecord) -> None:
        """Print a line with the number of the step, its figures and the time since the start."""
        self._print(f"step {record.step + 1}/{self._num_steps}  {format_figures(record)}  at {duration(record.wall_s)}")

    def event(self, event: Event) -> None:
        """Print the text of the event, with control characters made visible."""
        self._print(f"{'warning: ' if event.level == 'warning' else ''}{visible(event.text)}")

    def __exit__(self, *_: object) -> None:
        """Flush the stream."""
        self._stream.flush()

    def _print(self, line: str) -> None:
        """Write one line at once, so that a file or pipe shows it without delay."""
        self._stream.write(f"{line}\n")
        self._stream.flush()


class BarView(TerminalView):
    """A bar with the figures of the last step at the foot of the terminal; events are printed above it."""

    def __init__(self, console: Console, num_steps: int) -> None:
        """Create a display that draws on ``console``; the run has ``num_steps`` steps."""
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        """The bar, which rich draws."""
        self._task = self._progress.add_task("starting", total=num_steps)
        """The number by which rich knows the bar's only task."""

    def step(self, record: StepRecord) -> None:
        """Move the bar to the step, and show the figures of the step beside it."""
        self._progress.update(self._task, completed=record.step + 1, description=format_figures(record))

    def event(self, event: Event) -> None:
        """Print the text of the event above the bar, in yellow if it is a warning."""
        self._progress.console.print(
            Text(visible(event.text), style="yellow" if event.level == "warning" else "dim")
        )  # fmt: skip

    def __enter__(self) -> Self:
        """Draw the bar, and return the display."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar from the terminal."""
        self._progress.stop()
