"""What the files of a run directory say, as far as they can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import DataError, HeadraceError, visible
from headrace.base.types.observation import Account, Event, StepRecord
from headrace.base.types.trace import Span
from headrace.models.hub import called, is_hub_name
from headrace.run.observe.account import account_of
from headrace.run.observe.jsonl import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, read_jsonl, read_steps
from headrace.run.observe.settings import settings_of
from headrace.run.observe.summary import figures_of, observed
from headrace.run.observe.trace import Interval
from headrace.run.observe.verdict import judge
from headrace.run.observe.words import plural

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"

R = TypeVar("R")


def last_life(steps: list[StepRecord]) -> list[StepRecord]:
    """Return the steps since the run was last started: a resumed run begins a new clock."""
    first = 0
    for index in range(1, len(steps)):
        earlier, later = steps[index - 1], steps[index]
        if later.clock_s < earlier.clock_s or later.wall_s < earlier.wall_s:
            first = index
    return steps[first:]


def about_lives(steps: list[StepRecord]) -> str:
    """Return what the figures of a resumed run are of, in words; nothing where the run has had one life."""
    last = len(last_life(steps))
    if last == len(steps):
        return ""
    return (
        f"The run was resumed: times, rates, shares and the verdict are of the {plural(last, 'step')} since then, "
        "rewards and the books of the whole run."
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its directory holds it; a file that is missing or damaged leaves its field empty and a note."""

    directory: Path
    steps: list[StepRecord]
    spans: list[Span]
    summary: dict[str, Any]
    config: dict[str, Any]
    live: dict[str, Any] = field(default_factory=dict)
    """The last picture of the present moment."""
    events: list[Event] = field(default_factory=list)
    """What was worth a line, alarms included; of every life of the run."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    @cached_property
    def session(self) -> list[StepRecord]:
        """The steps since the run was last started: see :func:`last_life`."""
        return last_life(self.steps)

    @cached_property
    def loop(self) -> Interval:
        """From the start of the wait for the session's first batch to the end of its last step, on the spans' clock."""
        steps = self.session
        if steps:
            return steps[0].clock_s - steps[0].seconds - steps[0].wait_s, steps[-1].clock_s
        if self.spans:
            return min(span.start_s for span in self.spans), max(span.end_s for span in self.spans)
        return 0.0, 0.0

    @cached_property
    def account(self) -> Account | None:
        """Where the time and the tokens of the loop went, as the run itself has said last; else by its trace; ``None``
        without either."""
        told = told_account(self.summary) or told_account(self.live)
        if told is not None or not self.spans or self.loop[0] >= self.loop[1]:
            return told
        return account_of(self.spans, self.session, self.loop)

    @cached_property
    def verdict(self) -> str:
        """What held the run up, in words, as the run itself has said last; else by its trace; empty before the first
        step, and where no trace is there."""
        told = next((str(tree["verdict"]) for tree in (self.summary, self.live) if tree.get("verdict")), "")
        if told or not self.steps or self.account is None:
            return told
        return str(judge(self.account, settings_of(self.config)))

    @property
    def name(self) -> str:
        """What people call it."""
        return run_name(self.directory, self.config)

    def setting(self, section: str, key: str) -> Any:
        """A value of the resolved configuration; ``None`` where it has none."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, dict) else None

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The summary; where the run has left none, what steps and trace say in its place."""
        told = observed(self.steps, self.steps[-1].wall_s if self.steps else 0.0)
        return {**told, **({} if self.account is None else figures_of(self.account)), **self.summary}

    def measured(self, key: str) -> float | None:
        """One number of the figures; ``None`` where there is none."""
        value = self.figures.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def run_name(directory: Path, config: Mapping[str, Any]) -> str:
    """What people call the run in ``directory``: its name, or the name of its directory; of one that is called ``run``
    with that of the directory above it.

    >>> run_name(Path("/runs/sums/run"), {}), run_name(Path("/runs/sums"), {"run": {"name": "first try"}})
    ('sums/run', 'first try')
    """
    table = config.get("run")
    given = table.get("name") if isinstance(table, dict) else None
    return visible(str(given or _called(directory.resolve())))


def run_about(config: Mapping[str, Any]) -> str:
    """Model, rows and reward or environment of a run, in a line; empty where its settings say none of them.

    >>> run_about({"model": {"path": "/m/Qwen3-0.6B"}, "data": {"path": "/d/sums.jsonl"}, "env": {"reward": "/r.py:f"}})
    'Qwen3-0.6B · sums.jsonl · r.py:f'
    """
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    settings = (("model", "path"), ("data", "path"), ("env", "entry"), ("env", "reward"))
    values = [tables.get(section, {}).get(key) for section, key in settings]
    known = [value for value in values if isinstance(value, str) and value]
    return visible(" · ".join(called(value) if is_hub_name(value) else _called(Path(value)) for value in known))


def _called(path: Path) -> str:
    return f"{path.parent.name}/{path.name}" if path.name in _TOO_PLAIN and path.parent.name else path.name


_TOO_PLAIN = ("run", "model")
"""Names of directories that say nothing without the directory that they are in."""


def load_run(run_dir: Path) -> RunData:
    """Raises :class:`~headrace.base.errors.DataError` if ``run_dir`` is no directory or holds no file of a run."""
    names = (METRICS_FILE, TRACE_FILE, SUMMARY_FILE, CONFIG_FILE)
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in names):
        what = "holds no run" if run_dir.is_dir() else "is not a directory"
        raise DataError(f"{run_dir} {what}", remedy=f"name a directory with {METRICS_FILE} in it, as a run writes it")
    notes: list[str] = []
    metrics, trace = run_dir / METRICS_FILE, run_dir / TRACE_FILE
    return RunData(
        directory=run_dir,
        steps=_try(lambda: read_steps(metrics, notes.append), metrics, [], notes),
        spans=_try(lambda: _sound(read_jsonl(trace, Span, notes.append)), trace, [], notes),
        summary=_try(lambda: _tree(run_dir / SUMMARY_FILE), run_dir / SUMMARY_FILE, {}, notes),
        config=_try(lambda: _tree(run_dir / CONFIG_FILE), run_dir / CONFIG_FILE, {}, notes),
        live=_live(run_dir),
        events=_events(run_dir, notes),
        notes=notes,
    )


def told_account(tree: Mapping[str, Any]) -> Account | None:
    """The account in ``summary.json`` or ``live.json``; ``None`` where it holds none of some time."""
    try:
        account = msgspec.convert(tree.get("account") or {}, Account)
    except msgspec.ValidationError:
        return None
    return account if account.seconds > 0 else None


def _live(run_dir: Path) -> dict[str, Any]:
    """The last picture of the present moment; empty where there is none: no report depends on it."""
    try:
        return _tree(run_dir / LIVE_FILE)
    except DataError:
        return {}


def _events(run_dir: Path, notes: list[str]) -> list[Event]:
    path = run_dir / EVENTS_FILE
    return _try(lambda: read_jsonl(path, Event, notes.append), path, [], notes) if path.exists() else []


def _try(read: Callable[[], R], path: Path, empty: R, notes: list[str]) -> R:
    if not path.exists():
        notes.append(f"{path.name} is not there{_MEANING.get(path.name, '')}")
        return empty
    try:
        return read()
    except HeadraceError as error:
        notes.append(error.problem)
        return empty


_MEANING = {SUMMARY_FILE: ": the run has not ended, or was killed"}


def _sound(spans: list[Span]) -> list[Span]:
    return sorted((span for span in spans if span.start_s <= span.end_s), key=lambda span: span.start_s)


def _tree(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="remove it, or name another run") from None
