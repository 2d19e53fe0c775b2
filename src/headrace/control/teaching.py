"""Teachers with engines of their own: asked about answers while their rewards are computed.

    finished episode ──▶ ask ──▶ its teacher, by a prefill of every path ──▶ add ──▶ columns of its turns
                                 too late, or dead: asked again, `retries` times; then the episode has failed

What they say lies in the ledger with the tokens that it is about, and goes to the learner in the batch.

Shape legend: T tokens of one turn or path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.base.errors import ComponentDied, HeadraceError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.task import Task
from headrace.base.types.taught import Taught, TopScores
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import Engine
from headrace.rollout.scoring.rubric import FIRST_PAUSE_S, LONGEST_PAUSE_S

AT_ONCE = 2
"""Calls of one teacher: its engine answers one after the other, and the next is there when it is done."""
OTHER_PROMPT = "teacher_error: the episode does not begin with the prompt of its row, in whose place the teacher's is"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTerms:
    """What is wanted of a teacher."""

    version: int
    """Its weights: a version of the run, or ``FROZEN``."""
    num_entries: int = 0
    """How many of its likeliest entries are wanted at each token."""
    below: int = 0
    """Only those of ids below this one: those that the policy has; 0: all."""
    prompts: Sequence[IntColumn] | None = None
    """What it reads in the place of each row's prompt; ``None``: what the policy read."""
    timeout_s: float = 60.0
    """It has failed when it has not answered this long after its turn came."""
    retries: int = 2
    """How often a call that failed is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherClient:
    """One teacher."""

    engine: Engine
    """With its weights, which stay."""
    name: str
    """By which rows ask for it; empty where it is the only one."""
    terms: TeacherTerms
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """Those of a run."""

    by_name: Mapping[str, TeacherClient]
    column: str
    """Of a row, that names its teacher where there are several."""
    temperature: float
    """Of the sampling."""

    def of(self, task: Task) -> TeacherClient:
        """Who is asked about answers to ``task``."""
        if len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        return self.by_name[task.row[self.column]]


class Teaching:
    """What teachers say of the episodes that are scored. How much of it is on its way is bounded by the episodes that
    run."""

    def __init__(
        self, teachers: Teachers, tasks: asyncio.TaskGroup, asking: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """``asking`` is entered while a teacher is waited for."""
        self._teachers = teachers
        self._tasks = tasks
        self._asking = asking
        self._asked: dict[EpisodeKey, tuple[TeacherClient, asyncio.Task[dict[int, Taught] | str]]] = {}

    def ask(self, task: Task, episode: EpisodeGraph) -> None:
        """An episode has come to its end."""
        teacher = self._teachers.of(task)
        self._asked[episode.key] = teacher, self._tasks.create_task(self._lessons(teacher, task, episode))

    async def add(self, episode: EpisodeGraph) -> str:
        """Give the turns of an episode what was said of them, once it is there. Why it has failed; empty where it has
        not."""
        teacher, asked = self._asked.pop(episode.key)
        lessons = await asked
        if isinstance(lessons, str):
            return lessons
        for place, taught in lessons.items():
            turn = episode.turns[place]
            episode.turns[place] = replace(turn, tokens=replace(turn.tokens, taught=taught), teacher=teacher.name)
        return ""

    async def _lessons(self, teacher: TeacherClient, task: Task, episode: EpisodeGraph) -> dict[int, Taught] | str:
        """What is said of every turn that carries loss, or why there is no saying."""
        found: dict[int, Taught] = {}
        for leaf in episode.leaves():
            path = episode.path(leaf)
            wanted = [place for place in path if place not in found and _carries_loss(episode, place)]
            if not wanted:
                continue
            parts = [_bare(episode.turns[place].tokens) for place in path]
            if teacher.terms.prompts is not None:
                if not np.array_equal(parts[0].ids_T, task.prompt_ids_T):
                    return OTHER_PROMPT
                parts[0] = Tokens.observed(teacher.terms.prompts[task.row_index])
            scores = await self._patiently(teacher, Tokens.concat(parts))
            if isinstance(scores, str):
                return scores
            ends = np.cumsum([len(part) for part in parts])
            for place, part, end in zip(path, parts, ends.tolist(), strict=True):
                if place in wanted:
                    found[place] = _said(scores, slice(end - len(part), end), teacher.terms.version)
        return found

    async def _patiently(self, teacher: TeacherClient, tokens: Tokens) -> TopScores | str:
        """What the teacher says; why it does not, when it was asked as often as it may be."""
        pause_s, left = FIRST_PAUSE_S, teacher.terms.retries
        while True:
            scores, again = await self._once(teacher, tokens)
            if not isinstance(scores, str) or not (again and left):
                return scores
            await asyncio.sleep(pause_s)
            pause_s, left = min(2 * pause_s, LONGEST_PAUSE_S), left - 1

    async def _once(self, teacher: TeacherClient, tokens: Tokens) -> tuple[TopScores | str, bool]:
        """One call; where it failed, why, and whether another may do better."""
        terms = teacher.terms
        try:
            async with teacher.gate, asyncio.timeout(terms.timeout_s):
                with self._asking():
                    scores = await teacher.engine.top_scores(
                        tokens, terms.num_entries, below=terms.below, temperature=self._teachers.temperature
                    )
            return scores, False
        except TimeoutError:
            return f"teacher_timeout: no answer for {terms.timeout_s:g} s", True
        except ComponentDied as death:
            return f"teacher_died: {death.problem}", True
        except HeadraceError as error:
            return f"teacher_error: {error.problem}", False


def _carries_loss(episode: EpisodeGraph, place: int) -> bool:
    turn = episode.turns[place]
    return not turn.untrained and bool(turn.tokens.sampled_T.any())


def _bare(tokens: Tokens) -> Tokens:
    """What the teacher is told of: it chooses its own experts."""
    return Tokens(ids_T=tokens.ids_T, logprobs_T=tokens.logprobs_T, versions_T=tokens.versions_T, kept=tokens.kept)


def _said(scores: TopScores, span: slice, version: int) -> Taught:
    return Taught(
        logprobs_T=scores.logprobs_T[span],
        versions_T=np.full(span.stop - span.start, version, np.int32),
        ids_TK=scores.ids_TK[span],
        logs_TK=scores.logs_TK[span],
    )
