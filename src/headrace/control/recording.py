"""The record of a step and the picture of the moment, made from the run's state."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.observation import Account, LiveState, QueueCounts, StepRecord
from headrace.base.types.scored import ScoredGroup
from headrace.control.measuring import (
    age_metrics,
    episode_metrics,
    group_metrics,
    part_means,
    part_metrics,
    straggler_s,
    wasted_tokens,
)
from headrace.control.seen import BatchStats
from headrace.control.state import WINDOW_S, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One step, as the learning loop saw it."""

    groups: list[ScoredGroup]
    seen: BatchStats
    """What their episodes come to."""
    ordered_s: float
    """When the batch was given to the learner, on the clock."""
    report: StepReport
    ages: dict[int, int]
    """Trained tokens by age in versions."""
    waited_s: float
    """Seconds that the learner waited for the batch."""
    exposed_s: float
    """Seconds that the learner stood still for the sync after the step."""


def step_record(state: RunState, done: StepDone) -> StepRecord:
    """What ``metrics.jsonl`` keeps of one step."""
    report, tally, seen = done.report, state.tally, done.seen
    rewards = seen.told.rewards
    sampled, tally.fresh_rewards = tally.fresh_rewards, []
    eval_version, tally.fresh_eval = tally.fresh_eval, None
    held_back_s, tally.held_back_s = tally.held_back_s, 0.0
    envs = state.attempts.envs((group.number for group in done.groups), alive=state.flow.state.groups)
    of_episodes = episode_metrics(seen, envs)
    return StepRecord(
        step=report.step,
        version=report.step + 1,
        clock_s=state.parts.clock.now(),
        wall_s=state.wall_s,
        unix_s=state.parts.clock.wall(),
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_sampled=statistics.fmean(sampled) if sampled else None,
        reward_std=_std(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        eval_accuracy=None if eval_version is None else tally.evals[eval_version],
        eval_version=eval_version,
        length_mean=of_episodes.pop("length_mean", None),
        metrics={
            **report.metrics,
            **age_metrics(done.ages),
            **_tuned_and_grown(state),
            **part_means(seen),
            **tally.rewarding.metrics(),
            **of_episodes,
            **group_metrics(seen),
            **part_metrics(state, len(seen.episodes)),
            **state.system,
        },
        trained_tokens=report.trained_tokens,
        generated_tokens=tokens_generated(state),
        seconds=report.seconds,
        wait_s=done.waited_s,
        exposed_sync_s=done.exposed_s,
        straggler_s=straggler_s(seen.ends_s, (done.ordered_s - done.waited_s, done.ordered_s)),
        held_back_s=held_back_s,
        commit_gap_s=tally.commit_gaps_s[-1] if tally.commit_gaps_s else None,
        ages=done.ages,
        queue=queue_counts(state),
        dropped_groups=dict(state.flow.state.dropped),
        set_aside_episodes=dict(tally.set_aside),
        dropped_tokens=dict(tally.dropped_tokens),
        wasted_tokens=wasted_tokens(state),
    )


def _std(values: Sequence[float]) -> float:
    """Their standard deviation; there is at least one."""
    mean = statistics.fmean(values)
    return math.dist(values, [mean] * len(values)) / math.sqrt(len(values))


def _tuned_and_grown(state: RunState) -> dict[str, float]:
    """The limits that the run finds by itself, as they are now; pivots and branches since the last step."""
    config, limits = state.flow_config, state.flow.state.limits
    pivots, state.tally.fresh_pivots = state.tally.fresh_pivots, Counter()
    tuned: dict[str, float] = {"max_age": limits.max_age} if config.max_age == "auto" else {}
    if config.capacity == "auto" and limits.capacity is not None:
        tuned["capacity"] = limits.capacity
    return tuned | {f"pivots/{name}": float(count) for name, count in pivots.items()}


def tokens_generated(state: RunState) -> int:
    """Tokens sampled since the first rollout."""
    stats = state.engine_after or state.parts.engine.stats()
    return stats.generated_tokens - state.engine_before.generated_tokens - state.tally.eval_tokens


def queue_counts(state: RunState) -> QueueCounts:
    """Groups in flight."""
    counts = state.flow.state.counts
    return QueueCounts(
        submitted=counts[GroupState.SUBMITTED], running=state.flow.state.num_running, ready=len(state.flow.state.ready)
    )


def training_s(state: RunState) -> float:
    """Seconds since the first rollout, up to the last commit."""
    if state.training_from_s is None:
        return 0.0
    return (state.training_until_s or state.parts.clock.now()) - state.training_from_s


def account(state: RunState) -> Account:
    """Where the time of the training phase went, by the counters of the parts."""
    stats = state.engine_after or state.parts.engine.stats()
    return Account(
        seconds=training_s(state),
        engine_busy_s=stats.busy_s - state.engine_before.busy_s,
        learner_busy_s=state.tally.learner_busy_s,
        exposed_sync_s=state.tally.exposed_sync_s,
    )


def live_state(state: RunState) -> LiveState:
    """The present moment."""
    now = state.parts.clock.now()
    tally = state.tally
    tally.recent.append((now, tokens_generated(state), tally.tokens_trained))
    while len(tally.recent) > 2 and now - tally.recent[0][0] > WINDOW_S:
        tally.recent.popleft()
    (then, generated_then, trained_then), (_, generated, trained) = tally.recent[0], tally.recent[-1]
    window_s = max(now - then, 1e-9)
    stats = state.parts.engine.stats()
    done = len(tally.rewards)
    left = state.run.steps - tally.steps_done
    return LiveState(
        steps_done=tally.steps_done,
        steps_total=state.run.steps,
        title=str(state.parts.run_dir),
        phase=state.phase,
        wall_s=state.wall_s,
        eta_s=training_s(state) / done * left if done else None,
        learner_version=tally.steps_done,
        engine_version=stats.version,
        rewards=tuple(tally.rewards),
        eval_accuracy=list(tally.evals.values())[-1] if tally.evals else None,
        generated_tok_s=(generated - generated_then) / window_s,
        trained_tok_s=(trained - trained_then) / window_s,
        queue=queue_counts(state),
        ages=dict(sorted(tally.ages.items())),
        account=account(state) if state.training_from_s is not None else None,
        waits=state.board.table(),
        warnings=tuple(state.warnings),
        sample=tally.last_sample,
        sample_reward=tally.last_sample_reward,
    )
