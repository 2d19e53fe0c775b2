"""Credit of segments: the pieces of answers that process rewards grade, cut where the policy was least certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.tokens import Prpo
from headrace.algo.config import AlgoConfig
from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.tokens import Tokens


class Written(Protocol):
    """What is credited as one: some turns of an episode."""

    @property
    def episode(self) -> EpisodeGraph:
        """Whose turns."""
        ...

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the segments, in order."""
        ...


def cuts_of(algo: AlgoConfig) -> Callable[[Tokens], Sequence[int]] | None:
    """Where the segments of a turn begin, the first aside; ``None`` for an advantage that knows no segments."""
    advantage = algo.advantage
    if not isinstance(advantage, Prpo):
        return None
    return lambda tokens: () if tokens.entropies_T is None else advantage.starts(tokens.entropies_T)


def of_segments(algo: AlgoConfig, shares: Sequence[Written], scores: Outcomes) -> list[dict[int, float]]:
    """The advantage of each segment; a turn is one. ``scores`` has a row for every share.

    The formula (:class:`~headrace.algo.advantages.tokens.Prpo`) is one of tokens: all those of a segment are credited
    alike.
    """
    shaped = algo.shaped(scores)
    segments = [(share.episode.turns[turn], turn) for share in shares for turn in share.turns]
    counts = [len(turn.tokens) for turn, _ in segments]
    credit_N = algo.advantage(
        Outcomes(
            rewards_E=shaped.rewards_E,
            groups_E=scores.groups_E,
            lengths_E=scores.lengths_E,
            process_N=np.repeat([turn.process or 0.0 for turn, _ in segments], counts),
            segments_N=np.repeat([index for _, index in segments], counts),
        )
    )
    starts = iter(np.cumsum([0, *counts]).tolist())
    found: list[dict[int, float]] = []
    for share in shares:
        places = [(turn, next(starts)) for turn in share.turns]
        found.append({turn: float(credit_N[at]) for turn, at in places if len(share.episode.turns[turn].tokens)})
    return found
