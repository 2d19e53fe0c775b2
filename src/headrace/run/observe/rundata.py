"""The data of a run, read from the files of its directory as far as they can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import DataError, HeadraceError, visible
from headrace.base.types.observation import Account, Event, StepRecord
from headrace.base.types.trace import Span
from headrace.learner.disk import verify
from headrace.models.hub import called, is_hub_name
from headrace.run.observe.account import account_of
from headrace.run.observe.advice import settings_of
from headrace.run.observe.jsonl import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, read_jsonl, read_steps
from headrace.run.observe.summary import observed
from headrace.run.observe.trace import Interval
from headrace.run.observe.verdict import judge
from headrace.run.observe.words import plural

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"

R = TypeVar("R")


def lives(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the steps of each life of a run, in order. A run that is started or resumed begins a new life, with new
    clocks.

    A run without a step has no life.
    """
    found: list[list[StepRecord]] = []
    for step in steps:
        before = found[-1][-1] if found else None
        if before is None or step.clock_s < before.clock_s or step.wall_s < before.wall_s:
            found.append([])
        found[-1].append(step)
    return found


def last_life(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the steps since the run was last started or resumed."""
    return lives(steps)[-1] if steps else []


def clock_resets(steps: Sequence[StepRecord]) -> int:
    """Return how often the spans' clock stood lower after a resumption: on another machine, or after a restart of
    the machine."""
    sessions = lives(steps)
    return sum(later[0].clock_s < earlier[-1].clock_s for earlier, later in pairwise(sessions))


def note_on_resumption(steps: list[StepRecord]) -> str:
    """Return a note on which steps the figures of a resumed run cover; empty where the run has had one life."""
    last = len(last_life(steps))
    if last == len(steps):
        return ""
    return (
        f"The run was resumed: its figures of time, rates, shares and the verdict are of the "
        f"{plural(last, 'step')} since "
        "then, rewards and the books of the whole run. Charts and timeline show all of it, with a mark at every start."
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as its directory holds it. A file that is missing or damaged leaves its field empty, and a note."""

    directory: Path
    steps: list[StepRecord]
    spans: list[Span]
    summary: dict[str, Any]
    config: dict[str, Any]
    live: dict[str, Any] = field(default_factory=dict)
    """The last ``live.json``."""
    events: list[Event] = field(default_factory=list)
    """The events of all lives of the run, alarms included."""
    notes: list[str] = field(default_factory=list)
    """The files that could not be read, and why, in words."""

    @cached_property
    def session(self) -> list[StepRecord]:
        """Return the steps since the run was last started: see :func:`last_life`."""
        return last_life(self.steps)

    @cached_property
    def loop(self) -> Interval:
        """Return the interval from the start of the wait for the session's first batch to the end of its last step,
        on the spans' clock."""
        steps = self.session
        if steps:
            return steps[0].clock_s - steps[0].seconds - steps[0].wait_s, steps[-1].clock_s
        if self.spans:
            return min(span.start_s for span in self.spans), max(span.end_s for span in self.spans)
        return 0.0, 0.0

    @cached_property
    def account(self) -> Account | None:
        """Return the account of the session: the one that the run wrote last, or else one made from the trace;
        ``None`` without either."""
        recorded = recorded_account(self.summary) or recorded_account(self.live)
        if recorded is not None or not self.spans or self.loop[0] >= self.loop[1]:
            return recorded
        return account_of(self.spans, self.session, self.loop)

    @cached_property
    def verdict(self) -> str:
        """Return the verdict in words: the one that the run wrote last, or else one made from the trace; empty
        before the first step and without a trace."""
        recorded = next((str(tree["verdict"]) for tree in (self.summary, self.live) if tree.get("verdict")), "")
        if recorded or not self.steps or self.account is None:
            return recorded
        return str(judge(self.account, settings_of(self.config)))

    @property
    def name(self) -> str:
        """Return the name that people give the run: see :func:`run_name`."""
        return run_name(self.directory, self.config)

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the resolved configuration; ``None`` where it has none."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, dict) else None

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the summary; for keys that it lacks, the values that follow from steps and trace."""
        computed = observed(self.steps, self.steps[-1].wall_s if self.steps else 0.0)
        return {**computed, **({} if self.account is None else self.account.figures()), **self.summary}

    def measured(self, key: str) -> float | None:
        """Return one number of the figures; ``None`` where there is none."""
        value = self.figures.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def run_name(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the run in ``directory``: ``run.name``, or the name of the directory.

    A directory that is called ``run`` is named with the directory above it.

    >>> run_name(Path("/runs/sums/run"), {}), run_name(Path("/runs/sums"), {"run": {"name": "first try"}})
    ('sums/run', 'first try')
    """
    table = config.get("run")
    given = table.get("name") if isinstance(table, dict) else None
    return visible(str(given or _short_name(directory.resolve())))


def run_about(config: Mapping[str, Any]) -> str:
    """Return the model, the rows and the reward or environment of a run in one line; empty where its settings have
    none.

    >>> run_about({"model": {"path": "/m/Qwen3-0.6B"}, "data": {"path": "/d/sums.jsonl"}, "env": {"reward": "/r.py:f"}})
    'Qwen3-0.6B · sums.jsonl · r.py:f'
    """
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    settings = (("model", "path"), ("data", "path"), ("env", "entry"), ("env", "reward"))
    values = [tables.get(section, {}).get(key) for section, key in settings]
    known = [value for value in values if isinstance(value, str) and value]
    return visible(" · ".join(called(value) if is_hub_name(value) else _short_name(Path(value)) for value in known))


def _short_name(path: Path) -> str:
    """Return the name of a path, with the directory above it where the name alone says nothing."""
    return f"{path.parent.name}/{path.name}" if path.name in _UNTELLING_NAMES and path.parent.name else path.name


_UNTELLING_NAMES = ("run", "model")
"""The names of directories that say nothing without the directory above them."""


def load_run(run_dir: Path) -> RunData:
    """Read the run in ``run_dir``. Raises :class:`~headrace.base.errors.DataError` where it is not a directory, or
    holds no file of a run."""
    names = (METRICS_FILE, TRACE_FILE, SUMMARY_FILE, CONFIG_FILE)
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in names):
        what = "holds no run" if run_dir.is_dir() else "is not a directory"
        raise DataError(f"{run_dir} {what}", remedy=f"name a directory with {METRICS_FILE} in it, as a run writes it")
    notes: list[str] = []
    metrics, trace = run_dir / METRICS_FILE, run_dir / TRACE_FILE
    return RunData(
        directory=run_dir,
        steps=_read_or_note(lambda: read_steps(metrics, notes.append), metrics, [], notes),
        spans=_read_or_note(lambda: _valid_spans(read_jsonl(trace, Span, notes.append)), trace, [], notes),
        summary=_read_or_note(lambda: _tree(run_dir / SUMMARY_FILE), run_dir / SUMMARY_FILE, {}, notes),
        config=_read_or_note(lambda: _settings(run_dir), run_dir / CONFIG_FILE, {}, notes),
        live=_live(run_dir),
        events=_events(run_dir, notes),
        notes=notes,
    )


def recorded_account(tree: Mapping[str, Any]) -> Account | None:
    """Return the account in ``summary.json`` or ``live.json``; ``None`` where it has none, or one of no time."""
    try:
        account = msgspec.convert(tree.get("account") or {}, Account)
    except msgspec.ValidationError:
        return None
    return account if account.seconds > 0 else None


def _live(run_dir: Path) -> dict[str, Any]:
    """Return the last ``live.json``; empty where it is missing or damaged, since no report depends on it."""
    try:
        return _tree(run_dir / LIVE_FILE)
    except DataError:
        return {}


def _events(run_dir: Path, notes: list[str]) -> list[Event]:
    """Return the events of the run; a run of an older version has none."""
    path = run_dir / EVENTS_FILE
    return _read_or_note(lambda: read_jsonl(path, Event, notes.append), path, [], notes) if path.exists() else []


def _read_or_note(read: Callable[[], R], path: Path, empty: R, notes: list[str]) -> R:
    """Return the result of ``read``; where the file is missing or damaged, ``empty`` and a note."""
    if not path.exists():
        notes.append(f"{path.name} is not there{_MEANING.get(path.name, '')}")
        return empty
    try:
        return read()
    except HeadraceError as error:
        notes.append(error.problem)
        return empty


_MEANING = {SUMMARY_FILE: ": the run has not ended, or was killed"}
"""The meaning of a file that is missing, as the end of a note."""


def _valid_spans(spans: list[Span]) -> list[Span]:
    """Return the spans that end after they start, by their start."""
    return sorted((span for span in spans if span.start_s <= span.end_s), key=lambda span: span.start_s)


def _settings(run_dir: Path) -> dict[str, Any]:
    """Return the recorded settings, which must be as they were written."""
    verify(run_dir, [CONFIG_FILE])
    return _tree(run_dir / CONFIG_FILE)


def _tree(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="remove it, or name another run") from None
