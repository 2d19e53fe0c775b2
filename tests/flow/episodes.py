"""Episodes as the ledger gets them."""

from __future__ import annotations

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.tokens import Tokens


def sampled(count: int, versions: tuple[int, int] = (0, 0), seed: int = 0) -> Tokens:
    """``count`` tokens, the first sampled under the first version and the last under the second."""
    rng = np.random.default_rng(seed)
    column = np.sort(rng.integers(versions[0], versions[1] + 1, count)).astype(np.int32)
    column[:1], column[-1:] = versions
    return Tokens(
        ids_T=rng.integers(0, 50_000, count).astype(np.int32),
        logprobs_T=-rng.exponential(1.0, count).astype(np.float32),
        versions_T=column,
    )


def ended(
    group: int, place: int, *, tokens: Tokens | None = None, reward: float | None = 1.0, cause: str = ""
) -> EpisodeGraph:
    """An episode of one prompt and one answer that has ended; failed where there is a ``cause``."""
    answer = sampled(4) if tokens is None else tokens
    return EpisodeGraph(
        key=EpisodeKey(group, place),
        turns=[
            Turn(author="task", tokens=Tokens.observed([group, place])),
            Turn(author="policy", tokens=answer, parent=0, stop_reason=StopReason.STOP),
        ],
        status=EpisodeStatus.FAILED if cause else EpisodeStatus.SCORED,
        reward=None if cause else reward,
        cause=cause,
    )


def as_told(episode: EpisodeGraph) -> tuple[object, ...]:
    """All of an episode, for comparison."""
    turns = [
        (
            turn.author,
            turn.parent,
            turn.stop_reason,
            *(column.tobytes() for column in (turn.tokens.ids_T, turn.tokens.logprobs_T, turn.tokens.versions_T)),
        )
        for turn in episode.turns
    ]
    return (episode.key, turns, episode.status, episode.reward, episode.cause)
