"""The data of a run, read for reports and the dashboard from the files of its directory that can be read.

A *life* of a run is the time from one start or resumption to its end; a resumed run has several. The *spans* of the
event trace say what each part did when. An *account* is the record of where the time of an interval went, and the
*verdict* names the bottleneck that follows from it.
"""

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
from headrace.models.hub import is_hub_name, short_model_name
from headrace.run.observe.account import make_account
from headrace.run.observe.advice import make_verdict_settings
from headrace.run.observe.jsonl import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, read_jsonl, read_steps
from headrace.run.observe.summary import summarize_steps
from headrace.run.observe.trace import Interval
from headrace.run.observe.verdict import judge
from headrace.run.observe.words import plural

SUMMARY_FILE = "summary.json"
"""The file in a run directory with the figures of the run, written at its end."""
CONFIG_FILE = "config.json"
"""The file in a run directory with the resolved settings of the run."""

R = TypeVar("R")


def split_into_lives(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the records of the steps of a run, divided into its lives, in order. A new life begins where one of the
    two clocks of a record is lower than in the record before, since a resumption resets them.

    A life without a step leaves no record, so the result is empty for a run without a step.
    """
    lives: list[list[StepRecord]] = []
    for step in steps:
        preceding = lives[-1][-1] if lives else None
        if preceding is None or step.clock_s < preceding.clock_s or step.wall_s < preceding.wall_s:
            lives.append([])
        lives[-1].append(step)
    return lives


def find_last_life(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records of the steps since the run was last started or resumed; an empty list if the run has no
    step."""
    return split_into_lives(steps)[-1] if steps else []


def count_clock_resets(steps: Sequence[StepRecord]) -> int:
    """Return the number of resumptions after which the spans' clock was lower than before: on another machine, or after
    a restart of the machine. Spans before and after such a resumption have no common time axis."""
    lives = split_into_lives(steps)
    return sum(later[0].clock_s < earlier[-1].clock_s for earlier, later in pairwise(lives))


def describe_resumption(steps: list[StepRecord]) -> str:
    """Return a note for readers of a report that says which of ``steps`` the figures of a resumed run cover; an empty
    string if all steps belong to one life."""
    num_covered = len(find_last_life(steps))
    if num_covered == len(steps):
        return ""
    return (
        f"The run was resumed: its figures of time, rates, shares and the verdict are of the "
        f"{plural(num_covered, 'step')} since "
        "then, rewards and the books of the whole run. Charts and timeline show all of it, with a mark at every start."
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of one run, which :func:`load_run` reads from the files of its directory. For a file that is missing or
    damaged, its field is empty and ``notes`` has an entry. Values that depend on several files are properties,
    computed at their first use."""

    directory: Path
    """The directory of the run."""
    steps: list[StepRecord]
    """The records of the steps of all lives of the run, from ``metrics.jsonl``, in order. A step that was trained again
    after a resumption appears once."""
    spans: list[Span]
    """The event trace, from ``trace.jsonl``, of all lives of the run, ordered by start."""
    summary: dict[str, Any]
    """The content of ``summary.json``."""
    config: dict[str, Any]
    """The resolved settings, from ``config.json``, as a tree of sections."""
    live: dict[str, Any] = field(default_factory=dict)
    """The last ``live.json``."""
    events: list[Event] = field(default_factory=list)
    """The events of all lives of the run, alarms included."""
    notes: list[str] = field(default_factory=list)
    """The files that could not be read, and why, in words."""

    @cached_property
    def session(self) -> list[StepRecord]:
        """Return the records of the steps since the run was last started or resumed, in order; an empty list if no step
        has ended."""
        return find_last_life(self.steps)

    @cached_property
    def loop(self) -> Interval:
        """Return the interval of the run's training since it was last started, in seconds of the spans' clock: from the
        start of the wait for the first batch to the end of the last step. Without a step, return the interval of all
        spans, and without spans (0, 0)."""
        steps = self.session
        if steps:
            return steps[0].clock_s - steps[0].seconds - steps[0].wait_s, steps[-1].clock_s
        if self.spans:
            return min(span.start_s for span in self.spans), max(span.end_s for span in self.spans)
        return 0.0, 0.0

    @cached_property
    def account(self) -> Account | None:
        """Return the account of the run since it was last started: the account in its summary or live state, or else an
        account computed from the trace; ``None`` if all three are missing."""
        recorded = find_recorded_account(self.summary) or find_recorded_account(self.live)
        if recorded is not None or not self.spans or self.loop[0] >= self.loop[1]:
            return recorded
        return make_account(self.spans, self.session, self.loop)

    @cached_property
    def verdict(self) -> str:
        """Return the verdict in words: the verdict in the summary or the live state, or else a verdict computed from
        :attr:`account`; an empty string before the first step or without an account."""
        recorded = next((str(tree["verdict"]) for tree in (self.summary, self.live) if tree.get("verdict")), "")
        if recorded or not self.steps or self.account is None:
            return recorded
        return str(judge(self.account, make_verdict_settings(self.config)))

    @property
    def name(self) -> str:
        """Return the name of the run for people: the setting ``run.name``, or else the name of its directory."""
        return run_name(self.directory, self.config)

    def setting(self, section: str, key: str) -> Any:
        """Return the value of the setting ``section.key`` of the run; ``None`` if the resolved settings lack it, for
        example because an older version of Headrace wrote them."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, dict) else None

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Return the figures of the run by their names in ``summary.json``. A figure that this file lacks, for example
        because the run has not ended, is computed from the steps and the account."""
        computed = summarize_steps(self.steps, self.steps[-1].wall_s if self.steps else 0.0)
        return {**computed, **({} if self.account is None else self.account.figures()), **self.summary}

    def figure(self, key: str) -> float | None:
        """Return the figure ``key`` of :attr:`figures` as a number; ``None`` if it is missing or is no number."""
        value = self.figures.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def run_name(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the run in ``directory`` for people: the setting ``run.name`` in ``config``, or else the name
    of the directory.

    A directory that is called ``run`` or ``model`` is named with the directory above it.

    >>> run_name(Path("/runs/sums/run"), {}), run_name(Path("/runs/sums"), {"run": {"name": "first try"}})
    ('sums/run', 'first try')
    """
    section = config.get("run")
    configured_name = section.get("name") if isinstance(section, dict) else None
    return visible(str(configured_name or _short_name(directory.resolve())))


def describe_run(config: Mapping[str, Any]) -> str:
    """Return one line that describes a run by its settings ``config``: its model, its data file, and its environment or
    reward function. A setting that is missing is omitted.

    >>> data = {"path": "/d/sums.jsonl"}
    >>> describe_run({"model": {"path": "/m/Qwen3-0.6B"}, "data": data, "env": {"reward": "/r.py:f"}})
    'Qwen3-0.6B · sums.jsonl · r.py:f'
    """
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    settings = (("model", "path"), ("data", "path"), ("env", "entry"), ("env", "reward"))
    values = [tables.get(section, {}).get(key) for section, key in settings]
    names = [value for value in values if isinstance(value, str) and value]
    short = (short_model_name(value) if is_hub_name(value) else _short_name(Path(value)) for value in names)
    return visible(" · ".join(short))


def _short_name(path: Path) -> str:
    """Return the last part of ``path``. If this part is one of :data:`_UNTELLING_NAMES`, such as ``run``, the directory
    above is put before it."""
    return f"{path.parent.name}/{path.name}" if path.name in _UNTELLING_NAMES and path.parent.name else path.name


_UNTELLING_NAMES = ("run", "model")
"""The names of directories that say nothing without the directory above them."""


def load_run(run_dir: Path) -> RunData:
    """Read the run in ``run_dir``, which may still be running, and return its data. A file that is missing or damaged
    becomes a note in the result. Raises :class:`~headrace.base.errors.DataError` only if ``run_dir`` is not a
    directory, or holds no file of a run."""
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
        summary=_read_or_note(lambda: _read_tree(run_dir / SUMMARY_FILE), run_dir / SUMMARY_FILE, {}, notes),
        config=_read_or_note(lambda: _read_config(run_dir), run_dir / CONFIG_FILE, {}, notes),
        live=_read_live(run_dir),
        events=_read_events(run_dir, notes),
        notes=notes,
    )


def find_recorded_account(tree: Mapping[str, Any]) -> Account | None:
    """Return the account in ``tree``, the content of ``summary.json`` or ``live.json``; ``None`` if the account is
    missing, cannot be decoded, or covers no time."""
    try:
        account = msgspec.convert(tree.get("account") or {}, Account)
    except msgspec.ValidationError:
        return None
    return account if account.seconds > 0 else None


def _read_live(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``live.json``, the last live state that the run wrote; empty if the file is missing or
    damaged. Such a file causes no note, since no report depends on it."""
    try:
        return _read_tree(run_dir / LIVE_FILE)
    except DataError:
        return {}


def _read_events(run_dir: Path, notes: list[str]) -> list[Event]:
    """Return the events of the run in ``run_dir``, and append a note to ``notes`` if the file is damaged. A run of an
    older version of Headrace has no such file, and no events."""
    path = run_dir / EVENTS_FILE
    return _read_or_note(lambda: read_jsonl(path, Event, notes.append), path, [], notes) if path.exists() else []


def _read_or_note(read: Callable[[], R], path: Path, empty: R, notes: list[str]) -> R:
    """Return the result of ``read``, which reads the file ``path``. If the file is missing or damaged, append a note
    about it to ``notes``, and return ``empty``."""
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
    """Return ``spans`` ordered by their start. Spans that end before they start, which a damaged file may have, are
    skipped."""
    return sorted((span for span in spans if span.start_s <= span.end_s), key=lambda span: span.start_s)


def _read_config(run_dir: Path) -> dict[str, Any]:
    """Return the resolved settings of the run from ``config.json``. Raises :class:`~headrace.base.errors.HeadraceError`
    if the file differs from its checksum, or cannot be read."""
    verify(run_dir, [CONFIG_FILE])
    return _read_tree(run_dir / CONFIG_FILE)


def _read_tree(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path`` as a dictionary. Raises :class:`~headrace.base.errors.DataError` if
    the file cannot be read, or contains no JSON object."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="remove it, or name another run") from None
