"""The search for outlier tokens of a step: the tokens for which the log-probabilities of engine (log μ) and learner
(log π) differ most or, if the learner's were not recorded, the tokens with the smallest log-probability. When ratios or
the loss diverge, such tokens are usually the first to show it.

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
"""Number of tokens that are returned."""
MOST_PER_TURN = 5
"""Largest number of candidates from one turn."""
LOOK_S = 1.0
"""Longest time in seconds that one request reads. A larger step is read in part, and the answer has the number of read
episodes."""
MOST_EPISODES = 20_000
"""Largest number of episodes of one step that are considered."""


def find_outliers(run: OpenRun, clock: Clock, step: int) -> dict[str, Any]:
    """Return the outlier tokens of ``step`` of ``run``, the worst first: the tokens with the largest |log π − log μ|
    (learner minus engine) or, if the learner's log-probabilities were not recorded, with the smallest log μ. The field
    ``looked`` is the number of the step's episodes that were read within :data:`LOOK_S` on ``clock``."""
    rows = run.browser().page(EpisodeQuery(step=step), order="oldest", limit=MOST_EPISODES)
    scored = [row for row in rows if row.status == "scored"]
    until_s = clock.now() + LOOK_S
    found: list[tuple[float, tuple[int, int, int, int], dict[str, Any]]] = []
    episodes_read = 0
    learned = run.browser().token_results(scored[0].group) if scored else None
    for row in scored:
        if clock.now() > until_s:
            break
        episode = run.browser().episode(EpisodeKey(row.group, row.place))
        episodes_read += 1
        if episode is not None:
            gaps = None if learned is None else learned.gaps(episode)
            found = heapq.nsmallest(MOST, [*found, *_find_candidates(episode, row, gaps)], key=lambda each: each[:2])
    tokens = [_add_text(run, detail) for _, _, detail in found]
    by = "logprob" if learned is None else "gap"
    return {"step": step, "by": by, "tokens": tokens, "looked": episodes_read, "episodes": len(scored)}


def _find_candidates(
    episode: EpisodeGraph, row: EpisodeRow, gaps: Mapping[int, FloatColumn] | None
) -> list[tuple[float, tuple[int, int, int, int], dict[str, Any]]]:
    """Return up to :data:`MOST_PER_TURN` outlier tokens of each turn of an ``episode`` with the record ``row``: the
    tokens with the largest difference in ``gaps`` (log π − log μ by the index of the turn) or, if ``gaps`` is ``None``,
    the least likely tokens. Each entry has a rank (smaller is worse), the token's place, by which equal ranks are
    ordered, and its JSON for the page."""
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
        least = places[np.argsort(rank_T[places], kind="stable")[:MOST_PER_TURN]]
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


def _add_text(run: OpenRun, detail: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a token for the page, with its text and the text before it in place of ids."""
    before = detail.pop("before")
    words = run.words.pieces([*before, detail["id"]])
    return {**detail, "text": words[-1], "around": "".join(words[:-1])}
