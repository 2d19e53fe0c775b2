"""The terminal view: a picture that is redrawn in place on a terminal, or one plain line per step elsewhere.

Control characters in the text of a model, of data or of an error are spelled out, and no text is read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.base.errors import visible
from headrace.base.types.observation import Event, LiveState, StepRecord, Wait
from headrace.base.types.trace import Span
from headrace.control.observer import Observer
from headrace.run.observe.words import ages_in_words, bar, duration, number, percent, sparkline

NARROW = 60
"""The width in columns below which the frame and the explanations are left out."""


class TerminalView(Observer, Protocol):
    """An observer that also shows the present state. It is a context manager, which restores the terminal at its
    end."""

    def update(self, state: LiveState) -> None:
        """Show the present state."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def open_view(stream: TextIO, steps_total: int) -> TerminalView:
    """Return the live picture where ``stream`` is a terminal that redraws and shows Unicode, else plain lines."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only:
        return LiveView(console)
    return PlainView(stream, steps_total)


class PlainView:
    """One line per step and per event, for files and pipes.

    >>> import sys
    >>> record = StepRecord(step=0, version=1, clock_s=9.0, wall_s=4.0, reward_mean=0.5, seconds=0.5, ages={0: 8})
    >>> PlainView(sys.stdout, 10).step(record)
    step 1/10  reward 0.5  train 0.50 s  wait 0 s  ages 0: 100%  ready 0  at 4.0 s
    """

    def __init__(self, stream: TextIO, steps_total: int) -> None:
        self._stream = stream
        self._steps_total = steps_total

    def step(self, record: StepRecord) -> None:
        """Print a line about the step."""
        parts = [f"step {record.step + 1}/{self._steps_total}", f"reward {number(record.reward_mean)}"]
        if record.eval_accuracy is not None:
            parts.append(f"eval {number(record.eval_accuracy)}")
        parts += [
            f"train {duration(record.seconds)}",
            f"wait {duration(record.wait_s)}",
            f"ages {ages_in_words(record.ages)}",
            f"ready {record.queue.ready}",
            f"at {duration(record.wall_s)}",
        ]
        self._print("  ".join(parts))

    def event(self, event: Event) -> None:
        """Print the event."""
        mark = "warning: " if event.level == "warning" else ""
        self._print(f"{mark}{visible(event.text)}  at {duration(event.wall_s)}")

    def spans(self, spans: Sequence[Span]) -> None:
        """Do nothing: this observer has no use for spans."""

    def update(self, state: LiveState) -> None:
        """Do nothing: lines are printed for steps and events alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stream.flush()

    def _print(self, line: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class SilentView:
    """A view that prints nothing."""

    def step(self, record: StepRecord) -> None:
        """Do nothing."""

    def event(self, event: Event) -> None:
        """Do nothing."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Do nothing."""

    def update(self, state: LiveState) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return


class LiveView:
    """A picture that stays at the foot of the terminal. Events are printed above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def step(self, record: StepRecord) -> None:
        """Do nothing: :meth:`update` draws the steps."""

    def event(self, event: Event) -> None:
        """Print the event above the picture."""
        text = Text(f"{duration(event.wall_s):>12}  ", style="dim")
        text.append(visible(event.text), style="yellow" if event.level == "warning" else "")
        self._console.print(text)

    def spans(self, spans: Sequence[Span]) -> None:
        """Do nothing: this observer has no use for spans."""

    def update(self, state: LiveState) -> None:
        """Draw the picture of the present state."""
        picture = draw(state, self._console.width)
        self._live.update(picture, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()


def draw(state: LiveState, width: int) -> RenderableType:
    """Return the picture of ``state`` for a terminal of ``width`` columns."""
    shown = _Rows(state, width)
    idle = (None, None) if state.account is None else (state.account.engine_idle, state.account.learner_idle)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True, min_width=9)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    rows.add_row("progress", shown.progress())
    rows.add_row("reward", shown.reward())
    if state.throughput:
        rows.add_row("trained", shown.throughput())
    rows.add_row("engine", shown.component(state.generated_tok_s, idle[0], state.engine_version))
    rows.add_row("learner", shown.component(state.trained_tok_s, idle[1], state.learner_version))
    rows.add_row("groups", shown.queue())
    rows.add_row("token age", shown.ages())
    parts: list[RenderableType] = [rows]
    if state.waits:
        parts += [Text(), shown.waits()]
    parts += [shown.verdict(), *shown.warnings()]
    if state.sample and not shown.narrow:
        parts.append(shown.sample())
    if shown.narrow:
        return Group(*parts)
    title = Text.assemble((" headrace ", "bold"), (f"{visible(state.title, 60)} ", ""), (f"{state.phase} ", "cyan"))
    return Panel(
        Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1), width=min(width, 110)
    )


class _Rows:
    """Draws the rows of the picture for one state."""

    def __init__(self, state: LiveState, width: int) -> None:
        self.narrow = width < NARROW
        self._state = state
        self._inner = min(width, 110) - (0 if self.narrow else 4)
        self._bars = max(6, min(30, self._inner - 54))

    def progress(self) -> Text:
        """Return the bar of steps with the times."""
        state = self._state
        frac = state.steps_done / state.steps_total if state.steps_total else 0.0
        text = Text.assemble((self._bar(frac), "cyan"), f" step {state.steps_done}/{state.steps_total}")
        left = f"  {duration(state.eta_s)} left" if state.eta_s is not None and frac < 1 else ""
        return text.append(f"  {duration(state.wall_s)}{left}", style="dim")

    def reward(self) -> Text:
        """Return the curve of the mean rewards."""
        known = [reward for reward in self._state.rewards if reward is not None]
        if not known:
            return Text("none yet", style="dim")
        line = sparkline(self._state.rewards, self._bars)
        text = Text.assemble((line, "green"), " ", (number(known[-1]), "bold"))
        text.append(f"  first {number(known[0])}  best {number(max(known))}", style="dim")
        if self._state.eval_accuracy is not None:
            text.append(f"  eval {number(self._state.eval_accuracy)}")
        return text

    def throughput(self) -> Text:
        """Return the tokens trained per second in each step, and the share of each step for which the learner
        waited."""
        rates, waited = self._state.throughput, self._state.waited
        text = Text.assemble((sparkline(rates, self._bars), "green"), " ", (f"{number(rates[-1])} tok/s", "bold"))
        if waited and not self.narrow:
            text.append("  waited ", style="dim").append(sparkline(waited, self._bars // 2), style="yellow")
            text.append(f" {percent(waited[-1])}")
        return text

    def component(self, tok_s: float, idle: float | None, version: int) -> Text:
        """Return the bar of the working time of the engine or the learner, with its rate and version."""
        if idle is None:
            return Text("not started yet", style="dim")
        text = Text.assemble(
            (self._bar(1 - idle), "blue"), f" {percent(1 - idle):>4} busy  ", (f"{number(tok_s)} tok/s", "bold")
        )
        return text.append(f"  version {version}" if version >= 0 else "  no version yet", style="dim")

    def queue(self) -> Text:
        """Return the number of groups in each state."""
        queue = self._state.queue
        return Text(f"{queue.submitted} submitted  {queue.running} running  {queue.ready} ready")

    def ages(self) -> Text:
        """Return the bar of the ages of trained tokens."""
        ages = sorted(self._state.ages.items())
        total = sum(self._state.ages.values())
        if not total:
            return Text("nothing trained yet", style="dim")
        text = Text()
        for index, (_, tokens) in enumerate(ages):
            text.append("█▓▒░"[min(index, 3)] * round(tokens / total * self._bars), style="magenta")
        return text.append(f" {ages_in_words(dict(ages))}")

    def waits(self) -> Table:
        """Return the table of the loops and what they wait for."""
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=not self.narrow, header_style="dim", pad_edge=False)
        table.add_column("loop", no_wrap=True, min_width=8)
        table.add_column("", no_wrap=True, min_width=7)
        table.add_column("on what", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("for", justify="right", no_wrap=True, min_width=5)
        if not self.narrow:
            table.add_column("unblocked by", no_wrap=True, overflow="ellipsis")
        for wait in self._state.waits:
            table.add_row(*self._wait_row(wait))
        return table

    def _wait_row(self, wait: Wait) -> list[Text]:
        """Return the table row of a loop that waits or works; a narrow terminal does not show what ends the wait."""
        style = "yellow" if wait.state == "waiting" else "green"
        row = [
            Text(visible(wait.loop, 20)),
            Text(wait.state, style=style),
            Text(visible(wait.what, 200)),
            Text(duration(wait.since_s)),
        ]
        return row if self.narrow else [*row, Text(visible(wait.unblocked_by, 40))]

    def verdict(self) -> Text:
        """Return the verdict."""
        if not self._state.verdict:
            return Text(end="")
        bound, _, words = self._state.verdict.partition(": ")
        return Text.assemble("\n" if self._state.waits else "", (f"{bound}: ", "bold"), words)

    def warnings(self) -> list[Text]:
        """Return the last three warnings."""
        return [Text(f"⚠ {visible(warning, 500)}", style="yellow") for warning in self._state.warnings[-3:]]

    def sample(self) -> Text:
        """Return the latest completion, cut to two lines."""
        text = Text("latest completion", style="dim", no_wrap=True, overflow="ellipsis", end="")
        if self._state.sample_reward is not None:
            text.append(f" (reward {number(self._state.sample_reward)})")
        return text.append(": ").append(visible(self._state.sample, 2 * self._inner), style="not dim")

    def _bar(self, frac: float) -> str:
        return bar(frac, self._bars)
