"""The tokens of a step about which engine and learner differ most; where the learner's side was not recorded, those
that were least expected when they were sampled. Where a ratio or a loss goes astray, it begins with these.

Shape legend: T tokens of one turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.versions import oldest
from headrace.flow.ledger.browse import EpisodeQuery, EpisodeRow
from headrace.wings.view.run import OpenRun

MOST = 20
OF_ONE_TURN = 5
"""Candidates that a turn can put up."""
LOOK_S = 1.0
"""How long one look may take; a larger step is looked at in part, and the answer says so."""
MOST_EPISODES = 20_000


def outliers(run: OpenRun, clock: Clock, step: int) -> dict[str, Any]:
    """Of the sampled tokens that ``step`` trained, those with the greatest |log π − log μ|, or the least log μ."""
    rows = run.browser().page(EpisodeQuery(step=step), order="oldest", limit=MOST_EPISODES)
    scored = [row for row in rows if row.status == "scored"]
    until_s = clock.now() + LOOK_S
    found: list[tuple[float, tuple[int, int, int, int], dict[str, Any]]] = []
    looked = 0
    learned = run.browser().learned(scored[0].group) if scored else None
    for row in scored:
        if clock.now() > until_s:
            break
        episode = run.browser().episode(EpisodeKey(row.group, row.place))
        looked += 1
        if episode is not None:
            gaps = None if learned is None else learned.gaps(episode)
            found = heapq.nsmallest(MOST, [*found, *_of(episode, row, gaps)], key=lambda each: each[:2])
    told = [_told(run, detail) for _, _, detail in found]
    by = "logprob" if learned is None else "gap"
    return {"step": step, "by": by, "tokens": told, "looked": looked, "episodes": len(scored)}


def _of(
    episode: EpisodeGraph, row: EpisodeRow, gaps: Mapping[int, FloatColumn] | None
) -> list[tuple[float, tuple[int, int, int, int], dict[str, Any]]]:
    found = []
    for index, turn in enumerate(episode.turns):
        tokens = turn.tokens
        usable_T = tokens.sampled_T & np.isfinite(tokens.logprobs_T)
        if turn.untrained or not usable_T.any():
            continue
        gaps_T = None if gaps is None else gaps.get(index)
        if gaps is not None and gaps_T is None:
            continue
        rank_T = tokens.logprobs_T if gaps_T is None else -np.abs(gaps_T)
        places = np.flatnonzero(usable_T & np.isfinite(rank_T))
        least = places[np.argsort(rank_T[places], kind="stable")[:OF_ONE_TURN]]
        for place in least.tolist():
            version = int(oldest(tokens.versions_T[place : place + 1])[0])
            detail = {
                "key": f"{row.group}.{row.place}",
                "turn": index,
                "place": place,
                "id": int(tokens.ids_T[place]),
                "before": tokens.ids_T[max(0, place - 12) : place].tolist(),
                "logprob": float(tokens.logprobs_T[place]),
                "gap": None if gaps_T is None else float(gaps_T[place]),
                "age": None if row.step is None else row.step - version,
                "kept": None if tokens.kept is None else int(tokens.kept.sizes_T[place]),
                "reward": row.reward,
            }
            found.append((float(rank_T[place]), (row.group, row.place, index, place), detail))
    return found


def _told(run: OpenRun, detail: dict[str, Any]) -> dict[str, Any]:
    before = detail.pop("before")
    words = run.words.pieces([*before, detail["id"]])
    return {**detail, "text": words[-1], "around": "".join(words[:-1])}
