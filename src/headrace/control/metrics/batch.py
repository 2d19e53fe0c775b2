"""The metrics of one batch, computed from its episodes, groups and tokens by stateless functions.

    groups of a batch ──batch_stats──▶ BatchStats ──episode_metrics, group_metrics, reward_part_means, ...──▶ metrics

Every metric name is a row of :mod:`headrace.base.types.metrics`. A group holds the attempts (episodes) at one task. An
episode consists of turns: a turn is *sampled* if a model wrote it; prompts and tool results are turns that were not. A
*branch* is a continuation that was sampled again from within a failed episode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, StopReason, Turn, role_of
from headrace.base.types.metrics import as_label, quantile
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import IntColumn
from headrace.flow.filters import comparable_rewards, rewards_of

MOST_LABELS = 32
"""Number of environments and of agents that have metrics of their own; the others are counted together as ``other``."""
NUM_READ = 8
"""Number of episodes of a batch that are searched for repetitions."""
MOST_READ = 4096
"""Number of tokens of each such episode that are searched: the last ones, where an answer that does not end repeats
itself."""
GRAM = 4
"""Number of tokens in the n-grams that are compared."""
TAIL = 0.9
"""Share of a batch's episodes; those that end after this share has ended count as stragglers."""


@dataclass(slots=True, kw_only=True)
class EpisodeColumns:
    """Columns of numbers about some episodes, or about one agent's turns in them, from which metrics are computed."""

    lengths: list[int] = field(default_factory=list)
    """Number of sampled tokens of each episode."""
    turns: list[int] = field(default_factory=list)
    """Number of sampled turns of each episode."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of the episodes that have one."""

    def add(self, others: EpisodeColumns) -> None:
        """Append the columns of other episodes."""
        self.lengths += others.lengths
        self.turns += others.turns
        self.rewards += others.rewards


@dataclass(slots=True, kw_only=True)
class BatchStats:
    """Statistics of the trained episodes of a batch, without their branches.

    Each episode is read once, right after its batch was built, while it is in the processor's caches: to read it later
    would cost more than all computations with it.
    """

    episodes: list[EpisodeGraph] = field(default_factory=list)
    """The trained episodes, group after group."""
    columns: EpisodeColumns = field(default_factory=EpisodeColumns)
    """Lengths, turns and rewards of these episodes."""
    sizes: list[int] = field(default_factory=list)
    """Number of these episodes in each group."""
    ends_s: list[float] = field(default_factory=list)
    """The time, on the clock, at which each episode ended in this life of the run, whether it is trained or not."""
    equal: list[bool] = field(default_factory=list)
    """For each group of several episodes, whether all rewards that are compared with each other are equal."""
    truncated: int = 0
    """Number of episodes with a turn that was cut off at the length limit."""
    authors: set[str] = field(default_factory=set)
    """The names of the agents whose turns were sampled."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """The components of the reward by name, one dictionary for each episode that has several."""


def batch_stats(groups: Iterable[ScoredGroup]) -> BatchStats:  # gate: nesting - calls take longer than turns
    """Return the statistics of the trained episodes in the groups of a batch."""
    stats = BatchStats()
    columns, authors = stats.columns, stats.authors
    rewards, lengths, num_turns = columns.rewards, columns.lengths, columns.turns
    scored, too_long = EpisodeStatus.SCORED, StopReason.LENGTH
    for group in groups:
        first, first_reward, apart = len(lengths), len(rewards), False
        for episode in group.episodes:
            if episode.ended_s is not None:
                stats.ends_s.append(episode.ended_s)
            if episode.status is not scored:
                apart = True
                continue
            stats.episodes.append(episode)
            if episode.reward is not None:
                rewards.append(episode.reward)
            if episode.agent_rewards:
                apart = True
            if episode.parts:
                stats.parts.append(episode.parts)
            length = turns = cut = 0
            for turn in episode.turns:
                reason = turn.stop_reason
                if reason is not None and turn.branch is None:
                    length += len(turn.tokens.ids_T)
                    turns += 1
                    cut |= reason is too_long
                    authors.add(turn.author)
            lengths.append(length)
            num_turns.append(turns)
            stats.truncated += cut
        stats.sizes.append(len(lengths) - first)
        if len(group.episodes) > 1:
            alike = comparable_rewards(group.counted) if apart else [rewards[first_reward:]]
            stats.equal.append(all(len(set(of_role)) <= 1 for of_role in alike))
    return stats


def episode_metrics(stats: BatchStats, envs: Sequence[str]) -> dict[str, float]:
    """Return metrics of rewards, lengths and turns by name: over all trained episodes, by environment and, if several
    agents answered, by agent. ``envs`` has the environment of each group of the batch, empty if its task names none."""
    if not stats.episodes:
        return {}
    lengths = stats.columns.lengths
    mean = {"length_mean": statistics.fmean(lengths), "truncated_frac": stats.truncated / len(lengths)}
    metrics = {**mean, **_over_all(stats.columns), **_labelled("env", _by_env(stats, envs))}
    if len(stats.authors) > 1:
        metrics |= _labelled("agent", _by_agent(stats.episodes))
    return metrics


def _by_env(stats: BatchStats, envs: Sequence[str]) -> dict[str, EpisodeColumns]:
    """Return the columns of a batch's episodes by the name of their environment; episodes without one are left out.
    ``envs`` has the environment of each group, in the order of the batch."""
    of_env: dict[str, EpisodeColumns] = {}
    begin = 0
    for env, size in zip(envs, stats.sizes, strict=True):
        end = begin + size
        if env:
            columns = of_env.setdefault(env, EpisodeColumns())
            columns.lengths += stats.columns.lengths[begin:end]
            columns.turns += stats.columns.turns[begin:end]
            columns.rewards += rewards_of(stats.episodes[begin:end])
        begin = end
    return of_env


def own_turns(episode: EpisodeGraph) -> list[Turn]:
    """Return the sampled turns of the episode (those with a stop reason), without the turns of branches."""
    return [turn for turn in episode.turns if turn.stop_reason is not None and turn.branch is None]


def own_length(episode: EpisodeGraph) -> int:
    """Return the number of sampled tokens of the episode, without those of branches."""
    return sum(len(turn.tokens) for turn in own_turns(episode))


def sampled_length(episode: EpisodeGraph) -> int:
    """Return the number of sampled tokens of the episode, including those of branches."""
    return sum(len(turn.tokens) for turn in episode.turns if turn.stop_reason is not None)


def _by_agent(episodes: Iterable[EpisodeGraph]) -> dict[str, EpisodeColumns]:
    """Return the columns of each agent's turns by the role of the agent; agents with the same role are counted
    together."""
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


def _over_all(columns: EpisodeColumns) -> dict[str, float]:
    """Return quantiles of rewards and lengths, and the mean and greatest number of turns, over all episodes of
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


def _labelled(of: str, columns: Mapping[str, EpisodeColumns]) -> dict[str, float]:
    """Return metrics of each label, such as an environment, under names like ``env/maths/reward_mean``. ``of`` is the
    first part of the names, and ``columns`` has the episodes by label. Only the most frequent labels keep their names;
    the others become ``other``."""
    merged: dict[str, EpisodeColumns] = {}
    for rank, (name, each) in enumerate(sorted(columns.items(), key=lambda item: -len(item[1].lengths))):
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


def group_metrics(stats: BatchStats) -> dict[str, float]:
    """Return two metrics by name: the fraction of groups whose rewards are all equal, and the mean fraction of repeated
    4-grams in some of the episodes."""
    metrics = {"zero_variance_frac": sum(stats.equal) / len(stats.equal)} if stats.equal else {}
    episodes = stats.episodes
    read = episodes[:: max(1, len(episodes) // NUM_READ)][:NUM_READ]
    shares = [share for episode in read if (share := _repeats(episode)) is not None]
    if shares:
        metrics["repetition"] = statistics.fmean(shares)
    return metrics


def _repeats(episode: EpisodeGraph) -> float | None:
    """Return the fraction of repeated 4-grams at the end of the longest sampled turn of an episode; ``None`` if every
    turn is too short."""
    sampled = [turn.tokens.ids_T for turn in own_turns(episode) if len(turn.tokens.ids_T) > GRAM]
    return repetition(max(sampled, key=len)[-MOST_READ:]) if sampled else None


def repetition(ids_T: IntColumn) -> float | None:
    """Return the fraction of the 4-grams in ``ids_T`` that are repetitions of an earlier one; ``None`` for fewer than
    two 4-grams.

    >>> import numpy as np
    >>> repetition(np.arange(100)), round(repetition(np.arange(100) % 5), 2)
    (0.0, 0.95)
    """
    ids = ids_T.tolist()
    grams = list(zip(*(ids[place:] for place in range(GRAM)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else None


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """Return metrics of the ages of a batch's tokens by name: the spread of their versions (newest − oldest), the
    standard deviation, and the age that the oldest tenth of the tokens have at least. ``ages`` is the number of tokens
    that carry loss, by age in versions.

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
    """Return the seconds, within the interval ``waited`` (its start and end on the clock), in which nine in ten of a
    batch's episodes had ended and others had not. ``ends_s`` are the times at which the episodes ended.

    >>> straggler_s([1.0] * 9 + [8.0], (0.0, 9.0))
    7.0
    """
    ends_s = sorted(ends_s)
    if len(ends_s) < 2:
        return 0.0
    most_s = ends_s[min(math.ceil(TAIL * len(ends_s)), len(ends_s) - 1) - 1]
    return max(0.0, min(ends_s[-1], waited[1]) - max(most_s, waited[0]))
