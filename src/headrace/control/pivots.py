"""Pivot resampling: failed episodes are resampled from positions inside them (pivots), several times each, and the new
ends are kept as branches.

    failed episode ─▶ pivots ─▶ per pivot k attempts that repeat the episode up to there ─▶ scored ─▶ branches of the
                                (its cache forked, its weights pinned, other draws)                  episode's graph

An attempt is an episode of the same environment. The tokens that the episode had sampled before the pivot are given to
it as its answers again, and count in budgets and deadlines as they did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.types.episode import (
    AttemptKind,
    Branch,
    EpisodeGraph,
    EpisodeKey,
    EpisodeStatus,
    TokenChunk,
    Turn,
)
from headrace.base.types.group import GroupState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.groups import OpenGroup
from headrace.control.state import RunState
from headrace.flow.ledger import Ledger
from headrace.flow.pivots import Pivot, PivotChooser, PivotConfig, outcomes_of
from headrace.rollout import EpisodeRunner
from headrace.rollout.branches import Forking, graft, repeats, split
from headrace.rollout.history import prompt_digest

ScoreAttempts = Callable[[OpenGroup, Sequence[EpisodeGraph]], Awaitable[None]]
"""A function that scores those of the attempts that have finished."""
OnTurn = Callable[[EpisodeKey, Task, IntColumn, Turn], None]
"""A function that is called with each turn that was sampled, and the tokens of its prompt."""

ENV_DIFFERS = "branch_env_differs"
"""The reason under which an attempt is counted that becomes no branch, since its environment did not repeat the episode
up to the pivot."""
OTHER_VERSION = "branch_other_version"
"""The reason under which a branch without loss is counted that other weights sampled than the other branches of its
pivot."""
TOO_FEW = "branch_alone"
"""The reason under which a branch without loss is counted that has no other branch to be compared with."""
FAILED = "branch_failed"
"""The reason under which a branch without loss is counted that has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PivotPoint:
    """A pivot, located in the graph of its episode, with all that an attempt from there needs."""

    number: int
    """The number of the pivot in its episode, from 0."""
    pivot: Pivot
    """The pivot as it was chosen."""
    turn: int
    """The index of the turn within which the pivot lies."""
    begun: tuple[TokenChunk, ...]
    """The sampled turns up to the pivot, the last of them cut there; an attempt repeats them."""
    parent: int | None
    """The engine's id of the request that sampled the turn, whose cache can be forked; ``None`` if it is not known."""


@dataclass(slots=True, kw_only=True)
class _PivotAttempt:
    """One attempt to continue an episode from a pivot."""

    episode: EpisodeGraph
    """The attempt, as an episode with a key of its own."""
    untrained: str = ""
    """The reason why it carries no loss; empty if it carries loss."""


@dataclass(slots=True)
class SampledTurns:
    """The sampled turns of the episodes that run, as chunks of tokens with the ids of their requests. They are kept
    because a branch can be forked from a request only by its id."""

    _turns: dict[EpisodeKey, dict[int, list[TokenChunk]]] = field(default_factory=dict)

    def add(self, part: TokenChunk) -> None:
        """Append tokens that have arrived for a turn; if they come with the note that earlier ones are void (``lost``),
        these are removed."""
        turns = self._turns.setdefault(part.key, {})
        if part.lost:
            turns[part.turn] = []
        turns.setdefault(part.turn, []).append(part)

    def pop(self, key: EpisodeKey) -> list[TokenChunk]:
        """Remove and return the sampled turns of the episode ``key``, one chunk for each turn, in the order in which
        they were begun; empty if none are known."""
        turns = self._turns.pop(key, {})
        joined = (TokenChunk.joined(turns[number]) for number in sorted(turns))
        return [msgspec.structs.replace(chunk, lost="") for chunk in joined]


class PivotResampler:
    """A resampler of failed episodes, which adds the new ends to them as branches. The scoring loop owns it."""

    def __init__(self, state: RunState, config: PivotConfig, *, score_attempts: ScoreAttempts, on_turn: OnTurn) -> None:
        """Resample as ``config`` says. ``score_attempts`` scores the attempts at one pivot, and ``on_turn`` is called
        with each turn that they sample."""
        self._state = state
        self._config = config
        self._score_attempts = score_attempts
        self._on_turn = on_turn
        self._chooser = PivotChooser(config)
        self._outcomes: dict[int, list[tuple[float, bool]]] = {}
        """Outcomes (depth of the pivot, success) that the chooser has not learned from yet, by group."""
        self.sampled_turns = SampledTurns()

    async def add_branches(self, group: OpenGroup, episode: EpisodeGraph) -> None:
        """Add branches to a scored episode of ``group`` that has failed, which means that its reward is at most
        ``threshold``; do nothing to any other. Pivots are chosen in it, attempts are made from each, and those that
        repeat the episode up to the pivot are added to its graph."""
        sampled = self.sampled_turns.pop(episode.key)
        reward = episode.reward
        if episode.status is not EpisodeStatus.SCORED or reward is None or reward > self._config.threshold:
            return
        points = self._pivot_points(episode, sampled)
        if not points:
            return
        with self._state.board.requesting(
            "scoring", "branches of a failed episode", provider="engine, scoring workers"
        ):
            async with asyncio.TaskGroup() as tasks:
                attempted = [tasks.create_task(self._attempts(group, episode, point)) for point in points]
        original = list(episode.turns)
        self._count("chosen", len(points))
        by_point = zip(points, (task.result() for task in attempted), strict=True)
        # From the last pivot to the first, since a graft splits a turn and moves the indices of later ones.
        for point, attempts in sorted(by_point, key=lambda pair: (pair[0].turn, pair[0].pivot.at), reverse=True):
            self._graft_branches(episode, original, point, attempts)
        self._count("recovered", sum(success for _, success in outcomes_of(episode, self._config.threshold)))

    def ended(self, episode: EpisodeGraph) -> None:
        """Keep the outcomes of the pivots of an episode that has ended, as its branches show them. The chooser learns
        from them when the group is trained."""
        self.sampled_turns.pop(episode.key)
        if outcomes := outcomes_of(episode, self._config.threshold):
            self._outcomes.setdefault(episode.key.group, []).extend(outcomes)

    def dropped(self, number: int) -> None:
        """Forget the outcomes of the group ``number``, which will not be trained, so that nothing is learned from its
        pivots."""
        self._outcomes.pop(number, None)

    def restore(self, ledger: Ledger, step: int) -> None:
        """Restore the outcomes of pivots from ``ledger`` after a restart: those of the groups that were trained before
        the checkpoint at ``step``, and of the groups that are ready. Pivots that are not chosen by utility need
        none."""
        if self._config.choose != "utility":
            return
        trained = [number for at, numbers in ledger.steps().items() if at < step for number in numbers]
        groups = self._state.flow.state.groups
        for number in [*trained, *(number for number, entry in groups.items() if entry.state is GroupState.READY)]:
            for episode in ledger.episodes(number):
                self.ended(episode)

    def _learn_from_taken_groups(self) -> None:
        """Let the chooser learn from the groups that were taken for a batch. Only these count, so that the choice of
        pivots in a synchronous run does not depend on the order in which episodes end."""
        groups = self._state.flow.state.groups
        for number in sorted(self._outcomes):
            if number not in groups or groups[number].state in (GroupState.TAKEN, GroupState.TRAINED):
                for depth, success in self._outcomes.pop(number):
                    self._chooser.learn(depth, success)

    def _pivot_points(self, episode: EpisodeGraph, sampled: Sequence[TokenChunk]) -> list[_PivotPoint]:
        """Choose the pivots of an episode among the tokens of its sampled turns that carry loss, and return them in
        order. ``sampled`` holds its sampled turns as chunks, in order."""
        turns = episode.turns
        answers: list[tuple[int, TokenChunk]] = []
        for index, turn in enumerate(turns):
            if turn.stop_reason is not None and not turn.untrained:
                before_T = episode.path_tokens(episode.path(index)[:-1]).ids_T
                part = _part_of(turn, prompt_digest(before_T), sampled)
                answers += [(index, part)] if part is not None else []
        entropies = [
            np.zeros(len(part.tokens)) if part.tokens.entropies_T is None else part.tokens.entropies_T
            for _, part in answers
        ]
        self._learn_from_taken_groups()
        rng = np.random.default_rng([self._state.run.seed, *episode.key])
        points: list[_PivotPoint] = []
        for number, pivot in enumerate(self._chooser.choose(entropies, rng)):
            index, left = answers[pivot.answer]
            before = tuple(part for part in sampled if part.turn < left.turn)
            kept = msgspec.structs.replace(left, tokens=left.tokens[: pivot.at], stop_reason=None)
            begun = (*before, kept)
            parent = None if left.request_id < 0 else left.request_id
            points.append(_PivotPoint(number=number, pivot=pivot, turn=index, begun=begun, parent=parent))
        return points

    async def _attempts(self, group: OpenGroup, episode: EpisodeGraph, point: _PivotPoint) -> list[_PivotAttempt]:
        """Make, score and check the attempts at one pivot of an episode, and return them."""
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(self._attempt(group.task, episode, point, branch))
                for branch in range(self._config.branches)
            ]
        attempts = [_PivotAttempt(episode=task.result()) for task in made]
        await self._score_attempts(group, [attempt.episode for attempt in attempts])
        self._mark_untrained(episode, point, attempts)
        self._count("branches", len(attempts))
        return attempts

    async def _attempt(self, task: Task, episode: EpisodeGraph, point: _PivotPoint, branch: int) -> EpisodeGraph:
        """Run the attempt number ``branch`` at one pivot: repeat the episode up to the pivot and continue it with other
        draws. Return the attempt as an episode of its own, with a key of its own."""
        state, parts = self._state, self._state.parts
        own, name = self._key(episode, point, branch), f"{point.number}/{branch}"
        runner = EpisodeRunner(
            engine=Forking(parts.engine, parent=point.parent, name=name, on_prefix=self._count_prefix_sampling),
            env=parts.env,
            sampling=parts.sampling,
            run_seed=state.run.seed,
            on_tokens=lambda _: state.board.progress(),
            on_turn=lambda _, prompt_ids_T, turn: self._on_turn(own, task, prompt_ids_T, turn),
            note=lambda text: state.warn(text, kind=text),
            agents=parts.agents,
            chat=parts.chat,
            limits=parts.limits,
            timeout_s=parts.episode_timeout_s,
            attempt_kind=AttemptKind.BRANCH,
        )
        attempt = await runner.run(episode.key, task, begun=point.begun)
        attempt.key = own
        return attempt

    def _key(self, episode: EpisodeGraph, point: _PivotPoint, branch: int) -> EpisodeKey:
        """Return the key of the attempt number ``branch`` at a pivot. Its place is negative, so that it differs from
        those of all episodes of the group."""
        pivot = episode.key.place * self._config.per_episode + point.number
        return EpisodeKey(episode.key.group, -1 - pivot * self._config.branches - branch)

    def _count_prefix_sampling(self) -> None:
        """Count a branch that had to be sampled from the tokens of its prefix, and warn."""
        self._count("by_prefix", 1)
        text = "branches are sampled from the tokens of their prefix: its cache is gone, or of other weights"
        self._state.warn(text, kind=text)

    def _mark_untrained(self, episode: EpisodeGraph, point: _PivotPoint, attempts: Sequence[_PivotAttempt]) -> None:
        """Set the reason why it carries no loss on each of the ``attempts`` at one pivot that cannot be compared with
        the others."""
        index, at = point.turn, point.pivot.at
        for attempt in attempts:
            if not repeats(episode.turns, index, at, attempt.episode.turns):
                attempt.untrained = ENV_DIFFERS if attempt.episode.status is EpisodeStatus.SCORED else FAILED
            elif attempt.episode.status is not EpisodeStatus.SCORED:
                attempt.untrained = FAILED
        good = [attempt for attempt in attempts if not attempt.untrained]
        # Branches are comparable only if the same weights sampled them: those of the first branch count.
        pinned = good[0].episode.turns[index].tokens.versions_T[at] if good else None
        for attempt in good:
            if (attempt.episode.turns[index].tokens.versions_T[at:] != pinned).any():
                attempt.untrained = OTHER_VERSION
        good = [attempt for attempt in attempts if not attempt.untrained]
        if len(good) == 1:
            good[0].untrained = TOO_FEW

    def _graft_branches(
        self, episode: EpisodeGraph, original: Sequence[Turn], point: _PivotPoint, attempts: Sequence[_PivotAttempt]
    ) -> None:  # fmt: skip
        """Add the attempts at one pivot to the episode's graph as branches, to which those of all later pivots were
        added already. ``original`` holds the turns of the episode without branches. An attempt that does not repeat the
        episode up to the pivot is not added."""
        index, at = point.turn, point.pivot.at
        fitting = [pair for pair in enumerate(attempts) if repeats(original, index, at, pair[1].episode.turns)]
        if fitting:
            split(episode.turns, index, [at])
        for branch, attempt in fitting:
            name = Branch(
                pivot=point.number, number=branch, reward=None if attempt.untrained else attempt.episode.reward
            )
            turns = [
                msgspec.structs.replace(turn, untrained=attempt.untrained or turn.untrained)
                for turn in attempt.episode.turns
            ]
            graft(episode.turns, index, at, turns, name)
        for attempt in attempts:
            if attempt.untrained:
                self._count(attempt.untrained, 1)
                why = attempt.episode.cause or attempt.untrained
                self._state.warn(f"branches carry no loss: {why}", kind=f"branches carry no loss: {attempt.untrained}")

    def _count(self, name: str, by: int) -> None:
        """Add ``by`` to the metric ``pivots/{name}`` of the next step."""
        if by:
            self._state.metrics.count(f"pivots/{name}", by)


def _part_of(turn: Turn, prompt: str, sampled: Sequence[TokenChunk]) -> TokenChunk | None:
    """Return the chunk that is the sampled ``turn``, whose prompt has this digest; ``None`` if it is not known. Several
    turns may have the same tokens, after different prompts."""
    for part in sampled:
        if part.prompt.startswith(prompt) and np.array_equal(part.tokens.ids_T, turn.tokens.ids_T):
            return part
    return None
