"""A run on virtual time: the real flow, with models of everything that takes time.

    real      the flow: pacing, policies, filters, ledger operations, limits that tune themselves; how groups are closed
    modelled  engines, learner, sync, environments, rewards, failures

What happens is decided where it is decided in a real run, at the same moments; only the loops around it are replaced by
an agenda of events, since a task for each of a million episodes would take minutes.
"""

from __future__ import annotations

import heapq
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.heap import settled_heap
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.messages.controller import EngineStats, StepReport
from headrace.control.groups import close_group
from headrace.control.measuring import straggler_s
from headrace.control.tuning import LOOK_S
from headrace.flow import Admission, Flow
from headrace.flow.concurrency import Concurrency
from headrace.flow.filters import FilterContext, LengthFilter
from headrace.flow.policies import STALE
from headrace.wings.plan.agenda import Agenda
from headrace.wings.plan.books import CountingLedger
from headrace.wings.plan.engine import SimulatedAnswer
from headrace.wings.plan.fleet import SimulatedFleet
from headrace.wings.plan.groups import Episodic, SimulatedBatch, SimulatedGroup, SimulatedRecorder
from headrace.wings.plan.learner import SimulatedLearner
from headrace.wings.plan.outcome import SimulatedOutcome, StepSeen
from headrace.wings.plan.workload import Demand
from headrace.wings.plan.world import World


class Simulation:
    """One run. The same world and seed give the same outcome."""

    def __init__(self, world: World, *, seed: int, check: bool = False) -> None:
        """``check``: the books are compared after every event, rather than after every step."""
        if world.flow.pivots is not None:
            raise ConfigError("flow.pivots cannot be simulated", remedy="plan the run without flow.pivots")
        streams = [np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(10)]
        self.world, self._check = world, check
        self.agenda = Agenda()
        self.books = CountingLedger(self._dropped)
        self.flow = Flow(
            world.flow,
            writer=self.books,
            clock=self.agenda,
            last_step=sys.maxsize if world.endless else world.steps,
            pick_row=lambda number: number,
        )
        self.fleet = SimulatedFleet(
            self.agenda,
            world.engine,
            count=world.num_engines,
            max_sequences=world.max_sequences,
            cache_tokens=world.cache_tokens,
            sync=world.sync,
            failures=world.failures,
            rng=streams[0],
        )
        self.learner: SimulatedLearner[SimulatedBatch] = SimulatedLearner(
            self.agenda, world.learner, world.sync, world.failures, rng=streams[1],
            begins=self._begins, trained=self._trained,
            commit=lambda version: self.fleet.commit(version, lambda: self._committed(version)),
        )  # fmt: skip
        self._demand = Demand(world.workload, streams[2:], max_new_tokens=world.max_new_tokens)
        self._controller_s = 0.0
        """When the controller has dealt with the episodes that have begun and ended."""
        self._scorers = [0.0] * (world.workload.reward_slots or 0)
        self._judged = bool(world.flow.filters)
        self._scribe = SimulatedRecorder(whole=any(isinstance(each, LengthFilter) for each in world.flow.filters))
        self._context = FilterContext(decode=lambda ids: "", seed=seed)
        self.groups: dict[int, SimulatedGroup] = {}
        """Those that are neither trained nor dropped."""
        self.steps: list[StepSeen] = []
        self.wasted: dict[str, float] = defaultdict(float)
        """Tokens that were sampled and will not be trained, by reason."""
        self.sampling = self.scoring = 0
        self.scoring_s = self.sync_s = 0.0
        self._together_s = self._engine_busy_s = 0.0
        self._may_admit = self._may_take = True
        if world.flow.capacity == "auto":
            floor = world.flow.groups_per_step
            self._cap = Concurrency(floor=floor, capacity=floor, seen=EngineStats())
            self.agenda.after(LOOK_S, self._look)

    def run(self) -> SimulatedOutcome:
        """From the first group to the commit of the last version."""
        with settled_heap():
            self._run()
        self.verify()
        return SimulatedOutcome.of(self)

    def _run(self) -> None:
        self._settle()
        while self.flow.state.version < self.world.steps:
            before_s, waits = self.agenda.now_s, self._what_waits()
            assert self.agenda.step(), f"nothing can happen any more: {dict(self.flow.state.counts)}"
            passed_s = self.agenda.now_s - before_s
            if waits == "scoring":
                self.scoring_s += passed_s
            elif waits:
                self.sync_s += passed_s
            self._settle()
            if self._check:
                self.verify()

    def _what_waits(self) -> str:
        """For what engine and learner both stand still."""
        if self.sampling or self.learner.at_work is not None:
            return ""
        return "scoring" if self.scoring else "sync" if self.learner.publishing else ""

    def _settle(self) -> None:
        """Decide what can be decided now."""
        while self._may_admit or (self._may_take and self.learner.takes):
            if self._may_admit:
                self._admit()
            if self._may_take and self.learner.takes:
                self._take()
        self.fleet.settle()

    def _admit(self) -> None:
        self._may_admit = False
        groups: list[SimulatedGroup] = []
        while self.flow.starts_groups and (admissions := self.flow.admit()):
            groups += map(self._start, admissions)
        if self.world.episode_s and groups:  # the requests of one turn of the controller go in one message
            self.agenda.at(self._handled_s(len(groups) * self.world.flow.group_size), self._ask_first, groups)
        else:
            self._ask_first(groups)

    # --- generation

    def _start(self, admission: Admission) -> SimulatedGroup:
        self.flow.start(admission.number)
        group = SimulatedGroup(number=admission.number, chance=self._demand.chance())
        self.groups[group.number] = group
        prompt = self._demand.prompts.next()
        for place in range(self.world.flow.group_size):
            episode = Episodic(
                group=group, place=place, turns=int(self._demand.turns.next()), context=prompt, read=0.0, left=0.0,
                ended=self._turn_ended,
            )  # fmt: skip
            group.episodes.append(episode)
        return group

    def _ask_first(self, groups: Sequence[SimulatedGroup]) -> None:
        """The first answers, of siblings in one place."""
        for group in groups:
            for episode in group.episodes:
                episode.home, episode.home_version = group.home, group.home_version
                self._ask(episode)
                group.home, group.home_version = episode.home, episode.home_version

    def _handled_s(self, num: int = 1) -> float:
        """When the controller has dealt with episodes that begin or end now: half of its work is either."""
        self._controller_s = max(self.agenda.now_s, self._controller_s) + num * self.world.episode_s / 2
        return self._controller_s

    def _ask(self, episode: Episodic) -> None:
        """The next answer. What its engine has in the cache, of this turn or of a sibling's, is not read again."""
        if episode.status is not EpisodeStatus.RUNNING:
            return
        episode.left = self._demand.answers.next()
        episode.cut = episode.cut or episode.left >= self.world.max_new_tokens
        if episode.context + episode.left > self.world.cache_tokens:
            raise ConfigError(
                f"an episode of {episode.context + episode.left:.0f} tokens does not fit the cache of an engine, which "
                f"holds {self.world.cache_tokens:.0f}",
                remedy="give an engine more accelerators, or shorten prompts, answers or turns",
            )
        near = episode.home
        if near is None or near.version != episode.home_version:
            episode.read = episode.context
        self.sampling += 1
        episode.home = self.fleet.put(episode, near)
        if episode.home is not None:
            episode.home_version = episode.home.version

    def _turn_ended(self, answer: SimulatedAnswer) -> None:
        assert isinstance(answer, Episodic)
        if answer.status is not EpisodeStatus.RUNNING:
            return  # withdrawn at this very moment
        self.sampling -= 1
        answer.turns -= 1
        if answer.engine is not None:
            answer.home, answer.home_version = answer.engine, answer.engine.version
        if answer.turns:
            answer.read = self._demand.observed.next()
            answer.context += answer.read
            self.agenda.after(self._demand.turn_s.next(), self._ask, answer)
            return
        group = answer.group
        answer.status = EpisodeStatus.FINISHED
        group.ends_s.append(self.agenda.now_s)
        group.num_finished += 1
        if group.num_finished == self.world.flow.first:
            self._withdraw_rest(group)
        self.scoring += 1
        scored_s = self._scored_s()
        if scored_s > self.agenda.now_s:
            self.agenda.at(scored_s, self._scored, answer)
        else:
            self._scored(answer)

    def _scored_s(self) -> float:
        """When the reward of an episode that ends now is there."""
        asked_s = self._handled_s()
        seconds = self._demand.reward_s.next()
        if not self._scorers:
            return asked_s + seconds
        done_s = max(asked_s, self._scorers[0]) + seconds
        heapq.heapreplace(self._scorers, done_s)
        return done_s

    def _withdraw_rest(self, group: SimulatedGroup) -> None:
        for episode in group.episodes:
            if episode.status is EpisodeStatus.RUNNING:
                episode.status = EpisodeStatus.LEFT_OUT
                group.num_ended += 1
                self.sampling -= self.fleet.withdraw(episode)

    def _scored(self, episode: Episodic) -> None:
        self.scoring -= 1
        episode.reward = self._demand.reward(episode.group.chance)
        episode.status = EpisodeStatus.FAILED if episode.reward is None else EpisodeStatus.SCORED
        episode.group.num_ended += 1
        if episode.group.num_ended == len(episode.group.episodes):
            self._close(episode.group)

    def _close(self, group: SimulatedGroup) -> None:
        self._may_admit = self._may_take = True
        if self._judged or any(episode.status is not EpisodeStatus.SCORED for episode in group.episodes):
            self._judge(group)
            return
        for episode in group.episodes:
            group.add(episode)
        self.flow.scored(self._scribe.group(group))

    def _judge(self, group: SimulatedGroup) -> None:
        """Ask the filters, and whether enough episodes are left: as in a real run, with each episode written out."""
        config = self.world.flow
        closed = close_group(
            group.number,
            [self._scribe.episode(episode) for episode in group.episodes],
            min_episodes=config.min_episodes,
            filters=config.filters,
            context=self._context,
        )
        if closed.reason:
            self.flow.drop(group.number, closed.reason)
            return
        for episode, judged in zip(group.episodes, closed.group.episodes, strict=True):
            if judged.status is EpisodeStatus.SCORED:
                group.add(episode)
            else:
                self.wasted[judged.cause] += episode.sampled
        self.flow.scored(closed.group)

    def _dropped(self, number: int, reason: str) -> None:
        """A group leaves untrained: its tokens are wasted, but for those that were counted when it was closed."""
        group = self.groups.pop(number)
        self.wasted[reason] += sum(group.trained.values()) or sum(episode.sampled for episode in group.episodes)

    # --- the learner

    def _take(self) -> None:
        taken = self.flow.take()
        if taken is None:
            self._may_take = False
            return
        self._may_admit = True  # what was too old has left
        groups = [self.groups[group.number] for group in taken.groups]
        self.learner.order(
            SimulatedBatch(
                step=taken.step,
                tokens=sum(group.tokens for group in groups),
                squares=sum(group.squares for group in groups),
                taken_s=self.agenda.now_s,
                taken=taken,
                groups=groups,
            )
        )

    def _begins(self) -> None:
        self._engine_busy_s = self.fleet.counted().busy_s / len(self.fleet.engines)

    def _trained(self, batch: SimulatedBatch, waited_s: float) -> None:
        ages: dict[int, float] = defaultdict(float)
        for group in batch.groups:
            for version, tokens in group.trained.items():
                if batch.taken.oldest_version is not None and version < batch.taken.oldest_version:
                    self.wasted[STALE] += tokens
                    continue
                assert batch.step - version <= self.flow.state.allowed_age(version), f"age {batch.step - version}"
                ages[batch.step - version] += tokens
            self.groups.pop(group.number).episodes.clear()
        waited = (batch.taken_s - waited_s, batch.taken_s)
        ends_s = chain(*[group.ends_s for group in batch.groups])
        total = self.fleet.counted()
        engine_busy_s = total.busy_s / len(self.fleet.engines)
        self._together_s += engine_busy_s - self._engine_busy_s
        self.steps.append(
            StepSeen(
                end_s=self.agenda.now_s,
                tokens=sum(ages.values()),
                ages=dict(ages),
                wait_s=waited_s,
                straggler_s=straggler_s(ends_s, waited) if waited_s else 0.0,
                learner_busy_s=self.learner.busy_s,
                exposed_sync_s=self.learner.exposed_sync_s,
                engine_busy_s=engine_busy_s,
                together_s=self._together_s,
                prefill_s=total.prefill_s / len(self.fleet.engines),
                generated=total.generated,
                scoring_s=self.scoring_s,
                sync_s=self.sync_s,
                wasted=sum(self.wasted.values()) + total.wasted,
            )
        )
        report = StepReport(
            step=batch.step, metrics={}, trained_tokens=round(sum(ages.values())), dropped_tokens={}, seconds=0.0,
            log_pi_N=np.empty(0, np.float32),
        )  # fmt: skip
        self.flow.trained(batch.taken.groups, report, {age: round(tokens) for age, tokens in ages.items()})
        self._may_take = True

    def _committed(self, version: int) -> None:
        self.flow.committed(version, "")
        self.learner.committed()
        self._may_admit = self._may_take = True

    def _look(self) -> None:
        """The cap follows what the engines say of themselves."""
        flow, fleet = self.flow, self.fleet
        full = self.world.cache_tokens < float("inf")
        used = sum(engine.context for engine in fleet.engines) if full else 0.0
        stats = EngineStats(
            running=fleet.running,
            waiting=fleet.waiting,
            preempted=fleet.counted().preempted,
            cache_blocks=int(self.world.cache_tokens) * len(fleet.engines) if full else 0,
            cache_blocks_used=int(used),
        )
        limits = flow.state.limits
        most = (limits.run_ahead + 1) * limits.batch_size
        self._cap, why = self._cap.observe(stats, num_running=flow.state.num_running, limit=most)
        if why:
            flow.set_capacity(self._cap.capacity)
            self._may_admit = True
        self.agenda.after(LOOK_S, self._look)

    # --- invariants

    def in_flight_tokens(self) -> float:
        """Sampled tokens of groups that are neither trained nor dropped."""
        return sum(
            sum(group.trained.values())
            or sum(each.sampled + (each.engine.progress(each) if each.engine else 0.0) for each in group.episodes)
            for group in self.groups.values()
        )

    def verify(self) -> None:
        """``AssertionError`` unless sampled = trained + wasted + in flight, in groups and in tokens."""
        self.books.verify(self.flow.state)
        total = self.fleet.counted()
        trained = sum(step.tokens for step in self.steps)
        accounted = trained + sum(self.wasted.values()) + total.wasted + self.in_flight_tokens()
        assert abs(total.generated - accounted) <= 1e-6 * total.generated + 1.0, (
            f"{total.generated} tokens sampled, {accounted} accounted for"
        )
