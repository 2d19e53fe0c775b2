"""Where the time goes, in words: which part holds the run up, what the others wait for, and which setting to turn.

One pure function over one record, for the live view, the summary, the report and the dashboard alike. Its percentages
are shares of one interval, and those of one part add up to 100.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.base.types.observation import Account, Bound, Cause
from headrace.run.observe.advice import advise
from headrace.run.observe.settings import UNKNOWN, VerdictSettings
from headrace.run.observe.words import number, percent, percents


class Gain(enum.StrEnum):
    """What bounds the rate once the loss is gone."""

    ENGINE = "the engine"
    LEARNER = "the learner"
    CONTROLLER = "the controller"
    PROCESSORS = "the lack of processors"
    REST = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """One finding and one piece of advice."""

    bound: Bound
    frac: float
    """The share of the learner's time that is lost to it; where the learner holds the run up: its work."""
    most_tok_s: float
    """Trained tokens per second that there can be at most without it, where all parts work as fast as now: see
    :func:`_most`; 0 where nothing is promised."""
    finding: str
    """What every part does with its time."""
    gain: str
    """What there is to gain at most; empty where nothing is promised."""
    advice: str
    """What to change, by the names of settings; empty when balanced."""
    besides: str = ""
    """What else is worth knowing: sync, tokens that nobody trains. Empty where there is nothing."""

    def __str__(self) -> str:
        words = " ".join(filter(None, [self.finding, self.gain, self.advice, self.besides]))
        return f"{self.bound}: {words}"


SMALL = 0.10
"""A share of the time below which nobody is said to wait."""
MOSTLY = 0.5
"""A cause that explains at least this much of the waiting is its cause."""
SATURATED = 0.8
"""A part that works this much of the time holds the run up."""
FAR = 10.0
"""A rate that many times the present one is none that a run will see: it is not told."""
WORTH_A_WORD = 0.01

_OF_CAUSE = {
    Cause.ENGINE: Bound.GENERATION,
    Cause.CONTROLLER: Bound.CONTROLLER,
    Cause.ENVIRONMENT: Bound.ENVIRONMENT,
    Cause.SCORING: Bound.SCORING,
    Cause.TEACHERS: Bound.TEACHERS,
    Cause.SYNC: Bound.SYNC,
    Cause.LEDGER: Bound.LEDGER,
}
_WAITS = {
    Cause.ENGINE: "for tokens from the engine",
    Cause.LEARNER: "while the learner works",
    Cause.CONTROLLER: "for the controller",
    Cause.ENVIRONMENT: "for environments",
    Cause.SCORING: "for rewards",
    Cause.TEACHERS: "for teachers",
    Cause.SYNC: "for weights",
    Cause.LEDGER: "for the ledger's disk",
    Cause.NOBODY: "while no part works",
}


def judge(account: Account, settings: VerdictSettings = UNKNOWN) -> RunVerdict:
    """The verdict on one interval of a run with ``settings``.

    >>> waits = {"engine": 36.0, "controller": 2.0}
    >>> found = judge(Account(seconds=100.0, engine_busy_s=98.0, engine_waits_s={"controller": 2.0},
    ...                       learner_busy_s=62.0, learner_waits_s=waits, trained_tokens=62_000))
    >>> print(found.finding)
    The learner works 62% of the time and waits 38%: 36% for tokens from the engine, 2% for the controller. The engine
    works 98%.
    """
    bound = bound_of(account, settings)
    frac = _share(bound, account)
    most, next_one = _most(bound, frac, account)
    rate = account.per_second(account.trained_tokens)
    told = rate > 0 and rate < most < FAR * rate
    return RunVerdict(
        bound=bound,
        frac=frac,
        most_tok_s=most if told else 0.0,
        finding=_finding(bound, account),
        gain=_gain(bound, (rate, most), next_one) if told else "",
        advice=advise(bound, account, settings),
        besides=_besides(bound, account),
    )


def starved(a: Account) -> dict[str, float]:
    """By part on whose work the learner's time depends: the share of all time in which it could have gone on, and
    waited for a processor. The engine and the controller count as far as the learner waits for them.

    >>> starved(Account(seconds=10.0, learner_busy_s=8.0, observed_s=5.0, queued_s={"learner": 1.0}))
    {'learner': 0.2}
    """
    if a.observed_s <= 0:
        return {}
    on_path = {
        Cause.LEARNER: (1 - a.learner_idle, 1 - a.learner_idle),
        Cause.ENGINE: (a.learner_waits(Cause.ENGINE), 1 - a.engine_idle),
        Cause.CONTROLLER: (a.learner_waits(Cause.CONTROLLER), a.of_time(a.controller_busy_s)),
    }
    shares = {
        str(part): path * min(1.0, a.queued_s.get(part, 0.0) / a.observed_s / busy)
        for part, (path, busy) in on_path.items()
        if busy > 0
    }
    return {part: share for part, share in shares.items() if share > 0}


def bound_of(a: Account, settings: VerdictSettings = UNKNOWN) -> Bound:
    """What holds a run up that spent its time like this."""
    busy = {
        Bound.LEARNER: 1 - a.learner_idle,
        Bound.GENERATION: 1 - a.engine_idle,
        Bound.CONTROLLER: a.of_time(a.controller_busy_s),
    }
    if _starves(a):
        return Bound.PROCESSORS
    if min(busy[Bound.LEARNER], busy[Bound.GENERATION]) >= SATURATED:
        return Bound.BALANCED
    fullest = max(busy, key=lambda bound: busy[bound])
    if busy[fullest] >= SATURATED:
        return _of_episodes(a, fullest)
    waits = {cause: a.learner_waits(cause) for cause in _OF_CAUSE}
    cause = max(waits, key=lambda each: waits[each])
    if waits[cause] < SMALL or waits[cause] < MOSTLY * a.learner_idle:
        return Bound.NOTHING
    named = _of_episodes(a, _OF_CAUSE[cause])
    alternate = settings.by_turns or a.engine_waits(Cause.LEARNER) >= SMALL
    return Bound.TURNS if alternate and named in (Bound.GENERATION, Bound.PREFILL) else named


def _starves(a: Account) -> bool:
    """Whether waiting for a processor takes more of the learner's time than anything else, these waits aside."""
    queued = starved(a)
    lost = sum(queued.values())
    shares = {Cause.LEARNER: 1 - a.learner_idle, **{cause: a.learner_waits(cause) for cause in _OF_CAUSE}}
    return lost >= 2 * SMALL and all(lost >= share - queued.get(part, 0.0) for part, share in shares.items())


def _of_episodes(a: Account, bound: Bound) -> Bound:
    """``bound`` or, where the learner waits for episodes of which more could run, or for the last of them, that."""
    if bound in (Bound.GENERATION, Bound.ENVIRONMENT, Bound.SCORING) and a.of_time(a.held_back_s) >= MOSTLY:
        return Bound.CAPACITY
    if bound in (Bound.GENERATION, Bound.ENVIRONMENT):
        waits = a.learner_waits(Cause.ENGINE) + a.learner_waits(Cause.ENVIRONMENT)
        tail = a.of_time(a.straggler_s)
        if tail >= SMALL and tail >= MOSTLY * waits:
            return Bound.STRAGGLERS
    if bound is Bound.GENERATION and a.prefill_s >= MOSTLY * a.engine_busy_s > 0:
        return Bound.PREFILL
    return bound


def _share(bound: Bound, a: Account) -> float:
    """What of the learner's time it takes."""
    match bound:
        case Bound.LEARNER:
            return 1 - a.learner_idle
        case Bound.PROCESSORS:
            return sum(starved(a).values())
        case Bound.STRAGGLERS:
            return min(a.of_time(a.straggler_s), a.learner_idle)
        case Bound.BALANCED | Bound.NOTHING:
            return 0.0
        case Bound.CAPACITY:
            return a.learner_idle
        case Bound.TURNS | Bound.GENERATION | Bound.PREFILL:
            return a.learner_waits(Cause.ENGINE)
    return a.learner_waits(next(cause for cause, named in _OF_CAUSE.items() if named is bound))


_OWN = {
    Bound.LEARNER: Gain.LEARNER,
    Bound.CONTROLLER: Gain.CONTROLLER,
    Bound.GENERATION: Gain.ENGINE,
    Bound.PREFILL: Gain.ENGINE,
}


def _most(bound: Bound, frac: float, a: Account) -> tuple[float, Gain]:
    """The rate at which tokens could be trained at most if nobody waited for what holds the run up, and the part that
    would hold it up then: rate / the share of the time that the busiest other part works, as fast as now. Waiting for
    processors makes every share longer: there it is rate / (1 − the share that goes by waiting for them).
    """
    rate = a.per_second(a.trained_tokens)
    if bound in (Bound.BALANCED, Bound.NOTHING):
        return 0.0, Gain.REST
    if bound is Bound.PROCESSORS:
        return (rate / (1 - frac) if frac < 1 else 0.0), Gain.REST
    busy = {Gain.LEARNER: 1 - a.learner_idle, Gain.CONTROLLER: a.of_time(a.controller_busy_s)}
    if bound in (Bound.LEARNER, Bound.CONTROLLER, Bound.TURNS):  # else it may sample more at once in the same time
        busy[Gain.ENGINE] = 1 - a.engine_idle
    if a.observed_s > 0 and bound not in _OWN:
        busy[Gain.PROCESSORS] = a.processors_s / a.observed_s
    busy.pop(_OWN.get(bound, Gain.REST), None)
    next_one = max(busy, key=lambda part: busy[part])
    return (rate / busy[next_one] if busy[next_one] > 0 else 0.0), next_one


def _gain(bound: Bound, rates: tuple[float, float], next_one: Gain) -> str:
    rate, most = (f"{number(each)}" for each in rates)
    if bound is Bound.PROCESSORS:
        return f"Without waiting for processors the run would train at most {most} tokens/s instead of {rate}."
    if bound in _OWN:
        faster = f"If {_OWN[bound]} were faster, {next_one} would hold the run up next"
    else:
        faster = f"If nothing had to wait, {next_one} would hold the run up"
    return f"{faster}: at most {most} tokens/s instead of {rate}."


def _finding(bound: Bound, a: Account) -> str:
    """How each part spends its time. The words are the same for every bound, so that one run can be read against
    another; what the bound needs besides follows."""
    said = [f"The learner {_spends(a.learner_busy_s, a.learner_waits_s, a.seconds)}."]
    engine = _spends(a.engine_busy_s, a.engine_waits_s, a.seconds)
    brief = f"works {percent(1 - a.engine_idle)}"
    idle_matters = bound in (Bound.TURNS, Bound.LEARNER, Bound.NOTHING, Bound.CONTROLLER)
    said.append(f"The engine {engine if idle_matters else brief}.")
    if a.controller_busy_s:
        said.append(f"The controller works {percent(a.of_time(a.controller_busy_s))}.")
    match bound:
        case Bound.PREFILL:
            said.append(f"{percent(a.prefill_s / a.engine_busy_s)} of the engine's work is reading prompts.")
        case Bound.STRAGGLERS:
            tail = percent(a.of_time(a.straggler_s))
            said.append(f"{tail} of the time the learner waits for the last tenth of a batch's episodes.")
        case Bound.CAPACITY:
            held = percent(a.of_time(a.held_back_s))
            said.append(f"{held} of the time flow.capacity keeps more groups from running, and no request waits.")
    queued = starved(a)
    if bound is Bound.PROCESSORS or sum(queued.values()) >= SMALL:
        each = ", ".join(f"{part} {percent(share)}" for part, share in queued.items())
        used = percent(min(1.0, a.processors_s / a.observed_s))
        said.append(
            f"Within these times, {percent(sum(queued.values()))} of all time goes by waiting for a processor "
            f"({each}); the run uses {used} of the processors it may use."
        )
    return " ".join(said)


def _spends(busy_s: float, waits_s: Mapping[str, float], seconds: float) -> str:
    """Work and waits in whole percent that add up to 100.

    >>> _spends(5.04, {"scoring": 2.48, "nobody": 2.48}, 10.0)
    'works 50% of the time and waits 50%: 25% for rewards, 25% while no part works'
    """
    busy = 100 - percents([max(0.0, 1 - busy_s / seconds)], None)[0] if seconds > 0 else 0
    if busy == 100:
        return "works 100% of the time"
    causes = sorted(waits_s, key=lambda cause: -waits_s[cause])
    shares = percents([waits_s[cause] / seconds for cause in causes], 100 - busy)
    told = [f"{share}% {_WAITS[Cause(cause)]}" for cause, share in zip(causes, shares, strict=True) if share]
    return f"works {busy}% of the time and waits {100 - busy}%" + (f": {', '.join(told)}" if told else "")


def _besides(bound: Bound, a: Account) -> str:
    said: list[str] = []
    if bound is not Bound.SYNC and (exposed := a.of_time(a.exposed_sync_s)) >= WORTH_A_WORD:
        said.append(f"the learner stands still for the sync {percent(exposed)} of the time")
    if bound is not Bound.STRAGGLERS and (tail := a.of_time(a.straggler_s)) >= SMALL:
        said.append(f"{percent(tail)} of the time it waits for the last tenth of a batch's episodes")
    wasted = sum(a.wasted_tokens.values())
    if wasted and wasted >= WORTH_A_WORD * a.generated_tokens:
        most = sorted(a.wasted_tokens.items(), key=lambda item: -item[1])[:3]
        reasons = ", ".join(f"{reason} {number(count)}" for reason, count in most)
        share = wasted / max(a.generated_tokens, wasted)
        said.append(f"{percent(share)} of the sampled tokens are never trained ({reasons})")
    return f"Besides: {'; '.join(said)}." if said else ""
