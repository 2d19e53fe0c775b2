"""The advantages of a step's episodes, worked out from the recorded rewards by the run's own settings.

A ledger holds rewards, not advantages: these follow from them, and from what a teacher said of single tokens. What
follows from a critic's values is not there, and is said to be missing.
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
MOST_EPISODES = 20_000
"""Of one step; a larger one is not worked out."""

_Step = tuple[dict[EpisodeKey, float], str]


class Credits:
    """Advantages of the steps that were asked for last."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._known: dict[tuple[Path, int], _Step] = {}
        self._teaching: dict[Path, ReverseKl | None] = {}

    def of(self, run: OpenRun, episode: EpisodeGraph, row: EpisodeRow) -> tuple[Sequence[float] | None, str]:
        """One advantage per turn, or ``None`` and why there is none, in words."""
        if row.step is None:
            return None, "no step has taken its group"
        if row.status != "scored":
            return None, f"its tokens carry no loss: {row.cause or row.status}"
        if any(turn.branch is not None for turn in episode.turns):
            return None, "it has branches, which are credited apart from it"
        with self._one_at_a_time:
            of_step, why = self._step(run, row.step)
        if episode.key not in of_step:
            return None, why
        return [of_step[episode.key]] * len(episode.turns), why

    def by_teacher(self, run: OpenRun, gaps_T: FloatColumn | None) -> Floats | None:
        """What the teacher adds to the advantage of each token, of log ν − log μ; ``None`` where it adds nothing."""
        teaching = self._teaching_of(run)
        return None if teaching is None or gaps_T is None else teaching.of_tokens(gaps_T.astype(np.float64))

    def adds_teacher(self, run: OpenRun) -> bool:
        """Whether a teacher adds to the advantages of the run."""
        return self._teaching_of(run) is not None

    def _teaching_of(self, run: OpenRun) -> ReverseKl | None:
        with self._one_at_a_time:
            if run.directory not in self._teaching:
                self._teaching[run.directory] = _teaching(run)
            return self._teaching[run.directory]

    def _step(self, run: OpenRun, step: int) -> _Step:
        at = (run.directory, step)
        if at not in self._known:
            while len(self._known) >= 16:
                del self._known[next(iter(self._known))]
            self._known[at] = _worked_out(run, step)
        return self._known[at]


def _worked_out(run: OpenRun, step: int) -> _Step:
    from headrace.algo.advantages import Outcomes

    try:
        algo = _settings(run)
    except ConfigError as error:
        return {}, f"the settings of its advantage cannot be read: {error.problem}"
    by_others = algo.advantage.by_critic or algo.advantage.by_teacher
    if algo.advantage.by_turn or (algo.advantage.per_token and not by_others):
        return {}, f"advantage {algo.advantage.kind!r} is of single turns, which the ledger's counts do not tell"
    if algo.advantage.by_critic:
        return {}, f"advantage {algo.advantage.kind!r} follows from a critic, whose values are not recorded"
    rows = run.browser().page(EpisodeQuery(step=step), order="oldest", limit=MOST_EPISODES)
    counted = [row for row in rows if row.status in COUNTED and row.reward is not None]
    if not counted or len(rows) == MOST_EPISODES:
        return {}, "its step has more episodes than are worked out here" if counted else "nothing of it was rewarded"
    found_E = algo.credit_of_episodes(_outcomes(Outcomes, counted))
    keys = [EpisodeKey(row.group, row.place) for row in counted]
    return {key: float(value) for key, value in zip(keys, found_E, strict=True)}, ""


def _settings(run: OpenRun) -> AlgoConfig:
    from headrace.algo.config import AlgoConfig
    from headrace.base.config import validate

    return validate(AlgoConfig, run.config.section("algo"))


def _teaching(run: OpenRun) -> ReverseKl | None:
    from headrace.algo.advantages.tokens import ReverseKl

    try:
        advantage = _settings(run).advantage
    except ConfigError:
        return None
    return advantage if isinstance(advantage, ReverseKl) else None


def _outcomes(kind: Any, rows: Sequence[EpisodeRow]) -> Any:
    names = list(rows[0].parts)
    parts_EK = None
    if names and all(list(row.parts) == names for row in rows):
        parts_EK = np.array([list(row.parts.values()) for row in rows], np.float64)
    return kind(
        rewards_E=np.array([row.reward for row in rows], np.float64),
        groups_E=np.array([row.group for row in rows], np.int64),
        lengths_E=np.array([row.tokens for row in rows], np.int64),
        parts_EK=parts_EK,
    )
