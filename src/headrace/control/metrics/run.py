"""The metrics of a run: one object to which the loops report events, and which creates the three reports of a run: a
record for each step, the live state, and the summary.

Names that end in ``_s`` are seconds; points in time are seconds on the run's clock. A *life* of a run is the time from
one start or resumption to its end.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import EngineStats, StepReport
from headrace.base.types.metrics import last_tenth, quantile
from headrace.base.types.observation import Account, LiveState, QueueCounts, Recovery, StepRecord, Wait
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.weights import SwapReport, WeightUpdate
from headrace.control.metrics.batch import (
    BatchStats,
    age_metrics,
    episode_metrics,
    group_metrics,
    own_length,
    reward_part_means,
    sampled_length,
    straggler_s,
)
from headrace.control.metrics.counters import Attempts, CounterSnapshot, RunTotals, SinceStep
from headrace.control.metrics.rewards import RewardCounts
from headrace.control.metrics.summary import CommitGap, Summary
from headrace.control.parts import Components
from headrace.flow import Flow
from headrace.flow.ledger.base import Conservation
from headrace.models.gap import Gap
from headrace.rollout.scoring import Graded

WINDOW_S = 10.0
"""Seconds over which live throughputs are averaged."""
MAX_RECOVERIES = 100
"""Maximum number of recoveries in the summary; older ones are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The measurements of one step, which the learner loop reports."""

    groups: list[ScoredGroup]
    """The groups that the step trained."""
    stats: BatchStats
    """Statistics of the episodes in these groups."""
    ordered_s: float
    """The time at which the batch was sent to the learner, in seconds on the clock."""
    report: StepReport
    """The learner's report on the step."""
    waited_s: float
    """Seconds that the learner waited for the batch."""
    copied_s: float
    """Seconds for which the learner paused to copy its weights after the step."""
    exposed_s: float
    """Seconds in which the learner waited for the weight sync after the step: for the copy, and for a free buffer."""


class RunMetrics:
    """The metrics of one life of a run. The loops call a method for each event; other methods create the reports."""

    def __init__(self, parts: Components, flow: Flow, *, num_steps: int, env_column: str) -> None:
        """Create the counters. ``parts`` are the components of the run and ``flow`` is its flow, from which counters
        are read. ``num_steps`` is the number of steps of the whole run; ``env_column`` is the column of a dataset row
        that contains the name of its environment."""
        self._parts = parts
        self._flow = flow
        self._num_steps = num_steps
        self._started_s = parts.clock.now()
        self._at_start: CounterSnapshot | None = None
        """The counters when the first rollout began; ``None`` before that."""
        self._at_end: CounterSnapshot | None = None
        """The counters when the loops had ended; ``None`` before that."""
        self._last_step = CounterSnapshot(clock_s=self._started_s)
        """The counters at the end of the last step, or when training began."""
        self.totals = RunTotals()
        self.since = SinceStep()
        """The counts since the last step."""
        self.attempts = Attempts(env_column)
        """The ended episodes for the trace, and the environments of running groups."""
        self.rewards = RewardCounts(max_failing_calls=flow.config.groups_per_step * flow.config.group_size)
        """Failures and logged values of the components of the reward."""
        self.num_engines: int | None = None
        """The number of engines that are ready, as last looked at; ``None`` before."""
        self.system: dict[str, float] = {}
        """The last measurement of memory and processor time of the run's processes, by the name of the metric."""

    # -- events: the run as a whole ----------------------------------------------------------------------------------

    def run_resumed(self, step: int, *, eval_before: float | None, reward_first: float | None) -> None:
        """Restore the counters of a resumed run, of which ``step`` steps are done. The two rewards were measured in the
        first life of the run: the held-out mean reward before training, and the mean reward of the first batch;
        ``None`` if they were not measured."""
        totals = self.totals
        totals.steps_done, totals.eval_before, totals.reward_first = step, eval_before, reward_first

    def first_weights_committed(self) -> None:
        """Remove the gap of the first commit from the counters: no sequence was running that could have waited."""
        self.totals.commit_gaps_s.clear()

    def gap_measured(self, gap: Gap) -> None:
        """Record the gap between the logprobs of engine and learner at equal weights."""
        self.totals.mismatch_kl, self.totals.mismatch_abs = gap.kl, gap.mean_abs

    def training_began(self) -> None:
        """Store the time and the engine's counters before the first rollout."""
        self._at_start = self._last_step = CounterSnapshot(
            clock_s=self._parts.clock.now(), engine=self._parts.engine.stats()
        )
        self.totals.recent.clear()  # earlier values include the tokens of evaluation and comparison

    def training_ended(self) -> None:
        """Store the time and the engine's counters after the loops have ended."""
        self._at_end = CounterSnapshot(clock_s=self._parts.clock.now(), engine=self._parts.engine.stats())

    def evaluation_ended(self, version: int, reward: float, *, training: bool) -> None:
        """Record ``reward``, the mean held-out reward of an evaluation that began at ``version``. If ``training``
        continues, the record of the next step contains it."""
        self.totals.evals[version] = reward
        self.since.eval_version = version if training else None

    def eval_sampled(self, tokens: int) -> None:
        """Count ``tokens`` tokens that the engine sampled for an evaluation during training."""
        self.totals.eval_tokens += tokens

    def part_recovered(self, recovery: Recovery) -> None:
        """Record that a part of the run that had died is available again."""
        self.totals.recoveries = [*self.totals.recoveries, recovery][-MAX_RECOVERIES:]

    def count(self, name: str, amount: float) -> None:
        """Add ``amount`` to the metric ``name`` of the next step's record, which is a sum. ``name`` must have a row in
        the registry of metrics."""
        self.since.sums[name] = self.since.sums.get(name, 0.0) + amount

    # -- events: rollout and scoring ---------------------------------------------------------------------------------

    def group_started(self, number: int, row: Mapping[str, Any]) -> None:
        """Record that the group ``number`` starts. ``row`` is the dataset row of its task."""
        self.attempts.begin(number, row)

    def held_back(self, seconds: float) -> None:
        """Count ``seconds`` in which no more groups were allowed to run although no request waited for the engine."""
        self.since.held_back_s += seconds

    def episode_ended(self, episode: EpisodeGraph, start_s: float, end_s: float) -> None:
        """Record the start and the end, in seconds on the clock, of an episode that ran in this life of the run."""
        self.attempts.end(episode, start_s, end_s)

    def answer_graded(self, graded: Graded, warn: Callable[[str, str], None]) -> None:
        """Count the failures and logged values of the reward's components for one answer; see
        :meth:`RewardCounts.add`."""
        self.rewards.add(graded, warn)

    def answer_scored(self, text: str, reward: float | None) -> None:
        """Store the latest scored completion and its reward (``None`` if it has none) for the live view."""
        self.totals.last_sample, self.totals.last_sample_reward = text, reward

    def episode_scored(self, episode: EpisodeGraph) -> None:
        """Count an episode after its scoring, with or without a reward."""
        self.since.lengths.append(own_length(episode))
        if episode.status is EpisodeStatus.LEFT_OUT:
            self.totals.set_aside[episode.cause] += 1
        if episode.status.untrained:
            self.totals.wasted_tokens[extract_reason(episode.cause)] += sampled_length(episode)
        if episode.reward is not None:
            self.since.rewards.append(episode.reward)

    def episode_set_aside(self, episode: EpisodeGraph) -> None:
        """Count an episode of a kept group that a filter excluded or masked."""
        self.totals.set_aside[episode.cause] += 1
        self.totals.wasted_tokens[extract_reason(episode.cause)] += sampled_length(episode)

    def group_dropped(self, reason: str, episodes: Iterable[EpisodeGraph]) -> None:
        """Count the sampled tokens of a group that is dropped for ``reason`` as wasted. Episodes that are untrained for
        a reason of their own are skipped, because their tokens were counted before."""
        sampled = [sampled_length(episode) for episode in episodes if not episode.status.untrained]
        self.totals.wasted_tokens[reason] += sum(sampled)

    # -- events: learner and sync ------------------------------------------------------------------------------------

    def snapshot_saved(self, seconds: float) -> None:
        """Count the seconds for which a checkpoint kept the learner busy."""
        self.totals.learner_busy_s += seconds

    def version_committed(self, update: WeightUpdate, report: SwapReport) -> None:
        """Count the commit of the version that ``update`` published; ``report`` contains its costs."""
        self.totals.versions.append(update.version)
        self.totals.commit_gaps_s.append(report.gap_s)
        self.totals.restarted += report.restarted
        self.count("sync/commits", 1)
        self.count("sync/bytes", update.num_bytes)
        self.count("sync/carried_over", report.carried_over)
        self.count("sync/recomputed_tokens", report.recomputed_tokens)
        self.count("sync/wait_s", report.waited_s)

    def step_done(self, done: StepDone) -> StepRecord:
        """Add a step of the learner to the counters, and return its record, which becomes a line of
        ``metrics.jsonl``."""
        totals, report = self.totals, done.report
        totals.steps_done = report.step + 1
        totals.tokens_trained += report.trained_tokens
        totals.dropped_tokens.update(Counter(report.dropped_tokens))
        totals.ages.update(report.ages)
        totals.exposed_sync_s += done.exposed_s
        totals.learner_busy_s += report.seconds + done.copied_s
        if "mismatch_abs" in report.metrics:
            totals.mismatch_abs_most = max(totals.mismatch_abs_most or 0.0, report.metrics["mismatch_abs"])
        record = self._make_record(done)
        totals.rewards.append(record.reward_mean)
        if totals.reward_first is None:
            totals.reward_first = record.reward_mean
        return record

    # -- report: a line of metrics.jsonl -----------------------------------------------------------------------------

    def _make_record(self, done: StepDone) -> StepRecord:
        """Return the record of a finished step, and reset the counts since the last step."""
        report, totals, stats = done.report, self.totals, done.stats
        since, self.since = self.since, SinceStep()
        rewards = stats.columns.rewards
        envs = self.attempts.pop_envs((group.number for group in done.groups), alive=self._flow.state.groups)
        metrics_of_episodes = episode_metrics(stats, envs)
        return StepRecord(
            step=report.step,
            version=report.step + 1,
            clock_s=self._parts.clock.now(),
            wall_s=self.wall_s,
            unix_s=self._parts.clock.wall(),
            reward_mean=statistics.fmean(rewards) if rewards else None,
            reward_sampled=statistics.fmean(since.rewards) if since.rewards else None,
            reward_std=_std(rewards) if rewards else None,
            reward_min=min(rewards, default=None),
            reward_max=max(rewards, default=None),
            eval_accuracy=None if since.eval_version is None else totals.evals[since.eval_version],
            eval_version=since.eval_version,
            length_mean=metrics_of_episodes.pop("length_mean", None),
            metrics={
                **report.metrics,
                **age_metrics(report.ages),
                **self._synchronous_time_metrics(),
                **self._tuned_limits(),
                **since.sums,
                **reward_part_means(stats),
                **self.rewards.pop_metrics(),
                **metrics_of_episodes,
                **group_metrics(stats),
                **self._part_metrics(len(stats.episodes)),
                **_submitted_length_metrics(since.lengths),
                **self.system,
            },
            trained_tokens=report.trained_tokens,
            generated_tokens=self._tokens_generated,
            seconds=report.seconds,
            wait_s=done.waited_s,
            exposed_sync_s=done.exposed_s,
            straggler_s=straggler_s(stats.ends_s, (done.ordered_s - done.waited_s, done.ordered_s)),
            held_back_s=since.held_back_s,
            commit_gap_s=totals.commit_gaps_s[-1] if totals.commit_gaps_s else None,
            ages=report.ages,
            queue=self._queue,
            dropped_groups=dict(self._flow.state.dropped),
            set_aside_episodes=dict(totals.set_aside),
            dropped_tokens=dict(totals.dropped_tokens),
            wasted_tokens=self._wasted_tokens(),
        )

    def _synchronous_time_metrics(self) -> dict[str, float]:
        """Return two metrics by name: the upper and the lower bound of the time that the step would have taken if
        generation and training alternated; empty if they are not known."""
        bounds = self._flow.synchronous_time
        return {} if bounds is None else {"turns_s": bounds.most_s, "turns_least_s": bounds.least_s}

    def _tuned_limits(self) -> dict[str, float]:
        """Return the current values of the limits of the flow that are tuned automatically, by the name of the
        metric."""
        config, limits = self._flow.config, self._flow.state.limits
        tuned: dict[str, float] = {"max_age": limits.max_age} if config.max_age == "auto" else {}
        if config.capacity == "auto" and limits.capacity is not None:
            tuned["capacity"] = limits.capacity
        return tuned

    def _part_metrics(self, num_episodes: int) -> dict[str, float]:
        """Return metrics of the work of engine and learner since the last step, and of the engine's current load, by
        name. ``num_episodes`` is the number of episodes that the step trained."""
        last, totals = self._last_step, self.totals
        current = self._last_step = CounterSnapshot(
            clock_s=self._parts.clock.now(),
            engine=self._parts.engine.stats(),
            learner_busy_s=totals.learner_busy_s,
            tokens_trained=totals.tokens_trained,
        )
        stats, before = current.engine, last.engine
        wall_s = max(current.clock_s - last.clock_s, 1e-9)
        busy_s = min(stats.busy_s - before.busy_s, wall_s)
        learner_s = current.learner_busy_s - last.learner_busy_s
        metrics = {
            "trained_tok_s": (current.tokens_trained - last.tokens_trained) / wall_s,
            "generated_tok_s": (stats.generated_tokens - before.generated_tokens) / wall_s,
            "engine_busy_frac": max(0.0, busy_s / wall_s),
            "learner_busy_frac": min(1.0, learner_s / wall_s),
            "engine_steps": float(max(0, stats.steps - before.steps)),
            "engine_running": float(stats.running),
            "engine_waiting": float(stats.waiting),
            "preempted": float(stats.preempted),
        }
        if self.num_engines is not None:
            metrics["engines"] = float(self.num_engines)
        if busy_s > 0:
            metrics["prefill_frac"] = min(1.0, (stats.prefill_s - before.prefill_s) / busy_s)
        if stats.cache_blocks:
            metrics["cache_used_frac"] = stats.cache_blocks_used / stats.cache_blocks
            metrics["cache_bytes"] = float(stats.cache_bytes)
        prompts = stats.prompt_tokens - before.prompt_tokens
        if prompts > 0:
            metrics["cache_hit_frac"] = (stats.cached_tokens - before.cached_tokens) / prompts
        if (drafted := stats.drafted_tokens - before.drafted_tokens) > 0:
            accepted = stats.accepted_tokens - before.accepted_tokens
            metrics["draft_accepted_frac"] = accepted / drafted
            metrics["passes_by_token"] = 1 - accepted / max(stats.generated_tokens - before.generated_tokens, 1)
        if num_episodes:
            metrics["cost_s_per_episode"] = wall_s / num_episodes
            metrics["engine_s_per_episode"] = max(0.0, busy_s) / num_episodes
            metrics["learner_s_per_episode"] = learner_s / num_episodes
        return metrics

    def _wasted_tokens(self) -> dict[str, int]:
        """Return the number of sampled tokens of this life of the run that will not be trained, by reason."""
        wasted = self.totals.wasted_tokens + self.totals.dropped_tokens + self._flow.wasted_tokens
        discarded = self._engine.wasted_tokens - self._engine_before.wasted_tokens
        if discarded > 0:
            wasted["weight_update"] += discarded
        return dict(wasted)

    # -- report: the live state --------------------------------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """Return the seconds since this life of the run began."""
        return self._parts.clock.now() - self._started_s

    @property
    def _engine_before(self) -> EngineStats:
        """Return the engine's counters at the start of the first rollout; zeros before that."""
        return EngineStats() if self._at_start is None else self._at_start.engine

    @property
    def _engine(self) -> EngineStats:
        """Return the current counters of the engine or, if the loops have ended, its counters at their end."""
        return self._parts.engine.stats() if self._at_end is None else self._at_end.engine

    @property
    def _tokens_generated(self) -> int:
        """Return the number of tokens sampled since the first rollout, without the tokens of evaluations."""
        return self._engine.generated_tokens - self._engine_before.generated_tokens - self.totals.eval_tokens

    @property
    def _training_s(self) -> float:
        """Return the seconds from the start of the first rollout to the end of the loops, or until now if they have not
        ended; 0 before the first rollout."""
        if self._at_start is None:
            return 0.0
        end_s = self._parts.clock.now() if self._at_end is None else self._at_end.clock_s
        return end_s - self._at_start.clock_s

    @property
    def _queue(self) -> QueueCounts:
        """Return the number of groups in flight, by state."""
        state = self._flow.state
        submitted = state.counts[GroupState.SUBMITTED]
        return QueueCounts(submitted=submitted, running=state.num_running, ready=len(state.ready))

    def account(self) -> Account | None:
        """Return how the time of the training phase was spent, computed from the counters of engine and learner;
        ``None`` before the first rollout."""
        if self._at_start is None:
            return None
        return Account(
            seconds=self._training_s,
            engine_busy_s=self._engine.busy_s - self._engine_before.busy_s,
            learner_busy_s=self.totals.learner_busy_s,
            exposed_sync_s=self.totals.exposed_sync_s,
            generated_tokens=self._tokens_generated,
            trained_tokens=self.totals.tokens_trained,
        )

    def live(self, *, phase: str, waits: Sequence[Wait], warnings: Sequence[str]) -> LiveState:
        """Return the current state of the run for a view, which calls this about once a second. ``phase`` is the phase
        in words, ``waits`` the table of loops, and ``warnings`` the warnings so far."""
        now_s, totals = self._parts.clock.now(), self.totals
        totals.recent.append((now_s, self._tokens_generated, totals.tokens_trained))
        while len(totals.recent) > 2 and now_s - totals.recent[0][0] > WINDOW_S:
            totals.recent.popleft()
        (then_s, generated_then, trained_then), (_, generated, trained) = totals.recent[0], totals.recent[-1]
        window_s = max(now_s - then_s, 1e-9)
        done = len(totals.rewards)
        num_left = self._num_steps - totals.steps_done
        return LiveState(
            steps_done=totals.steps_done,
            steps_total=self._num_steps,
            title=str(self._parts.run_dir),
            phase=phase,
            wall_s=self.wall_s,
            eta_s=self._training_s / done * num_left if done else None,
            learner_version=totals.steps_done,
            engine_version=self._parts.engine.stats().version,
            rewards=tuple(totals.rewards),
            eval_accuracy=list(totals.evals.values())[-1] if totals.evals else None,
            generated_tok_s=(generated - generated_then) / window_s,
            trained_tok_s=(trained - trained_then) / window_s,
            queue=self._queue,
            ages=dict(sorted(totals.ages.items())),
            account=self.account(),
            waits=tuple(waits),
            warnings=tuple(warnings),
            sample=totals.last_sample,
            sample_reward=totals.last_sample_reward,
        )

    # -- report: summary.json ----------------------------------------------------------------------------------------

    def summary(
        self,
        conservation: Conservation,
        *,
        status: str,
        cause: str,
        stopped_by: str,
        eval_after: float | None,
        warnings: Sequence[str],
    ) -> Summary:
        """Return the summary of this life of the run. ``conservation`` are the ledger's counts; ``status`` is
        ``finished``, ``stopped`` or ``failed``; ``cause`` is the reason why the run failed or finished early;
        ``stopped_by`` is the signal that stopped it; ``eval_after`` is the held-out mean reward after training,
        ``None`` if it was not measured."""
        totals = self.totals
        gaps_ms = np.array(totals.commit_gaps_s or [0.0]) * 1e3
        return Summary(
            status=status,
            cause=cause,
            eval_before=totals.eval_before,
            eval_after=eval_after,
            reward_first=totals.reward_first,
            reward_last=last_tenth([reward for reward in totals.rewards if reward is not None]),
            steps=self._flow.state.version,
            **(self.account() or Account()).figures(),
            commit_gap_ms=CommitGap(p50=float(np.percentile(gaps_ms, 50)), p99=float(np.percentile(gaps_ms, 99))),
            sequences_restarted=totals.restarted,
            max_token_age=max(totals.ages, default=0),
            age_histogram=dict(sorted(totals.ages.items())),
            mismatch_kl=totals.mismatch_kl,
            mismatch_abs=totals.mismatch_abs,
            mismatch_abs_most=totals.mismatch_abs_most,
            ledger=conservation,
            versions=[totals.versions[0], totals.versions[-1]] if totals.versions else [],
            reward_failures=dict(self.rewards.get_failing()),
            warnings=list(warnings),
            recoveries=[str(recovery) for recovery in totals.recoveries],
            verdict="",
            run_dir=str(self._parts.run_dir),
            stopped_by=stopped_by,
        )


def extract_reason(cause: str) -> str:
    """Return the reason at the beginning of ``cause``, the cause of an untrained episode, without the details after the
    colon.

    >>> extract_reason("env_timeout: it was not over after 20 s")
    'env_timeout'
    """
    return cause.partition(":")[0]


def _std(values: Sequence[float]) -> float:
    """Return the population standard deviation of ``values``, which must not be empty."""
    mean = statistics.fmean(values)
    return math.dist(values, [mean] * len(values)) / math.sqrt(len(values))


def _submitted_length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """Return metrics by name of ``lengths``, the number of sampled tokens of each episode that ended since the last
    step, trained or not; empty if no episode ended."""
    if not lengths:
        return {}
    return {
        "length_submitted_mean": statistics.fmean(lengths),
        "length_submitted_p90": float(quantile(sorted(lengths), 0.9)),
    }
