"""The advantages of the episodes of a step, computed again from the recorded rewards with the run's settings, for the
dashboard's page about an episode.

A ledger records rewards and the log-probabilities of teachers, but no advantages. Advantages that depend on a critic's
values cannot be computed from it; the page then shows the reason. μ is the distribution that sampled a token, and ν is
the distribution of a teacher.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.tokens import FloatColumn
from headrace.flow.ledger.browse import EpisodeQuery, EpisodeRow
from headrace.wings.view.run import OpenRun

if TYPE_CHECKING:
    from headrace.algo.advantages.outcomes import Floats
    from headrace.algo.advantages.tokens import ReverseKl
    from headrace.algo.config import AlgoConfig

COUNTED = ("scored", "masked")
"""The statuses of episodes whose rewards count in a baseline."""
MOST_EPISODES = 20_000
"""Largest number of episodes of one step for which advantages are computed."""

_Step = tuple[dict[EpisodeKey, float], str]
"""The advantage of each episode of a step, and the reason why other episodes have none; empty if all have an
advantage."""


class EpisodeAdvantages:
    """A cache that computes the advantages of the episodes of a step, and keeps the results of recent steps. The
    dashboard has one instance for all runs; its methods may be called from any thread."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._lock = threading.Lock()
        """Held while results are looked up or computed."""
        self._steps: dict[tuple[Path, int], _Step] = {}
        """The results of recent steps, by run directory and step."""
        self._reverse_kl: dict[Path, ReverseKl | None] = {}
        """The settings of the reverse KL to a teacher of each run, by run directory; ``None`` for a run without."""

    def find(self, run: OpenRun, episode: EpisodeGraph, row: EpisodeRow) -> tuple[Sequence[float] | None, str]:
        """Return the advantage of each turn of ``episode``, or ``None`` and the reason why there is no advantage.
        ``row`` is the episode's record in the list of episodes. ``run`` is the run of the episode."""
        if row.step is None:
            return None, "no step has taken its group"
        if row.status != "scored":
            return None, f"its tokens carry no loss: {row.cause or row.status}"
        if any(turn.branch is not None for turn in episode.turns):
            return None, "it has branches, which are credited apart from it"
        with self._lock:
            of_step, why = self._find_step(run, row.step)
        if episode.key not in of_step:
            return None, why
        return [of_step[episode.key]] * len(episode.turns), why

    def teacher_term(self, run: OpenRun, gaps_T: FloatColumn | None) -> Floats | None:
        """Return the term that a teacher adds to the advantage of each of T tokens, computed from ``gaps_T``, log ν −
        log μ; ``None`` if no teacher contributes to the run's advantage, or if there are no gaps."""
        reverse_kl = self._get_reverse_kl(run)
        return None if reverse_kl is None or gaps_T is None else reverse_kl.credit_tokens(gaps_T.astype(np.float64))

    def has_teacher_term(self, run: OpenRun) -> bool:
        """Return whether a teacher adds a term to the run's advantages."""
        return self._get_reverse_kl(run) is not None

    def _get_reverse_kl(self, run: OpenRun) -> ReverseKl | None:
        """Return the settings of the run's advantage if it is the reverse KL to a teacher, and ``None`` otherwise. The
        settings are read once for each run."""
        with self._lock:
            if run.directory not in self._reverse_kl:
                self._reverse_kl[run.directory] = _read_reverse_kl(run)
            return self._reverse_kl[run.directory]

    def _find_step(self, run: OpenRun, step: int) -> _Step:
        """Return the advantages of a step of a run. The results of the last 16 computed steps are cached. The caller
        must hold the lock."""
        at = (run.directory, step)
        if at not in self._steps:
            while len(self._steps) >= 16:
                del self._steps[next(iter(self._steps))]
            self._steps[at] = _compute(run, step)
        return self._steps[at]


def _compute(run: OpenRun, step: int) -> _Step:
    """Compute the advantages of the episodes that ``step`` of the run trained, with the run's settings. If they cannot
    be computed, return an empty dictionary and the reason."""
    from headrace.algo.advantages import Outcomes

    try:
        algo = _read_settings(run)
    except ConfigError as error:
        return {}, f"the settings of its advantage cannot be read: {error.problem}"
    recorded_elsewhere = algo.advantage.by_critic or algo.advantage.by_teacher
    if algo.advantage.by_turn or (algo.advantage.per_token and not recorded_elsewhere):
        return {}, f"advantage {algo.advantage.kind!r} is of single turns, which the ledger's counts do not tell"
    if algo.advantage.by_critic:
        return {}, f"advantage {algo.advantage.kind!r} follows from a critic, whose values are not recorded"
    rows = run.browser().page(EpisodeQuery(step=step), order="oldest", limit=MOST_EPISODES)
    counted = [row for row in rows if row.status in COUNTED and row.reward is not None]
    if not counted or len(rows) == MOST_EPISODES:
        return {}, "its step has more episodes than are worked out here" if counted else "nothing of it was rewarded"
    found_E = algo.credit_of_episodes(_make_outcomes(Outcomes, counted))
    keys = [EpisodeKey(row.group, row.place) for row in counted]
    return {key: float(value) for key, value in zip(keys, found_E, strict=True)}, ""


def _read_settings(run: OpenRun) -> AlgoConfig:
    """Return the settings ``[algo]`` of a run, from its ``config.json``. Raises
    :class:`~headrace.base.errors.ConfigError` if they cannot be read."""
    from headrace.algo.config import AlgoConfig
    from headrace.base.config import validate

    return validate(AlgoConfig, run.config.section("algo"))


def _read_reverse_kl(run: OpenRun) -> ReverseKl | None:
    """Return the settings of the run's advantage if it is the reverse KL to a teacher; ``None`` otherwise, and if the
    settings cannot be read."""
    from headrace.algo.advantages.tokens import ReverseKl

    try:
        advantage = _read_settings(run).advantage
    except ConfigError:
        return None
    return advantage if isinstance(advantage, ReverseKl) else None


def _make_outcomes(record_type: Any, rows: Sequence[EpisodeRow]) -> Any:
    """Return the inputs of the advantages as a ``record_type`` (the class ``Outcomes``): reward, group and number of
    tokens of each of E episodes and, if all episodes have the same K reward components, these components."""
    names = list(rows[0].parts)
    parts_EK = None
    if names and all(list(row.parts) == names for row in rows):
        parts_EK = np.array([list(row.parts.values()) for row in rows], np.float64)
    return record_type(
        rewards_E=np.array([row.reward for row in rows], np.float64),
        groups_E=np.array([row.group for row in rows], np.int64),
        lengths_E=np.array([row.tokens for row in rows], np.int64),
        parts_EK=parts_EK,
    )
