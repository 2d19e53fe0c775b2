"""Looks for the best way to run it: every candidate is a simulated run.

Coarse first: splits of the accelerators and run-ahead together, and all accelerators in turn; then around the best of
these a finer split, the batch, the interrupt, the transport, one after the other. Of candidates that are about as fast
the one with younger tokens wins, and of these the one that changes less of what was asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from headrace.base.clock import Clock
from headrace.base.types.weights import Interrupt
from headrace.flow import FlowConfig
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.simulator import Simulation
from headrace.wings.plan.system import Choice, PlanContext

COARSE = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Shares of the accelerators that generate."""
FINE = (-0.0625, -0.03125, 0.03125, 0.0625)
"""Beside the best of those."""
AGES = (1, 2, 4, 8)
EPISODES = 6_000
"""Of one simulated run, about: enough for its rate to be known within a percent or two."""
LEAST_STEPS, MOST_STEPS = 6, 24
ALIKE = 0.02
"""Rates that differ by less are the same: simulated runs scatter by about as much."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate and what it came to."""

    generation: int
    """Accelerators that generate; 0: all do both in turn."""
    training: int
    """Accelerators that train."""
    groups_per_step: int
    """The batch."""
    max_age: int
    """The bound."""
    lead: int
    interrupt: str
    transport: str
    trained_tok_s: float
    generated_tok_s: float
    step_s: float
    engine_idle: float
    """Fraction of the time."""
    learner_idle: float
    """The same."""
    mean_age: float
    """Of trained tokens, in versions."""
    oldest: int
    """The greatest age."""
    exposed_sync: float
    """Fraction of the time that the learner stands still for the sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice and its run."""

    choice: Choice
    outcome: SimulatedOutcome

    @property
    def tok_s(self) -> float:
        """Trained tokens a second."""
        return self.outcome.tok_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search came to."""

    site: PlanContext
    best: Candidate
    asked: Candidate
    """As the run file has it, with the best split for it; in turn, where there is none."""
    synchronous: Candidate
    """The fastest one whose tokens are all fresh: on accelerators that generate and train in turn, or on two parts."""
    tried: Sequence[Tried]
    """All candidates, in the order in which they were looked at."""
    seconds: float
    """That the search took."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search; what was simulated once is not simulated again."""

    site: PlanContext
    clock: Clock
    seed: int
    fixed: int | None = None
    """Accelerators that generate, where that is given."""
    _known: dict[tuple[object, ...], Candidate] = field(default_factory=dict)

    def run(self) -> SearchResult:
        """All of it."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            asked = synchronous = self._try(self._shared())
            return self._found(began_s, self._better(asked, self._batches(asked.choice)), asked, synchronous)
        asked = self._best([self._asked(count) for count in self._splits()])
        best = self._best([self._asked(count).but(**_aged(age)) for count in self._splits() for age in AGES])
        in_turn = [self._shared()] if self.site.fit.shared_tokens else []
        best = self._better(best, in_turn)
        if not best.choice.shared:
            best = self._better(best, self._finer(best.choice))
        best = self._better(best, self._batches(best.choice))
        best = self._better(
            best, [replace(best.choice, interrupt=mode) for mode in (Interrupt.INFLIGHT, Interrupt.DRAIN)]
        )
        best = self._better(best, [replace(best.choice, transport=route) for route in ("shm", "collective")])
        fresh = [self._asked(count).but(**_FRESH) for count in self._splits()]
        return self._found(began_s, self._better(best, [asked.choice]), asked, self._best([*fresh, *in_turn]))

    def glance(self) -> SearchResult:
        """What is asked for and its synchronous counterpart only."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            turns = self._try(self._shared())
            return self._found(began_s, turns, turns, turns)
        asked = self._best([self._asked(count) for count in self._splits()])
        fresh = self._best([self._asked(count).but(**_FRESH) for count in self._splits()])
        return self._found(began_s, asked, asked, fresh)

    def _found(self, began_s: float, best: Candidate, asked: Candidate, synchronous: Candidate) -> SearchResult:
        return SearchResult(
            site=self.site,
            best=best,
            asked=asked,
            synchronous=synchronous,
            tried=[row_of(self.site, each) for each in self._known.values()],
            seconds=self.clock.now() - began_s,
        )

    def _splits(self) -> Sequence[int]:
        """How many accelerators may generate: whole engines, and enough left for the learner."""
        counts = [self.fixed] if self.fixed else [round(share * self.site.cluster.count) for share in COARSE]
        return _unique(self._possible(counts))

    def _possible(self, counts: Sequence[int]) -> Iterator[int]:
        fit, total = self.site.fit, self.site.cluster.count
        most = total - fit.least_learner
        for count in counts:
            yield min(max(count // fit.ways * fit.ways, fit.ways), most // fit.ways * fit.ways)

    def _asked(self, generation: int) -> Choice:
        asked = self.site.asked
        return Choice(
            generation=generation,
            flow=asked.flow,
            interrupt=asked.sync.interrupt,
            transport=asked.sync.transport,
        )

    def _shared(self) -> Choice:
        """All accelerators in turn: what is generated is trained at once."""
        choice = self._asked(self.site.cluster.count).but(**_FRESH)
        return replace(choice, shared=True, interrupt=Interrupt.SLEEP)

    def _finer(self, choice: Choice) -> list[Choice]:
        if self.fixed:
            return []
        total = self.site.cluster.count
        counts = [choice.generation + round(step * total) for step in FINE]
        return [replace(choice, generation=count) for count in _unique(self._possible(counts))]

    def _batches(self, choice: Choice) -> list[Choice]:
        size = choice.flow.groups_per_step
        return [choice.but(groups_per_step=each) for each in (size // 2, 2 * size) if each >= 1]

    def _try(self, choice: Choice) -> Candidate:
        key = (choice.generation, choice.shared, choice.interrupt, choice.transport, choice.flow.model_dump_json())
        if key not in self._known:
            per_step = choice.flow.groups_per_step * choice.flow.group_size
            lead = min(choice.flow.effective_lead, MOST_STEPS)
            steps = min(MOST_STEPS, max(LEAST_STEPS + lead, EPISODES // per_step))
            nearer = replace(choice, flow=choice.flow.model_copy(update=_no_further(choice.flow, MOST_STEPS)))
            world = replace(self.site.world(nearer, steps), endless=True)
            self._known[key] = Candidate(choice=choice, outcome=Simulation(world, seed=self.seed).run())
        return self._known[key]

    def _best(self, choices: Sequence[Choice]) -> Candidate:
        first, *others = choices
        return self._better(self._try(first), others)

    def _better(self, best: Candidate, choices: Sequence[Choice]) -> Candidate:
        for choice in choices:
            other = self._try(choice)
            ratio = other.tok_s / best.tok_s
            younger = other.outcome.mean_age < best.outcome.mean_age - 0.05
            if ratio > 1 + ALIKE or (ratio > 1 - ALIKE and younger):
                best = other
        return best


_FRESH = {"policy": "synchronous", "max_age": 0, "lead": 0, "order": "strict", "capacity": None}


def _no_further(flow: FlowConfig, steps: int) -> dict[str, object]:
    """What keeps generation from running further ahead than ``steps``: a group that ends later is not seen."""
    ahead = {"max_age": flow.max_age, "lead": flow.lead}
    return {key: steps for key, value in ahead.items() if isinstance(value, int) and value > steps}


def _aged(age: int) -> dict[str, object]:
    return {"policy": "bounded", "max_age": age, "lead": age, "order": "ready_first"}


def _unique(counts: Iterator[int]) -> list[int]:
    return list(dict.fromkeys(counts))


def row_of(site: PlanContext, tried: Candidate) -> Tried:
    """A candidate as a row."""
    choice, outcome = tried.choice, tried.outcome
    account = outcome.account()
    return Tried(
        generation=0 if choice.shared else choice.generation,
        training=site.trainers(choice),
        groups_per_step=choice.flow.groups_per_step,
        max_age=choice.flow.greatest_age,
        lead=choice.flow.effective_lead,
        interrupt=str(choice.interrupt),
        transport=choice.transport,
        trained_tok_s=outcome.tok_s,
        generated_tok_s=account.per_second(account.generated_tokens),
        step_s=outcome.step_s,
        engine_idle=account.engine_idle,
        learner_idle=account.learner_idle,
        mean_age=outcome.mean_age,
        oldest=outcome.max_age,
        exposed_sync=account.of_time(account.exposed_sync_s),
    )
