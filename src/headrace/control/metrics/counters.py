"""The counters of a run: totals over this life of the run, counts since the last step, and the environments of running
groups. :class:`RunMetrics` owns them. A *life* of a run is the time from one start or resumption to its end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.metrics import as_label
from headrace.base.types.observation import Recovery
from headrace.base.types.trace import Span


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals over this life of the run."""

    tokens_trained: int = 0
    """Number of tokens that carried loss."""
    eval_tokens: int = 0
    """Number of tokens sampled for evaluations during training. The engine's counters include these tokens."""
    learner_busy_s: float = 0.0
    """Seconds in which the learner trained, copied its weights or saved a checkpoint."""
    exposed_sync_s: float = 0.0
    """Seconds in which the learner waited for the weight sync."""
    ages: Counter[int] = field(default_factory=Counter)
    """Number of trained tokens, by age in versions."""
    commit_gaps_s: list[float] = field(default_factory=list)
    """Seconds for which the engine's step loop paused, one number for each commit."""
    restarted: int = 0
    """Number of sequences that restarted because of a weight update."""
    rewards: list[float | None] = field(default_factory=list)
    """Mean reward of every step; ``None`` for a step without rewards."""
    set_aside: Counter[str] = field(default_factory=Counter)
    """Number of episodes that were excluded from their groups or masked, by reason."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Number of sampled tokens of trained groups that carried no loss, by reason."""
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens of scored episodes and groups that will not be trained, by reason."""
    versions: list[int] = field(default_factory=list)
    """The committed versions, in order."""
    recoveries: list[Recovery] = field(default_factory=list)
    """The latest recoveries of parts that had died."""
    mismatch_kl: float | None = None
    """KL(μ‖π) between engine and learner at equal weights; ``None`` if it was not measured."""
    mismatch_abs: float | None = None
    """Mean |log μ − log π| of the same tokens; ``None`` if it was not measured."""
    mismatch_abs_most: float | None = None
    """The largest mean |log μ − log π| of any step, over tokens that the step's own version sampled; ``None`` if no
    step had such tokens."""
    evals: dict[int, float] = field(default_factory=dict)
    """Mean held-out reward by the version that was committed when the evaluation began."""
    eval_before: float | None = None
    """The held-out mean reward before training; ``None`` if there was no evaluation."""
    reward_first: float | None = None
    """The mean reward of the run's first batch; ``None`` before it."""
    steps_done: int = 0
    """Number of optimizer steps of the run, including steps of earlier lives."""
    recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=4096))
    """(time, tokens generated, tokens trained) at the latest updates of the live view, from which it computes
    throughputs."""
    last_sample: str = ""
    """The completion that was scored last."""
    last_sample_reward: float | None = None
    """The reward of the completion that was scored last; ``None`` if it has no reward."""


@dataclass(slots=True, kw_only=True)
class SinceStep:
    """The counts since the last step. The record of a step includes them, and then a new object is created."""

    sums: dict[str, float] = field(default_factory=dict)
    """Sums that are metrics of the step, under their names in ``metrics.jsonl``."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of all scored episodes, including episodes of dropped groups."""
    lengths: list[int] = field(default_factory=list)
    """Number of sampled tokens of each episode that ended, including episodes of dropped groups."""
    held_back_s: float = 0.0
    """Seconds in which no more groups were allowed to run although no request waited for the engine."""
    eval_version: int | None = None
    """The version of the evaluation that ended in this interval; ``None`` if no evaluation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSnapshot:
    """The values of counters at one time (the end of the last step, the start or the end of training), for computing
    differences. The counters only increase."""

    clock_s: float = 0.0
    """The time, in seconds on the clock."""
    engine: EngineStats = field(default_factory=EngineStats)
    """The engine's counters."""
    learner_busy_s: float = 0.0
    """The value of :attr:`RunTotals.learner_busy_s`."""
    tokens_trained: int = 0
    """The value of :attr:`RunTotals.tokens_trained`."""


class Attempts:
    """A record of the episodes that have ended since the last call of :meth:`pop_spans`, for the trace, and of the
    environment of each group in flight, for the metrics.

    Thousands of episodes end each second, so their spans are created together.
    """

    def __init__(self, env_column: str) -> None:
        """Create an empty record. ``env_column`` is the column of a dataset row that names its environment."""
        self._env_column = env_column
        self._envs: dict[int, str] = {}
        """The environment of each group whose task names one, by group number."""
        self._ended: list[tuple[EpisodeKey, float, float]] = []
        """The keys of the episodes for which :meth:`pop_spans` has not returned a span, each with the start and the end
        of its episode in seconds on the clock."""

    def begin(self, number: int, row: Mapping[str, Any]) -> None:
        """Record that the group ``number`` starts. ``row`` is the dataset row of its task."""
        env = row.get(self._env_column)
        if env is not None:
            self._envs[number] = as_label(str(env))

    def end(self, episode: EpisodeGraph, start_s: float, end_s: float) -> None:
        """Record that ``episode`` has ended. It ran from ``start_s`` to ``end_s``, in seconds on the clock."""
        episode.ended_s = end_s
        self._ended.append((episode.key, start_s, end_s))

    def pop_spans(self) -> list[Span]:
        """Return one span of the trace for each episode that has ended since the last call."""
        ended, self._ended = self._ended, []
        return [
            Span(lane="rollout", name="episode", start_s=start_s, end_s=end_s, of=key) for key, start_s, end_s in ended
        ]

    def pop_envs(self, numbers: Iterable[int], alive: Container[int]) -> list[str]:
        """Return the environment of each group of a batch, empty for a task that names no environment. ``numbers`` are
        the groups of the batch. Then remove the environments of all groups that are not in ``alive``, the numbers of
        the groups in flight."""
        batch_envs = [self._envs.pop(number, "") for number in numbers]
        self._envs = {number: env for number, env in self._envs.items() if number in alive}
        return batch_envs
