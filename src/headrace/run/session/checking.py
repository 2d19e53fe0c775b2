"""``headrace check env``: whether an environment, a rollout, a program, a bridge or a reward can be trusted with a run,
in words.

It is run in an environment worker as a run would run it, against models that say what scripts say. No weights are
needed: what is looked at is what the user's code does.
"""

from __future__ import annotations

import asyncio
import itertools
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
from headrace.launch.clients import EnvPool, EnvTerms
from headrace.launch.hosts import trial
from headrace.launch.starts import EnvironmentStart
from headrace.launch.trial import trial_pool
from headrace.rollout.environments.blocking import blocking_calls
from headrace.rollout.environments.scripted import SCRIPTS, Script, ScriptedEpisode, says_what_is_right
from headrace.run.observe.words import plural
from headrace.run.session.references import kind_of
from headrace.run.session.running import first_cause, in_own_loop

MAX_ANSWERS = 64
"""An episode that asks for more is one that does not end by itself."""
MAX_LAG_S = 0.5
"""Code that keeps the loop of a worker from turning for longer than this, twice in the same episode, blocks it."""
BLOCK_S = 2.0
"""The same where the check gives up on it."""
NUM_TASKS = 3
"""Tasks of a library that makes its own on which it is tried."""
_HOPELESS = frozenset({"env_timeout", "env_blocked", "env_crashed", trial.UNUSABLE})
"""Reasons after which nothing more is tried."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFinding:
    """One thing that was looked at."""

    clause: str
    level: Level
    detail: str
    """What was seen, and what would mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTimings:
    """In seconds."""

    load_s: float
    """To import the file."""
    episode_s: float
    """One episode, at the median; the scripted model answers at once."""
    slowest_episode_s: float
    turn_s: float
    """Between an answer and the next question, at the median."""
    slowest_turn_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What :func:`check_env` found."""

    reference: str
    kind: str
    """``env``, ``rollout``, ``program``, ``bridge`` or ``reward``."""
    episodes: int
    """That were tried."""
    findings: tuple[EnvFinding, ...]
    timings: EnvTimings | None
    """``None`` where no episode ended."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.level is not Level.FAIL for finding in self.findings)

    def __str__(self) -> str:
        verdict = "sound" if self.ok else "to be mended"
        head = f"{self.reference} ({self.kind}, {plural(self.episodes, 'episode')}): {verdict}"
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
    """One episode."""

    script: str
    row: int
    again: bool
    """Whether it repeats the one before it."""
    talk: ScriptedEpisode
    reward: float | None = None
    reason: str = ""
    problem: str = ""
    seconds: float = 0.0
    report: trial.TrialReport = field(default_factory=trial.TrialReport)

    @property
    def name(self) -> str:
        return f"row {self.row + 1}, where the model says {self.script}"


def check_env(
    reference: str,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    timeout_s: float = 20.0,
    options: Mapping[str, Any] | None = None,
) -> EnvReport:
    """Try ``file.py:Name`` (an ``Env``, a rollout, a reward function), the command of a program, or ``LIBRARY/WHAT`` of
    a bridge with its ``options`` on some rows; of a bridge, unless there are any, on the tasks of the first numbers.

    Every row meets every script; the first two scripts twice with the same seed. An episode may take ``timeout_s``.
    Raises :class:`~headrace.base.errors.ConfigError` for a reference that names nothing, and what workers say that
    cannot start.
    """
    kind, entry, tree = kind_of(reference)
    if options and kind != "bridge":
        raise ConfigError(
            f"{reference}: options {sorted(options)} have no effect, it is no bridge", remedy="leave --option out"
        )
    blocking = [] if tree is None else blocking_calls(tree, entry.rpartition(":")[2])
    numbered = [{"number": number} for number in range(NUM_TASKS)]
    tried = list(rows) or (numbered if kind == "bridge" else [{}])
    order = {"kind": kind, "entry": entry, "options": dict(options or {})}
    attempts = in_own_loop(lambda _: _tried(order, tried, timeout_s))
    return EnvReport(
        reference=reference,
        kind=kind,
        episodes=len(attempts),
        findings=tuple(_findings(kind, blocking, attempts)),
        timings=_timings(attempts),
    )


async def _tried(
    named: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[_CheckedEpisode]:
    """``named``: what is tried."""
    start = EnvironmentStart(kind="rollout", entry=f"{trial.__file__}:trial", concurrency=1, block_s=BLOCK_S)
    terms = EnvTerms(num_workers=1, concurrency=1, block_s=BLOCK_S, start_timeout_s=60.0, scored=False)
    attempts = _plan(rows)
    orders = [{**named, "row": dict(rows[attempt.row])} for attempt in attempts]
    try:
        async with trial_pool(start, terms, lambda _: None) as pool:
            return await _one_by_one(pool, attempts, orders, timeout_s)
    except BaseExceptionGroup as error:
        raise first_cause(error) from None


async def _one_by_one(
    pool: EnvPool, attempts: list[_CheckedEpisode], orders: Sequence[Mapping[str, Any]], timeout_s: float
) -> list[_CheckedEpisode]:
    """Those that were made."""
    for number, (attempt, order) in enumerate(zip(attempts, orders, strict=True), start=1):
        await _attempt(pool, attempt, order, timeout_s)
        if attempt.reason in _HOPELESS:
            return attempts[:number]
    return attempts


def _plan(rows: Sequence[Mapping[str, Any]]) -> list[_CheckedEpisode]:
    def attempt(number: int, row: int, name: str, script: Script, *, again: bool = False) -> _CheckedEpisode:
        talk = ScriptedEpisode(
            row=rows[row], script=script, seed=1000 + number, max_answers=MAX_ANSWERS, clock=RealClock()
        )
        return _CheckedEpisode(script=name, row=row, again=again, talk=talk)

    planned: list[_CheckedEpisode] = []
    for row in range(len(rows)):
        for number, (name, script) in enumerate(SCRIPTS.items()):
            planned.append(attempt(number, row, name, script))
            if (row == 0 and "tool" in name) or (number == 0 and row < 2):
                planned.append(attempt(number, row, name, script, again=True))
    return planned


async def _attempt(pool: EnvPool, attempt: _CheckedEpisode, order: Mapping[str, Any], timeout_s: float) -> None:
    task = Task(row_index=attempt.row, row=dict(order), prompt="", prompt_ids_T=np.zeros(0, np.int32))
    clock = RealClock()
    began_s = clock.now()
    try:
        async with asyncio.timeout(timeout_s):
            outcome = await pool.run(task, attempt.talk)
        attempt.reward = outcome.reward
    except EpisodeError as error:
        attempt.reason, attempt.problem = error.reason, error.problem
    except TimeoutError:
        attempt.reason, attempt.problem = "env_timeout", f"it was not over after {timeout_s:g} s"
    attempt.seconds = clock.now() - began_s
    if attempt.talk.reports:
        attempt.report = msgspec.json.decode(attempt.talk.reports[-1], type=trial.TrialReport)


# -- what was seen ----------------------------------------------------------------------------------------------------


def _findings(
    kind: str, blocking: Sequence[tuple[int, str, str]], attempts: Sequence[_CheckedEpisode]
) -> list[EnvFinding]:
    first = attempts[0]
    if first.reason == trial.UNUSABLE:
        return [EnvFinding(clause="it can be loaded", level=Level.FAIL, detail=first.problem)]
    looks: list[Callable[[], EnvFinding | None]] = [
        lambda: _found("it can be loaded", [], f"in {first.report.load_s:.2f} s"),
        lambda: _episodes_end(attempts),
        lambda: _ends_by_itself(attempts),
        lambda: _rewards_are_numbers(kind, attempts),
        lambda: _rewards_differ(attempts),
        lambda: _is_repeatable(kind, attempts),
        lambda: _does_not_block(blocking, attempts) if kind != "program" else None,
        lambda: _can_be_copied(attempts) if kind == "env" else None,
        lambda: _tools_are_described(attempts),
    ]
    return [finding for look in looks if (finding := look()) is not None]


def _found(clause: str, wrong: Sequence[str], right: str, level: Level = Level.FAIL) -> EnvFinding:
    if not wrong:
        return EnvFinding(clause=clause, level=Level.OK, detail=right)
    more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
    return EnvFinding(clause=clause, level=level, detail="; ".join(wrong[:4]) + more)


def _episodes_end(attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    told = ("max_turns", "reward_none", "reward_nan")
    failed = Counter(f"{a.reason}: {a.problem}" for a in attempts if a.reason and a.reason not in told)
    where = {f"{a.reason}: {a.problem}": a.name for a in reversed(attempts) if a.reason}
    if mute := [a for a in attempts if not a.talk.heard and a.reason in ("", *told)]:  # as a run would count them
        cause = "nothing_sampled: it ended without asking the model"
        failed[cause], where[cause] = len(mute), mute[0].name
    wrong = [f"{cause} ({times} of {len(attempts)} episodes; first {where[cause]})" for cause, times in failed.items()]
    return _found("its episodes end without an error", wrong, f"{len(attempts)} did")


def _ends_by_itself(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    if attempts[-1].reason in _HOPELESS:
        return None  # it was not seen to end
    spent = [attempt for attempt in attempts if attempt.talk.was_spent]
    wrong = [f"{spent[0].name}: it asked for more than {MAX_ANSWERS} answers; say done=True, or return, at some point "
             "whatever the model says (env.max_turns cuts it off, else)"] if spent else []  # fmt: skip
    most = max(len(attempt.talk.heard) for attempt in attempts)
    return _found("it ends whatever the model says", wrong, f"after at most {most} answers")


def _rewards_are_numbers(kind: str, attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    looked = [attempt for attempt in attempts if attempt.reason in ("", "reward_none", "reward_nan")]
    if not looked:
        return None
    left_out = sum(attempt.reward is None and attempt.reason != "reward_nan" for attempt in looked)
    refused = ("reward_nan",) if kind == "reward" else ("reward_none", "reward_nan")  # a function may leave one out
    wrong = [f"{a.problem} ({a.name})" for a in looked if a.reason in refused]
    level = Level.FAIL
    if left_out == len(attempts) and kind == "reward":
        right = any(says_what_is_right(attempt.talk.row) for attempt in attempts)
        level = Level.FAIL if right else Level.WARN
        wrong = ["it returned None for every answer, and those do not count: does it return what it found?"]
    elif left_out == len(attempts):
        wrong, level = ["it never says what an episode earned: return a reward, or set env.reward"], Level.WARN
    counted = f"{len(looked) - left_out} of {len(looked)}; with None, the others do not count"
    return _found("rewards are numbers", wrong, counted if left_out else "every one", level)


def _rewards_differ(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    if len(rewards) < 2:
        return None
    low, high = min(rewards), max(rewards)
    said = len({attempt.script for attempt in attempts})
    wrong = [
        f"every episode earned {low:g}, whether the model said the row's answer, nothing or something else ({said} "
        "scripts): a model learns nothing from equal rewards. Is the answer compared as it should be, and in a column "
        "'answer' (give rows with --data)?"
    ] if low == high else []  # fmt: skip
    if wrong and not any(says_what_is_right(attempt.talk.row) for attempt in attempts):
        wrong = [f"every episode earned {low:g}: no row says what is right in a column 'answer', so no script did "
                 "either; that may be as it should be (give rows that say so with --data)"]  # fmt: skip
    return _found("rewards differ", wrong, f"from {low:g} to {high:g}", Level.WARN)


def _is_repeatable(kind: str, attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    pairs = [(one, two) for one, two in itertools.pairwise(attempts) if two.again]
    if not pairs:
        return None
    wrong = [f"{two.name}: {said}" for one, two in pairs if (said := _difference(one, two))]
    if wrong:
        seed = {"env": "self.seed", "rollout": "policy.seed"}.get(kind, "the row")
        wrong[-1] += f"; draw from random.Random({seed})" if kind != "program" else ""
    return _found(
        "the same seed gives the same episode", wrong, f"{plural(len(pairs), 'episode was', 'episodes were')} repeated"
    )


def _difference(one: _CheckedEpisode, two: _CheckedEpisode) -> str:
    """The first thing in which two attempts that should be the same are not; empty where there is none."""
    for place, (before, after) in enumerate(zip(one.talk.heard, two.talk.heard, strict=False)):
        if before != after:
            words = [(b, a) for b, a in zip(_texts(before), _texts(after), strict=False) if b != a]
            was, then = words[0] if words else (f"{len(before)} messages", f"{len(after)} messages")
            return f"question {place + 1} was {_short(was)} and then {_short(then)}"
    if len(one.talk.heard) != len(two.talk.heard):
        return f"it asked {len(one.talk.heard)} times and then {len(two.talk.heard)} times"
    if one.reward != two.reward:
        return f"it earned {one.reward} and then {two.reward}"
    return (
        "" if one.reason == two.reason else f"it ended with {one.reason or 'a reward'} and then {two.reason or 'one'}"
    )


def _texts(messages: Sequence[Message]) -> list[str]:
    return [f"{message.role}: {message.content}" for message in messages]


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= 80 else text[:80] + "…")


def _does_not_block(blocking: Sequence[tuple[int, str, str]], attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    wrong = [
        f"line {line}: {called}() in async def {function}: await what waits, or asyncio.to_thread({called}, ...)"
        for line, called, function in blocking
    ]
    wrong += [f"{a.problem} ({a.name})" for a in attempts if a.reason == "env_blocked"]
    pairs = [(one, two) for one, two in itertools.pairwise(attempts) if two.again]
    lags = [(min(one.report.lag_s, two.report.lag_s), two) for one, two in pairs]
    lag_s, slow = max(lags, key=lambda each: each[0], default=(0.0, attempts[0]))
    if lag_s > MAX_LAG_S and not wrong:
        wrong = [f"its code kept the loop of the worker from turning for {lag_s:.2f} s, again and again ({slow.name}): "
                 "hand what computes to asyncio.to_thread"]  # fmt: skip
    return _found("async code does not block", wrong, f"nobody waited longer than {lag_s * 1e3:.0f} ms")


def _can_be_copied(attempts: Sequence[_CheckedEpisode]) -> EnvFinding:
    held = [attempt.report.uncopyable for attempt in attempts if attempt.report.uncopyable]
    wrong = (
        [f"{each}: it cannot be kept or forked with its episode; make it when it is needed" for each in held[0]]
        if held
        else []
    )
    return _found("its state can be copied", wrong, "every attribute", Level.WARN)


def _tools_are_described(attempts: Sequence[_CheckedEpisode]) -> EnvFinding | None:
    tools = {name: tool for attempt in attempts for name, tool in attempt.talk.tools.items()}
    if not tools:
        return None
    wrong = [f"tool {name!r} has no docstring" for name, tool in tools.items() if not tool.description]
    for name, tool in tools.items():
        for argument, schema in tool.parameters.get("properties", {}).items():
            if schema.keys() <= {"default", "description"}:
                wrong.append(f"argument {argument!r} of tool {name!r} has no type")
            elif "description" not in schema:
                wrong.append(f"argument {argument!r} of tool {name!r} is not described (Args: in the docstring)")
    return _found("tools are described", wrong, ", ".join(tools), Level.WARN)


def _timings(attempts: Sequence[_CheckedEpisode]) -> EnvTimings | None:
    ended = [attempt for attempt in attempts if not attempt.reason]
    if not ended:
        return None
    seconds = [attempt.seconds - attempt.report.load_s for attempt in ended]
    turns = [own_s for attempt in ended for own_s in attempt.talk.own_s] or [0.0]
    return EnvTimings(
        load_s=attempts[0].report.load_s,
        episode_s=median(seconds),
        slowest_episode_s=max(seconds),
        turn_s=median(turns),
        slowest_turn_s=max(turns),
    )
