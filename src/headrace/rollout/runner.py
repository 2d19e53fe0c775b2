"""One episode, from its task to its last token: the boundary at which a failure becomes a record."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from headrace.base.clock import being_cancelled
from headrace.base.errors import EpisodeError, HeadraceError, RequestError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn, TurnPart
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import RequestOptions, TokenSource
from headrace.rollout.agents import FROZEN_AGENT, POLICY_ALONE, Agents, of_frozen
from headrace.rollout.chat import Chat
from headrace.rollout.conversations import UNLIMITED, Conversations, EpisodeLimits, TurnRequest
from headrace.rollout.environments import AttemptOutcome, Environment
from headrace.rollout.withdrawal import Withdrawal

RETRIED = ("env_error", "env_timeout", "env_crashed", "env_blocked")
"""Reasons for which an attempt is made again, where ``env.retries`` are left."""
NOT_CHOSEN = "not_chosen"
"""Why a turn carries no loss that a rollout has not named among those that do."""
CUT_OFF = "cut_off"
"""Why a turn carries no loss whose end nobody waited for, or that broke off: nobody has read it."""
_OWN_DRAWS = -1
"""In place of a turn: the seed of the environment itself."""


def episode_seed(run_seed: int, key: EpisodeKey, turn: int = 0) -> int:
    """The seed of one sampled turn: fixed by the run's seed and the turn's place, whatever else happens.

    >>> episode_seed(0, EpisodeKey(1, 2)) == episode_seed(0, EpisodeKey(1, 2))
    True
    """
    digest = hashlib.blake2b(f"{run_seed}/{key.group}/{key.place}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def prompt_digest(prompt_ids_T: IntColumn) -> str:
    """Names what a turn is sampled after."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids_T, np.int32).tobytes(), digest_size=8).hexdigest()


def _ignore(_: TurnPart) -> None:
    """Nobody keeps what is sampled."""


def _ignore_turn(_: EpisodeKey, __: IntColumn, ___: Turn) -> None:
    """Nobody looks at turns before their episode has ended."""


def _ignore_note(_: str) -> None:
    """Nobody counts what is odd."""


@dataclass(slots=True, kw_only=True)
class EnginePolicy:
    """Samples the turns of one episode from an engine, and holds all of its turns."""

    engine: TokenSource
    sampling: Sampling
    run_seed: int
    key: EpisodeKey
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""
    on_part: Callable[[TurnPart], None] = _ignore
    """Handed every token of a turn as it arrives."""
    on_turn: Callable[[EpisodeKey, IntColumn, Turn], None] = _ignore_turn
    """Handed every turn that has come to its end, with what it was sampled after."""
    agents: Agents = POLICY_ALONE
    """Who answers under which name."""
    sampling_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """Is entered while a turn is sampled: the episode waits for the engine then, not for its environment."""
    begun: dict[int, TurnPart] = field(default_factory=dict)
    """What was sampled of turns in an earlier life or attempt, by their places among the sampled turns."""
    turns: list[Turn] = field(default_factory=list)
    """Given and sampled, parents before children; those that failed halfway included."""
    _asked: dict[int, TurnPart] = field(default_factory=dict)
    _lost: str = "crash"

    async def sample(self, wanted: TurnRequest) -> int:
        """Sample a turn and append it; its index."""
        frozen = self.agents.frozen(wanted.author)
        if frozen is not None:
            wanted = replace(wanted, untrained=FROZEN_AGENT)
        prompt = self._name(wanted)
        number = self._number(prompt)
        empty = TurnPart(key=self.key, turn=number, prompt=prompt, tokens=Tokens.concat([]))
        self._asked[number] = empty
        parts: list[TurnPart] = []
        try:
            with self.sampling_turn():
                await self._collect(parts, empty, wanted)
        finally:
            routings = (part.context_routing for part in parts if part.context_routing is not None)
            ended = parts[-1].stop_reason if parts else None
            turn = Turn(
                author=wanted.author,
                tokens=Tokens.concat([part.tokens for part in parts]),
                parent=wanted.parent,
                stop_reason=ended,
                context_routing=next(routings, None),
                untrained=wanted.untrained or ("" if ended else CUT_OFF),
            )
            self.turns.append(turn)
            index = len(self.turns) - 1
            self._asked[number] = replace(
                empty, tokens=turn.tokens, stop_reason=turn.stop_reason, context_routing=turn.context_routing
            )
        if frozen is None:
            self.on_turn(self.key, wanted.prompt_ids_T, turn)
        return index

    async def _collect(self, parts: list[TurnPart], empty: TurnPart, wanted: TurnRequest) -> None:
        """Add the parts of a turn to ``parts`` as they arrive; where some were lost, those that follow replace them."""
        async for part in self._parts(empty, wanted):
            if part.lost:
                parts.clear()
            parts.append(part)
            if wanted.hear is not None:
                wanted.hear(part)

    def begin_again(self) -> None:
        """The episode is attempted once more: what is asked again is answered with what was sampled."""
        self.begun = self.begun | {number: part for number, part in self._asked.items() if len(part.tokens)}
        self._asked = {}
        self._lost = "env_retry"
        self.turns.clear()

    def _name(self, wanted: TurnRequest) -> str:
        """A digest of what the turn is sampled after and, where that is not as usual, how, and by whom."""
        other = f"{wanted.sampling.stop}" if wanted.sampling.stop != self.sampling.stop else ""
        if wanted.untrained:
            other += f"{wanted.sampling.temperature}/{wanted.sampling.top_p}/{wanted.sampling.top_k}"
        if wanted.untrained == FROZEN_AGENT or self.agents.adapter(wanted.author):
            other += f"/{wanted.author}"
        return prompt_digest(wanted.prompt_ids_T) + other

    def _number(self, prompt: str) -> int:
        """The place of the next turn among those that are sampled: that of one that was begun after the same, if any,
        else the first that is free."""
        same = [number for number, part in self.begun.items() if part.prompt == prompt and number not in self._asked]
        if same:
            return min(same)
        return next(number for number in range(len(self._asked) + 1) if number not in self._asked)

    async def _parts(self, empty: TurnPart, wanted: TurnRequest) -> AsyncIterator[TurnPart]:
        """The turn as it grows, from what there is of it: the same draws come after the same tokens."""
        sampling = msgspec.structs.replace(wanted.sampling, seed=episode_seed(self.run_seed, self.key, empty.turn))
        begun, lost = self.begun.get(empty.turn), ""
        session = f"{self.run_seed}/{self.key.group}/{self.key.place}"
        options = RequestOptions(session=session, agent=self.agents.adapter(wanted.author))
        if begun is not None and begun.prompt != empty.prompt:
            begun, lost = None, self._lost
        if begun is not None:
            full = len(begun.tokens) >= sampling.max_new_tokens
            ended = begun.stop_reason or (StopReason.LENGTH if full else None)
            yield replace(begun, stop_reason=ended)
            if ended is not None:
                return
            options = replace(options, answer_ids_T=begun.tokens.ids_T)
        frozen = self.agents.frozen(wanted.author)
        if frozen is not None:
            unrecorded = {"record_kept": False, "record_routing": False, "record_entropy": False}
            sampling = msgspec.structs.replace(sampling, **unrecorded)
        source = self.engine if frozen is None else frozen
        async for chunk in source.generate(wanted.prompt_ids_T, sampling, options):
            part = replace(
                empty,
                tokens=chunk.tokens if frozen is None else of_frozen(chunk.tokens),
                stop_reason=chunk.stop_reason,
                context_routing=chunk.prompt_routing,
                lost="restarted" if chunk.restarted else lost,
                request_id=chunk.request_id,
            )
            lost = ""
            self.on_tokens(len(chunk.tokens))
            self.on_part(part)
            yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of one environment against one engine."""

    engine: TokenSource
    env: Environment
    sampling: Sampling
    run_seed: int
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""
    on_part: Callable[[TurnPart], None] = _ignore
    """Handed every token of a turn as it arrives."""
    on_turn: Callable[[EpisodeKey, IntColumn, Turn], None] = _ignore_turn
    """Handed every turn that has come to its end, with what it was sampled after."""
    note: Callable[[str], None] = _ignore_note
    """Told, in words that can be counted, what is odd and no error."""
    agents: Agents = POLICY_ALONE
    """Who answers under which name."""
    limits: EpisodeLimits = UNLIMITED
    """What one episode may have."""
    chat: Chat | None = None
    """Writes and reads messages; ``None``: the environment asks in tokens."""
    timeout_s: float | None = None
    """How long an attempt may take; ``None``: for ever."""
    retries: int = 0
    """How often an episode whose environment failed is attempted again."""
    sampling_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """Is entered while a turn of an episode is sampled."""

    async def run(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal | None = None, begun: Sequence[TurnPart] = ()
    ) -> EpisodeGraph:
        """One episode of ``task``; turns that were ``begun`` go on from there. A request that the engine refuses, an
        attempt that takes too long, and whatever the environment raises, fails this episode only; the death of a part
        is not its failure and goes on to whoever runs it."""
        policy = EnginePolicy(
            engine=self.engine,
            sampling=self.sampling,
            run_seed=self.run_seed,
            key=key,
            on_tokens=self.on_tokens,
            on_part=self.on_part,
            on_turn=self.on_turn,
            agents=self.agents,
            sampling_turn=self.sampling_turn,
            begun={part.turn: part for part in begun},
        )
        withdrawal = withdrawal or Withdrawal()
        episode = await self._attempt(policy, task, withdrawal)
        for _ in range(self.retries):
            reason = episode.cause.partition(":")[0]
            if episode.status is not EpisodeStatus.FAILED or reason not in RETRIED:
                break
            self.note(f"an episode is attempted again: {reason}")
            policy.begin_again()
            episode = await self._attempt(policy, task, withdrawal)
        return episode

    async def _attempt(self, policy: EnginePolicy, task: Task, withdrawal: Withdrawal) -> EpisodeGraph:
        episode = EpisodeGraph(key=policy.key, status=EpisodeStatus.FAILED)
        seed = episode_seed(self.run_seed, policy.key, _OWN_DRAWS)
        conversations = Conversations(policy, self.limits, chat=self.chat, seed=seed, note=self.note)
        limit = asyncio.timeout(self.timeout_s)
        withdrawal.attach(limit)
        try:
            async with limit:
                outcome = await self.env.run(task, conversations)
            if policy.turns:
                _apply(outcome, episode, policy.turns)
            else:
                episode.cause = "nothing_sampled: the environment ended without an answer of the model"
        except TimeoutError as error:
            if withdrawal.reason:
                episode.status, episode.cause = EpisodeStatus.LEFT_OUT, withdrawal.reason
            elif limit.expired():
                episode.cause = f"env_timeout: not over after env.timeout_s={self.timeout_s} s"
            else:  # one of the environment's own
                episode.cause = f"env_error: {type(error).__name__}: {error}"
        except EpisodeError as error:
            episode.cause = f"{error.reason}: {error.problem}"
        except RequestError as error:
            came = bool(policy.turns) and bool(policy.turns[-1].tokens.sampled_T.any())
            reason = "engine_failed" if came else "request_refused"
            episode.cause = f"{reason}: {error.problem}"
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of an environment: its failure is a record
            episode.cause = f"env_error: {type(error).__name__}: {error}"
        if being_cancelled():  # whatever the environment made of it: else it would be attempted again
            raise asyncio.CancelledError
        episode.turns = episode.turns or list(policy.turns)
        return episode


def remedy_of(cause: str) -> str:
    """Whom to look at where episodes fail, by the cause of one.

    >>> remedy_of("request_refused: prompt of 900 tokens + max_new_tokens=256 exceed max_context=512")
    'look at what is asked of the engine, at its settings and its log'
    """
    if cause.partition(":")[0] in ("request_refused", "engine_failed"):
        return "look at what is asked of the engine, at its settings and its log"
    return "mend the environment or the reward function"


def _apply(outcome: AttemptOutcome, episode: EpisodeGraph, turns: Sequence[Turn]) -> None:
    """The attempt is over. Raises :class:`~headrace.base.errors.EpisodeError` where it leaves an agent without a
    reward."""
    for index, turn in enumerate(turns):
        left = outcome.trained is not None and turn.stop_reason is not None and index not in outcome.trained
        why = turn.untrained or (NOT_CHOSEN if left else "")
        episode.turns.append(replace(turn, untrained=why, reward=outcome.turn_rewards.get(index)))
    episode.reward, episode.agent_rewards = outcome.reward, outcome.agent_rewards
    if outcome.agent_rewards:
        _refuse_unrewarded(episode)
        if episode.reward is None:
            episode.reward = statistics.fmean((episode.shares or outcome.agent_rewards).values())
    episode.status = EpisodeStatus.FINISHED


def _refuse_unrewarded(episode: EpisodeGraph) -> None:
    trained = {turn.author for turn in episode.turns if turn.stop_reason is not None and not turn.untrained}
    lacking = sorted(trained - episode.agent_rewards.keys())
    if lacking:
        raise EpisodeError(
            f"agent_rewards leaves out {lacking[0]!r}, whose answers carry loss",
            remedy="give one for each agent that answered, or choose with trained=[...] what carries loss",
            reason="reward_none",
        )
