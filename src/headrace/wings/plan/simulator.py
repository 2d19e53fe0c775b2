"""The discrete-event simulation of a run on virtual time, with which ``headrace plan`` evaluates a choice of settings.

    real       the flow: pacing, policies, filters, ledger operations, automatic limits; closing of groups
    modelled   engines, learner, sync, environments, rewards, failures; the ledger only counts

The same code makes the same decisions at the same times as in a real run. Only the controller's asyncio loops are
replaced by an event queue, because an asyncio task for each of a million episodes would take minutes.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.heap import gc_frozen
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import EngineStats, StepReport
from headrace.control.groups import close_group
from headrace.control.loops.learning import LOOK_S
from headrace.control.metrics.batch import straggler_s
from headrace.flow import Admission, Flow
from headrace.flow.filters import FilterContext, LengthFilter
from headrace.flow.ledger.base import CommitVersion, EndStep, Move, Operation, Submit
from headrace.flow.policies import STALE
from headrace.flow.state import FlowState
from headrace.flow.tuning import Concurrency
from headrace.wings.plan.engine import SimulatedAnswer
from headrace.wings.plan.events import EventQueue
from headrace.wings.plan.fleet import SimulatedFleet
from headrace.wings.plan.groups import SimulatedBatch, SimulatedEpisode, SimulatedGroup, SimulatedRecorder
from headrace.wings.plan.learner import SimulatedLearner
from headrace.wings.plan.outcome import SimulatedOutcome, StepSnapshot
from headrace.wings.plan.workload import WorkloadDraws
from headrace.wings.plan.world import World


class Simulation:
    """One simulated run. Its :class:`World` contains the settings and the cost models; equal worlds and seeds give
    equal outcomes."""

    def __init__(self, world: World, *, seed: int, check: bool = False) -> None:
        """Build the flow, the engines and the learner of the run; no event is executed yet. With ``check``, the
        invariants are verified after every event and not only at the end, which is slow. Raises
        :class:`~headrace.base.errors.ConfigError` for settings that cannot be simulated."""
        if world.flow.pivots is not None:
            raise ConfigError("flow.pivots cannot be simulated", remedy="plan the run without flow.pivots")
        streams = [np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(10)]
        self.world, self._check, self.events = world, check, EventQueue()
        self.ledger = CountingLedger(self._group_dropped)
        last_step = sys.maxsize if world.endless else world.steps
        self.flow = Flow(
            world.flow, writer=self.ledger, clock=self.events, last_step=last_step, pick_row=lambda number: number
        )
        self.fleet = SimulatedFleet(
            self.events, world.engine, count=world.num_engines, max_sequences=world.max_sequences,
            cache_tokens=world.cache_tokens, sync=world.sync, failures=world.failures, rng=streams[0],
        )  # fmt: skip
        self.learner: SimulatedLearner[SimulatedBatch] = SimulatedLearner(
            self.events, world.learner, world.sync, world.failures, rng=streams[1],
            on_start=self._step_starts, on_trained=self._step_ends,
            commit=lambda version: self.fleet.commit(version, lambda: self._committed(version)),
        )  # fmt: skip
        self._draws = WorkloadDraws(world.workload, streams[2:], max_new_tokens=world.max_new_tokens)
        self._controller_s = 0.0
        """Virtual time until which the controller is busy with the starts and ends of episodes."""
        self._scorers = [0.0] * (world.workload.reward_slots or 0)
        """Heap of the times at which each scorer is free; empty if their number is not limited."""
        self._has_filters = bool(world.flow.filters)
        self._recorder = SimulatedRecorder(
            full_length=any(isinstance(each, LengthFilter) for each in world.flow.filters)
        )
        """Converts simulated groups for the filters and the flow."""
        self._context = FilterContext(decode=lambda ids: "", seed=seed)
        self.groups: dict[int, SimulatedGroup] = {}
        """Groups that are neither trained nor dropped."""
        self.steps: list[StepSnapshot] = []
        self.wasted: dict[str, float] = defaultdict(float)
        """Number of sampled tokens that will not be trained, by reason."""
        self.sampling = self.scoring = 0
        """Number of answers on engines, and number of episodes whose reward is being computed."""
        self.scoring_s = self.sync_s = 0.0
        """Time in which engines and learner both waited: for rewards, and for the weight sync."""
        self._overlap_s = self._engine_busy_s = 0.0
        """Time in which both sides were busy; and the engines' mean busy time at the start of the present step."""
        self._may_admit = self._may_take = True
        """Whether the flow may now have a group to start, and a complete batch."""
        self._planned_s: float | None = None
        """The time for which the pacing has planned the next start of a group; ``None`` if there is no such time."""
        floor = world.flow.groups_per_step
        self._concurrency = Concurrency(floor=floor, capacity=floor, last_stats=EngineStats())
        """The state of the automatic limit of concurrent groups."""
        if world.flow.capacity == "auto":
            self.events.after(LOOK_S, self._tune_capacity)

    def run(self) -> SimulatedOutcome:
        """Simulate from the first group to the commit of the last version, and return the result."""
        with gc_frozen():
            self._run()
        self.verify()
        return self._outcome()

    def _outcome(self) -> SimulatedOutcome:
        """Return the result of the run, which has ended."""
        total = self.fleet.counts()
        wasted = dict(self.wasted)
        if total.wasted:
            wasted["weight_update"] = total.wasted
        return SimulatedOutcome(
            seconds=self.events.now_s,
            steps=tuple(self.steps),
            wasted_tokens=wasted,
            dropped_groups=dict(self.ledger.dropped),
            preempted=total.preempted,
            num_episodes=self.ledger.submitted * self.world.flow.group_size,
        )

    def _run(self) -> None:
        """Execute events until the last step is committed. Time in which engines and learner are both idle is added to
        ``scoring_s`` or ``sync_s``."""
        self._make_decisions()
        while self.flow.state.version < self.world.steps:
            before_s, waits = self.events.now_s, self._common_wait()
            assert self.events.step(), f"nothing can happen any more: {dict(self.flow.state.counts)}"
            passed_s = self.events.now_s - before_s
            if waits == "scoring":
                self.scoring_s += passed_s
            elif waits:
                self.sync_s += passed_s
            self._make_decisions()
            if self._check:
                self.verify()

    def _common_wait(self) -> str:
        """Return what engines and learner both wait for: "scoring", "sync", or "" if one of them works."""
        if self.sampling or self.learner.current is not None:
            return ""
        return "scoring" if self.scoring else "sync" if self.learner.publishing else ""

    def _make_decisions(self) -> None:
        """Make all decisions that can be made at the current time: start groups, give batches to the learner, and
        settle the engines."""
        while self._may_admit or (self._may_take and self.learner.can_order):
            if self._may_admit:
                self._admit()
            if self._may_take and self.learner.can_order:
                self._order_batch()
        self.fleet.settle()

    def _admit(self) -> None:
        """Start all groups that the flow admits now, and schedule the time at which it plans the next start."""
        self._may_admit = False
        groups: list[SimulatedGroup] = []
        while self.flow.may_admit and (admissions := self.flow.admit()):
            groups += map(self._start, admissions)
        planned_s = self.flow.planned_s
        if planned_s is not None and (self._planned_s is None or planned_s < self._planned_s):
            self._planned_s = planned_s
            self.events.at(planned_s, self._planned_start)
        if self.world.episode_s and groups:  # the requests of one turn of the controller go in one message
            self.events.at(
                self._time_handled_s(len(groups) * self.world.flow.group_size), self._request_first_answers, groups
            )
        else:
            self._request_first_answers(groups)

    def _planned_start(self) -> None:
        """Handle the time for which the pacing has planned the next start: allow the flow to admit groups."""
        self._planned_s, self._may_admit = None, True

    # --- generation

    def _start(self, admission: Admission) -> SimulatedGroup:
        """Start the group of an ``admission`` and return it, with a random chance of success, prompt length and number
        of turns of each episode."""
        self.flow.start(admission.number)
        group = SimulatedGroup(number=admission.number, chance=self._draws.chance())
        self.groups[group.number] = group
        prompt = self._draws.prompts.next()
        for index in range(self.world.flow.group_size):
            episode = SimulatedEpisode(
                group=group, index=index, turns=int(self._draws.turns.next()), context=prompt, uncached=0.0,
                tokens_left=0.0, on_ended=self._turn_ended,
            )  # fmt: skip
            group.episodes.append(episode)
        return group

    def _request_first_answers(self, groups: Sequence[SimulatedGroup]) -> None:
        """Request the first answer of every episode of these groups. Episodes of one group prefer the engine whose
        cache contains their prompt."""
        for group in groups:
            for episode in group.episodes:
                episode.cache_engine, episode.cache_version = group.cache_engine, group.cache_version
                self._request_answer(episode)
                group.cache_engine, group.cache_version = episode.cache_engine, episode.cache_version

    def _time_handled_s(self, num: int = 1) -> float:
        """Return the virtual time at which the controller has handled ``num`` episodes that start or end now. It
        handles the starts and ends one after another; each takes half of the world's ``episode_s``."""
        self._controller_s = max(self.events.now_s, self._controller_s) + num * self.world.episode_s / 2
        return self._controller_s

    def _request_answer(self, episode: SimulatedEpisode) -> None:
        """Request the next answer of an episode from an engine. Context that is in the engine's cache, from this
        episode or from another episode of its group, is not prefilled again. Raises
        :class:`~headrace.base.errors.ConfigError` if the episode is longer than the cache."""
        if episode.status is not EpisodeStatus.RUNNING:
            return
        episode.tokens_left = self._draws.answers.next()
        episode.truncated = episode.truncated or episode.tokens_left >= self.world.max_new_tokens
        if episode.context + episode.tokens_left > self.world.cache_tokens:
            raise ConfigError(
                f"an episode of {episode.context + episode.tokens_left:.0f} tokens does not fit the "
                f"cache of an engine, which holds {self.world.cache_tokens:.0f}",
                remedy="give an engine more accelerators, or shorten prompts, answers or turns",
            )
        preferred = episode.cache_engine
        if preferred is None or preferred.version != episode.cache_version:
            episode.uncached = episode.context
        self.sampling += 1
        episode.cache_engine = self.fleet.put(episode, preferred)
        if episode.cache_engine is not None:
            episode.cache_version = episode.cache_engine.version

    def _turn_ended(self, answer: SimulatedAnswer) -> None:
        """Handle the end of an answer: the next turn of its episode begins after the environment's time, or the episode
        is scored."""
        assert isinstance(answer, SimulatedEpisode)
        if answer.status is not EpisodeStatus.RUNNING:
            return  # an earlier event of the same time has withdrawn the episode
        self.sampling -= 1
        answer.turns -= 1
        if answer.engine is not None:
            answer.cache_engine, answer.cache_version = answer.engine, answer.engine.version
        if answer.turns:
            answer.uncached = self._draws.observed.next()
            answer.context += answer.uncached
            self.events.after(self._draws.turn_s.next(), self._request_answer, answer)
            return
        group = answer.group
        answer.status = EpisodeStatus.FINISHED
        group.ends_s.append(self.events.now_s)
        group.num_finished += 1
        if group.num_finished == self.world.flow.first:
            self._withdraw_rest(group)
        self.scoring += 1
        scored_s = self._time_scored_s()
        if scored_s > self.events.now_s:
            self.events.at(scored_s, self._episode_scored, answer)
        else:
            self._episode_scored(answer)

    def _time_scored_s(self) -> float:
        """Return the virtual time at which the reward of an episode that ends now is available. If the number of
        scorers is limited, this includes the wait for a free scorer."""
        requested_s = self._time_handled_s()
        seconds = self._draws.reward_s.next()
        if not self._scorers:
            return requested_s + seconds
        done_s = max(requested_s, self._scorers[0]) + seconds
        heapq.heapreplace(self._scorers, done_s)
        return done_s

    def _withdraw_rest(self, group: SimulatedGroup) -> None:
        """Withdraw the episodes of a group that still run, after its first ``flow.first`` episodes have finished."""
        for episode in group.episodes:
            if episode.status is EpisodeStatus.RUNNING:
                episode.status = EpisodeStatus.LEFT_OUT
                group.num_ended += 1
                self.sampling -= self.fleet.withdraw(episode)

    def _episode_scored(self, episode: SimulatedEpisode) -> None:
        """Handle the end of an episode's scoring: draw its reward, and close its group if all its episodes have
        ended."""
        self.scoring -= 1
        episode.reward = self._draws.reward(episode.group.chance)
        episode.status = EpisodeStatus.FAILED if episode.reward is None else EpisodeStatus.SCORED
        episode.group.num_ended += 1
        if episode.group.num_ended == len(episode.group.episodes):
            self._close_group(episode.group)

    def _close_group(self, group: SimulatedGroup) -> None:
        """Add a group whose episodes have all ended to the flow. If the run has filters or an episode has failed, the
        filters are applied to the group first."""
        self._may_admit = self._may_take = True
        if self._has_filters or any(episode.status is not EpisodeStatus.SCORED for episode in group.episodes):
            self._apply_filters(group)
            return
        for episode in group.episodes:
            group.add(episode)
        self.flow.add_scored(self._recorder.group(group))

    def _apply_filters(self, group: SimulatedGroup) -> None:
        """Apply the filters and the minimum number of episodes to a group, then add it to the flow or drop it. The
        episodes are converted to the type of a real run for this. Tokens of episodes that are left out count as
        wasted."""
        config = self.world.flow
        closed = close_group(
            group.number,
            [self._recorder.episode(episode) for episode in group.episodes],
            min_episodes=config.min_episodes,
            filters=config.filters,
            context=self._context,
        )
        if closed.reason:
            self.flow.drop(group.number, closed.reason)
            return
        for episode, filtered in zip(group.episodes, closed.group.episodes, strict=True):
            if filtered.status is EpisodeStatus.SCORED:
                group.add(episode)
            else:
                self.wasted[filtered.cause] += episode.sampled
        self.flow.add_scored(closed.group)

    def _group_dropped(self, number: int, reason: str) -> None:
        """Count the tokens of a dropped group as wasted, by the reason of the drop. Tokens of episodes that were left
        out when the group was closed have been counted already."""
        group = self.groups.pop(number)
        self.wasted[reason] += sum(group.trained.values()) or sum(episode.sampled for episode in group.episodes)

    # --- the learner

    def _order_batch(self) -> None:
        """Order a training step on the learner for the next batch, if the flow has a complete batch."""
        flow_batch = self.flow.take()
        if flow_batch is None:
            self._may_take = False
            return
        self._may_admit = True  # groups that were too old have been dropped, which frees their slots
        groups = [self.groups[group.number] for group in flow_batch.groups]
        self.learner.order(
            SimulatedBatch(
                step=flow_batch.step,
                tokens=sum(group.tokens for group in groups),
                squares=sum(group.squares for group in groups),
                taken_s=self.events.now_s,
                flow_batch=flow_batch,
                groups=groups,
            )
        )

    def _step_starts(self) -> None:
        """Store the engines' busy time at the start of a training step. Its increase until the end of the step is the
        time in which engines and learner both work."""
        self._engine_busy_s = self.fleet.counts().busy_s / len(self.fleet.engines)

    def _step_ends(self, batch: SimulatedBatch, waited_s: float) -> None:
        """Record the step that trained ``batch`` and report it to the flow. Before the step, the learner had waited
        ``waited_s`` seconds for the batch."""
        ages: dict[int, float] = defaultdict(float)
        for group in batch.groups:
            for version, tokens in group.trained.items():
                if batch.flow_batch.oldest_version is not None and version < batch.flow_batch.oldest_version:
                    self.wasted[STALE] += tokens
                    continue
                assert batch.step - version <= self.flow.state.allowed_age(version), f"age {batch.step - version}"
                ages[batch.step - version] += tokens
            self.groups.pop(group.number).episodes.clear()
        waited = (batch.taken_s - waited_s, batch.taken_s)
        ends_s = chain(*[group.ends_s for group in batch.groups])
        total = self.fleet.counts()
        engine_busy_s = total.busy_s / len(self.fleet.engines)
        self._overlap_s += engine_busy_s - self._engine_busy_s
        self.steps.append(
            StepSnapshot(
                end_s=self.events.now_s,
                tokens=sum(ages.values()),
                ages=dict(ages),
                wait_s=waited_s,
                straggler_s=straggler_s(ends_s, waited) if waited_s else 0.0,
                learner_busy_s=self.learner.busy_s,
                exposed_sync_s=self.learner.exposed_sync_s,
                engine_busy_s=engine_busy_s,
                both_busy_s=self._overlap_s,
                prefill_s=total.prefill_s / len(self.fleet.engines),
                generated=total.generated,
                scoring_s=self.scoring_s,
                sync_s=self.sync_s,
                wasted=sum(self.wasted.values()) + total.wasted,
            )
        )
        report = StepReport(
            step=batch.step, metrics={}, trained_tokens=round(sum(ages.values())), dropped_tokens={}, seconds=0.0,
            log_pi_N=np.empty(0, np.float32), ages={age: round(tokens) for age, tokens in ages.items()},
        )  # fmt: skip
        self.flow.record_step_trained(batch.flow_batch.groups, report)
        self._may_admit = self._may_take = True  # the learner is free earlier or later than the pacing expected

    def _committed(self, version: int) -> None:
        """Record that all engines use ``version``: the slots of the groups in its batch become free."""
        self.flow.record_version_committed(version, "")
        self.learner.committed()
        self._may_admit = self._may_take = True

    def _tune_capacity(self) -> None:
        """Adapt the limit of concurrent groups (``flow.capacity = "auto"``) to the statistics of the engines, and
        schedule the next adaptation."""
        flow, fleet = self.flow, self.fleet
        limited_cache = self.world.cache_tokens < float("inf")
        used = sum(engine.context for engine in fleet.engines) if limited_cache else 0.0
        stats = EngineStats(
            running=fleet.running,
            waiting=fleet.waiting,
            preempted=fleet.counts().preempted,
            cache_blocks=int(self.world.cache_tokens) * len(fleet.engines) if limited_cache else 0,
            cache_blocks_used=int(used),
        )
        limits = flow.state.limits
        max_groups = (limits.run_ahead + 1) * limits.batch_size
        self._concurrency, why = self._concurrency.observe(stats, num_running=flow.state.num_running, limit=max_groups)
        if why:
            flow.set_capacity(self._concurrency.capacity)
            self._may_admit = True
        self.events.after(LOOK_S, self._tune_capacity)

    # --- invariants

    def in_flight_tokens(self) -> float:
        """Return the number of sampled tokens of groups that are neither trained nor dropped."""
        return sum(
            sum(group.trained.values())
            or sum(each.sampled + (each.engine.progress(each) if each.engine else 0.0) for each in group.episodes)
            for group in self.groups.values()
        )

    def verify(self) -> None:
        """Raise ``AssertionError`` unless sampled = trained + wasted + in flight, in groups and in tokens."""
        self.ledger.verify(self.flow.state)
        total = self.fleet.counts()
        trained = sum(step.tokens for step in self.steps)
        accounted = trained + sum(self.wasted.values()) + total.wasted + self.in_flight_tokens()
        assert abs(total.generated - accounted) <= 1e-6 * total.generated + 1.0, (
            f"{total.generated} tokens sampled, {accounted} accounted for"
        )


class CountingLedger:
    """A :class:`~headrace.flow.ledger.LedgerWriter` that stores nothing and only counts the groups of the operations
    that the flow writes. The simulation compares these counts with those of the flow's state."""

    def __init__(self, on_drop: Callable[[int, str], None]) -> None:
        """Create an empty ledger. ``on_drop(number, reason)`` is called for every dropped group."""
        self._on_drop = on_drop
        self.submitted = 0
        """Number of submitted groups. ``trained`` and ``dropped`` (by reason) are what became of them."""
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.version = 0

    def write(self, operation: Operation) -> None:
        """Count the groups of an operation, and assert that a commit's version is higher than the last committed
        version."""
        match operation:
            case Submit():
                self.submitted += len(operation.numbers)
            case EndStep():
                self.trained += len(operation.numbers)
            case Move(state=GroupState.DROPPED):
                self.dropped[operation.reason] += len(operation.numbers)
                for number in operation.numbers:
                    self._on_drop(number, operation.reason)
            case CommitVersion():
                assert operation.version > self.version, f"version {operation.version} after {self.version}"
                self.version = operation.version

    async def flush(self, *, durable: bool = False) -> None:
        """Do nothing: no operation is buffered, so ``durable`` has no effect."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def verify(self, state: FlowState) -> None:
        """Raise ``AssertionError`` if a group was lost or counted twice, or if the counts of ``state`` and of
        this ledger differ."""
        assert state.conserved(), f"groups are not conserved: {state.counts}"
        assert state.dropped == self.dropped, f"dropped: {dict(state.dropped)}, the ledger says {dict(self.dropped)}"
        left = sum(count for place, count in state.counts.items() if place.in_flight)
        assert self.submitted == self.trained + self.dropped.total() + left, (
            f"{self.submitted} groups submitted, {self.trained} trained, {self.dropped.total()} dropped, {left} left"
        )
        assert state.version == self.version <= state.next_step
