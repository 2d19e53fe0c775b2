"""Where the time goes, in words: who waits, for what, what that costs, and which setting to turn.

One pure function over one record, for the live view, the summary, the report and the dashboard alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.observe.words import number
from headrace.types.observation import Account


class Bound(enum.StrEnum):
    """What holds a run up."""

    GENERATION = "generation-bound"
    """The learner waits while the engine works."""
    PREFILL = "prefill-bound"
    """The learner waits while the engine reads prompts."""
    STRAGGLERS = "straggler-bound"
    """The learner waits for the last episodes of a batch."""
    CAPACITY = "capacity-bound"
    """The learner waits, and no more groups may run at once."""
    LEARNER = "learner-bound"
    """The engine waits while the learner works."""
    SCORING = "scoring-bound"
    """Both wait for rewards."""
    SYNC = "sync-bound"
    """Somebody waits for weights."""
    TURNS = "taking turns"
    """Engine and learner mostly work one after the other."""
    BALANCED = "balanced"
    """Nobody waits long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One finding and one piece of advice."""

    bound: Bound
    frac: float
    """The fraction of the time that is lost to it."""
    cost_tok_s: float
    """Tokens per second that would be trained (where the learner is what holds the run up: sampled) besides, if
    nothing were lost to it."""
    finding: str
    """A sentence with the numbers."""
    advice: str
    """A sentence with the names of settings; empty when balanced."""
    besides: str = ""
    """What else is worth knowing: sync, stragglers, tokens that nobody trains. Empty where there is nothing."""

    def __str__(self) -> str:
        return " ".join(filter(None, [f"{self.bound}: {self.finding}", self.advice, self.besides]))


SMALL = 0.10
"""A fraction of the time below which nobody is said to wait."""
MOSTLY = 0.5
"""A part that explains at least this much of the waiting is its cause."""
WORTH_A_WORD = 0.01

_ADVICE = {
    Bound.GENERATION: "Give the engine more: add one (engine.count), raise launch.engine_threads (and lower "
    "launch.learner_threads), or engine.max_sequences if many requests wait to join.",
    Bound.PREFILL: "Read less: shorten prompts, raise flow.group_size (a group's prompt is read once), or add an "
    "engine (engine.count).",
    Bound.STRAGGLERS: "Let the next batch be sampled meanwhile: raise flow.max_age and flow.lead; set flow.order = "
    "'ready_first'; or cut the tail: lower engine.max_new_tokens, or ask for more episodes than are needed "
    "(flow.filters, kind = 'redundancy').",
    Bound.CAPACITY: "Raise flow.capacity, or leave it out (and let engine.max_sequences hold as many sequences).",
    Bound.LEARNER: "Give the learner more: raise launch.learner_threads (and lower launch.engine_threads), or spread "
    "it over more devices (learner.parallel).",
    Bound.SCORING: "Let generation run ahead while rewards are computed: raise flow.max_age and flow.lead, or make the "
    "reward faster (env.reward_workers, env.reward_concurrency).",
    Bound.SYNC: "Let generation run ahead while weights travel: raise flow.lead (and flow.max_age, which bounds it); "
    "send less (sync.codec).",
    Bound.TURNS: "Let them overlap: set flow.max_age >= 1; where it is, raise flow.max_age and flow.lead.",
    Bound.BALANCED: "",
}
_RUN_AHEAD = "The {idle} stands idle too: raise flow.lead (and flow.max_age, which bounds it)."


def judge(account: Account) -> Verdict:
    """The verdict on one interval.

    >>> verdict = judge(Account(seconds=100.0, engine_busy_s=98.0, learner_busy_s=62.0, trained_tokens=62_000))
    >>> print(verdict.finding)
    38% of the learner's time goes by waiting for episodes; the engine works 98%. It costs 380 trained tokens/s.
    """
    bound, frac = _bound(account)
    advice = _ADVICE[bound]
    if bound is Bound.GENERATION and account.engine_idle > 2 * SMALL:
        advice = _RUN_AHEAD.format(idle="engine")
    elif bound is Bound.LEARNER and account.learner_idle > 2 * SMALL:
        advice = _RUN_AHEAD.format(idle="learner")
    cost = _cost(bound, frac, account)
    kind = "sampled" if bound is Bound.LEARNER else "trained"
    costs = f" It costs {number(cost)} {kind} tokens/s." if cost else ""
    return Verdict(
        bound=bound,
        frac=frac,
        cost_tok_s=cost,
        finding=_finding(bound, account) + costs,
        advice=advice,
        besides=_besides(bound, account),
    )


def _bound(a: Account) -> tuple[Bound, float]:
    engine, learner = a.engine_idle, a.learner_idle
    outside = max((a.scoring, Bound.SCORING), (a.sync, Bound.SYNC), key=lambda pair: pair[0])
    if outside[0] >= SMALL and outside[0] >= MOSTLY * min(engine, learner):
        return outside[1], outside[0]
    if max(engine, learner) < SMALL:
        return Bound.BALANCED, max(engine, learner)
    stragglers = a.of_time(a.straggler_s)
    if stragglers >= SMALL and stragglers >= MOSTLY * learner:
        return Bound.STRAGGLERS, stragglers
    if learner >= SMALL and a.of_time(a.held_back_s) >= MOSTLY:
        return Bound.CAPACITY, learner
    overlap = a.together_s > MOSTLY * min(a.engine_busy_s, a.learner_busy_s)
    if min(engine, learner) >= SMALL and engine + learner >= 0.9 and not overlap:
        return Bound.TURNS, min(1 - engine, 1 - learner)
    if learner < engine:
        return Bound.LEARNER, engine
    prefill = a.prefill_s >= MOSTLY * a.engine_busy_s > 0
    return (Bound.PREFILL if prefill else Bound.GENERATION), learner


def _cost(bound: Bound, frac: float, a: Account) -> float:
    """What the rate would grow by if the lost fraction were not lost; at most twentyfold."""
    if bound is Bound.BALANCED:
        return 0.0
    rate = a.per_second(a.generated_tokens if bound is Bound.LEARNER else a.trained_tokens)
    lost = min(frac, 0.95)
    return rate * lost / (1 - lost)


def _finding(bound: Bound, a: Account) -> str:
    engine, learner = f"{1 - a.engine_idle:.0%}", f"{1 - a.learner_idle:.0%}"
    waits = f"{a.learner_idle:.0%} of the learner's time goes by waiting"
    match bound:
        case Bound.GENERATION:
            return f"{waits} for episodes; the engine works {engine}."
        case Bound.PREFILL:
            read = f"{a.prefill_s / a.engine_busy_s:.0%}"
            return f"{waits} for episodes; the engine works {engine}, and {read} of that is reading prompts."
        case Bound.STRAGGLERS:
            tail = f"{a.of_time(a.straggler_s):.0%}"
            return f"{waits}; {tail} of the time it waits for the last tenth of a batch's episodes."
        case Bound.CAPACITY:
            held = f"{a.of_time(a.held_back_s):.0%}"
            return f"{waits}; {held} of the time flow.capacity keeps more groups from running, and no request waits."
        case Bound.LEARNER:
            return f"the engine waits for its turn {a.engine_idle:.0%} of the time; the learner works {learner}."
        case Bound.SCORING:
            return f"engine and learner both stand idle {a.scoring:.0%} of the time because rewards are outstanding."
        case Bound.SYNC:
            return f"{a.sync:.0%} of the time somebody stands still because weights are on their way."
        case Bound.TURNS:
            return f"the engine works {engine} of the time and the learner {learner}, mostly one after the other."
        case Bound.BALANCED:
            return f"the engine works {engine} of the time, the learner {learner}."


def _besides(bound: Bound, a: Account) -> str:
    said: list[str] = []
    if bound is not Bound.SYNC and (exposed := a.of_time(a.exposed_sync_s)) >= WORTH_A_WORD:
        said.append(f"exposed sync {exposed:.0%} of the time")
    if bound is not Bound.STRAGGLERS and (tail := a.of_time(a.straggler_s)) >= WORTH_A_WORD:
        said.append(f"stragglers {tail:.0%}")
    wasted = sum(a.wasted_tokens.values())
    if wasted and wasted >= WORTH_A_WORD * a.generated_tokens:
        most = sorted(a.wasted_tokens.items(), key=lambda item: -item[1])[:3]
        reasons = ", ".join(f"{reason} {number(count)}" for reason, count in most)
        share = wasted / max(a.generated_tokens, wasted)
        said.append(f"{share:.0%} of the sampled tokens are never trained ({reasons})")
    return f"Besides: {'; '.join(said)}." if said else ""
