"""Pivot resampling: failed episodes go on from within, several times, and keep what came of it as branches.

    failed episode ─▶ pivots ─▶ per pivot k attempts that repeat the episode up to there ─▶ scored ─▶ branches of the
                                (its cache forked, its weights pinned, other draws)                  episode's graph

An attempt is an episode of the same environment: what the episode had sampled before the pivot is answered as it was,
and counts in budgets and deadlines as it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.base.types.episode import Branch, EpisodeGraph, EpisodeKey, EpisodeStatus, Turn, TurnPart
from headrace.base.types.group import GroupState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.control.groups import OpenGroup
from headrace.control.state import RunState
from headrace.flow.ledger import Ledger
from headrace.flow.pivots import Pivot, PivotChooser, PivotConfig, outcomes_of
from headrace.rollout import EpisodeRunner
from headrace.rollout.branches import Forking, graft, repeats, split

Judge = Callable[[OpenGroup, Sequence[EpisodeGraph]], Awaitable[None]]
"""Scores attempts that have finished."""
OnTurn = Callable[[EpisodeKey, Task, IntColumn, Turn], None]

ENV_DIFFERS = "branch_env_differs"
"""Why an attempt is no branch: its environment did not repeat the episode up to the pivot."""
OTHER_VERSION = "branch_other_version"
"""Why a branch carries no loss that other weights sampled than those of its pivot."""
TOO_FEW = "branch_alone"
"""Why a branch carries no loss that has no other one to be compared with."""
FAILED = "branch_failed"
"""Why a branch carries no loss that has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PivotPoint:
    """A pivot, as its episode knows it."""

    number: int
    """Which of the episode's pivots."""
    pivot: Pivot
    turn: int
    """Index of the turn that is left."""
    begun: tuple[TurnPart, ...]
    """What was sampled up to the pivot."""
    parent: int | None
    """The request that sampled the turn; ``None`` where it is not known."""


@dataclass(slots=True, kw_only=True)
class _PivotAttempt:
    """One way on."""

    episode: EpisodeGraph
    untrained: str = ""


@dataclass(slots=True)
class Trails:
    """The sampled turns of the episodes that run, whole, and which requests they were."""

    _turns: dict[EpisodeKey, dict[int, list[TurnPart]]] = field(default_factory=dict)

    def add(self, part: TurnPart) -> None:
        """A turn has grown."""
        turns = self._turns.setdefault(part.key, {})
        if part.lost:
            turns[part.turn] = []
        turns.setdefault(part.turn, []).append(part)

    def take(self, key: EpisodeKey) -> list[TurnPart]:
        """The turns of an episode, by their numbers; it is forgotten."""
        turns = self._turns.pop(key, {})
        return [_joined(turns[number]) for number in sorted(turns)]


def _joined(parts: Sequence[TurnPart]) -> TurnPart:
    first, last = parts[0], parts[-1]
    tokens = Tokens.concat([part.tokens for part in parts])
    return replace(first, tokens=tokens, stop_reason=last.stop_reason, lost="", request_id=last.request_id)


class PivotResampler:
    """Grows the branches of failed episodes."""

    def __init__(self, state: RunState, config: PivotConfig, *, judge: Judge, on_turn: OnTurn) -> None:
        self._state = state
        self._config = config
        self._judge = judge
        self._on_turn = on_turn
        self._chooser = PivotChooser(config)
        self._outcomes: dict[int, list[tuple[float, bool]]] = {}
        """Of pivots that nothing has been learned from yet, by their groups."""
        self.trails = Trails()

    async def grow(self, group: OpenGroup, episode: EpisodeGraph) -> None:
        """Add branches to an episode that has been scored, if it has failed; it ends with them."""
        trail = self.trails.take(episode.key)
        reward = episode.reward
        if episode.status is not EpisodeStatus.SCORED or reward is None or reward > self._config.threshold:
            return
        places = self._places(episode, trail)
        if not places:
            return
        with self._state.board.asking("scoring", "branches of a failed episode", of="engine, scoring workers"):
            async with asyncio.TaskGroup() as tasks:
                grown = [tasks.create_task(self._attempts(group, episode, place)) for place in places]
        original = list(episode.turns)
        self._count("chosen", len(places))
        both = zip(places, (attempts.result() for attempts in grown), strict=True)
        for place, attempts in sorted(both, key=lambda pair: (pair[0].turn, pair[0].pivot.at), reverse=True):
            self._hang(episode, original, place, attempts)
        self._count("recovered", sum(success for _, success in outcomes_of(episode, self._config.threshold)))

    def ended(self, episode: EpisodeGraph) -> None:
        """An episode has ended, with the branches it has."""
        self.trails.take(episode.key)
        if outcomes := outcomes_of(episode, self._config.threshold):
            self._outcomes.setdefault(episode.key.group, []).extend(outcomes)

    def dropped(self, number: int) -> None:
        """A group will not be trained: nothing is learned from its pivots."""
        self._outcomes.pop(number, None)

    def recall(self, ledger: Ledger, step: int) -> None:
        """Learn from the pivots of all groups that a checkpoint at ``step`` has trained, and remember those of the
        groups that are ready."""
        if self._config.choose != "utility":
            return
        trained = [number for at, numbers in ledger.steps().items() if at < step for number in numbers]
        groups = self._state.flow.state.groups
        for number in [*trained, *(number for number, entry in groups.items() if entry.state is GroupState.READY)]:
            for episode in ledger.episodes(number):
                self.ended(episode)

    def _learn(self) -> None:
        """From the groups that have been taken: what a synchronous run knows does not depend on who was first."""
        groups = self._state.flow.state.groups
        for number in sorted(self._outcomes):
            if number not in groups or groups[number].state in (GroupState.TAKEN, GroupState.TRAINED):
                for depth, success in self._outcomes.pop(number):
                    self._chooser.learn(depth, success)

    def _places(self, episode: EpisodeGraph, trail: Sequence[TurnPart]) -> list[_PivotPoint]:
        """The pivots of an episode, in its turns that carry loss."""
        turns = episode.turns
        answers: list[tuple[int, TurnPart]] = []
        for index, turn in enumerate(turns):
            part = next((part for part in trail if np.array_equal(part.tokens.ids_T, turn.tokens.ids_T)), None)
            if part is not None and turn.stop_reason is not None and not turn.untrained:
                answers.append((index, part))
        entropies = [
            np.zeros(len(part.tokens)) if part.tokens.entropies_T is None else part.tokens.entropies_T
            for _, part in answers
        ]
        self._learn()
        rng = np.random.default_rng([self._state.run.seed, *episode.key])
        places: list[_PivotPoint] = []
        for number, pivot in enumerate(self._chooser.choose(entropies, rng)):
            index, left = answers[pivot.answer]
            before = tuple(part for part in trail if part.turn < left.turn)
            kept = replace(left, tokens=left.tokens[: pivot.at], stop_reason=None)
            begun = (*before, kept)
            places.append(_PivotPoint(number=number, pivot=pivot, turn=index, begun=begun, parent=left.request_id))
        return places

    async def _attempts(self, group: OpenGroup, episode: EpisodeGraph, place: _PivotPoint) -> list[_PivotAttempt]:
        """What came of the branches of one pivot."""
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(self._attempt(group.task, episode, place, branch))
                for branch in range(self._config.branches)
            ]
        attempts = [_PivotAttempt(episode=task.result()) for task in made]
        await self._judge(group, [one.episode for one in attempts])
        self._sort_out(episode, place, attempts)
        self._count("branches", len(attempts))
        return attempts

    async def _attempt(self, task: Task, episode: EpisodeGraph, place: _PivotPoint, branch: int) -> EpisodeGraph:
        state, parts = self._state, self._state.parts
        own, name = self._key(episode, place, branch), f"{place.number}/{branch}"
        runner = EpisodeRunner(
            engine=Forking(parts.engine, parent=place.parent, name=name, on_prefix=self._by_prefix),
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
        )
        attempt = await runner.run(episode.key, task, begun=place.begun)
        attempt.key = own
        return attempt

    def _key(self, episode: EpisodeGraph, place: _PivotPoint, branch: int) -> EpisodeKey:
        """A name for an attempt that no episode of the group has."""
        pivot = episode.key.place * self._config.per_episode + place.number
        return EpisodeKey(episode.key.group, -1 - pivot * self._config.branches - branch)

    def _by_prefix(self) -> None:
        self._count("by_prefix", 1)
        text = "branches are sampled from the tokens of their prefix: its cache is gone, or of other weights"
        self._state.warn(text, kind=text)

    def _sort_out(self, episode: EpisodeGraph, place: _PivotPoint, attempts: Sequence[_PivotAttempt]) -> None:
        """Which of them are compared with each other; of the others, why not."""
        index, at = place.turn, place.pivot.at
        for one in attempts:
            if not repeats(episode.turns, index, at, one.episode.turns):
                one.untrained = ENV_DIFFERS if one.episode.status is EpisodeStatus.SCORED else FAILED
            elif one.episode.status is not EpisodeStatus.SCORED:
                one.untrained = FAILED
        good = [one for one in attempts if not one.untrained]
        pinned = good[0].episode.turns[index].tokens.versions_T[at] if good else None
        for one in good:
            if (one.episode.turns[index].tokens.versions_T[at:] != pinned).any():
                one.untrained = OTHER_VERSION
        good = [one for one in attempts if not one.untrained]
        if len(good) == 1:
            good[0].untrained = TOO_FEW

    def _hang(
        self, episode: EpisodeGraph, original: Sequence[Turn], place: _PivotPoint, attempts: Sequence[_PivotAttempt]
    ) -> None:  # fmt: skip
        """Bring the branches of one pivot into the episode's graph. Pivots behind it are there already."""
        index, at = place.turn, place.pivot.at
        fitting = [pair for pair in enumerate(attempts) if repeats(original, index, at, pair[1].episode.turns)]
        if fitting:
            split(episode.turns, index, [at])
        for branch, one in fitting:
            name = Branch(pivot=place.number, number=branch, reward=None if one.untrained else one.episode.reward)
            turns = [replace(turn, untrained=one.untrained or turn.untrained) for turn in one.episode.turns]
            graft(episode.turns, index, at, turns, name)
        for one in attempts:
            if one.untrained:
                self._count(one.untrained, 1)
                why = one.episode.cause or one.untrained
                self._state.warn(f"branches carry no loss: {why}", kind=f"branches carry no loss: {one.untrained}")

    def _count(self, name: str, by: int) -> None:
        if by:
            self._state.tally.fresh_pivots[name] += by
