"""The metrics of one batch, computed from its episodes, groups and tokens by stateless functions.

    groups of a batch ──batch_stats──▶ BatchStats ──episode_metrics, group_metrics, reward_part_means, ...──▶ metrics

Every metric name has a row in :mod:`headrace.base.types.metrics`. A group holds the attempts (episodes) at one task. An
episode consists of turns. A turn is *sampled* if a model wrote it; prompts and tool results are turns that are not
sampled. A *branch* is a continuation that was sampled from a position within a failed episode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, StopReason, Turn, get_role
from headrace.base.types.metrics import as_label, quantile
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import IntColumn
from headrace.flow.filters import comparable_rewards, get_rewards

MAX_LABELS = 32
"""Maximum number of environments, and of agents, with separate metrics; all further ones are combined as ``other``."""
NUM_READ = 8
"""Number of episodes of a batch that are searched for repetitions."""
MAX_READ_TOKENS = 4096
"""Maximum number of tokens that are searched in each of these episodes. They are the last tokens, where an answer that
does not end repeats itself."""
GRAM = 4
"""Number of tokens in an n-gram."""
TAIL = 0.9
"""Fraction of a batch's episodes; episodes that end after this fraction has ended are stragglers."""


@dataclass(slots=True, kw_only=True)
class EpisodeColumns:
    """Columns of numbers about a set of episodes, or about one agent's turns in them, from which metrics are
    computed."""

    lengths: list[int] = field(default_factory=list)
    """Number of sampled tokens of each episode."""
    turns: list[int] = field(default_factory=list)
    """Number of sampled turns of each episode."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of the episodes that have a reward."""

    def add(self, others: EpisodeColumns) -> None:
        """Append the columns ``others`` of other episodes."""
        self.lengths += others.lengths
        self.turns += others.turns
        self.rewards += others.rewards


@dataclass(slots=True, kw_only=True)
class BatchStats:
    """Statistics of the trained episodes of a batch, without their branches.

    The statistics are computed right after the batch was built, while the episodes are in the processor's caches;
    reading them from memory later would cost more than the computation.
    """

    episodes: list[EpisodeGraph] = field(default_factory=list)
    """The trained episodes, group after group."""
    columns: EpisodeColumns = field(default_factory=EpisodeColumns)
    """Lengths, turns and rewards of these episodes."""
    sizes: list[int] = field(default_factory=list)
    """Number of trained episodes in each group."""
    ends_s: list[float] = field(default_factory=list)
    """The time at which each episode of the groups ended, trained or not, in seconds on the clock. Episodes that ended
    in an earlier life of the run are not included."""
    equal: list[bool] = field(default_factory=list)
    """For each group of several episodes, whether all rewards that are compared with each other are equal."""
    truncated: int = 0
    """Number of episodes with a turn that was cut off at the length limit."""
    authors: set[str] = field(default_factory=set)
    """The names of the agents whose turns were sampled."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """The components of the reward by name, one dictionary for each episode whose reward has components."""


def batch_stats(groups: Iterable[ScoredGroup]) -> BatchStats:  # gate: nesting - calls take longer than turns
    """Return the statistics of the trained episodes in ``groups``, the groups of a batch."""
    stats = BatchStats()
    columns, authors = stats.columns, stats.authors
    rewards, lengths, num_turns = columns.rewards, columns.lengths, columns.turns
    scored, too_long = EpisodeStatus.SCORED, StopReason.LENGTH
    for group in groups:
        first, first_reward, must_compare = len(lengths), len(rewards), False
        for episode in group.episodes:
            if episode.ended_s is not None:
                stats.ends_s.append(episode.ended_s)
            if episode.status is not scored:
                must_compare = True
                continue
            stats.episodes.append(episode)
            if episode.reward is not None:
                rewards.append(episode.reward)
            if episode.agent_rewards:
                must_compare = True
            if episode.parts:
                stats.parts.append(episode.parts)
            length = turns = truncated = 0
            for turn in episode.turns:
                reason = turn.stop_reason
                if reason is not None and turn.branch is None:
                    length += len(turn.tokens.ids_T)
                    turns += 1
                    truncated |= reason is too_long
                    authors.add(turn.author)
            lengths.append(length)
            num_turns.append(turns)
            stats.truncated += truncated
        stats.sizes.append(len(lengths) - first)
        if len(group.episodes) > 1:
            compared = comparable_rewards(group.counted) if must_compare else [rewards[first_reward:]]
            stats.equal.append(all(len(set(rewards_of_role)) <= 1 for rewards_of_role in compared))
    return stats


def episode_metrics(stats: BatchStats, envs: Sequence[str]) -> dict[str, float]:
    """Return metrics of rewards, lengths and turns by name: over all trained episodes, for each environment and, if
    several agents wrote turns, for each agent. ``envs`` contains the environment of each group of the batch; an empty
    name means that the task names no environment."""
    if not stats.episodes:
        return {}
    lengths = stats.columns.lengths
    mean = {"length_mean": statistics.fmean(lengths), "truncated_frac": stats.truncated / len(lengths)}
    metrics = {**mean, **_distribution_metrics(stats.columns), **_labelled_metrics("env", _columns_by_env(stats, envs))}
    if len(stats.authors) > 1:
        metrics |= _labelled_metrics("agent", _columns_by_agent(stats.episodes))
    return metrics


def _columns_by_env(stats: BatchStats, envs: Sequence[str]) -> dict[str, EpisodeColumns]:
    """Return the columns of a batch's episodes by the name of their environment, without episodes that have no
    environment. ``envs`` contains the environment of each group, in the order of the batch."""
    by_env: dict[str, EpisodeColumns] = {}
    begin = 0
    for env, size in zip(envs, stats.sizes, strict=True):
        end = begin + size
        if env:
            columns = by_env.setdefault(env, EpisodeColumns())
            columns.lengths += stats.columns.lengths[begin:end]
            columns.turns += stats.columns.turns[begin:end]
            columns.rewards += get_rewards(stats.episodes[begin:end])
        begin = end
    return by_env


def own_turns(episode: EpisodeGraph) -> list[Turn]:
    """Return the sampled turns of the episode (those with a stop reason), without the turns of branches."""
    return [turn for turn in episode.turns if turn.stop_reason is not None and turn.branch is None]


def own_length(episode: EpisodeGraph) -> int:
    """Return the number of sampled tokens of the episode, without the tokens of branches."""
    return sum(len(turn.tokens) for turn in own_turns(episode))


def sampled_length(episode: EpisodeGraph) -> int:
    """Return the number of sampled tokens of the episode, including the tokens of branches."""
    return sum(len(turn.tokens) for turn in episode.turns if turn.stop_reason is not None)


def _columns_by_agent(episodes: Iterable[EpisodeGraph]) -> dict[str, EpisodeColumns]:
    """Return the columns of the agents' turns by role; agents with the same role are combined."""
    by_agent: dict[str, EpisodeColumns] = {}
    for episode in episodes:
        shares: dict[str, list[Turn]] = {}
        for turn in own_turns(episode):
            shares.setdefault(turn.author, []).append(turn)
        for author, turns in shares.items():
            earned = [turn.reward for turn in turns if turn.reward is not None]
            reward = episode.agent_rewards.get(author, sum(earned) if earned else episode.reward)
            share = EpisodeColumns(lengths=[sum(len(turn.tokens) for turn in turns)], turns=[len(turns)])
            share.rewards = [] if reward is None else [reward]
            by_agent.setdefault(get_role(author), EpisodeColumns()).add(share)
    return by_agent


def _distribution_metrics(columns: EpisodeColumns) -> dict[str, float]:
    """Return quantiles of rewards and lengths, and the mean and maximum number of turns, over all episodes of
    ``columns``, by the name of the metric."""
    rewards, lengths = sorted(columns.rewards), sorted(columns.lengths)
    metrics = {
        "length_p10": float(quantile(lengths, 0.1)),
        "length_p90": float(quantile(lengths, 0.9)),
        "length_max": float(lengths[-1]),
        "turns_mean": sum(columns.turns) / len(columns.turns),
        "turns_max": float(max(columns.turns)),
    }
    if rewards:
        metrics |= {"reward_p10": quantile(rewards, 0.1), "reward_p90": quantile(rewards, 0.9)}
    return metrics


def _labelled_metrics(prefix: str, columns: Mapping[str, EpisodeColumns]) -> dict[str, float]:
    """Return metrics for each label (an environment or an agent) under names like ``env/maths/reward_mean``. ``prefix``
    is the first part of the names, and ``columns`` are the columns of episodes by label. Only the :data:`MAX_LABELS`
    most frequent labels have separate metrics; the others are combined as ``other``."""
    merged: dict[str, EpisodeColumns] = {}
    for rank, (name, each) in enumerate(sorted(columns.items(), key=lambda item: -len(item[1].lengths))):
        merged.setdefault(as_label(name) if rank < MAX_LABELS else "other", EpisodeColumns()).add(each)
    metrics: dict[str, float] = {}
    for label, stats in merged.items():
        name = f"{prefix}/{label}"
        metrics[f"{name}/episodes"] = float(len(stats.lengths))
        metrics[f"{name}/length_mean"] = statistics.fmean(stats.lengths)
        metrics |= {f"{name}/{key}": value for key, value in _distribution_metrics(stats).items() if key != "turns_max"}
        if stats.rewards:
            metrics[f"{name}/reward_mean"] = statistics.fmean(stats.rewards)
            metrics[f"{name}/reward_max"] = max(stats.rewards)
    return metrics


def group_metrics(stats: BatchStats) -> dict[str, float]:
    """Return two metrics by name: the fraction of groups whose rewards are all equal, and the mean fraction of repeated
    4-grams over a sample of the episodes."""
    metrics = {"zero_variance_frac": sum(stats.equal) / len(stats.equal)} if stats.equal else {}
    episodes = stats.episodes
    searched = episodes[:: max(1, len(episodes) // NUM_READ)][:NUM_READ]
    shares = [share for episode in searched if (share := _repeated_frac(episode)) is not None]
    if shares:
        metrics["repetition"] = statistics.fmean(shares)
    return metrics


def _repeated_frac(episode: EpisodeGraph) -> float | None:
    """Return the fraction of repeated 4-grams at the end of the longest sampled turn of an episode; ``None`` if every
    turn is too short."""
    sampled = [turn.tokens.ids_T for turn in own_turns(episode) if len(turn.tokens.ids_T) > GRAM]
    return repetition(max(sampled, key=len)[-MAX_READ_TOKENS:]) if sampled else None


def repetition(ids_T: IntColumn) -> float | None:
    """Return the fraction of the 4-grams in ``ids_T`` that occur earlier in ``ids_T``; ``None`` for fewer than two
    4-grams.

    >>> import numpy as np
    >>> repetition(np.arange(100)), round(repetition(np.arange(100) % 5), 2)
    (0.0, 0.95)
    """
    ids = ids_T.tolist()
    grams = list(zip(*(ids[start:] for start in range(GRAM)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else None


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """Return metrics of the ages of a batch's tokens by name: the spread of their versions (newest − oldest), the
    standard deviation, and the 90th percentile of the age. ``ages`` is the number of tokens that carry loss, by age in
    versions.

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


def reward_part_means(stats: BatchStats) -> dict[str, float]:
    """Return the mean of each component of the reward over the batch, by the name of the metric."""
    values: dict[str, list[float]] = {}
    for parts in stats.parts:
        for name, value in parts.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def straggler_s(ends_s: Iterable[float], waited: tuple[float, float]) -> float:
    """Return for how many seconds of the interval ``waited`` nine in ten of a batch's episodes had ended and the others
    had not. The interval is (start, end); it and ``ends_s``, the times at which the episodes ended, are in seconds on
    the clock.

    >>> straggler_s([1.0] * 9 + [8.0], (0.0, 9.0))
    7.0
    """
    ends_s = sorted(ends_s)
    if len(ends_s) < 2:
        return 0.0
    tail_start_s = ends_s[min(math.ceil(TAIL * len(ends_s)), len(ends_s) - 1) - 1]
    return max(0.0, min(ends_s[-1], waited[1]) - max(tail_start_s, waited[0]))
