"""Calls of teachers that have their own engines. A teacher scores an answer: it computes its log-probability of each
token, while the rewards of the answer are computed.

    finished episode ──▶ start ──▶ its teacher, by a prefill of every path ──▶ finish ──▶ columns of its turns
                                   too late, or dead: called again, `retries` times; then the episode has failed

The ledger stores the teacher's scores together with the tokens, and the batch contains them for the learner.

Shape legend: T tokens of one turn or path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.clock import TimeLimit
from headrace.base.errors import ComponentDied, HeadraceError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.task import Task
from headrace.base.types.teacher_scores import TeacherScores, TopScores
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import Engine
from headrace.rollout.scoring.rubric import FIRST_PAUSE_S, LONGEST_PAUSE_S

CALLS_AT_ONCE = 2
"""Maximum number of concurrent calls of one teacher. Its engine handles one call at a time; with a second call in its
queue, the engine does not wait between calls."""
OTHER_PROMPT = "teacher_error: the episode does not begin with the prompt of its row, in whose place the teacher's is"
"""The cause of an episode that fails because its first turn is not the prompt of its row, which the teacher's prompt
would replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherCallConfig:
    """The content and the limits of a call to a teacher."""

    version: int
    """The version of the teacher's weights: one of the run, or ``FROZEN``."""
    num_entries: int = 0
    """Number of vocabulary entries with the highest probabilities that the teacher returns for each token; 0 for
    none."""
    below: int = 0
    """Only vocabulary entries with ids below this are returned, because others are not in the policy's vocabulary; 0:
    all entries may be returned."""
    prompts: Sequence[IntColumn] | None = None
    """The prompts that replace the rows' prompts in calls of the teacher, by row index; ``None``: the teacher gets the
    same prompts as the policy."""
    timeout_s: float = 60.0
    """Timeout of a call, in seconds."""
    retries: int = 2
    """Maximum number of retries of a failed call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherClient:
    """A teacher: its engine, and the settings of calls."""

    engine: Engine
    """The engine that computes the teacher's logprobs."""
    name: str
    """The name by which rows choose this teacher; empty if it is the only one."""
    config: TeacherCallConfig
    """The content and the limits of a call."""
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CALLS_AT_ONCE))
    """A semaphore that limits the number of concurrent calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """The teachers of a run, and the rule by which a dataset row chooses one of them."""

    by_name: Mapping[str, TeacherClient]
    """The teachers by name."""
    column: str
    """The column of a row that contains the name of its teacher, if there are several teachers."""
    temperature: float
    """The temperature of the teacher's logprobs, which is the sampling temperature of training."""

    def find(self, task: Task) -> TeacherClient:
        """Return the teacher that scores answers to ``task``: the only teacher, or the teacher that its row names."""
        if len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        return self.by_name[task.row[self.column]]


class Teaching:
    """The running calls of teachers, one for each episode whose rewards are being computed. The scoring loop owns this
    object. The number of calls is bounded by the number of episodes in flight."""

    def __init__(
        self, teachers: Teachers, tasks: asyncio.TaskGroup, show_request: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Create the object without running calls. Calls of ``teachers`` run in tasks of the group ``tasks``.
        ``show_request`` returns a context manager that is entered during each call, so that views can show the call."""
        self._teachers = teachers
        self._tasks = tasks
        self._show_request = show_request
        self._calls: dict[EpisodeKey, tuple[TeacherClient, asyncio.Task[dict[int, TeacherScores] | str]]] = {}
        """For each episode that is being scored, its teacher and the task that returns the scores of its turns, or the
        cause of the failure."""

    def start(self, task: Task, episode: EpisodeGraph) -> None:
        """Start the call that scores a finished episode, an attempt at ``task``, and return at once."""
        teacher = self._teachers.find(task)
        self._calls[episode.key] = teacher, self._tasks.create_task(self._score_episode(teacher, task, episode))

    async def finish(self, episode: EpisodeGraph) -> str:
        """Wait for the teacher's scores of an episode that was passed to :meth:`start`, and add them to its turns.
        Return the cause of the episode's failure if the teacher failed; empty if it did not fail."""
        teacher, call = self._calls.pop(episode.key)
        scores_by_turn = await call
        if isinstance(scores_by_turn, str):
            return scores_by_turn
        for index, teacher_scores in scores_by_turn.items():
            turn = episode.turns[index]
            episode.turns[index] = msgspec.structs.replace(
                turn, tokens=msgspec.structs.replace(turn.tokens, teacher_scores=teacher_scores), teacher=teacher.name
            )
        return ""

    async def _score_episode(
        self, teacher: TeacherClient, task: Task, episode: EpisodeGraph
    ) -> dict[int, TeacherScores] | str:
        """Return the scores by ``teacher`` of every turn of ``episode``, an attempt at ``task``, that carries loss, by
        the index of the turn; or a text that says why the teacher failed."""
        scores_by_turn: dict[int, TeacherScores] = {}
        for leaf in episode.leaves():
            path = episode.path(leaf)
            # Paths share their first turns; each turn is scored once, in the first path that contains it.
            new_turns = [index for index in path if index not in scores_by_turn and _carries_loss(episode, index)]
            if not new_turns:
                continue
            parts = [_without_routing(episode.turns[index].tokens) for index in path]
            if teacher.config.prompts is not None:
                if not np.array_equal(parts[0].ids_T, task.prompt_ids_T):
                    return OTHER_PROMPT
                parts[0] = Tokens.observed(teacher.config.prompts[task.row_index])
            scores = await self._call_with_retries(teacher, Tokens.concat(parts))
            if isinstance(scores, str):
                return scores
            # The scores cover the whole path; each turn gets its slice.
            ends = np.cumsum([len(part) for part in parts])
            for index, part, end in zip(path, parts, ends.tolist(), strict=True):
                if index in new_turns:
                    scores_by_turn[index] = _slice_scores(scores, slice(end - len(part), end), teacher.config.version)
        return scores_by_turn

    async def _call_with_retries(self, teacher: TeacherClient, tokens: Tokens) -> TopScores | str:
        """Return the scores of ``tokens`` by ``teacher``, or a text that says why the last call failed. A failed call
        is repeated, up to the number of retries, if another call may succeed."""
        pause_s, num_left = FIRST_PAUSE_S, teacher.config.retries
        while True:
            scores, may_repeat = await self._call_once(teacher, tokens)
            if not isinstance(scores, str) or not (may_repeat and num_left):
                return scores
            await asyncio.sleep(pause_s)
            pause_s, num_left = min(2 * pause_s, LONGEST_PAUSE_S), num_left - 1

    async def _call_once(self, teacher: TeacherClient, tokens: Tokens) -> tuple[TopScores | str, bool]:
        """Call ``teacher`` once for its scores of ``tokens``. Return the scores, or a text that says why the call
        failed; and whether another call may succeed."""
        config = teacher.config
        try:
            async with teacher.gate, TimeLimit(config.timeout_s):
                with self._show_request():
                    scores = await teacher.engine.top_scores(
                        tokens, config.num_entries, below=config.below, temperature=self._teachers.temperature
                    )
            return scores, False
        except TimeoutError:
            return f"teacher_timeout: no answer for {config.timeout_s:g} s", True
        except ComponentDied as death:
            return f"teacher_died: {death.problem}", True
        except HeadraceError as error:
            return f"teacher_error: {error.problem}", False


def _carries_loss(episode: EpisodeGraph, index: int) -> bool:
    """Return whether the turn at index ``index`` was sampled and carries loss."""
    turn = episode.turns[index]
    return not turn.untrained and bool(turn.tokens.sampled_T.any())


def _without_routing(tokens: Tokens) -> Tokens:
    """Return the tokens with their kept-sets but without their recorded experts, since the teacher's model routes
    tokens by itself."""
    return Tokens(ids_T=tokens.ids_T, logprobs_T=tokens.logprobs_T, versions_T=tokens.versions_T, kept=tokens.kept)


def _slice_scores(scores: TopScores, span: slice, version: int) -> TeacherScores:
    """Return the part of ``scores`` for the tokens in ``span``, as the record that a turn stores. ``version`` is the
    version of the teacher's weights."""
    return TeacherScores(
        logprobs_T=scores.logprobs_T[span],
        versions_T=np.full(span.stop - span.start, version, np.int32),
        ids_TK=scores.ids_TK[span],
        logs_TK=scores.logs_TK[span],
    )
