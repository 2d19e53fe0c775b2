"""A search for the fastest way to divide and configure a run; every candidate is simulated.

The search is coarse first: splits of the accelerators combined with staleness bounds, and all accelerators alternating
between both tasks. Around the best of these it then varies the split, the batch, the interrupt and the transport, one
after another. Among candidates of about the same speed, the one with younger tokens wins, then the one that changes
fewer settings of the run file. A split is the number of accelerators that generate; the others train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from headrace.base.clock import Clock
from headrace.base.types.weights import Interrupt
from headrace.flow import FlowConfig
from headrace.sync.config import TRANSPORTS
from headrace.wings.plan.outcome import SimulatedOutcome
from headrace.wings.plan.simulator import Simulation
from headrace.wings.plan.system import Choice, PlanContext

COARSE = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Fractions of the accelerators that generate, in the first pass of the search."""
FINE = (-0.0625, -0.03125, 0.03125, 0.0625)
"""Changes to the best of those fractions, in the second pass."""
AGES = (1, 2, 4, 8)
"""Staleness bounds that are tried with every split."""
EPISODES = 6_000
"""Approximate number of episodes of one simulated run, enough to know its rate within one or two percent."""
LEAST_STEPS, MOST_STEPS = 6, 24
"""Smallest number of steps of a simulated run beside those that fill its lead, and the largest number of all."""
EQUAL_WITHIN = 0.02
"""Relative difference below which two rates count as equal; simulated runs scatter by about as much."""


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """The settings and results of one candidate, as a row of the plan's table."""

    generation: int
    """Number of generating accelerators; 0: all accelerators alternate between generation and training."""
    training: int
    """Number of training accelerators."""
    groups_per_step: int
    """Number of groups in a batch."""
    max_age: int
    """Staleness bound in versions."""
    lead: int
    """Number of batches that generation may run ahead of training."""
    interrupt: str
    """What becomes of running sequences at a commit."""
    transport: str
    """The transport that brings new weights to the engines."""
    trained_tok_s: float
    """Tokens trained per second."""
    generated_tok_s: float
    """Tokens sampled per second."""
    step_s: float
    """Mean duration of a step in seconds."""
    engine_idle: float
    """Fraction of the time in which the engines are idle."""
    learner_idle: float
    """Fraction of the time in which the learner is idle."""
    mean_age: float
    """Mean age of trained tokens in versions."""
    oldest: int
    """Greatest age of a trained token in versions."""
    exposed_sync: float
    """Fraction of the time in which the learner is blocked by the weight sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice of settings, with the result of its simulated run."""

    choice: Choice
    outcome: SimulatedOutcome

    @property
    def tok_s(self) -> float:
        """Return the tokens trained per second in the simulated run, after its initial steps."""
        return self.outcome.tok_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search: three candidates by name, and a row for each that was tried."""

    site: PlanContext
    """The inputs of the plan: run file, cluster and workload."""
    best: Candidate
    """The best candidate: the fastest or, among those of about the same speed, one with younger tokens."""
    requested: Candidate
    """The candidate with the settings of the run file and the best split for them; all accelerators alternate if no
    split fits."""
    synchronous: Candidate
    """The best candidate that trains no stale tokens, with a split or alternating."""
    tried: Sequence[PlanRow]
    """All candidates in the order in which they were simulated."""
    seconds: float
    """Duration of the search in seconds."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search for the best settings of a run on a cluster. Each candidate is simulated at most once."""

    site: PlanContext
    """The inputs of the plan, which are the same for all candidates."""
    clock: Clock
    """The clock that measures how long the search takes."""
    seed: int
    """Seed of every simulated run."""
    fixed: int | None = None
    """Number of generating accelerators if the user gave it; ``None``: the search chooses it."""
    _simulated: dict[tuple[object, ...], Candidate] = field(default_factory=dict)

    def run(self) -> SearchResult:
        """Simulate all candidates and return the best one, with the requested and the synchronous one to compare it
        with."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            requested = synchronous = self._simulate(self._shared())
            return self._result(
                began_s, self._better(requested, self._other_batches(requested.choice)), requested, synchronous
            )
        requested = self._best([self._configured(count) for count in self._splits()])
        best = self._best(
            [self._configured(count).with_flow(**_bounded(age)) for count in self._splits() for age in AGES]
        )
        in_turn = [self._shared()] if self.site.fit.shared_tokens else []
        best = self._better(best, in_turn)
        if not best.choice.shared:
            best = self._better(best, self._finer_splits(best.choice))
        best = self._better(best, self._other_batches(best.choice))
        best = self._better(
            best, [replace(best.choice, interrupt=mode) for mode in (Interrupt.INFLIGHT, Interrupt.DRAIN)]
        )
        best = self._better(best, [replace(best.choice, transport=each) for each in self._transports()])
        fresh = [self._configured(count).with_flow(**_FRESH) for count in self._splits()]
        return self._result(began_s, self._better(best, [requested.choice]), requested, self._best([*fresh, *in_turn]))

    def _transports(self) -> list[str]:
        """Return the names of the transports that may be proposed instead of the run file's: none that stays on one
        machine where there are several. Transports of other packages are not imported for a plan."""
        found = {name: TRANSPORTS.load(name) for name in TRANSPORTS.rows}
        apart = self.site.cluster.num_machines > 1
        return [name for name, each in found.items() if each.cost.proposed and (each.crosses_machines or not apart)]

    def glance(self) -> SearchResult:
        """Simulate only the settings of the run file and their synchronous counterpart, for a dry run, and return
        these."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            turns = self._simulate(self._shared())
            return self._result(began_s, turns, turns, turns)
        requested = self._best([self._configured(count) for count in self._splits()])
        fresh = self._best([self._configured(count).with_flow(**_FRESH) for count in self._splits()])
        return self._result(began_s, requested, requested, fresh)

    def _result(self, began_s: float, best: Candidate, requested: Candidate, synchronous: Candidate) -> SearchResult:
        """Return the result of the search, which began at ``began_s`` and ends now."""
        return SearchResult(
            site=self.site,
            best=best,
            requested=requested,
            synchronous=synchronous,
            tried=[row_of(self.site, each) for each in self._simulated.values()],
            seconds=self.clock.now() - began_s,
        )

    def _splits(self) -> Sequence[int]:
        """Return the candidate numbers of generating accelerators: whole engines, with enough accelerators left for
        the learner."""
        counts = [self.fixed] if self.fixed else [round(share * self.site.cluster.count) for share in COARSE]
        return _unique(self._possible(counts))

    def _possible(self, counts: Sequence[int]) -> Iterator[int]:
        """Yield each of ``counts``, numbers of generating accelerators, rounded to whole engines and to a number that
        leaves enough for the learner."""
        fit, total = self.site.fit, self.site.cluster.count
        most = total - fit.least_learner
        for count in counts:
            yield min(max(count // fit.ways * fit.ways, fit.ways), most // fit.ways * fit.ways)

    def _configured(self, generation: int) -> Choice:
        """Return the choice that the run file makes, with ``generation`` accelerators that generate."""
        requested = self.site.request
        return Choice(
            generation=generation,
            flow=requested.flow,
            interrupt=requested.sync.interrupt,
            transport=requested.sync.transport,
        )

    def _shared(self) -> Choice:
        """Return the choice in which all accelerators alternate between generation and training: every batch is trained
        as soon as it is generated."""
        choice = self._configured(self.site.cluster.count).with_flow(**_FRESH)
        return replace(choice, shared=True, interrupt=Interrupt.SLEEP)

    def _finer_splits(self, choice: Choice) -> list[Choice]:
        """Return choices with slightly other numbers of generating accelerators than ``choice``; none if the user fixed
        that number."""
        if self.fixed:
            return []
        total = self.site.cluster.count
        counts = [choice.generation + round(step * total) for step in FINE]
        return [replace(choice, generation=count) for count in _unique(self._possible(counts))]

    def _other_batches(self, choice: Choice) -> list[Choice]:
        """Return ``choice`` with half and with twice as many groups in a batch."""
        size = choice.flow.groups_per_step
        return [choice.with_flow(groups_per_step=each) for each in (size // 2, 2 * size) if each >= 1]

    def _simulate(self, choice: Choice) -> Candidate:
        """Return the candidate for a choice: simulate a run that is long enough to fill its lead, or take the result of
        an earlier simulation."""
        key = (choice.generation, choice.shared, choice.interrupt, choice.transport, choice.flow.model_dump_json())
        if key not in self._simulated:
            per_step = choice.flow.groups_per_step * choice.flow.group_size
            lead = min(choice.flow.effective_lead, MOST_STEPS)
            steps = min(MOST_STEPS, max(LEAST_STEPS + lead, EPISODES // per_step))
            shortened = replace(choice, flow=choice.flow.model_copy(update=_limit_ahead(choice.flow, MOST_STEPS)))
            world = replace(self.site.world(shortened, steps), endless=True)
            self._simulated[key] = Candidate(choice=choice, outcome=Simulation(world, seed=self.seed).run())
        return self._simulated[key]

    def _best(self, choices: Sequence[Choice]) -> Candidate:
        """Return the best candidate among ``choices``, as :meth:`_better` compares them."""
        first, *others = choices
        return self._better(self._simulate(first), others)

    def _better(self, best: Candidate, choices: Sequence[Choice]) -> Candidate:
        """Return the best candidate among ``best`` and ``choices``, which are simulated: the one with more trained
        tokens per second or, where these are nearly equal, with the younger tokens."""
        for choice in choices:
            other = self._simulate(choice)
            ratio = other.tok_s / best.tok_s
            younger = other.outcome.mean_age < best.outcome.mean_age - 0.05
            if ratio > 1 + EQUAL_WITHIN or (ratio > 1 - EQUAL_WITHIN and younger):
                best = other
        return best


_FRESH = {"policy": "synchronous", "max_age": 0, "lead": 0, "order": "strict", "capacity": None}


def _limit_ahead(flow: FlowConfig, steps: int) -> dict[str, object]:
    """Return changes of the flow's settings that keep generation from running further ahead than ``steps`` batches,
    since the groups of later batches would not be counted."""
    ahead = {"max_age": flow.max_age, "lead": flow.lead}
    return {key: steps for key, value in ahead.items() if isinstance(value, int) and value > steps}


def _bounded(age: int) -> dict[str, object]:
    """Return the settings of the flow for asynchronous training with the staleness bound ``age`` and the same lead."""
    return {"policy": "bounded", "max_age": age, "lead": age, "order": "ready_first"}


def _unique(counts: Iterator[int]) -> list[int]:
    """Return the numbers without repetitions, in their order."""
    return list(dict.fromkeys(counts))


def row_of(site: PlanContext, tried: Candidate) -> PlanRow:
    """Return the settings and results of the candidate ``tried`` as a row."""
    choice, outcome = tried.choice, tried.outcome
    account = outcome.account()
    return PlanRow(
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
