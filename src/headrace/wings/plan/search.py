"""The search of ``headrace plan`` for the split of the accelerators and the settings with which a run is fastest. Every
candidate is evaluated by a simulated run.

A split is the number of accelerators that generate; the other accelerators train. The first pass of the search combines
coarse splits with staleness bounds, and also tries all accelerators alternating between generation and training. The
second pass varies the split, the batch, the interrupt and the transport of the best candidate, one after another. Among
candidates of about the same speed, the candidate with younger tokens wins, then the candidate that changes fewer
settings of the run file.
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
"""Changes to the fraction of the best split, in the second pass."""
AGES = (1, 2, 4, 8)
"""Staleness bounds that are tried with every split."""
EPISODES = 6_000
"""Approximate number of episodes of one simulated run; its throughput is then known to within one or two percent."""
LEAST_STEPS, MOST_STEPS = 6, 24
"""Smallest number of steps of a simulated run without the steps that fill its lead, and largest number of all its
steps."""
EQUAL_WITHIN = 0.02
"""Relative difference below which two throughputs count as equal; repeated simulations differ by about as much."""


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
    """The transport that sends new weights to the engines."""
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
    """Largest age of a trained token in versions."""
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
    """The result of a search: the best, the requested and the synchronous candidate, and a row for every candidate."""

    site: PlanContext
    """The inputs of the plan: run file, cluster and workload."""
    best: Candidate
    """The best candidate: the fastest or, among candidates of about the same speed, the candidate with younger
    tokens."""
    requested: Candidate
    """The candidate with the settings of the run file and the best split for these settings; if no split fits, all
    accelerators alternate."""
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
    """Number of generating accelerators that the user has fixed; ``None``: the search chooses it."""
    _simulated: dict[tuple[object, ...], Candidate] = field(default_factory=dict)
    """The candidates that were simulated, by their settings."""

    def run(self) -> SearchResult:
        """Simulate all candidates and return the best candidate, together with the requested and the synchronous
        candidate for comparison."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            requested = synchronous = self._simulate(self._alternating_choice())
            return self._build_result(
                began_s, self._better(requested, self._other_batches(requested.choice)), requested, synchronous
            )
        requested = self._best(self._at_splits())
        best = self._best([each.with_flow(**_bounded_flow(age)) for each in self._at_splits() for age in AGES])
        alternating = [self._alternating_choice()] if self.site.fit.shared_tokens else []
        best = self._better(best, alternating)
        if not best.choice.shared:
            best = self._better(best, self._finer_splits(best.choice))
        best = self._better(best, self._other_batches(best.choice))
        best = self._better(
            best, [replace(best.choice, interrupt=mode) for mode in (Interrupt.INFLIGHT, Interrupt.DRAIN)]
        )
        best = self._better(best, [replace(best.choice, transport=each) for each in self._transports()])
        synchronous_choices = [each.with_flow(**_SYNCHRONOUS_FLOW) for each in self._at_splits()]
        return self._build_result(
            began_s, self._better(best, [requested.choice]), requested, self._best([*synchronous_choices, *alternating])
        )

    def _transports(self) -> list[str]:
        """Return the names of the transports that the plan may propose instead of the run file's. On a cluster of
        several machines, transports within one machine are left out. Transports of third-party packages are never
        proposed, so that a plan need not import them."""
        found = {name: TRANSPORTS.load(name) for name in TRANSPORTS.rows}
        apart = self.site.cluster.num_machines > 1
        return [name for name, each in found.items() if each.cost.proposed and (each.crosses_machines or not apart)]

    def run_preview(self) -> SearchResult:
        """Simulate only the settings of the run file and their synchronous variant, and return both as the result; a
        dry run uses this short search."""
        began_s = self.clock.now()
        if not self.site.fit.beside:
            alternating = self._simulate(self._alternating_choice())
            return self._build_result(began_s, alternating, alternating, alternating)
        requested = self._best(self._at_splits())
        synchronous = self._best([each.with_flow(**_SYNCHRONOUS_FLOW) for each in self._at_splits()])
        return self._build_result(began_s, requested, requested, synchronous)

    def _build_result(
        self, began_s: float, best: Candidate, requested: Candidate, synchronous: Candidate
    ) -> SearchResult:
        """Return the result of the search, which began at ``began_s`` and ends now."""
        return SearchResult(
            site=self.site,
            best=best,
            requested=requested,
            synchronous=synchronous,
            tried=[make_plan_row(self.site, each) for each in self._simulated.values()],
            seconds=self.clock.now() - began_s,
        )

    def _at_splits(self) -> Sequence[Choice]:
        """Return the choices with the settings of the run file to try in the first pass. Their numbers of generating
        accelerators are multiples of an engine's accelerators that leave enough accelerators for the learner."""
        counts = [self.fixed] if self.fixed else [round(share * self.site.cluster.count) for share in COARSE]
        return [self._configured_choice(count) for count in _unique(self._round_to_engines(counts))]

    def _round_to_engines(self, counts: Sequence[int]) -> Iterator[int]:
        """Yield each number of generating accelerators in ``counts``, rounded down to whole engines and limited so that
        it leaves enough accelerators for the learner."""
        fit, total = self.site.fit, self.site.cluster.count
        most = total - fit.least_learner
        for count in counts:
            yield min(max(count // fit.ways * fit.ways, fit.ways), most // fit.ways * fit.ways)

    def _configured_choice(self, generation: int) -> Choice:
        """Return the choice with the settings of the run file and ``generation`` generating accelerators."""
        requested = self.site.request
        return Choice(
            generation=generation,
            flow=requested.flow,
            interrupt=requested.sync.interrupt,
            transport=requested.sync.transport,
        )

    def _alternating_choice(self) -> Choice:
        """Return the choice in which all accelerators alternate between generation and training: every batch is trained
        as soon as it is generated."""
        choice = self._configured_choice(self.site.cluster.count).with_flow(**_SYNCHRONOUS_FLOW)
        return replace(choice, shared=True, interrupt=Interrupt.SLEEP)

    def _finer_splits(self, choice: Choice) -> list[Choice]:
        """Return copies of ``choice`` with slightly fewer and slightly more generating accelerators; none if the user
        has fixed that number."""
        if self.fixed:
            return []
        total = self.site.cluster.count
        counts = [choice.generation + round(step * total) for step in FINE]
        return [replace(choice, generation=count) for count in _unique(self._round_to_engines(counts))]

    def _other_batches(self, choice: Choice) -> list[Choice]:
        """Return two copies of ``choice``, with half and with twice as many groups in a batch."""
        size = choice.flow.groups_per_step
        return [choice.with_flow(groups_per_step=each) for each in (size // 2, 2 * size) if each >= 1]

    def _simulate(self, choice: Choice) -> Candidate:
        """Return the candidate for a choice, from the cache or by simulating a run that is long enough to fill its
        lead."""
        key = (choice.generation, choice.shared, choice.interrupt, choice.transport, choice.flow.model_dump_json())
        if key not in self._simulated:
            per_step = choice.flow.groups_per_step * choice.flow.group_size
            lead = min(choice.flow.effective_lead, MOST_STEPS)
            steps = min(MOST_STEPS, max(LEAST_STEPS + lead, EPISODES // per_step))
            shortened = replace(choice, flow=choice.flow.model_copy(update=_limit_run_ahead(choice.flow, MOST_STEPS)))
            world = replace(self.site.world(shortened, steps), endless=True)
            self._simulated[key] = Candidate(choice=choice, outcome=Simulation(world, seed=self.seed).run())
        return self._simulated[key]

    def _best(self, choices: Sequence[Choice]) -> Candidate:
        """Return the best candidate among ``choices``, as :meth:`_better` compares them."""
        first, *others = choices
        return self._better(self._simulate(first), others)

    def _better(self, best: Candidate, choices: Sequence[Choice]) -> Candidate:
        """Simulate ``choices`` and return the best candidate among ``best`` and these: the candidate with more trained
        tokens per second or, where these are nearly equal, with younger tokens."""
        for choice in choices:
            other = self._simulate(choice)
            ratio = other.tok_s / best.tok_s
            younger = other.outcome.mean_age < best.outcome.mean_age - 0.05
            if ratio > 1 + EQUAL_WITHIN or (ratio > 1 - EQUAL_WITHIN and younger):
                best = other
        return best


_SYNCHRONOUS_FLOW = {"policy": "synchronous", "max_age": 0, "lead": 0, "order": "strict", "capacity": None}


def _limit_run_ahead(flow: FlowConfig, steps: int) -> dict[str, object]:
    """Return changes to the flow's settings that limit generation to at most ``steps`` batches ahead of training. The
    groups of later batches would not be trained within the simulated run, and thus not counted."""
    ahead = {"max_age": flow.max_age, "lead": flow.lead}
    return {key: steps for key, value in ahead.items() if isinstance(value, int) and value > steps}


def _bounded_flow(age: int) -> dict[str, object]:
    """Return the settings of the flow for asynchronous training with the staleness bound ``age`` and the same lead."""
    return {"policy": "bounded", "max_age": age, "lead": age, "order": "ready_first"}


def _unique(counts: Iterator[int]) -> list[int]:
    """Return the numbers without repetitions, in their order."""
    return list(dict.fromkeys(counts))


def make_plan_row(site: PlanContext, candidate: Candidate) -> PlanRow:
    """Return the settings and the results of ``candidate`` in the context ``site`` as a row of the plan's table."""
    choice, outcome = candidate.choice, candidate.outcome
    account = outcome.account()
    return PlanRow(
        generation=0 if choice.shared else choice.generation,
        training=site.trainers(choice),
        groups_per_step=choice.flow.groups_per_step,
        max_age=choice.flow.largest_age,
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
        exposed_sync=account.to_fraction(account.exposed_sync_s),
    )
