"""One episode, from its task to its last token: the boundary at which a failure becomes a record."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from headrace.engine import PLAIN, Engine, RequestOptions
from headrace.env import Env
from headrace.errors import HeadraceError, RequestError
from headrace.rollout.withdrawal import Withdrawal
from headrace.types.episode import Episode, EpisodeKey, EpisodeStatus, StopReason, Turn, TurnPart
from headrace.types.sampling import Sampling
from headrace.types.task import Task
from headrace.types.tokens import IntColumn, Tokens


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


@dataclass(slots=True, kw_only=True)
class EnginePolicy:
    """A policy that samples from an engine, for one episode."""

    engine: Engine
    sampling: Sampling
    run_seed: int
    key: EpisodeKey
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""
    on_part: Callable[[TurnPart], None] = _ignore
    """Handed every token of a turn as it arrives."""
    begun: dict[int, TurnPart] = field(default_factory=dict)
    """What was sampled of a turn in an earlier life, by its place among the sampled turns."""
    turns_begun: int = 0
    """So far; a part of the next turn's seed."""
    sampled: list[Turn] = field(default_factory=list)
    """Every turn that has ended, one that failed halfway included."""

    async def sample(self, prompt_ids_T: IntColumn, *, parent: int) -> Turn:
        number = self.turns_begun
        self.turns_begun += 1
        parts: list[TurnPart] = []
        try:
            async for part in self._parts(number, prompt_ids_T):
                if part.lost:
                    parts.clear()
                parts.append(part)
        finally:
            routings = (part.context_routing for part in parts if part.context_routing is not None)
            turn = Turn(
                author="policy",
                tokens=Tokens.concat([part.tokens for part in parts]),
                parent=parent,
                stop_reason=parts[-1].stop_reason if parts else None,
                context_routing=next(routings, None),
            )
            self.sampled.append(turn)
        return turn

    async def _parts(self, number: int, prompt_ids_T: IntColumn) -> AsyncIterator[TurnPart]:
        """The turn as it grows, from what an earlier life has of it: the same draws come after the same tokens."""
        seed = episode_seed(self.run_seed, self.key, number)
        sampling = msgspec.structs.replace(self.sampling, seed=seed)
        prompt = prompt_digest(prompt_ids_T)
        begun, lost, options = self.begun.get(number), "", PLAIN
        if begun is not None and begun.prompt != prompt:
            begun, lost = None, "crash"
        if begun is not None:
            full = len(begun.tokens) >= sampling.max_new_tokens
            ended = begun.stop_reason or (StopReason.LENGTH if full else None)
            yield replace(begun, stop_reason=ended)
            if ended is not None:
                return
            options = RequestOptions(answer_ids_T=begun.tokens.ids_T)
        async for chunk in self.engine.generate(prompt_ids_T, sampling, options):
            part = TurnPart(
                key=self.key,
                turn=number,
                prompt=prompt,
                tokens=chunk.tokens,
                stop_reason=chunk.stop_reason,
                context_routing=chunk.prompt_routing,
                lost="restarted" if chunk.restarted else lost,
            )
            lost = ""
            self.on_tokens(len(chunk.tokens))
            self.on_part(part)
            yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of one environment against one engine."""

    engine: Engine
    env: Env
    sampling: Sampling
    run_seed: int
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""
    on_part: Callable[[TurnPart], None] = _ignore
    """Handed every token of a turn as it arrives."""
    timeout_s: float | None = None
    """How long an attempt may take; ``None``: for ever."""

    async def run(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal | None = None, begun: Sequence[TurnPart] = ()
    ) -> Episode:
        """One attempt at ``task``; turns that were ``begun`` go on from there. A request that the engine refuses, an
        attempt that takes too long, and whatever the environment raises, fails this episode only; the death of a part
        is not its failure and goes on to whoever runs it."""
        policy = EnginePolicy(
            engine=self.engine,
            sampling=self.sampling,
            run_seed=self.run_seed,
            key=key,
            on_tokens=self.on_tokens,
            on_part=self.on_part,
            begun={part.turn: part for part in begun},
        )
        episode = Episode(key=key)
        withdrawal = withdrawal or Withdrawal()
        limit = asyncio.timeout(self.timeout_s)
        withdrawal.attach(limit)
        try:
            async with limit:
                episode.turns = await self.env.run(task, policy)
        except TimeoutError as error:
            if withdrawal.reason:
                return _unfinished(episode, policy, EpisodeStatus.LEFT_OUT, withdrawal.reason)
            cause = f"env_timeout: not over after env.timeout_s={self.timeout_s} s"
            if not limit.expired():  # one of the environment's own
                cause = f"env_error: {type(error).__name__}: {error}"
            return _unfinished(episode, policy, EpisodeStatus.FAILED, cause)
        except RequestError as error:
            came = bool(policy.sampled) and len(policy.sampled[-1].tokens) > 0
            reason = "engine_failed" if came else "request_refused"
            return _unfinished(episode, policy, EpisodeStatus.FAILED, f"{reason}: {error.problem}")
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of an environment: its failure is a record
            cause = f"env_error: {type(error).__name__}: {error}"
            return _unfinished(episode, policy, EpisodeStatus.FAILED, cause)
        episode.status = EpisodeStatus.FINISHED
        return episode


def _unfinished(episode: Episode, policy: EnginePolicy, status: EpisodeStatus, cause: str) -> Episode:
    """What was sampled stays with it, so that it is counted; what it answered is gone with the environment's turns."""
    episode.turns = [replace(turn, parent=None) for turn in policy.sampled]
    episode.status, episode.cause = status, cause
    return episode
