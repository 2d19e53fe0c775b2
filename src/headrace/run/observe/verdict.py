"""The verdict on a run: which part is the bottleneck, what the other parts wait for, and which setting to change.

:func:`judge` computes the verdict from one record, the *account*: where the time and the tokens of an interval of the
run went. The *bound* (:class:`Bound`) is the bottleneck; a *cause* (:class:`Cause`) is a part that another part waits
for. A *share* is a fraction of the interval, from 0 to 1; in words, the percentages of one part add up to 100.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.types.observation import Account, Bound, Cause
from headrace.run.observe.advice import UNKNOWN, VerdictSettings, advise
from headrace.run.observe.words import duration, number, percent, percents


class NextBound(enum.StrEnum):
    """The part that would be the bottleneck of a run next, without the present bound, in the words of a verdict.
    ``REST``, an empty text, means that no such part is named."""

    ENGINE = "the engine"
    LEARNER = "the learner"
    CONTROLLER = "the controller"
    PROCESSORS = "the lack of processors"
    REST = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """The verdict on a run: its bound (the bottleneck), the finding that explains the bound, and advice. The live view,
    the summary and the dashboard show it as text."""

    bound: Bound
    """The bottleneck: a part of the run, or the lack of a resource."""
    frac: float
    """The share of the learner's time that the bound costs; for a bound by the learner, the share in which it works."""
    max_tok_s: float
    """The largest rate of trained tokens per second that would be possible without the bound, if all other parts worked
    as fast as now (:func:`_estimate_largest_rate`); 0 if it is not known."""
    finding: str
    """The time of each part, in words."""
    gain: str
    """The maximum gain that is possible, in words; empty if it is not known."""
    advice: str
    """The settings to change, in words; empty if the run is balanced."""
    besides: str = ""
    """Other losses, in words: waits for the sync, and tokens that are never trained. Empty if there are none."""

    def __str__(self) -> str:
        """Return the verdict as one line: the bound, a colon, and all sentences."""
        words = " ".join(filter(None, [self.finding, self.gain, self.advice, self.besides]))
        return f"{self.bound}: {words}"


SMALL_SHARE = 0.10
"""The share of the time below which a wait is not mentioned."""
MAIN_SHARE = 0.5
"""The share of a wait from which on a cause explains the wait."""
SATURATED_SHARE = 0.8
"""The share of the time from which on a working part counts as the bottleneck."""
MAX_PROMISED_GAIN = 10.0
"""The largest ratio of the possible to the present rate that a verdict names, since no run would reach a higher one."""
CLOSE = 1.1
"""The ratio of two times below which they are reported as one time."""
CROWDED_SHARE = 0.05
"""The share of time, lost by waiting for a processor, from which on the times of parts say little about the parts."""
MAX_CONTROLLER_SHARE = 0.5
"""The share of time above which a working controller is expected to delay the other parts."""
NOTED_SHARE = 0.01
"""The share of time or tokens above which a loss is mentioned besides the bound."""

_BOUND_BY_CAUSE = {
    Cause.ENGINE: Bound.GENERATION,
    Cause.CONTROLLER: Bound.CONTROLLER,
    Cause.ENVIRONMENT: Bound.ENVIRONMENT,
    Cause.SCORING: Bound.SCORING,
    Cause.TEACHERS: Bound.TEACHERS,
    Cause.SYNC: Bound.SYNC,
    Cause.LEDGER: Bound.LEDGER,
    Cause.STOPPED: Bound.STOPPED,
}
"""The bound of a run that waits for this part."""
_WAIT_WORDS = {
    Cause.ENGINE: "for tokens from the engine",
    Cause.LEARNER: "while the learner works",
    Cause.CONTROLLER: "for the controller",
    Cause.ENVIRONMENT: "for environments",
    Cause.SCORING: "for rewards",
    Cause.TEACHERS: "for teachers",
    Cause.SYNC: "for weights",
    Cause.LEDGER: "for the ledger's disk",
    Cause.STOPPED: "while a process is stopped",
    Cause.NOBODY: "while no part works",
}
"""The words for a wait, by its cause."""


def judge(account: Account, settings: VerdictSettings = UNKNOWN) -> RunVerdict:
    """Return the verdict on the interval of a run that ``account`` covers. ``settings`` are the values of the run's
    settings that the advice names; by default no value is known.

    >>> waits = {"engine": 36.0, "controller": 2.0}
    >>> verdict = judge(Account(seconds=100.0, engine_busy_s=98.0, engine_waits_s={"controller": 2.0},
    ...                         learner_busy_s=62.0, learner_waits_s=waits, trained_tokens=62_000))
    >>> print(verdict.finding)
    The learner works 62% of the time and waits 38%: 36% for tokens from the engine, 2% for the controller. The engine
    works 98%.
    """
    bound = find_bound(account, settings)
    frac = _estimate_cost(bound, account)
    max_rate, next_bound = _estimate_largest_rate(bound, frac, account)
    rate = account.per_second(account.trained_tokens)
    promised = rate > 0 and rate < max_rate < MAX_PROMISED_GAIN * rate
    return RunVerdict(
        bound=bound,
        frac=frac,
        max_tok_s=max_rate if promised else 0.0,
        finding=_describe_finding(bound, account),
        gain=_describe_gain(bound, (rate, max_rate), next_bound) if promised else "",
        advice=advise(bound, account, settings),
        besides=_describe_other_losses(bound, account),
    )


def estimate_processor_waits(account: Account) -> dict[str, float]:
    """Return the share of the interval of ``account`` that the learner loses because a part of the run waits for a
    processor (CPU), by the name of that part; parts that cost nothing are omitted.

    The waits of the engine and of the controller count only while the learner waits for these parts. The result is
    empty if waiting for processors was not measured.

    >>> estimate_processor_waits(Account(seconds=10.0, learner_busy_s=8.0, observed_s=5.0, queued_s={"learner": 1.0}))
    {'learner': 0.2}
    """
    if account.observed_s <= 0:
        return {}
    on_path = {
        Cause.LEARNER: (1 - account.learner_idle, 1 - account.learner_idle),
        Cause.ENGINE: (account.learner_waits(Cause.ENGINE), 1 - account.engine_idle),
        Cause.CONTROLLER: (account.learner_waits(Cause.CONTROLLER), account.to_fraction(account.controller_busy_s)),
    }
    shares = {
        str(part): path * min(1.0, account.queued_s.get(part, 0.0) / account.observed_s / busy)
        for part, (path, busy) in on_path.items()
        if busy > 0
    }
    return {part: share for part, share in shares.items() if share > 0}


def find_bound(account: Account, settings: VerdictSettings = UNKNOWN) -> Bound:
    """Return the bound of a run with ``account``: the bottleneck that the verdict names. ``settings`` tell whether
    engine and learner share a device.

    The rules are, in order: a lack of processors; a part that works nearly all the time; the part for which the learner
    waits longest, if it explains most of the learner's waiting; otherwise the run is bound by no single part.
    """
    busy = {
        Bound.LEARNER: 1 - account.learner_idle,
        Bound.GENERATION: 1 - account.engine_idle,
        Bound.CONTROLLER: account.to_fraction(account.controller_busy_s),
    }
    if _is_short_of_processors(account):
        return Bound.PROCESSORS
    if min(busy[Bound.LEARNER], busy[Bound.GENERATION]) >= SATURATED_SHARE:
        return Bound.BALANCED
    if max(account.learner_waits(Cause.CONTROLLER), account.engine_waits(Cause.CONTROLLER)) < SMALL_SHARE:
        del busy[Bound.CONTROLLER]  # it works while the others do: no part would be faster without it
    fullest = max(busy, key=lambda bound: busy[bound])
    if busy[fullest] >= SATURATED_SHARE:
        return _refine_bound(account, fullest)
    waits = {cause: account.learner_waits(cause) for cause in _BOUND_BY_CAUSE}
    cause = max(waits, key=lambda each: waits[each])
    is_other_part = cause is not Cause.ENGINE
    if (
        is_other_part
        and busy[Bound.LEARNER] >= MAIN_SHARE
        and _sum_waits(account, Cause.LEARNER) > _sum_waits(account, cause)
    ):
        return Bound.NOTHING  # the engine waits for the learner for longer than both wait for that part
    explains_most = waits[cause] >= MAIN_SHARE * account.learner_idle or _is_longest_wait(account, cause)
    if waits[cause] < SMALL_SHARE or not explains_most:
        return Bound.NOTHING
    bound = _refine_bound(account, _BOUND_BY_CAUSE[cause])
    alternate = settings.alternating or account.engine_waits(Cause.LEARNER) >= SMALL_SHARE
    return Bound.TURNS if alternate and bound in (Bound.GENERATION, Bound.PREFILL) else bound


def _sum_waits(account: Account, cause: Cause) -> float:
    """Return the share of time in which the learner waits for the part ``cause``, plus the share in which the engine
    waits for it: a number from 0 to 2."""
    return account.learner_waits(cause) + account.engine_waits(cause)


def _is_longest_wait(account: Account, cause: Cause) -> bool:
    """Return whether learner and engine together wait longer for ``cause`` than for any other part.

    The result is false if ``cause`` is the learner or the engine itself, and if the learner spends more time waiting
    while no part works than waiting for ``cause``.
    """
    is_other_part = cause not in (Cause.ENGINE, Cause.LEARNER, Cause.NOBODY)
    longest = max(Cause, key=lambda each: _sum_waits(account, each))
    return is_other_part and longest is cause and account.learner_waits(cause) > account.learner_waits(Cause.NOBODY)


def _is_short_of_processors(account: Account) -> bool:
    """Return whether a lack of processors (CPUs) is the bottleneck: whether waiting for a processor costs the learner
    at least a fifth of its time, and at least as much as its own work and as its wait for any part. Work and waits are
    counted without the waiting for a processor that they contain."""
    queued = estimate_processor_waits(account)
    lost = sum(queued.values())
    shares = {
        Cause.LEARNER: 1 - account.learner_idle,
        **{cause: account.learner_waits(cause) for cause in _BOUND_BY_CAUSE},
    }
    return lost >= 2 * SMALL_SHARE and all(lost >= share - queued.get(part, 0.0) for part, share in shares.items())


def _refine_bound(account: Account, bound: Bound) -> Bound:
    """Return the reason why the learner waits for episodes, if ``bound`` means such a wait: too few groups in flight
    (``CAPACITY``), the last episodes of a batch (``STRAGGLERS``), or an engine that mostly reads prompts (``PREFILL``).
    In all other cases return ``bound`` itself."""
    if (
        bound in (Bound.GENERATION, Bound.ENVIRONMENT, Bound.SCORING)
        and account.to_fraction(account.held_back_s) >= MAIN_SHARE
    ):
        return Bound.CAPACITY
    if bound in (Bound.GENERATION, Bound.ENVIRONMENT):
        waits = account.learner_waits(Cause.ENGINE) + account.learner_waits(Cause.ENVIRONMENT)
        tail = account.to_fraction(account.straggler_s)
        if tail >= SMALL_SHARE and tail >= MAIN_SHARE * waits:
            return Bound.STRAGGLERS
    if bound is Bound.GENERATION and account.prefill_s >= MAIN_SHARE * account.engine_busy_s > 0:
        return Bound.PREFILL
    return bound


def _estimate_cost(bound: Bound, account: Account) -> float:
    """Return the share of the learner's time that the bound costs, from 0 to 1; for a bound by the learner itself, the
    share in which it works, and 0 if no part is the bottleneck."""
    match bound:
        case Bound.LEARNER:
            return 1 - account.learner_idle
        case Bound.PROCESSORS:
            return sum(estimate_processor_waits(account).values())
        case Bound.STRAGGLERS:
            return min(account.to_fraction(account.straggler_s), account.learner_idle)
        case Bound.BALANCED | Bound.NOTHING:
            return 0.0
        case Bound.CAPACITY:
            return account.learner_idle
        case Bound.TURNS | Bound.GENERATION | Bound.PREFILL:
            return account.learner_waits(Cause.ENGINE)
    return account.learner_waits(next(cause for cause, named in _BOUND_BY_CAUSE.items() if named is bound))


_OWN_SPEED = {
    Bound.LEARNER: NextBound.LEARNER,
    Bound.CONTROLLER: NextBound.CONTROLLER,
    Bound.GENERATION: NextBound.ENGINE,
    Bound.PREFILL: NextBound.ENGINE,
}
"""The part whose own speed limits the run, for each bound that is the speed of a part."""


def _estimate_largest_rate(bound: Bound, frac: float, account: Account) -> tuple[float, NextBound]:
    """Return the largest possible rate of trained tokens without the bound, in tokens per second, and the part that
    would be the bottleneck then. The rate is 0 if it is not known. ``frac`` is the share of time that the bound costs.

    The rate is the present rate divided by the share of the time in which the busiest other part works. For a lack of
    processors, which slows every part down, the present rate is divided by 1 − ``frac`` instead.
    """
    rate = account.per_second(account.trained_tokens)
    if bound in (Bound.BALANCED, Bound.NOTHING):
        return 0.0, NextBound.REST
    if bound is Bound.PROCESSORS:
        return (rate / (1 - frac) if frac < 1 else 0.0), NextBound.REST
    busy = {
        NextBound.LEARNER: 1 - account.learner_idle,
        NextBound.CONTROLLER: account.to_fraction(account.controller_busy_s),
    }
    # for other bounds the engine could sample more sequences at once in the same time
    if bound in (Bound.LEARNER, Bound.CONTROLLER, Bound.TURNS):
        busy[NextBound.ENGINE] = 1 - account.engine_idle
    if account.observed_s > 0 and bound not in _OWN_SPEED:
        busy[NextBound.PROCESSORS] = account.processors_s / account.observed_s
    busy.pop(_OWN_SPEED.get(bound, NextBound.REST), None)
    next_bound = max(busy, key=lambda part: busy[part])
    return (rate / busy[next_bound] if busy[next_bound] > 0 else 0.0), next_bound


def _describe_gain(bound: Bound, rates: tuple[float, float], next_bound: NextBound) -> str:
    """Return the possible gain as a sentence of the verdict. ``rates`` are the present rate and the largest possible
    rate without ``bound``, in trained tokens per second; ``next_bound`` is the part that would be the bottleneck
    then."""
    rate, max_rate = (number(each) for each in rates)
    if bound is Bound.PROCESSORS:
        return f"Without waiting for processors the run would train at most {max_rate} tokens/s instead of {rate}."
    if bound in _OWN_SPEED:
        condition = f"If {_OWN_SPEED[bound]} were faster, {next_bound} would hold the run up next"
    else:
        condition = f"If nothing had to wait, {next_bound} would hold the run up"
    return f"{condition}: at most {max_rate} tokens/s instead of {rate}."


def _describe_finding(bound: Bound, account: Account) -> str:
    """Return sentences that say how learner, engine and controller spend their time by ``account``, followed by a fact
    that explains ``bound``, if there is one.

    The first sentences have the same form for every bound, so that two runs can be compared.
    """
    sentences = [f"The learner {_describe_time(account.learner_busy_s, account.learner_waits_s, account.seconds)}."]
    engine = _describe_time(account.engine_busy_s, account.engine_waits_s, account.seconds)
    engine_briefly = f"works {percent(1 - account.engine_idle)}"
    cause = next((each for each, named in _BOUND_BY_CAUSE.items() if named is bound and each is not Cause.ENGINE), None)
    is_shared_wait = (
        cause is not None and SMALL_SHARE <= account.learner_waits(cause) < MAIN_SHARE * account.learner_idle
    )
    idle_matters = is_shared_wait or bound in (Bound.TURNS, Bound.LEARNER, Bound.NOTHING, Bound.CONTROLLER)
    sentences.append(f"The engine {engine if idle_matters else engine_briefly}.")
    if account.controller_busy_s:
        sentences.append(f"The controller works {percent(account.to_fraction(account.controller_busy_s))}.")
    if cause is not None and is_shared_wait and _is_longest_wait(account, cause):
        learner = _compute_wait_percents(account.learner_busy_s, account.learner_waits_s, account.seconds).get(cause, 0)
        waits = _compute_wait_percents(account.engine_busy_s, account.engine_waits_s, account.seconds).get(cause, 0)
        sentences.append(
            f"Both together wait longest {_WAIT_WORDS[cause]}: {learner}% of the learner's time, {waits}% of the "
            "engine's."
        )
    match bound:
        case Bound.PREFILL:
            sentences.append(
                f"{percent(account.prefill_s / account.engine_busy_s)} of the engine's work is reading prompts."
            )
        case Bound.STRAGGLERS:
            tail = percent(account.to_fraction(account.straggler_s))
            sentences.append(f"{tail} of the time the learner waits for the last tenth of a batch's episodes.")
        case Bound.CAPACITY:
            held = percent(account.to_fraction(account.held_back_s))
            sentences.append(f"{held} of the time flow.capacity keeps more groups from running, and no request waits.")
    queued = estimate_processor_waits(account)
    if bound is Bound.PROCESSORS or sum(queued.values()) >= SMALL_SHARE:
        by_part = ", ".join(f"{part} {percent(share)}" for part, share in queued.items())
        used = percent(min(1.0, account.processors_s / account.observed_s))
        sentences.append(
            f"Within these times, {percent(sum(queued.values()))} of all time goes by waiting for a processor "
            f"({by_part}); the run uses {used} of the processors it may use."
        )
    return " ".join(sentences)


def _describe_time(busy_s: float, waits_s: Mapping[str, float], seconds: float) -> str:
    """Return in words how one part spends its time: the percentages of its work and of its waits, which add up to 100.
    ``busy_s`` is its work and ``waits_s`` its waits by cause, in seconds, out of an interval of ``seconds``.

    >>> _describe_time(5.04, {"scoring": 2.48, "nobody": 2.48}, 10.0)
    'works 50% of the time and waits 50%: 25% for rewards, 25% while no part works'
    """
    waits = _compute_wait_percents(busy_s, waits_s, seconds)
    idle = sum(waits.values()) if waits_s else _compute_idle_percent(busy_s, seconds)
    if not idle:
        return "works 100% of the time"
    phrases = [f"{share}% {_WAIT_WORDS[Cause(cause)]}" for cause, share in waits.items() if share]
    return f"works {100 - idle}% of the time and waits {idle}%" + (f": {', '.join(phrases)}" if phrases else "")


def _compute_wait_percents(busy_s: float, waits_s: Mapping[str, float], seconds: float) -> dict[str, int]:
    """Return the waits of a part by cause, in whole percent of its time, the longest first. ``waits_s`` has their
    seconds, ``busy_s`` the seconds of its work, out of ``seconds``. Work and waits add up to 100 percent."""
    causes = sorted(waits_s, key=lambda cause: -waits_s[cause])
    shares = percents(
        [waits_s[cause] / seconds if seconds > 0 else 0.0 for cause in causes], _compute_idle_percent(busy_s, seconds)
    )
    return dict(zip(causes, shares, strict=True))


def _compute_idle_percent(busy_s: float, seconds: float) -> int:
    """Return the share of time in which a part did not work, in whole percent, if it worked for ``busy_s`` of
    ``seconds``; 100 for an empty interval."""
    return percents([max(0.0, 1 - busy_s / seconds)], None)[0] if seconds > 0 else 100


def _describe_other_losses(bound: Bound, account: Account) -> str:
    """Return the losses in ``account`` that are not the bound of the run, as sentences: waits for the sync, the last
    episodes of batches, tokens that are never trained, and the age of trained tokens. Small losses are omitted; the
    text may be empty."""
    sentences: list[str] = []
    if bound is not Bound.SYNC and (exposed := account.to_fraction(account.exposed_sync_s)) >= NOTED_SHARE:
        sentences.append(f"the learner is blocked by the sync {percent(exposed)} of the time")
    if bound is not Bound.STRAGGLERS and (tail := account.to_fraction(account.straggler_s)) >= SMALL_SHARE:
        sentences.append(f"{percent(tail)} of the time it waits for the last tenth of a batch's episodes")
    wasted = sum(account.wasted_tokens.values())
    if wasted and wasted >= NOTED_SHARE * account.generated_tokens:
        main_reasons = sorted(account.wasted_tokens.items(), key=lambda item: -item[1])[:3]
        reasons = ", ".join(f"{reason} {number(count)}" for reason, count in main_reasons)
        share = wasted / max(account.generated_tokens, wasted)
        sentences.append(f"{percent(share)} of the sampled tokens are never trained ({reasons})")
    besides = f"Besides: {'; '.join(sentences)}." if sentences else ""
    return " ".join(filter(None, [besides, _describe_ages(account)]))


def _describe_ages(account: Account) -> str:
    """Return in words the mean age of the trained tokens, in versions, and how long a synchronous run would have taken.
    Return an empty string if the ages are not known, or if every token had the age 0."""
    if not account.aged_tokens or not account.trained_ages:
        return ""
    mean_age = account.trained_ages / account.aged_tokens
    return f"Tokens are trained at a mean age of {mean_age:.1f}. {_describe_synchronous_time(account)}".rstrip()


def _describe_synchronous_time(account: Account) -> str:
    """Return in words how long the run would have taken if generation and training took turns. Return an empty string
    if this cannot be estimated: if the parts delayed each other, or the run was too short to measure this.

    >>> measured = {"observed_s": 20.0, "turned_s": 20.0, "turns_least_s": 30.0}
    >>> _describe_synchronous_time(Account(seconds=22.0, turns_s=30.0, **measured))
    'A synchronous run (flow.max_age = 0) would have taken about 33 s instead of 22 s.'
    >>> _describe_synchronous_time(Account(seconds=20.0, turns_s=60.0, **measured))
    'A synchronous run (flow.max_age = 0) would have taken 30 s to 1 min 00 s instead of 20 s.'
    """
    if account.turned_s <= 0 or account.turns_s <= 0 or account.observed_s <= 0 or _is_crowded(account):
        return ""
    min_s = account.turns_least_s / account.turned_s * account.seconds
    max_s = account.turns_s / account.turned_s * account.seconds
    times = f"about {duration(max_s)}" if max_s < CLOSE * min_s else f"{duration(min_s)} to {duration(max_s)}"
    return f"A synchronous run (flow.max_age = 0) would have taken {times} instead of {duration(account.seconds)}."


def _is_crowded(account: Account) -> bool:
    """Return whether the parts of the run delay each other much, by waiting for a processor or for the controller. A
    synchronous run would not have these waits, so its time cannot be estimated from the times of this run.

    >>> [_is_crowded(Account(seconds=10.0, controller_busy_s=busy_s)) for busy_s in (2.0, 6.0)]
    [False, True]
    """
    return (
        sum(estimate_processor_waits(account).values()) >= CROWDED_SHARE
        or account.to_fraction(account.controller_busy_s) >= MAX_CONTROLLER_SHARE
    )
