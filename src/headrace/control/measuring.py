"""What a step measures of its episodes and of the parts. Every name is a row of :mod:`headrace.base.types.metrics`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.base.types.episode import EpisodeGraph, Turn, role_of
from headrace.base.types.metrics import as_label, quantile
from headrace.base.types.tokens import IntColumn
from headrace.control.seen import BatchStats, EpisodeColumns
from headrace.control.state import RunState
from headrace.flow.filters import rewards_of

MOST_LABELS = 32
"""Environments and agents with metrics of their own; the others are one, called ``other``."""
NUM_READ = 8
"""Episodes of a batch that are searched for repetitions."""
MOST_READ = 4096
"""Tokens of each: the last ones, where an answer that does not end repeats itself."""
GRAM = 4
TAIL = 0.9
"""The episodes after this share of a batch are its stragglers."""


def episode_metrics(seen: BatchStats, envs: Sequence[str]) -> dict[str, float]:
    """Rewards, lengths and turns of a batch: over all episodes, by environment and by agent. ``envs``: one for each
    group, empty where its task names none."""
    if not seen.episodes:
        return {}
    lengths = seen.told.lengths
    mean = {"length_mean": statistics.fmean(lengths), "truncated_frac": seen.truncated / len(lengths)}
    metrics = {**mean, **_over_all(seen.told), **_labelled("env", _by_env(seen, envs))}
    if len(seen.authors) > 1:
        metrics |= _labelled("agent", _by_agent(seen.episodes))
    return metrics


def _by_env(seen: BatchStats, envs: Sequence[str]) -> dict[str, EpisodeColumns]:
    of_env: dict[str, EpisodeColumns] = {}
    begin = 0
    for env, size in zip(envs, seen.sizes, strict=True):
        end = begin + size
        if env:
            told = of_env.setdefault(env, EpisodeColumns())
            told.lengths += seen.told.lengths[begin:end]
            told.turns += seen.told.turns[begin:end]
            told.rewards += rewards_of(seen.episodes[begin:end])
        begin = end
    return of_env


def own_turns(episode: EpisodeGraph) -> list[Turn]:
    """The turns that were sampled in the episode itself, those of branches aside."""
    return [turn for turn in episode.turns if turn.stop_reason is not None and turn.branch is None]


def own_length(episode: EpisodeGraph) -> int:
    """Sampled tokens of the episode itself."""
    return sum(len(turn.tokens) for turn in own_turns(episode))


def sampled_length(episode: EpisodeGraph) -> int:
    """Sampled tokens of all its turns, those of branches included."""
    return sum(len(turn.tokens) for turn in episode.turns if turn.stop_reason is not None)


def _by_agent(episodes: Iterable[EpisodeGraph]) -> dict[str, EpisodeColumns]:
    """A column for each role: agents of one role are alike."""
    of_agent: dict[str, EpisodeColumns] = {}
    for episode in episodes:
        shares: dict[str, list[Turn]] = {}
        for turn in own_turns(episode):
            shares.setdefault(turn.author, []).append(turn)
        for author, turns in shares.items():
            earned = [turn.reward for turn in turns if turn.reward is not None]
            reward = episode.agent_rewards.get(author, sum(earned) if earned else episode.reward)
            share = EpisodeColumns(lengths=[sum(len(turn.tokens) for turn in turns)], turns=[len(turns)])
            share.rewards = [] if reward is None else [reward]
            of_agent.setdefault(role_of(author), EpisodeColumns()).add(share)
    return of_agent


def _over_all(told: EpisodeColumns) -> dict[str, float]:
    rewards, lengths = sorted(told.rewards), sorted(told.lengths)
    metrics = {
        "length_p10": float(quantile(lengths, 0.1)),
        "length_p90": float(quantile(lengths, 0.9)),
        "length_max": float(lengths[-1]),
        "turns_mean": sum(told.turns) / len(told.turns),
        "turns_max": float(max(told.turns)),
    }
    if rewards:
        metrics |= {"reward_p10": quantile(rewards, 0.1), "reward_p90": quantile(rewards, 0.9)}
    return metrics


def _labelled(of: str, told: Mapping[str, EpisodeColumns]) -> dict[str, float]:
    """The same for each label: the commonest keep their names."""
    merged: dict[str, EpisodeColumns] = {}
    for rank, (name, each) in enumerate(sorted(told.items(), key=lambda item: -len(item[1].lengths))):
        merged.setdefault(as_label(name) if rank < MOST_LABELS else "other", EpisodeColumns()).add(each)
    metrics: dict[str, float] = {}
    for label, some in merged.items():
        name = f"{of}/{label}"
        metrics[f"{name}/episodes"] = float(len(some.lengths))
        metrics[f"{name}/length_mean"] = statistics.fmean(some.lengths)
        metrics |= {f"{name}/{key}": value for key, value in _over_all(some).items() if key != "turns_max"}
        if some.rewards:
            metrics[f"{name}/reward_mean"] = statistics.fmean(some.rewards)
            metrics[f"{name}/reward_max"] = max(some.rewards)
    return metrics


def group_metrics(seen: BatchStats) -> dict[str, float]:
    """Groups without anything to prefer in them, and how much episodes repeat themselves."""
    metrics = {"zero_variance_frac": sum(seen.equal) / len(seen.equal)} if seen.equal else {}
    episodes = seen.episodes
    read = episodes[:: max(1, len(episodes) // NUM_READ)][:NUM_READ]
    shares = [share for episode in read if (share := _repeats(episode)) is not None]
    if shares:
        metrics["repetition"] = statistics.fmean(shares)
    return metrics


def _repeats(episode: EpisodeGraph) -> float | None:
    sampled = [turn.tokens.ids_T for turn in own_turns(episode) if len(turn.tokens.ids_T) > GRAM]
    return repetition(max(sampled, key=len)[-MOST_READ:]) if sampled else None


def repetition(ids_T: IntColumn) -> float | None:
    """The fraction of 4-grams that stand earlier in the same tokens; ``None`` where there are fewer than 2.

    >>> import numpy as np
    >>> repetition(np.arange(100)), round(repetition(np.arange(100) % 5), 2)
    (0.0, 0.95)
    """
    ids = ids_T.tolist()
    grams = list(zip(*(ids[place:] for place in range(GRAM)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else None


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """How far apart the versions of the batch's tokens are, newest − oldest and their standard deviation, and the age
    that a tenth of them reach.

    >>> age_metrics({0: 80, 2: 20})
    {'version_spread': 2.0, 'version_std': 0.8, 'age_p90': 2.0}
    """
    if not ages:
        return {}
    total = sum(ages.values())
    mean = sum(age * tokens for age, tokens in ages.items()) / total
    variance = sum((age - mean) ** 2 * tokens for age, tokens in ages.items()) / total
    older = 0
    for age in sorted(ages, reverse=True):
        older += ages[age]
        if older >= 0.1 * total:
            break
    return {"version_spread": float(max(ages) - min(ages)), "version_std": math.sqrt(variance), "age_p90": float(age)}


def part_means(seen: BatchStats) -> dict[str, float]:
    """The mean of each component of the reward."""
    values: dict[str, list[float]] = {}
    for parts in seen.parts:
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def straggler_s(ends_s: Iterable[float], waited: tuple[float, float]) -> float:
    """Seconds within ``waited`` in which nine in ten of a batch's episodes had ended and others had not.

    >>> straggler_s([1.0] * 9 + [8.0], (0.0, 9.0))
    7.0
    """
    ends_s = sorted(ends_s)
    if len(ends_s) < 2:
        return 0.0
    most_s = ends_s[min(math.ceil(TAIL * len(ends_s)), len(ends_s) - 1) - 1]
    return max(0.0, min(ends_s[-1], waited[1]) - max(most_s, waited[0]))


def part_metrics(state: RunState, num_episodes: int) -> dict[str, float]:
    """What engine and learner did since the last step, and how full they are; moves the mark of the last step on."""
    now_s, stats = state.parts.clock.now(), state.parts.engine.stats()
    mark = state.tally.mark
    then = mark.stats or state.engine_before
    since_s = mark.clock_s if mark.clock_s is not None else (state.training_from_s or state.started_s)
    wall_s = max(now_s - since_s, 1e-9)
    busy_s = min(stats.busy_s - then.busy_s, wall_s)
    learner_s = state.tally.learner_busy_s - mark.learner_busy_s
    mark.clock_s, mark.stats, mark.learner_busy_s = now_s, stats, state.tally.learner_busy_s
    trained, mark.tokens_trained = state.tally.tokens_trained - mark.tokens_trained, state.tally.tokens_trained
    lengths, state.tally.fresh_lengths = sorted(state.tally.fresh_lengths), []
    metrics = {
        "trained_tok_s": trained / wall_s,
        "generated_tok_s": (stats.generated_tokens - then.generated_tokens) / wall_s,
        "engine_busy_frac": max(0.0, busy_s / wall_s),
        "learner_busy_frac": min(1.0, learner_s / wall_s),
        "engine_steps": float(max(0, stats.steps - then.steps)),
        "engine_running": float(stats.running),
        "engine_waiting": float(stats.waiting),
        "preempted": float(stats.preempted),
    }
    if busy_s > 0:
        metrics["prefill_frac"] = min(1.0, (stats.prefill_s - then.prefill_s) / busy_s)
    if stats.cache_blocks:
        metrics["cache_used_frac"] = stats.cache_blocks_used / stats.cache_blocks
        metrics["cache_bytes"] = float(stats.cache_bytes)
    prompts = stats.prompt_tokens - then.prompt_tokens
    if prompts > 0:
        metrics["cache_hit_frac"] = (stats.cached_tokens - then.cached_tokens) / prompts
    metrics |= _sync_metrics(state)
    if num_episodes:
        metrics["cost_s_per_episode"] = wall_s / num_episodes
        metrics["engine_s_per_episode"] = max(0.0, busy_s) / num_episodes
        metrics["learner_s_per_episode"] = learner_s / num_episodes
    if lengths:
        metrics["length_submitted_mean"] = statistics.fmean(lengths)
        metrics["length_submitted_p90"] = float(quantile(lengths, 0.9))
    return metrics


def _sync_metrics(state: RunState) -> dict[str, float]:
    """What became of weights on their way, and of who was running, since the last step."""
    counted, state.tally.fresh_sync = state.tally.fresh_sync, Counter()
    waited_s, state.tally.fresh_waits_s = state.tally.fresh_waits_s, 0.0
    return {name: float(count) for name, count in counted.items()} | ({"sync/wait_s": waited_s} if counted else {})


def wasted_tokens(state: RunState) -> dict[str, int]:
    """Tokens sampled in this life of the run that will not be trained, by reason."""
    wasted = state.tally.wasted_tokens + state.tally.dropped_tokens + state.flow.wasted_tokens
    thrown_away = (state.engine_after or state.parts.engine.stats()).wasted_tokens - state.engine_before.wasted_tokens
    if thrown_away > 0:
        wasted["weight_update"] += thrown_away
    return dict(wasted)
