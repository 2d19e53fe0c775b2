"""The tokens of a step that were least expected when they were sampled: where a ratio or a loss goes astray, it begins
with these.

Shape legend: T tokens of one turn.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from headrace.clock import Clock
from headrace.flow.ledger.browse import EpisodeRow, Wanted
from headrace.types.episode import Episode, EpisodeKey
from headrace.types.versions import oldest
from headrace.view.run import OpenRun

MOST = 20
OF_ONE_TURN = 5
"""Candidates that a turn can put up."""
LOOK_S = 1.0
"""How long one look may take; a larger step is looked at in part, and the answer says so."""
MOST_EPISODES = 20_000


def outliers(run: OpenRun, clock: Clock, step: int) -> dict[str, Any]:
    """The sampled tokens of the episodes that ``step`` trained with the least log μ, the least first."""
    rows = run.browser().page(Wanted(step=step), order="oldest", limit=MOST_EPISODES)
    scored = [row for row in rows if row.status == "scored"]
    until_s = clock.now() + LOOK_S
    found: list[tuple[float, tuple[int, int, int, int], dict[str, Any]]] = []
    looked = 0
    for row in scored:
        if clock.now() > until_s:
            break
        episode = run.browser().episode(EpisodeKey(row.group, row.place))
        looked += 1
        if episode is not None:
            found = heapq.nsmallest(MOST, [*found, *_of(episode, row)], key=lambda each: each[:2])
    told = [_told(run, detail) for _, _, detail in found]
    return {"step": step, "tokens": told, "looked": looked, "episodes": len(scored)}


def _of(episode: Episode, row: EpisodeRow) -> list[tuple[float, tuple[int, int, int, int], dict[str, Any]]]:
    found = []
    for index, turn in enumerate(episode.turns):
        tokens = turn.tokens
        usable_T = tokens.sampled_T & np.isfinite(tokens.logprobs_T)
        if turn.untrained or not usable_T.any():
            continue
        places = np.flatnonzero(usable_T)
        least = places[np.argsort(tokens.logprobs_T[places], kind="stable")[:OF_ONE_TURN]]
        for place in least.tolist():
            version = int(oldest(tokens.versions_T[place : place + 1])[0])
            detail = {
                "key": f"{row.group}.{row.place}",
                "turn": index,
                "place": place,
                "id": int(tokens.ids_T[place]),
                "before": tokens.ids_T[max(0, place - 12) : place].tolist(),
                "logprob": float(tokens.logprobs_T[place]),
                "age": None if row.step is None else row.step - version,
                "kept": None if tokens.kept is None else int(tokens.kept.sizes_T[place]),
                "reward": row.reward,
            }
            found.append((detail["logprob"], (row.group, row.place, index, place), detail))
    return found


def _told(run: OpenRun, detail: dict[str, Any]) -> dict[str, Any]:
    before = detail.pop("before")
    words = run.words.pieces([*before, detail["id"]])
    return {**detail, "text": words[-1], "around": "".join(words[:-1])}
