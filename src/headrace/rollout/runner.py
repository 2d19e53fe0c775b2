"""The run of one episode, from its task to its last token. A failure of the environment or of a request is caught here
and becomes part of the episode's record.

A turn is a sequence of tokens by one author. A sampled turn arrives in chunks. Tokens that were recorded before a
restart are reused instead of being sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headrace.base.clock import TimeLimit, being_cancelled
from headrace.base.errors import EpisodeError, HeadraceError, RequestError
from headrace.base.types.episode import (
    AttemptKind,
    EpisodeGraph,
    EpisodeKey,
    EpisodeStatus,
    StopReason,
    TokenChunk,
    Turn,
)
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import NO_TOKENS, IntColumn, Tokens
from headrace.engine import RequestOptions, TokenSource
from headrace.rollout.agents import FROZEN_AGENT, POLICY_ALONE, Agents, mark_as_frozen
from headrace.rollout.chat import Chat
from headrace.rollout.conversations import UNLIMITED, Conversations, EpisodeLimits, TurnRequest
from headrace.rollout.environments import AttemptOutcome, Environment
from headrace.rollout.environments.base import LAST

RETRIED = ("env_error", "env_timeout", "env_crashed", "env_blocked")
"""The reasons of failure after which an episode is attempted again, at most ``env.retries`` times."""
NOT_CHOSEN = "not_chosen"
"""The reason why a turn carries no loss that ``trained`` of the environment's outcome does not list."""
CUT_OFF = "cut_off"
"""The reason why an unfinished turn carries no loss: its sampling was abandoned or failed, so no caller received the
complete answer."""
_OWN_DRAWS = -1
"""The turn number from which the seed of the environment's own random draws is computed."""


def episode_seed(run_seed: int, key: EpisodeKey, turn: int = 0) -> int:
    """Return the seed of sampled turn number ``turn`` of the episode ``key``. It depends only on the run's seed, the
    episode and this number. The number −1 gives the seed of the environment's own random draws.

    >>> episode_seed(0, EpisodeKey(1, 2)) == episode_seed(0, EpisodeKey(1, 2))
    True
    """
    digest = hashlib.blake2b(f"{run_seed}/{key.group}/{key.place}/{turn}".encode(), digest_size=8).digest()
    # a seed is a signed 64-bit integer, so the digest is shifted by one bit
    return int.from_bytes(digest, "big") >> 1


def make_session_name(run_seed: int, key: EpisodeKey) -> str:
    """Return the session name that all requests of the episode ``key`` share. Requests with the same session are routed
    to the same engine."""
    return f"{run_seed}/{key.group}/{key.place}"


def cause_of_refusal(error: RequestError, last: Tokens) -> str:
    """Return the cause to record for an episode whose request ended with ``error``. ``last`` are the tokens of the
    episode's last turn: if some of them were sampled, the engine has failed, and otherwise it has refused the
    request."""
    reason = "engine_failed" if last.sampled_T.any() else "request_refused"
    return f"{reason}: {error.problem}"


def timeout_cause(timeout_s: float | None) -> str:
    """Return the cause to record for an episode whose attempt took longer than ``timeout_s`` seconds."""
    return f"env_timeout: not over after env.timeout_s={timeout_s} s"


def make_sampled_turn(chunks: Sequence[TokenChunk], *, author: str, parent: int, untrained: str = "") -> Turn:
    """Return the turn that ``author`` sampled after the turn ``parent``, with the tokens of ``chunks``. It carries no
    loss if ``untrained`` says why, or if its end has not arrived."""
    routings = (chunk.prompt_routing for chunk in chunks if chunk.prompt_routing is not None)
    stop_reason = chunks[-1].stop_reason if chunks else None
    return Turn(
        author=author,
        tokens=Tokens.concat([chunk.tokens for chunk in chunks]),
        parent=parent,
        stop_reason=stop_reason,
        context_routing=next(routings, None),
        untrained=untrained or ("" if stop_reason else CUT_OFF),
    )


def _ignore(*_: object) -> None:
    """Do nothing: the default for callbacks."""


@dataclass(slots=True, kw_only=True)
class EnginePolicy:
    """The :class:`~headrace.rollout.conversations.TurnSampler` of one episode: it samples turns from an engine and
    stores all turns of the episode."""

    runner: EpisodeRunner
    """The runner of the episode: its engine, sampling parameters, seed, agents and callbacks."""
    key: EpisodeKey
    """The group and the number of the episode."""
    partial_turns: dict[int, TokenChunk] = field(default_factory=dict)
    """The turns that were sampled before a restart of the process or in an earlier attempt, complete or not, by the
    number of the sampled turn."""
    turns: list[Turn] = field(default_factory=list)
    """All turns of the episode, sampled or not, parents before children. Unfinished turns are included."""
    _sampled: dict[int, TokenChunk] = field(default_factory=dict)
    """The turns sampled in this attempt, by the number of the sampled turn."""
    _restart_reason: str = "crash"
    """The reason that is recorded as ``lost`` if recorded tokens cannot be reused because the prompt of their turn has
    changed: ``crash`` after a restart of the process, ``env_retry`` in another attempt."""

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters of the run."""
        return self.runner.sampling

    async def sample(self, request: TurnRequest) -> int:
        """Sample the turn that ``request`` describes, append it to ``turns``, and return its index. If the engine
        fails, the tokens that have arrived are appended as an unfinished turn."""
        frozen = self.runner.agents.frozen(request.author)
        if frozen is not None:
            request = msgspec.structs.replace(request, untrained=FROZEN_AGENT)
        prompt = self._prompt_key(request)
        number = self._choose_number(prompt)
        empty = TokenChunk(key=self.key, turn=number, prompt=prompt, tokens=NO_TOKENS)
        self._sampled[number] = empty
        parts: list[TokenChunk] = []
        try:
            with self.runner.sampling_turn():
                await self._collect(parts, empty, request)
        finally:
            turn = make_sampled_turn(parts, author=request.author, parent=request.parent, untrained=request.untrained)
            self.turns.append(turn)
            index = len(self.turns) - 1
            self._sampled[number] = msgspec.structs.replace(
                empty, tokens=turn.tokens, stop_reason=turn.stop_reason, prompt_routing=turn.context_routing
            )
        if frozen is None:
            self.runner.on_turn(self.key, request.prompt_ids_T, turn)
        return index

    async def _collect(self, parts: list[TokenChunk], empty: TokenChunk, request: TurnRequest) -> None:
        """Append the chunks of the turn that ``request`` describes to ``parts`` as they arrive. A chunk with ``lost``
        says that all earlier chunks of the turn are lost, so it replaces them. ``empty`` is the chunk of this turn
        without tokens."""
        async for part in self._generate(empty, request):
            if part.lost:
                parts.clear()
            parts.append(part)
            if request.on_chunk is not None:
                request.on_chunk(part)

    def restart(self) -> None:
        """Discard all turns before another attempt at the episode. The tokens of this attempt are recorded and reused
        if the same turn is requested again."""
        sampled = {number: part for number, part in self._sampled.items() if len(part.tokens)}
        self.partial_turns = self.partial_turns | sampled
        self._sampled = {}
        self._restart_reason = "env_retry"
        self.turns.clear()

    def _prompt_key(self, request: TurnRequest) -> str:
        """Return the string that identifies the turn among recorded turns: the digest of the prompt. The sampling
        parameters and the agent are appended where they differ from the policy's usual ones."""
        suffix = f"{request.sampling.stop}" if request.sampling.stop != self.runner.sampling.stop else ""
        if request.untrained:
            suffix += f"{request.sampling.temperature}/{request.sampling.top_p}/{request.sampling.top_k}"
        if request.untrained == FROZEN_AGENT or self.runner.agents.adapter(request.author):
            suffix += f"/{request.author}"
        return request.digest + suffix

    def _choose_number(self, prompt: str) -> int:
        """Return the number of the next sampled turn. If a recorded turn has the same prompt key ``prompt``, the result
        is the number of that turn, and otherwise the first unused number."""
        same = [
            number
            for number, part in self.partial_turns.items()
            if part.prompt == prompt and number not in self._sampled
        ]
        if same:
            return min(same)
        return next(number for number in range(len(self._sampled) + 1) if number not in self._sampled)

    async def _generate(self, empty: TokenChunk, request: TurnRequest) -> AsyncIterator[TokenChunk]:
        """Yield the chunks of the turn that ``request`` describes: first the recorded tokens, then the chunks that the
        engine samples. ``empty`` is the chunk of this turn without tokens. The seed depends on its turn number, so that
        sampling continues with the same random draws after the same tokens."""
        runner = self.runner
        sampling = msgspec.structs.replace(request.sampling, seed=episode_seed(runner.run_seed, self.key, empty.turn))
        partial, lost = self.partial_turns.get(empty.turn), ""
        session = make_session_name(runner.run_seed, self.key)
        options = RequestOptions(session=session, agent=runner.agents.adapter(request.author))
        if partial is not None and partial.prompt != empty.prompt:
            partial, lost = None, self._restart_reason
        if partial is not None:
            is_full = len(partial.tokens) >= sampling.max_new_tokens
            stop_reason = partial.stop_reason or (StopReason.LENGTH if is_full else None)
            yield msgspec.structs.replace(partial, stop_reason=stop_reason)
            if stop_reason is not None:
                return
            options = msgspec.structs.replace(options, answer_ids_T=partial.tokens.ids_T)
        frozen = runner.agents.frozen(request.author)
        if frozen is not None:
            no_columns = {"record_kept": False, "record_routing": False, "record_entropy": False}
            sampling = msgspec.structs.replace(sampling, **no_columns)
        source = runner.engine if frozen is None else frozen
        async for chunk in source.generate(request.prompt_ids_T, sampling, options):
            part = msgspec.structs.replace(
                chunk,
                tokens=chunk.tokens if frozen is None else mark_as_frozen(chunk.tokens),
                lost=chunk.lost or lost,
                key=self.key,
                turn=empty.turn,
                prompt=empty.prompt,
            )
            lost = ""
            runner.on_tokens(len(chunk.tokens))
            runner.on_part(part)
            yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """A runner of the episodes of one environment against one engine. The controller calls :meth:`run` for each
    episode."""

    engine: TokenSource
    """The engine of the policy under training."""
    env: Environment
    """The environment that attempts the tasks."""
    sampling: Sampling
    """The sampling parameters of the run."""
    run_seed: int
    """The seed of the run, from which the seeds of all turns are derived."""
    on_tokens: Callable[[int], None]
    """Called with the number of tokens of each chunk as it arrives."""
    on_part: Callable[[TokenChunk], None] = _ignore
    """Called with every chunk of a turn as it arrives."""
    on_turn: Callable[[EpisodeKey, IntColumn, Turn], None] = _ignore
    """Called with every completed turn and its prompt."""
    note: Callable[[str], None] = _ignore
    """Called with a short description of each event that is unusual but not an error; equal descriptions are
    counted."""
    agents: Agents = POLICY_ALONE
    """The agents that may answer in an episode."""
    limits: EpisodeLimits = UNLIMITED
    """The budgets of one episode."""
    chat: Chat | None = None
    """The converter between messages and tokens; ``None`` if the environment uses token ids."""
    timeout_s: float | None = None
    """The time limit of an attempt, in seconds; ``None`` means unlimited."""
    retries: int = 0
    """The maximum number of further attempts at an episode after its environment has failed."""
    sampling_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """A function that returns a context manager, which is entered while a turn of an episode is sampled."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Whether the episodes stand alone, may have branches, or are branches themselves."""

    async def run(
        self,
        key: EpisodeKey,
        task: Task,
        withdrawal: Withdrawal | None = None,
        partial_turns: Sequence[TokenChunk] = (),
    ) -> EpisodeGraph:
        """Run one episode of ``task``. Return it with its turns, its status and, if the environment computes the
        reward, its reward. ``partial_turns`` are turns, complete or not, that were recorded before a crash or
        sampled before a pivot; each continues after its tokens. The caller can end the episode early through
        ``withdrawal``.

        If the engine refuses a request, an attempt takes too long, or the environment raises an exception, only this
        episode fails. An error of the run itself, such as the death of a component, is raised to the caller.
        """
        policy = EnginePolicy(runner=self, key=key, partial_turns={part.turn: part for part in partial_turns})
        withdrawal = withdrawal or Withdrawal()
        episode = await self._attempt(policy, task, withdrawal)
        for _ in range(self.retries):
            reason = episode.cause.partition(":")[0]
            if episode.status is not EpisodeStatus.FAILED or reason not in RETRIED:
                break
            self.note(f"an episode is attempted again: {reason}")
            policy.restart()
            episode = await self._attempt(policy, task, withdrawal)
        return episode

    async def _attempt(self, policy: EnginePolicy, task: Task, withdrawal: Withdrawal) -> EpisodeGraph:
        """Run the environment once on ``task``, with turns that ``policy`` samples, and return the episode. A failure
        of the environment becomes the cause of the returned episode. The attempt ends early through ``withdrawal``.
        Only errors of the run itself and cancellation are raised."""
        episode = EpisodeGraph(key=policy.key, status=EpisodeStatus.FAILED)
        seed = episode_seed(self.run_seed, policy.key, _OWN_DRAWS)
        conversations = Conversations(
            policy, self.limits, chat=self.chat, seed=seed, note=self.note, attempt_kind=self.attempt_kind
        )
        limit = TimeLimit(self.timeout_s)
        try:
            async with limit:
                withdrawal.attach(partial(_expire, limit.scope))
                outcome = await self.env.run(task, conversations)
            if policy.turns:
                _apply(outcome, episode, policy.turns)
            else:
                episode.cause = "nothing_sampled: the environment ended without an answer of the model"
        except TimeoutError as error:
            if withdrawal.reason:
                episode.status, episode.cause = EpisodeStatus.LEFT_OUT, withdrawal.reason
            elif limit.scope.expired():
                episode.cause = timeout_cause(self.timeout_s)
            else:  # a timeout inside the environment
                episode.cause = f"env_error: {type(error).__name__}: {error}"
        except EpisodeError as error:
            episode.cause = f"{error.reason}: {error.problem}"
        except RequestError as error:
            episode.cause = cause_of_refusal(error, policy.turns[-1].tokens if policy.turns else NO_TOKENS)
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of an environment: its failure is a record
            episode.cause = f"env_error: {type(error).__name__}: {error}"
        if being_cancelled():  # raised again if the environment has caught it: otherwise a new attempt would begin
            raise asyncio.CancelledError
        episode.turns = episode.turns or list(policy.turns)
        return episode


def find_remedy(cause: str) -> str:
    """Return the remedy to show for failed episodes, given the recorded cause of one of them.

    >>> find_remedy("request_refused: prompt of 900 tokens + max_new_tokens=256 exceed max_context=512")
    'look at what is asked of the engine, at its settings and its log'
    """
    if cause.partition(":")[0] in ("request_refused", "engine_failed"):
        return "look at what is asked of the engine, at its settings and its log"
    return "fix the environment or the reward function"


def _apply(outcome: AttemptOutcome, episode: EpisodeGraph, turns: Sequence[Turn]) -> None:
    """Record the ``outcome`` of an attempt with the turns ``turns`` in ``episode``, and mark the episode as finished.
    The outcome contains the rewards and which turns carry loss. Raises :class:`~headrace.base.errors.EpisodeError` if
    an agent has no reward."""
    last = max((index for index, turn in enumerate(turns) if turn.stop_reason is not None), default=-1)
    for index, turn in enumerate(turns):
        is_excluded = outcome.trained is not None and turn.stop_reason is not None and index not in outcome.trained
        reason = turn.untrained or (NOT_CHOSEN if is_excluded else "")
        reward = outcome.turn_rewards.get(index)
        columns = outcome.turn_extra.get(index)
        if index == last and LAST in outcome.turn_extra:
            columns = {**(columns or {}), **outcome.turn_extra[LAST]}
        is_unchanged = (reason, reward, columns) == (turn.untrained, turn.reward, None)  # true of most turns
        changes = {"untrained": reason, "reward": reward, "extra": {**turn.extra, **(columns or {})}}
        episode.turns.append(turn if is_unchanged else msgspec.structs.replace(turn, **changes))
    episode.reward, episode.agent_rewards = outcome.reward, outcome.agent_rewards
    if outcome.agent_rewards:
        _refuse_unrewarded(episode)
        if episode.reward is None:
            episode.reward = statistics.fmean((episode.shares or outcome.agent_rewards).values())
    episode.status = EpisodeStatus.FINISHED


def _refuse_unrewarded(episode: EpisodeGraph) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` if an agent whose answers carry loss has no reward."""
    trained = {turn.author for turn in episode.turns if turn.stop_reason is not None and not turn.untrained}
    unrewarded = sorted(trained - episode.agent_rewards.keys())
    if unrewarded:
        raise EpisodeError(
            f"agent_rewards leaves out {unrewarded[0]!r}, whose answers carry loss",
            remedy="give one for each agent that answered, or choose with trained=[...] what carries loss",
            reason="reward_none",
        )


class Withdrawal:
    """A handle through which the controller ends one episode early: the engine drops its request at once, and the
    record of the episode contains the tokens sampled so far."""

    def __init__(self) -> None:
        """Create a handle that is not attached to an episode yet."""
        self.reason = ""
        """The reason of the withdrawal; empty until :meth:`withdraw` is called."""
        self._end: Callable[[], None] | None = None
        """The function that ends the attached episode; ``None`` while no episode is attached."""

    def attach(self, end: Callable[[], None]) -> None:
        """Set ``end``, the function that ends the episode. It is called at once if the episode was already
        withdrawn."""
        self._end = end
        if self.reason:
            end()

    def withdraw(self, reason: str) -> None:
        """End the episode and record ``reason``. This has no effect on an episode whose time limit has already
        expired."""
        self.reason = reason
        if self._end is not None:
            self._end()


def _expire(scope: asyncio.Timeout) -> None:
    """Make a timeout scope expire now. Do nothing if it has already expired."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
