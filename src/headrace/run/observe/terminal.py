"""The terminal view: a picture that is redrawn in place on a terminal, or one plain line per step elsewhere.

A view is an observer of a run: the controller calls ``step`` with the record of each optimizer step, ``event`` with
each message, ``spans`` with parts of the event trace, and ``update`` with the present state once a second.
Control characters in the text of a model, of data or of an error are made visible, and no text is read as markup.
"""

from __future__ import annotations

from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.base.errors import visible
from headrace.base.types.observation import Event, LiveState, StepRecord, Wait
from headrace.control.observer import Observer
from headrace.run.observe.words import ages_in_words, bar, duration, number, percent, sparkline

NARROW = 60
"""The width in columns below which the frame and the explanations are omitted."""


class TerminalView(Observer):
    """The base class of views: an observer that shows the run to a person in the terminal, and a context manager that
    restores the terminal at its end. This class shows nothing, for ``observe.view = "none"``."""

    def __enter__(self) -> Self:
        """Begin to show the run, and return the view."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the display, and restore the terminal."""


def open_view(stream: TextIO, steps_total: int) -> TerminalView:
    """Return the view for ``stream``, usually standard output: a :class:`LiveView` if ``stream`` is a terminal that can
    move its cursor and show Unicode, else a :class:`PlainView`. ``steps_total`` is the number of optimizer steps of the
    whole run, which the plain lines show."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only:
        return LiveView(console)
    return PlainView(stream, steps_total)


class PlainView(TerminalView):
    """A view that prints one line for each optimizer step and each event, for output to a file or a pipe.

    >>> import sys
    >>> record = StepRecord(step=0, version=1, clock_s=9.0, wall_s=4.0, reward_mean=0.5, seconds=0.5, ages={0: 8})
    >>> PlainView(sys.stdout, 10).step(record)
    step 1/10  reward 0.5  train 0.50 s  wait 0 s  ages 0: 100%  ready 0  at 4.0 s
    """

    def __init__(self, stream: TextIO, steps_total: int) -> None:
        """Create a view that prints to ``stream``. ``steps_total`` is the number of optimizer steps of the whole
        run."""
        self._stream = stream
        self._steps_total = steps_total

    def step(self, record: StepRecord) -> None:
        """Print one line about an optimizer step: its number, mean reward, training time, waiting time, token ages,
        groups that are ready, and the time since the run started."""
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
        """Print the text of the event and its time since the run started, with ``warning:`` before a warning."""
        mark = "warning: " if event.level == "warning" else ""
        self._print(f"{mark}{visible(event.text)}  at {duration(event.wall_s)}")

    def __exit__(self, *_: object) -> None:
        """Flush the stream, which stays open."""
        self._stream.flush()

    def _print(self, line: str) -> None:
        """Write a line to the stream at once, with ``?`` for characters that its encoding does not have."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class LiveView(TerminalView):
    """A view that draws a picture of the run's present state in the last lines of the terminal, redraws it once a
    second, and prints events above it."""

    def __init__(self, console: Console) -> None:
        """Prepare the picture on ``console``. The picture appears when the view is entered as a context manager."""
        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def event(self, event: Event) -> None:
        """Print the event above the picture: the time since the run started, and its text, yellow for a warning."""
        text = Text(f"{duration(event.wall_s):>12}  ", style="dim")
        text.append(visible(event.text), style="yellow" if event.level == "warning" else "")
        self._console.print(text)

    def update(self, state: LiveState) -> None:
        """Redraw the picture from the present state of the run."""
        picture = draw(state, self._console.width)
        self._live.update(picture, refresh=True)

    def __enter__(self) -> Self:
        """Begin to draw in the last lines of the terminal, and return the view."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing; the last picture stays on the terminal."""
        self._live.stop()


def draw(state: LiveState, width: int) -> RenderableType:
    """Return the picture of the run's present state for a terminal of ``width`` columns: rows with progress, reward,
    rates, groups and token ages (for a run on given rows, the figures of its last step), then the waits of the loops,
    the verdict, warnings and a sample completion. Below :data:`NARROW` columns the frame and the sample are omitted."""
    shown = _Rows(state, width)
    idle = (None, None) if state.account is None else (state.account.engine_idle, state.account.learner_idle)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True, min_width=9)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    rows.add_row("progress", shown.progress())
    if state.figures is not None:
        rows.add_row("last step", Text(state.figures or "none yet"))
        rows.add_row("learner", Text(f"{number(state.trained_tok_s)} tok/s  version {state.learner_version}"))
    else:
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
    """The parts of the live picture for one state of the run, each returned by a method as text that ``rich`` prints.
    :func:`draw` puts them together."""

    def __init__(self, state: LiveState, width: int) -> None:
        """Prepare the parts of ``state`` for a terminal of ``width`` columns, which defines the length of bars and
        texts."""
        self.narrow = width < NARROW
        """Whether the terminal is narrow, so that some parts are omitted or shorter."""
        self._state = state
        self._inner_width = min(width, 110) - (0 if self.narrow else 4)
        """The width inside the frame, in columns."""
        self._bar_width = max(6, min(30, self._inner_width - 54))
        """The length of bars and sparklines, in columns."""

    def progress(self) -> Text:
        """Return a bar and the number of the steps that have ended, the time since the start, and the estimated
        remaining time, if there is an estimate."""
        state = self._state
        frac = state.steps_done / state.steps_total if state.steps_total else 0.0
        text = Text.assemble((bar(frac, self._bar_width), "cyan"), f" step {state.steps_done}/{state.steps_total}")
        left = f"  {duration(state.eta_s)} left" if state.eta_s is not None and frac < 1 else ""
        return text.append(f"  {duration(state.wall_s)}{left}", style="dim")

    def reward(self) -> Text:
        """Return a sparkline of the mean reward of every step, with the latest, the first and the best of them, and the
        latest evaluation, if there is one; ``none yet`` before the first reward."""
        known = [reward for reward in self._state.rewards if reward is not None]
        if not known:
            return Text("none yet", style="dim")
        line = sparkline(self._state.rewards, self._bar_width)
        text = Text.assemble((line, "green"), " ", (number(known[-1]), "bold"))
        text.append(f"  first {number(known[0])}  best {number(max(known))}", style="dim")
        if self._state.eval_accuracy is not None:
            text.append(f"  eval {number(self._state.eval_accuracy)}")
        return text

    def throughput(self) -> Text:
        """Return a sparkline of the tokens trained per second in each step and, on a wide terminal, one of the share of
        each step in which the learner waited for its batch. Call it only after the first step."""
        rates, waited = self._state.throughput, self._state.waited
        text = Text.assemble((sparkline(rates, self._bar_width), "green"), " ", (f"{number(rates[-1])} tok/s", "bold"))
        if waited and not self.narrow:
            text.append("  waited ", style="dim").append(sparkline(waited, self._bar_width // 2), style="yellow")
            text.append(f" {percent(waited[-1])}")
        return text

    def component(self, tok_s: float, idle: float | None, version: int) -> Text:
        """Return the row of the engine or of the learner: a bar of the share of time in which it worked, its rate and
        the version of its weights.

        ``idle`` is the share of time in which it did not work, from 0 to 1; ``None`` before it has started. ``tok_s``
        is its rate in tokens per second, sampled or trained; ``version`` is −1 if it has no weights yet.
        """
        if idle is None:
            return Text("not started yet", style="dim")
        text = Text.assemble(
            (bar(1 - idle, self._bar_width), "blue"),
            f" {percent(1 - idle):>4} busy  ",
            (f"{number(tok_s)} tok/s", "bold"),
        )
        return text.append(f"  version {version}" if version >= 0 else "  no version yet", style="dim")

    def queue(self) -> Text:
        """Return the numbers of groups that are submitted, running, and ready to be trained."""
        queue = self._state.queue
        return Text(f"{queue.submitted} submitted  {queue.running} running  {queue.ready} ready")

    def ages(self) -> Text:
        """Return a bar that is divided by the ages of all trained tokens, in versions, and the share of each age in
        words. Each of the three lowest ages has a shade of its own; all higher ages have the fourth shade."""
        ages = sorted(self._state.ages.items())
        total = sum(self._state.ages.values())
        if not total:
            return Text("nothing trained yet", style="dim")
        text = Text()
        for index, (_, tokens) in enumerate(ages):
            text.append("█▓▒░"[min(index, 3)] * round(tokens / total * self._bar_width), style="magenta")
        return text.append(f" {ages_in_words(dict(ages))}")

    def waits(self) -> Table:
        """Return a table with one row for each loop of the controller: its name, whether it works or waits, on what,
        for how long, and (on a wide terminal) which part can end the wait."""
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=not self.narrow, header_style="dim", pad_edge=False)
        table.add_column("loop", no_wrap=True, min_width=8)
        table.add_column("", no_wrap=True, min_width=7)
        table.add_column("on what", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("for", justify="right", no_wrap=True, min_width=5)
        if not self.narrow:
            table.add_column("unblocked by", no_wrap=True, overflow="ellipsis")
        for wait in self._state.waits:
            table.add_row(*self._format_wait(wait))
        return table

    def _format_wait(self, wait: Wait) -> list[Text]:
        """Return the cells of one loop's row in the table of :meth:`waits`. On a narrow terminal the last cell, the
        part that can end the wait, is omitted."""
        style = "yellow" if wait.state == "waiting" else "green"
        row = [
            Text(visible(wait.loop, 20)),
            Text(wait.state, style=style),
            Text(visible(wait.what, 200)),
            Text(duration(wait.since_s)),
        ]
        return row if self.narrow else [*row, Text(visible(wait.unblocked_by, 40))]

    def verdict(self) -> Text:
        """Return the verdict on the run, which names its bottleneck in bold; an empty text while there is none."""
        if not self._state.verdict:
            return Text(end="")
        bound, _, words = self._state.verdict.partition(": ")
        return Text.assemble("\n" if self._state.waits else "", (f"{bound}: ", "bold"), words)

    def warnings(self) -> list[Text]:
        """Return the last three warnings of the run, oldest first, each on a line of its own."""
        return [Text(f"⚠ {visible(warning, 500)}", style="yellow") for warning in self._state.warnings[-3:]]

    def sample(self) -> Text:
        """Return the latest completion of the policy, cut to about two lines and with control characters made visible,
        and its reward if that is known."""
        text = Text("latest completion", style="dim", no_wrap=True, overflow="ellipsis", end="")
        if self._state.sample_reward is not None:
            text.append(f" (reward {number(self._state.sample_reward)})")
        return text.append(": ").append(visible(self._state.sample, 2 * self._inner_width), style="not dim")
