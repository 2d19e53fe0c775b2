"""Pivot resampling: from positions within failed episodes (pivots), several new continuations are sampled and added to
the episode as branches.

    failed episode ─▶ pivots ─▶ per pivot k attempts that repeat the episode up to there ─▶ scored ─▶ branches of the
                                (its cache forked, its weights pinned, other draws)                  episode's graph

An attempt is an episode of the same environment. It repeats the tokens that the failed episode had sampled before the
pivot as its own answers, and they count towards its limits in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from headrace.base.types.episode import AttemptKind, Branch, EpisodeGraph, EpisodeKey, EpisodeStatus, TokenChunk, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.groups import OpenGroup
from headrace.control.state import RunState
from headrace.flow.ledger import Ledger
from headrace.flow.pivots import Pivot, PivotChooser, PivotConfig, list_outcomes
from headrace.rollout.branches import Forking, graft, repeats, split
from headrace.rollout.history import prompt_digest

ScoreAttempts = Callable[[OpenGroup, Sequence[EpisodeGraph]], Awaitable[None]]
"""A function that scores the finished attempts among the given attempts of a group."""
OnTurn = Callable[[EpisodeKey, Task, IntColumn, Turn], None]
"""A function that is called with each sampled turn: the key of the episode, its task, the tokens of the turn's prompt,
and the turn."""

ENV_DIFFERS = "branch_env_differs"
"""The reason under which an attempt is counted that is not added as a branch, because its environment did not repeat
the episode up to the pivot."""
OTHER_VERSION = "branch_other_version"
"""The reason under which a branch is counted that carries no loss, because it was sampled by other weights than the
first branch of its pivot."""
TOO_FEW = "branch_alone"
"""The reason under which a branch is counted that carries no loss, because there is no other branch to compare it
with."""
FAILED = "branch_failed"
"""The reason under which a branch is counted that carries no loss, because it has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PivotPoint:
    """A pivot with its position in the graph of the episode, and the data that an attempt from there needs."""

    number: int
    """The number of the pivot in its episode, from 0."""
    pivot: Pivot
    """The pivot as it was chosen."""
    turn: int
    """The index of the turn that contains the pivot."""
    prefix: tuple[TokenChunk, ...]
    """The sampled turns before the pivot, which an attempt repeats; the last turn ends at the pivot."""
    parent: int | None
    """The engine's id of the request that sampled the turn, whose cache can be forked; ``None`` if the id is not
    known."""


@dataclass(slots=True, kw_only=True)
class _PivotAttempt:
    """One attempt to continue an episode from a pivot."""

    episode: EpisodeGraph
    """The attempt as an episode with its own key."""
    untrained: str = ""
    """The reason why the attempt carries no loss; empty if it carries loss."""


@dataclass(slots=True)
class SampledTurns:
    """The sampled turns of the running episodes, as chunks of tokens with the ids of their requests. The ids are needed
    to fork a branch from a request."""

    _turns: dict[EpisodeKey, dict[int, list[TokenChunk]]] = field(default_factory=dict)
    """The chunks of each sampled turn, by the key of the episode and the number of the turn."""

    def add(self, part: TokenChunk) -> None:
        """Append tokens of a turn that have arrived. If ``part.lost`` says that earlier tokens of the turn are invalid,
        remove those first."""
        turns = self._turns.setdefault(part.key, {})
        if part.lost:
            turns[part.turn] = []
        turns.setdefault(part.turn, []).append(part)

    def pop(self, key: EpisodeKey) -> list[TokenChunk]:
        """Remove and return the sampled turns of the episode ``key``, one chunk for each turn, in the order in which
        they started; empty if no tokens were added."""
        turns = self._turns.pop(key, {})
        concatenated = (TokenChunk.concat(turns[number]) for number in sorted(turns))
        return [msgspec.structs.replace(chunk, lost="") for chunk in concatenated]


class PivotResampler:
    """The component that samples branches from failed episodes and adds them to the episodes. The scoring loop owns
    it."""

    def __init__(self, state: RunState, config: PivotConfig, *, score_attempts: ScoreAttempts, on_turn: OnTurn) -> None:
        """Create the resampler. ``state`` is the state of the run, and ``config`` are the settings of pivots.
        ``score_attempts`` scores the attempts at one pivot, and ``on_turn`` is called with each turn that an attempt
        samples."""
        self._state = state
        self._config = config
        self._score_attempts = score_attempts
        self._on_turn = on_turn
        self._chooser = PivotChooser(config)
        """The object that chooses pivots, by the outcomes of earlier ones."""
        self._outcomes: dict[int, list[tuple[float, bool]]] = {}
        """Outcomes (depth of the pivot, success) that were not passed to the chooser yet, by the number of the
        group."""
        self.sampled_turns = SampledTurns()
        """The sampled turns of the episodes that have no score yet."""

    async def add_branches(self, group: OpenGroup, episode: EpisodeGraph) -> None:
        """If ``episode``, a scored episode of ``group``, has failed (its reward is at most ``threshold``), add branches
        to it; otherwise do nothing. Pivots are chosen in the episode, attempts are run from each pivot, and attempts
        that repeat the episode up to the pivot are added to its graph."""
        sampled = self.sampled_turns.pop(episode.key)
        reward = episode.reward
        if episode.status is not EpisodeStatus.SCORED or reward is None or reward > self._config.threshold:
            return
        points = self._choose_points(episode, sampled)
        if not points:
            return
        with self._state.board.requesting(
            "scoring", "branches of a failed episode", provider="engine, scoring workers"
        ):
            async with asyncio.TaskGroup() as tasks:
                attempted = [tasks.create_task(self._run_attempts(group, episode, point)) for point in points]
        original = list(episode.turns)
        self._count("chosen", len(points))
        by_point = zip(points, (task.result() for task in attempted), strict=True)
        # From the last pivot to the first, because a graft splits a turn and changes the indices of later turns.
        for point, attempts in sorted(
            by_point, key=lambda pair: (pair[0].turn, pair[0].pivot.num_tokens_before), reverse=True
        ):
            self._graft_branches(episode, original, point, attempts)
        self._count("recovered", sum(success for _, success in list_outcomes(episode, self._config.threshold)))

    def record_outcomes(self, episode: EpisodeGraph) -> None:
        """Store the outcomes of the pivots of an ended episode, which follow from the rewards of its branches. The
        chooser learns from them when a batch has taken the group."""
        self.sampled_turns.pop(episode.key)
        if outcomes := list_outcomes(episode, self._config.threshold):
            self._outcomes.setdefault(episode.key.group, []).extend(outcomes)

    def forget_group(self, number: int) -> None:
        """Remove the outcomes of the group ``number``, which was dropped, so that the chooser does not learn from
        them."""
        self._outcomes.pop(number, None)

    def restore(self, ledger: Ledger, step: int) -> None:
        """Restore the outcomes of pivots from ``ledger`` after a restart, for the groups that were trained before the
        checkpoint of ``step`` and the groups that are ready. Do nothing if pivots are not chosen by utility."""
        if self._config.choose != "utility":
            return
        trained = [number for trained_at, numbers in ledger.steps().items() if trained_at < step for number in numbers]
        groups = self._state.flow.state.groups
        for number in [*trained, *(number for number, entry in groups.items() if entry.state is GroupState.READY)]:
            for episode in ledger.episodes(number):
                self.record_outcomes(episode)

    def _learn_from_taken_groups(self) -> None:
        """Pass the outcomes of groups that a batch has taken to the chooser. Other groups are not used yet, so that the
        choice of pivots in a synchronous run does not depend on the order in which episodes end."""
        groups = self._state.flow.state.groups
        for number in sorted(self._outcomes):
            if number not in groups or groups[number].state in (GroupState.TAKEN, GroupState.TRAINED):
                for depth, success in self._outcomes.pop(number):
                    self._chooser.learn(depth, success)

    def _choose_points(self, episode: EpisodeGraph, sampled: Sequence[TokenChunk]) -> list[_PivotPoint]:
        """Choose the pivots of an episode, among the tokens of its sampled turns that carry loss, and return them in
        order. ``sampled`` are the chunks of its sampled turns, in order."""
        turns = episode.turns
        answers: list[tuple[int, TokenChunk]] = []
        for index, turn in enumerate(turns):
            if turn.stop_reason is not None and not turn.untrained:
                before_T = episode.path_tokens(episode.path(index)[:-1]).ids_T
                part = _find_chunk(turn, prompt_digest(before_T), sampled)
                answers += [(index, part)] if part is not None else []
        entropies = [
            np.zeros(len(part.tokens)) if part.tokens.entropies_T is None else part.tokens.entropies_T
            for _, part in answers
        ]
        self._learn_from_taken_groups()
        rng = np.random.default_rng([self._state.run.seed, *episode.key])
        points: list[_PivotPoint] = []
        for number, pivot in enumerate(self._chooser.choose(entropies, rng)):
            index, answer = answers[pivot.answer]
            earlier_turns = tuple(part for part in sampled if part.turn < answer.turn)
            cut_turn = msgspec.structs.replace(
                answer, tokens=answer.tokens[: pivot.num_tokens_before], stop_reason=None
            )
            prefix = (*earlier_turns, cut_turn)
            parent = None if answer.request_id < 0 else answer.request_id
            points.append(_PivotPoint(number=number, pivot=pivot, turn=index, prefix=prefix, parent=parent))
        return points

    async def _run_attempts(self, group: OpenGroup, episode: EpisodeGraph, point: _PivotPoint) -> list[_PivotAttempt]:
        """Run, score and check the attempts at the pivot ``point`` of ``episode``, an episode of ``group``, and return
        them."""
        async with asyncio.TaskGroup() as tasks:
            attempt_tasks = [
                tasks.create_task(self._run_attempt(group.task, episode, point, branch))
                for branch in range(self._config.branches)
            ]
        attempts = [_PivotAttempt(episode=task.result()) for task in attempt_tasks]
        await self._score_attempts(group, [attempt.episode for attempt in attempts])
        self._mark_untrained(episode, point, attempts)
        self._count("branches", len(attempts))
        return attempts

    async def _run_attempt(self, task: Task, episode: EpisodeGraph, point: _PivotPoint, branch: int) -> EpisodeGraph:
        """Run the attempt number ``branch`` at the pivot ``point``: repeat ``episode``, an attempt at ``task``, up to
        the pivot and continue it with other random numbers. Return the attempt as a separate episode with its own
        key."""
        state, parts = self._state, self._state.parts
        own_key, name = self._make_key(episode, point, branch), f"{point.number}/{branch}"
        runner = replace(
            parts.make_runner(state.run.seed, lambda _: state.board.record_progress()),
            engine=Forking(parts.engine, parent=point.parent, name=name, on_prefix=self._count_prefix_sampling),
            on_turn=lambda _, prompt_ids_T, turn: self._on_turn(own_key, task, prompt_ids_T, turn),
            note=state.warn,
            retries=0,
            attempt_kind=AttemptKind.BRANCH,
        )
        attempt = await runner.run(episode.key, task, partial_turns=point.prefix)
        attempt.key = own_key
        return attempt

    def _make_key(self, episode: EpisodeGraph, point: _PivotPoint, branch: int) -> EpisodeKey:
        """Return the key of the attempt number ``branch`` at the pivot ``point`` of ``episode``. Its place is negative,
        so that the key differs from the keys of the group's episodes."""
        pivot = episode.key.place * self._config.per_episode + point.number
        return EpisodeKey(episode.key.group, -1 - pivot * self._config.branches - branch)

    def _count_prefix_sampling(self) -> None:
        """Count a branch whose prefix had to be computed again because its cache could not be forked, and warn."""
        self._count("by_prefix", 1)
        self._state.warn("branches are sampled from the tokens of their prefix: its cache is gone, or of other weights")

    def _mark_untrained(self, episode: EpisodeGraph, point: _PivotPoint, attempts: Sequence[_PivotAttempt]) -> None:
        """Set ``untrained`` of each of ``attempts``, made at the pivot ``point`` of ``episode``, that cannot be
        compared with the other attempts."""
        index, position = point.turn, point.pivot.num_tokens_before
        for attempt in attempts:
            if not repeats(episode.turns, index, position, attempt.episode.turns):
                attempt.untrained = ENV_DIFFERS if attempt.episode.status is EpisodeStatus.SCORED else FAILED
            elif attempt.episode.status is not EpisodeStatus.SCORED:
                attempt.untrained = FAILED
        candidates = [attempt for attempt in attempts if not attempt.untrained]
        # Branches are comparable only if the same weights sampled them: the weights of the first branch decide.
        first_version = candidates[0].episode.turns[index].tokens.versions_T[position] if candidates else None
        for attempt in candidates:
            if (attempt.episode.turns[index].tokens.versions_T[position:] != first_version).any():
                attempt.untrained = OTHER_VERSION
        candidates = [attempt for attempt in attempts if not attempt.untrained]
        if len(candidates) == 1:
            candidates[0].untrained = TOO_FEW

    def _graft_branches(
        self, episode: EpisodeGraph, original: Sequence[Turn], point: _PivotPoint, attempts: Sequence[_PivotAttempt]
    ) -> None:  # fmt: skip
        """Add ``attempts``, made at the pivot ``point``, to the graph of ``episode`` as branches. The branches of all
        later pivots must have been added before. ``original`` are the turns of the episode without branches. An attempt
        that does not repeat the episode up to the pivot is not added."""
        index, position = point.turn, point.pivot.num_tokens_before
        fitting = [pair for pair in enumerate(attempts) if repeats(original, index, position, pair[1].episode.turns)]
        if fitting:
            split(episode.turns, index, [position])
        for branch, attempt in fitting:
            name = Branch(
                pivot=point.number, number=branch, reward=None if attempt.untrained else attempt.episode.reward
            )
            turns = [
                msgspec.structs.replace(turn, untrained=attempt.untrained or turn.untrained)
                for turn in attempt.episode.turns
            ]
            graft(episode.turns, index, position, turns, name)
        for attempt in attempts:
            if attempt.untrained:
                self._count(attempt.untrained, 1)
                cause = attempt.episode.cause or attempt.untrained
                self._state.warn(
                    f"branches carry no loss: {cause}", kind=f"branches carry no loss: {attempt.untrained}"
                )

    def _count(self, name: str, amount: int) -> None:
        """Add ``amount`` to the metric ``pivots/{name}`` of the next step."""
        if amount:
            self._state.metrics.count(f"pivots/{name}", amount)


def _find_chunk(turn: Turn, prompt: str, sampled: Sequence[TokenChunk]) -> TokenChunk | None:
    """Return the chunk among ``sampled`` that contains the tokens of ``turn``; ``None`` if there is none. ``prompt`` is
    the digest of the turn's prompt, which distinguishes turns with equal tokens after different prompts."""
    for part in sampled:
        if part.prompt.startswith(prompt) and np.array_equal(part.tokens.ids_T, turn.tokens.ids_T):
            return part
    return None
