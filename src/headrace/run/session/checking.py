"""``headrace check env``: check whether an environment, a rollout, a program, a bridge or a reward is fit for a run.

The user's code runs in an environment worker, as in a run, but a *script* answers in place of a model, so that no
weights are needed. An *attempt* is one episode with one row and one script. Each check is a function that returns a
finding about all attempts, or ``None`` if the attempts do not show the property.

A failed attempt has a *reason*, one of the names by which a run counts failures (``env_timeout``), and a *problem*, the
details in words. Its *failure* is both; its *cause* is the failure without the parts that differ between attempts.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

import msgspec
import numpy as np

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, EpisodeError
from headrace.base.types.chat import Message
from headrace.base.types.task import Task
from headrace.launch.clients import EnvPool, EnvPoolConfig
from headrace.launch.hosts import trial
from headrace.launch.starts import EnvironmentStart
from headrace.launch.trial import trial_pool
from headrace.rollout.environments.blocking import find_blocking_calls
from headrace.rollout.environments.program import find_namespace_warnings
from headrace.rollout.environments.registry import ENVIRONMENTS
from headrace.rollout.environments.scripted import SCRIPTS, Script, ScriptedEpisode, has_right_answer
from headrace.run.observe.words import plural
from headrace.run.session.references import resolve_reference
from headrace.run.session.running import first_cause, run_in_own_loop

MAX_ANSWERS = 64
"""The largest number of answers that an episode may request; with more it counts as one that does not end by itself."""
MAX_LAG_S = 0.5
"""The longest time, in seconds, for which code may block its worker's event loop in both runs of a repeated episode."""
BLOCK_S = 2.0
"""The time, in seconds, for which code must block its worker's event loop before the worker ends the episode."""
NUM_TASKS = 3
"""The number of generated tasks that are tried for a bridge without rows."""
START_S = 60.0
"""The longest time, in seconds, for the start of the worker."""
PROGRESS_EVERY_S = 1.0
"""The interval between two progress lines, in seconds; shorter episodes may have none."""
_FATAL_REASONS = frozenset({"env_timeout", "env_blocked", "env_crashed", trial.UNUSABLE})
"""The reasons of failure after which no further episode is tried."""
MAX_SHOWN = 20
"""The largest number of problems that the finding of one check lists."""
NUM_EQUAL_FAILURES = 4
"""The check stops after this number of episodes if all of them have failed for the same cause."""
_CHECKED_ELSEWHERE = frozenset({"max_turns", "reward_none", "reward_nan"})
"""The reasons of failure that have a check of their own."""
_VARIABLE_PARTS = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^/\s'\":]+|\b0x[0-9a-f]+")
"""Matches what differs between failures with the same cause: temporary directories and addresses of objects."""


class Level(StrEnum):
    """The severity of a finding: no problem, a problem to consider, or a problem that prevents a run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFinding:
    """The result of one check of :func:`check_env`: whether the user's code has a property that a run needs."""

    clause: str
    """The property that was checked, in words."""
    level: Level
    detail: str
    """The observation in words; for a problem, also how to fix it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTimings:
    """The durations that were measured while the episodes ran, in seconds."""

    load_s: float
    """The time to import the file."""
    episode_s: float
    """The median time of an episode; the scripted model answers at once."""
    slowest_episode_s: float
    turn_s: float
    """The median time between an answer of the model and the next request to it."""
    slowest_turn_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """The result of :func:`check_env`, which ``headrace check env`` prints."""

    reference: str
    """The user's code, as the caller named it."""
    kind: str
    """``env``, ``rollout``, ``program``, ``bridge`` or ``reward``."""
    episodes: int
    """The number of episodes that were tried."""
    left_out: int
    """The number of episodes that were not tried, because earlier episodes showed enough."""
    findings: tuple[EnvFinding, ...]
    timings: EnvTimings | None
    """``None`` if no episode ended without an error."""

    @property
    def ok(self) -> bool:
        """True if no check failed; warnings do not count."""
        return all(finding.level is not Level.FAIL for finding in self.findings)

    def __str__(self) -> str:
        """Return the report as text: a line with the verdict, a line for each finding, and a line of durations."""
        verdict = "passed" if self.ok else "failed"
        tried = plural(self.episodes, "episode") + (f", {self.left_out} more not tried" if self.left_out else "")
        head = f"{self.reference} ({self.kind}, {tried}): {verdict}"
        rows = [f"  {finding.level:<4}  {finding.clause}: {finding.detail}" for finding in self.findings]
        if self.timings is None:
            return "\n".join([head, *rows])
        t = self.timings
        timed = (
            f"  time  load {t.load_s:.2f} s; an episode {t.episode_s:.3f} s (slowest {t.slowest_episode_s:.3f} s); "
            f"between two answers {t.turn_s * 1e3:.1f} ms (slowest {t.slowest_turn_s * 1e3:.1f} ms)"
        )
        return "\n".join([head, *rows, timed])


@dataclass(slots=True, kw_only=True)
class _CheckedEpisode:
    """One episode of the check: its plan (script, row, scripted model), and its outcome after it has run."""

    script: str
    """The name of the script that the model follows."""
    row: int
    is_repeat: bool
    """Whether this episode repeats the episode before it, with the same row, script and seed."""
    model: ScriptedEpisode
    """The scripted model; it also records the requests of the user's code."""
    reward: float | None = None
    reason: str = ""
    """The reason of the failure; empty if the episode ended with a reward."""
    problem: str = ""
    """The failure in words; empty if the episode ended with a reward."""
    seconds: float = 0.0
    report: trial.TrialReport = field(default_factory=trial.TrialReport)
    """The measurements that the worker sent at the end of the episode."""

    @property
    def name(self) -> str:
        """The row and the script of the episode in words, for progress lines and findings."""
        return f"row {self.row + 1}, where the model says {self.script}"

    @property
    def failure(self) -> str:
        """The failure in words: the reason, such as ``env_timeout``, and the problem."""
        return f"{self.reason}: {self.problem}"

    @property
    def cause(self) -> str:
        """The failure without the parts that differ between episodes. Empty without a failure, and for a reason that
        another check reports (:data:`_CHECKED_ELSEWHERE`)."""
        is_counted = self.reason and self.reason not in _CHECKED_ELSEWHERE
        return _VARIABLE_PARTS.sub("", self.failure) if is_counted else ""


def check_env(
    reference: str,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    timeout_s: float = 20.0,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> EnvReport:
    """Run the user's code on some rows against scripted models, and return a report on the properties that a run needs.

    ``reference`` is ``file.py:Name`` (an ``Env``, a rollout or a reward function), the command of a program, or, with
    ``options``, ``LIBRARY/WHAT`` of a bridge or the name of an installed package's environment. A bridge without
    ``rows`` is tried on the first :data:`NUM_TASKS` tasks that it generates.

    Every row is tried with every script, and some episodes are repeated with the same seed. An episode may take
    ``timeout_s`` seconds. ``on_progress`` is called with a line about the progress of the check.

    Raises :class:`~headrace.base.errors.ConfigError` if ``reference`` names nothing, and the errors of a worker that
    cannot start.
    """
    kind, entry, tree = resolve_reference(reference)
    if options and kind != "bridge" and kind not in ENVIRONMENTS:
        text = f"{reference}: options {sorted(options)} have no effect, it is not a bridge"
        raise ConfigError(text, remedy="leave --option out")
    blocking = [] if tree is None else find_blocking_calls(tree, entry.rpartition(":")[2])
    numbered = [{"number": number} for number in range(NUM_TASKS)]
    tried = list(rows) or (numbered if kind == "bridge" else [{}])
    target = {"kind": kind, "entry": entry, "options": dict(options or {})}
    planned = _plan_episodes(tried)
    attempts = run_in_own_loop(lambda _: _run_episodes(target, tried, planned, timeout_s, on_progress))
    return EnvReport(
        reference=reference,
        kind=kind,
        episodes=len(attempts),
        left_out=len(planned) - len(attempts),
        findings=tuple(_collect_findings(kind, blocking, attempts)),
        timings=_summarize_timings(attempts),
    )


async def _run_episodes(
    target: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    attempts: list[_CheckedEpisode],
    timeout_s: float,
    on_progress: Callable[[str], None],
) -> list[_CheckedEpisode]:
    """Run the planned ``attempts`` in one worker, and return the attempts that were tried, with their outcomes.
    ``target`` has the kind, the entry and the options of the user's code; an episode may take ``timeout_s`` seconds."""
    start = EnvironmentStart(kind="rollout", entry=f"{trial.__file__}:trial", concurrency=1, block_s=BLOCK_S)
    pool_config = EnvPoolConfig(num_workers=1, concurrency=1, block_s=BLOCK_S, start_timeout_s=START_S, scored=False)
    trials = [{**target, "row": dict(rows[attempt.row])} for attempt in attempts]
    on_progress(f"starting a worker for it, in at most {START_S:g} s")
    try:
        async with trial_pool(start, pool_config, lambda _: None) as pool:
            on_progress(f"trying {plural(len(attempts), 'episode')} sequentially, each for at most {timeout_s:g} s")
            return await _run_sequentially(pool, attempts, trials, timeout_s, on_progress)
    except BaseExceptionGroup as error:
        raise first_cause(error) from None


async def _run_sequentially(
    pool: EnvPool,
    attempts: list[_CheckedEpisode],
    trials: Sequence[Mapping[str, Any]],
    timeout_s: float,
    on_progress: Callable[[str], None],
) -> list[_CheckedEpisode]:
    """Run the episodes ``attempts`` sequentially, and report the first failure at once. ``trials`` has the row for each
    of them; each may take ``timeout_s`` seconds. Return the episodes that were run: all, or up to the first fatal
    failure, or the first :data:`NUM_EQUAL_FAILURES` if these have all failed for the same cause."""
    started: list[_CheckedEpisode] = []  # the last one is running
    reported = False
    async with asyncio.TaskGroup() as group:
        progress = group.create_task(_report_progress(started, len(attempts), on_progress))
        for number, (attempt, trial_row) in enumerate(zip(attempts, trials, strict=True), start=1):
            started.append(attempt)
            await _run_episode(pool, attempt, trial_row, timeout_s)
            if attempt.cause and not reported:
                reported = True
                on_progress(f"episode {number} of {len(attempts)} ({attempt.name}) failed: {attempt.failure}")
            if attempt.reason in _FATAL_REASONS:
                break
            if number == NUM_EQUAL_FAILURES and attempt.cause and len({each.cause for each in started}) == 1:
                num_skipped = len(attempts) - number
                on_progress(f"the first {number} failed for the same cause: the other {num_skipped} are skipped")
                break
        progress.cancel()
    return started


async def _report_progress(
    started: Sequence[_CheckedEpisode], num_planned: int, on_progress: Callable[[str], None]
) -> None:
    """Report every :data:`PROGRESS_EVERY_S` which episode runs, until cancelled. ``started`` has the episodes that were
    started, to which the caller appends; the last one runs. ``num_planned`` is the number of all episodes."""
    num_reported = 0
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        if len(started) != num_reported:
            num_reported = len(started)
            on_progress(f"episode {num_reported} of {num_planned}: {started[-1].name}")


def _plan_episodes(rows: Sequence[Mapping[str, Any]]) -> list[_CheckedEpisode]:
    """Return the episodes to try on ``rows``, in order: every script on every row, script by script. Some episodes are
    planned twice in a row with the same seed, to check that both runs are equal."""

    def plan(number: int, row: int, name: str, script: Script, *, is_repeat: bool = False) -> _CheckedEpisode:
        """Return the plan of an episode with the row at index ``row`` and ``script``, which is called ``name``;
        ``number`` determines its seed."""
        model = ScriptedEpisode(
            row=rows[row], script=script, seed=1000 + number, max_answers=MAX_ANSWERS, clock=RealClock()
        )
        return _CheckedEpisode(script=name, row=row, is_repeat=is_repeat, model=model)

    planned: list[_CheckedEpisode] = []
    for number, (name, script) in enumerate(SCRIPTS.items()):
        for row in range(len(rows)):
            planned.append(plan(number, row, name, script))
            if (row == 0 and "tool" in name) or (number == 0 and row < 2):
                planned.append(plan(number, row, name, script, is_repeat=True))
    return planned


async def _run_episode(pool: EnvPool, attempt: _CheckedEpisode, trial_row: Mapping[str, Any], timeout_s: float) -> None:
    """Run the episode ``attempt`` with the row ``trial_row`` in a worker of ``pool``, for at most ``timeout_s``
    seconds, and write its reward or failure, and its duration, into ``attempt``."""
    task = Task(row_index=attempt.row, row=dict(trial_row), prompt="", prompt_ids_T=np.zeros(0, np.int32))
    clock = RealClock()
    began_s = clock.now()
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await pool.run(task, attempt.model)
        attempt.reward = outcome.reward
    except EpisodeError as error:
        attempt.reason, attempt.problem = error.reason, error.problem
    except TimeoutError:
        attempt.reason, attempt.problem = "env_timeout", f"it was not over after {timeout_s:g} s"
    attempt.seconds = clock.now() - began_s
    if attempt.model.reports:
        attempt.report = msgspec.json.decode(attempt.model.reports[-1], type=trial.TrialReport)


def _collect_findings(
    kind: str, blocking: Sequence[tuple[int, str, str]], attempts: Sequence[_CheckedEpisode]
) -> list[EnvFinding]:
    """Return the findings of all checks about ``attempts`` for user code of this ``kind``; ``blocking`` has the
    blocking calls in it."""
    first = attempts[0]
    if first.reason == trial.UNUSABLE:
        return [EnvFinding(clause="it can be loaded", level=Level.FAIL, detail=first.problem)]
    checks: list[Callable[[], EnvFinding | None]] = [
        lambda: _check_loading(kind, attempts),
        lambda: _check_ends(attempts),
        lambda: _check_end_by_itself(attempts),
        lambda: _check_reward_values(kind, attempts),
        lambda: _check_reward_differences(attempts),
        lambda: _check_repeatability(kind, attempts),
        lambda: _check_blocking(blocking, attempts) if kind != "program" else _check_isolation(),
        lambda: _check_copies(attempts) if kind == "env" else None,
        lambda: _check_tool_descriptions(attempts),
    ]
    return [finding for check in checks if (finding := check()) is not None]


def _make_finding(clause: str, problems: Sequence[str], passed: str, level: Level = Level.FAIL) -> EnvFinding:
    """Return the finding of the check of the property ``clause``: OK with the text ``passed`` if there are no
    ``problems``, else ``level`` with the problems."""
    if not problems:
        return EnvFinding(clause=clause, level=Level.OK, detail=passed)
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    return EnvFinding(clause=clause, level=level, detail="; ".join(problems[:MAX_SHOWN]) + more)


def _check_loading(kind: str, attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    """Check that the worker has loaded the file; a program must have made a request, or ended without an error."""
    if kind != "program":
        return _make_finding("it can be loaded", [], f"in {attempts[0].report.load_s:.2f} s")
    ended = [attempt for attempt in attempts if attempt.model.requests or not attempt.reason]
    problems = [] if ended else ["no episode of it got as far as asking the model"]
    return _make_finding("it can be started", problems, "it asked the model" if ended else "")


def _check_isolation() -> EnvFinding:
    """Check that the programs of episodes run isolated from each other on this machine; warn if they do not."""
    passed = "each runs in a user namespace of its own"
    return _make_finding("its episodes cannot read one another's keys", find_namespace_warnings(), passed, Level.WARN)


def _check_ends(attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    """Check that all episodes ended without an error and made at least one request to the model."""
    failed = [attempt for attempt in attempts if attempt.cause]
    first_by_cause = {attempt.cause: attempt for attempt in reversed(failed)}
    counts = Counter(attempt.cause for attempt in failed)
    failures = [(first_by_cause[cause].failure, count, first_by_cause[cause].name) for cause, count in counts.items()]
    # a run counts an episode without any sampled token as failed
    if mute := [a for a in attempts if not a.model.requests and a.reason in ("", *_CHECKED_ELSEWHERE)]:
        failures.append(("nothing_sampled: it ended without asking the model", len(mute), mute[0].name))
    problems = [f"{failure} ({count} of {len(attempts)} episodes; first {name})" for failure, count, name in failures]
    return _make_finding("its episodes end without an error", problems, f"{len(attempts)} did")


def _check_end_by_itself(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    """Check that no episode requested more than :data:`MAX_ANSWERS` answers; ``None`` if the last was aborted."""
    if attempts[-1].reason in _FATAL_REASONS:
        return None
    endless = [attempt for attempt in attempts if attempt.model.is_exhausted]
    problems = [f"{endless[0].name}: it asked for more than {MAX_ANSWERS} answers; say done=True, or return, at some "
                "point whatever the model says (env.max_turns cuts it off, else)"] if endless else []  # fmt: skip
    max_answers = max(len(attempt.model.requests) for attempt in attempts)
    if not max_answers:
        return None
    return _make_finding("it ends whatever the model says", problems, f"after at most {max_answers} answers")


def _check_reward_values(kind: str, attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    """Check that every episode earned a number; ``None`` if no episode got as far as a reward."""
    rewarded = [attempt for attempt in attempts if attempt.reason in ("", "reward_none", "reward_nan")]
    if not rewarded:
        return None
    num_none = sum(attempt.reward is None and attempt.reason != "reward_nan" for attempt in rewarded)
    # a reward function may return None
    refused = ("reward_nan",) if kind == "reward" else ("reward_none", "reward_nan")
    problems = [f"{a.problem} ({a.name})" for a in rewarded if a.reason in refused]
    level = Level.FAIL
    if num_none == len(attempts) and kind == "reward":
        has_answer = any(has_right_answer(attempt.model.row) for attempt in attempts)
        level = Level.FAIL if has_answer else Level.WARN
        problems = ["it returned None for every answer, and those do not count: does it return what it found?"]
    elif num_none == len(attempts):
        problems, level = ["it never says what an episode earned: return a reward, or set env.reward"], Level.WARN
    passed = f"{len(rewarded) - num_none} of {len(rewarded)}; with None, the others do not count"
    return _make_finding("rewards are numbers", problems, passed if num_none else "every one", level)


def _check_reward_differences(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    """Check that rewards differ, since equal rewards teach a model nothing; ``None`` for fewer than two rewards."""
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    if len(rewards) < 2:
        return None
    low, high = min(rewards), max(rewards)
    num_scripts = len({attempt.script for attempt in attempts})
    problems = [
        f"every episode earned {low:g}, whether the model said the row's answer, nothing or something else "
        f"({num_scripts} scripts): a model learns nothing from equal rewards. Is the answer compared as it should be, "
        "and in a column 'answer' (give rows with --data)?"
    ] if low == high else []  # fmt: skip
    if problems and not any(has_right_answer(attempt.model.row) for attempt in attempts):
        problems = [f"every episode earned {low:g}: no row says what is right in a column 'answer', so no script did "
                 "either; that may be as it should be (give rows that say so with --data)"]  # fmt: skip
    return _make_finding("rewards differ", problems, f"from {low:g} to {high:g}", Level.WARN)


def _check_repeatability(kind: str, attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    """Check that episodes repeated with the same seed are equal to their first run; ``None`` without repeated ones."""
    pairs = [(a, b) for a, b in itertools.pairwise(attempts) if b.is_repeat and a.reason != "env_error"]
    if not pairs:
        return None
    problems = [f"{b.name}: {difference}" for a, b in pairs if (difference := _describe_difference(a, b))]
    if problems:
        seed = {"env": "self.seed", "rollout": "policy.seed"}.get(kind, "the row")
        problems[-1] += f"; draw from random.Random({seed})" if kind != "program" else ""
    return _make_finding(
        "the same seed gives the same episode",
        problems,
        f"{plural(len(pairs), 'episode was', 'episodes were')} repeated",
    )


def _describe_difference(a: _CheckedEpisode, b: _CheckedEpisode) -> str:
    """Return the first difference between ``a`` and ``b``, two runs of the same episode, in words; empty if the runs
    are equal."""
    for index, (in_a, in_b) in enumerate(zip(a.model.requests, b.model.requests, strict=False)):
        if in_a != in_b:
            messages = zip(_format_messages(in_a), _format_messages(in_b), strict=False)
            num_messages = (f"{len(in_a)} messages", f"{len(in_b)} messages")
            was, then = next((pair for pair in messages if pair[0] != pair[1]), num_messages)
            return f"question {index + 1} was {_shorten(was)} and then {_shorten(then)}"
    if len(a.model.requests) != len(b.model.requests):
        return f"it asked {len(a.model.requests)} times and then {len(b.model.requests)} times"
    if a.reward != b.reward:
        return f"it earned {a.reward} and then {b.reward}"
    return "" if a.reason == b.reason else f"it ended with {a.reason or 'a reward'} and then {b.reason or 'one'}"


def _format_messages(messages: Sequence[Message]) -> list[str]:
    """Return each message as one text with its role, so that two requests can be compared message by message."""
    return [f"{message.role}: {message.content}" for message in messages]


def _shorten(value: object) -> str:
    """Return ``value`` as a quoted text for an error message, cut after 80 characters."""
    text = str(value)
    return repr(text if len(text) <= 80 else text[:80] + "…")


def _check_blocking(blocking: Sequence[tuple[int, str, str]], attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    """Check that async code does not block its worker's event loop, by the blocking calls in its source (``blocking``)
    and by the lags of the event loop while ``attempts`` ran."""
    problems = [
        f"line {line}: {called}() in async def {function}: await what waits, or asyncio.to_thread({called}, ...)"
        for line, called, function in blocking
    ]
    problems += [f"{a.problem} ({a.name})" for a in attempts if a.reason == "env_blocked"]
    # a busy machine may slow one of the two runs down; code that blocks is slow in both
    lags = [(min(a.report.lag_s, b.report.lag_s), b) for a, b in itertools.pairwise(attempts) if b.is_repeat]
    lag_s, slow = max(lags, key=lambda each: each[0], default=(0.0, attempts[0]))
    if lag_s > MAX_LAG_S and not problems:
        problems = [f"its code kept the loop of the worker from turning for {lag_s:.2f} s, again and again "
                    f"({slow.name}): hand what computes to asyncio.to_thread"]  # fmt: skip
    return _make_finding("async code does not block", problems, f"nobody waited longer than {lag_s * 1e3:.0f} ms")


def _check_copies(attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    """Check that all attributes of the environment can be copied, which forking an episode requires; warn if not."""
    uncopyable = [attempt.report.uncopyable for attempt in attempts if attempt.report.uncopyable]
    problems = (
        [f"{each}: it cannot be kept or forked with its episode; make it when it is needed" for each in uncopyable[0]]
        if uncopyable
        else []
    )
    return _make_finding("its state can be copied", problems, "every attribute", Level.WARN)


def _check_tool_descriptions(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    """Check that tools and their arguments have types and descriptions; ``None`` if no tool was offered."""
    tools = {name: tool for attempt in attempts for name, tool in attempt.model.tools.items()}
    if not tools:
        return None
    problems = [f"tool {name!r} has no docstring" for name, tool in tools.items() if not tool.description]
    for name, tool in tools.items():
        for argument, schema in tool.parameters.get("properties", {}).items():
            if schema.keys() <= {"default", "description"}:
                problems.append(f"argument {argument!r} of tool {name!r} has no type")
            elif "description" not in schema:
                problems.append(f"argument {argument!r} of tool {name!r} is not described (Args: in the docstring)")
    return _make_finding("tools are described", problems, ", ".join(tools), Level.WARN)


def _summarize_timings(attempts: Sequence[_CheckedEpisode]) -> EnvTimings | None:
    """Return the durations of the episodes that ended without an error; ``None`` if there are none."""
    ended = [attempt for attempt in attempts if not attempt.reason]
    if not ended:
        return None
    seconds = [attempt.seconds - attempt.report.load_s for attempt in ended]
    turns = [duration_s for attempt in ended for duration_s in attempt.model.durations_s] or [0.0]
    return EnvTimings(
        load_s=attempts[0].report.load_s,
        episode_s=median(seconds),
        slowest_episode_s=max(seconds),
        turn_s=median(turns),
        slowest_turn_s=max(turns),
    )
