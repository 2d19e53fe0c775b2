"""Groups of random episodes with all kinds of columns and turns, for the layout of batches."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.outline import BatchOutline
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.scored import Credit, ScoredGroup
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.flow.layout import make_outline

LAYERS, EXPERTS = 3, 2


def make_span(rng: np.random.Generator, count: int, *, sampled: bool, plain: bool = False) -> Tokens:
    """Tokens with every column that tokens can have; given ones have ids alone, and ``plain`` ones no rare column."""
    ids_T = rng.integers(0, 90, count).astype(np.int32)
    if not sampled:
        return Tokens.observed(ids_T)
    if plain:
        logprobs_T = rng.normal(size=count).astype(np.float32)
        return Tokens(ids_T=ids_T, logprobs_T=logprobs_T, versions_T=rng.integers(-1, 4, count).astype(np.int32))
    known_T = rng.random(count) < 0.9
    scores = TeacherScores(
        logprobs_T=np.where(rng.random(count) < 0.1, np.nan, rng.normal(size=count)).astype(np.float32),
        versions_T=np.zeros(count, np.int32),
        ids_TK=rng.integers(0, 90, (count, 2)).astype(np.int32),
        logs_TK=rng.normal(size=(count, 2)).astype(np.float32),
    )
    return Tokens(
        ids_T=ids_T,
        logprobs_T=rng.normal(size=count).astype(np.float32),
        versions_T=np.where(rng.random(count) < 0.05, NOT_SAMPLED, rng.integers(0, 4, count)).astype(np.int32),
        kept=KeptSets.from_spans([[int(token)] for token in ids_T]),
        routing=Routing(known_T=known_T, experts_RLK=experts(rng, int(known_T.sum()))),
        entropies_T=rng.random(count).astype(np.float32),
        teacher_scores=scores,
    )


def experts(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 9, (count, LAYERS, EXPERTS)).astype(np.uint8)


def make_episode(rng: np.random.Generator, key: EpisodeKey, status: EpisodeStatus, longest: int) -> EpisodeGraph:
    """A chain or a tree of turns by several authors, some of which carry no loss. A third of the episodes are chains
    without rare fields, as most are in a run."""
    turns: list[Turn] = []
    if rng.random() < 0.35:
        for index in range(int(rng.integers(1, 5))):
            span = make_span(rng, int(rng.integers(1, longest)), sampled=index % 2 == 1, plain=True)
            author = ["task", "policy", "tool", "critic/1"][index]
            turns.append(Turn(author=author, tokens=span, parent=index - 1 if index else None))
        return EpisodeGraph(key=key, turns=turns, status=status, reward=float(rng.random()))
    for index in range(int(rng.integers(2, 7))):
        parent = None if not index else index - 1 if rng.random() < 0.8 else int(rng.integers(0, index))
        sampled = index % 2 == 1
        count = int(rng.integers(0 if index > 1 else 1, longest))
        turn = Turn(
            author=["task", "policy", "tool", "critic/1"][index % 4],
            tokens=make_span(rng, count, sampled=sampled),
            parent=parent,
            stop_reason=StopReason.STOP if sampled else None,
            untrained="cut" if sampled and rng.random() < 0.2 else "",
        )
        if sampled and rng.random() < 0.5:
            before = sum(len(turns[at].tokens) for at in EpisodeGraph(key=key, turns=turns).path(parent or 0))
            known_T = np.ones(before, bool)
            context = Routing(known_T=known_T, experts_RLK=experts(rng, before))
            turn = msgspec.structs.replace(turn, context_routing=context)
        turns.append(turn)
    return EpisodeGraph(key=key, turns=turns, status=status, reward=float(rng.random()))


def groups_with(seed: int, *, num_groups: int = 5, size: int = 4, longest: int = 40) -> list[ScoredGroup]:
    """Groups of which some episodes are not trained, and the last one has none that is."""
    rng = np.random.default_rng(seed)
    others = [EpisodeStatus.SCORED, EpisodeStatus.FAILED, EpisodeStatus.MASKED]
    groups: list[ScoredGroup] = []
    for number in range(num_groups):
        statuses = [EpisodeStatus.SCORED] * 2 + [others[int(rng.integers(0, 3))] for _ in range(size - 2)]
        if number == num_groups - 1:
            statuses = [EpisodeStatus.MASKED] * size
        episodes = [
            make_episode(rng, EpisodeKey(10 + number, place), statuses[which], longest)
            for place, which in enumerate(rng.permutation(size).tolist())
        ]
        groups.append(ScoredGroup(number=10 + number, episodes=tuple(episodes)))
    return groups


def make_credit(groups: list[ScoredGroup], seed: int) -> list[Credit]:
    """Credit for each counted episode: of some as a whole, of others by turn."""
    rng = np.random.default_rng(seed)
    counted = [episode for group in groups for episode in group.counted]
    return [
        float(rng.normal()) if place % 2 else rng.normal(size=len(episode.turns)).tolist()
        for place, episode in enumerate(counted)
    ]


def outline_with(seed: int) -> BatchOutline:
    """The outline of a batch with everything that a batch may have, in memory."""
    groups = groups_with(seed)
    return make_outline(seed, groups, make_credit(groups, seed), agents=("critic",), oldest_version=1)
