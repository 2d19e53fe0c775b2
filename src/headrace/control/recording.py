"""The record of a step and the picture of the moment, made from the run's state."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.control.state import WINDOW_S, RunState
from headrace.types.episode import Episode
from headrace.types.group import GroupState
from headrace.types.messages.controller import StepReport
from headrace.types.observation import Fractions, LiveState, QueueCounts, StepRecord
from headrace.types.scored import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One step, as the learning loop saw it."""

    groups: list[ScoredGroup]
    report: StepReport
    ages: dict[int, int]
    """Trained tokens by age in versions."""
    waited_s: float
    """Seconds that the learner waited for the batch."""
    exposed_s: float
    """Seconds that the learner stood still for the sync after the step."""


def step_record(state: RunState, done: StepDone) -> StepRecord:
    """What ``metrics.jsonl`` keeps of one step."""
    report = done.report
    episodes = [episode for group in done.groups for episode in group.scored]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    sampled, state.tally.fresh_rewards = state.tally.fresh_rewards, []
    eval_version, state.tally.fresh_eval = state.tally.fresh_eval, None
    return StepRecord(
        step=report.step,
        version=report.step + 1,
        clock_s=state.parts.clock.now(),
        wall_s=state.wall_s,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_sampled=statistics.fmean(sampled) if sampled else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        eval_accuracy=None if eval_version is None else state.tally.evals[eval_version],
        eval_version=eval_version,
        metrics={**report.metrics, **_spread(done.ages), **_tuned(state), **_parts(episodes)},
        trained_tokens=report.trained_tokens,
        generated_tokens=tokens_generated(state),
        seconds=report.seconds,
        wait_s=done.waited_s,
        exposed_sync_s=done.exposed_s,
        commit_gap_s=state.tally.commit_gaps_s[-1] if state.tally.commit_gaps_s else None,
        ages=done.ages,
        queue=queue_counts(state),
        length_mean=statistics.fmean(episode.num_sampled for episode in episodes) if episodes else None,
        dropped_groups=dict(state.flow.state.dropped),
        set_aside_episodes=dict(state.tally.set_aside),
        dropped_tokens=dict(state.tally.dropped_tokens),
    )


def _parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """The mean of each component of the reward."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.parts.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def _spread(ages: dict[int, int]) -> dict[str, float]:
    """How far apart the versions of the batch's tokens are: newest − oldest, and their standard deviation."""
    if not ages:
        return {}
    values, weights = np.array(list(ages), np.float64), np.array(list(ages.values()), np.float64)
    deviation = float(np.sqrt(np.average((values - np.average(values, weights=weights)) ** 2, weights=weights)))
    return {"version_spread": float(values.max() - values.min()), "version_std": deviation}


def _tuned(state: RunState) -> dict[str, float]:
    """The limits that the run finds by itself, as they are now."""
    config, limits = state.flow_config, state.flow.state.limits
    tuned: dict[str, float] = {"max_age": limits.max_age} if config.max_age == "auto" else {}
    if config.capacity == "auto" and limits.capacity is not None:
        tuned["capacity"] = limits.capacity
    return tuned


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


def fractions(state: RunState) -> Fractions:
    """Where the time of the training phase went."""
    wall_s = training_s(state)
    if wall_s <= 0:
        return Fractions()
    stats = state.engine_after or state.parts.engine.stats()
    busy_s = stats.busy_s - state.engine_before.busy_s
    return Fractions(
        engine_idle=_unit(1 - busy_s / wall_s),
        learner_idle=_unit(1 - state.tally.learner_busy_s / wall_s),
        sync=_unit(state.tally.exposed_sync_s / wall_s),
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
        fractions=fractions(state),
        waits=state.board.table(),
        warnings=tuple(state.warnings),
        sample=tally.last_sample,
        sample_reward=tally.last_sample_reward,
    )


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))
