"""One episode, from its task to its last token: the boundary at which a failure becomes a record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from headrace.engine import Engine
from headrace.env import Env
from headrace.errors import HeadraceError, RequestError
from headrace.types.episode import Episode, EpisodeKey, EpisodeStatus, Turn
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


@dataclass(slots=True, kw_only=True)
class EnginePolicy:
    """A policy that samples from an engine, for one episode."""

    engine: Engine
    sampling: Sampling
    run_seed: int
    key: EpisodeKey
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""
    turns_begun: int = 0
    """So far; a part of the next turn's seed."""
    sampled: list[Turn] = field(default_factory=list)
    """Every turn that has ended, one that failed halfway included."""

    async def sample(self, prompt_ids_T: IntColumn, *, parent: int) -> Turn:
        seed = episode_seed(self.run_seed, self.key, self.turns_begun)
        self.turns_begun += 1
        sampling = msgspec.structs.replace(self.sampling, seed=seed)
        parts: list[Tokens] = []
        stop_reason, context_routing = None, None
        try:
            async for chunk in self.engine.generate(prompt_ids_T, sampling):
                if chunk.restarted:
                    parts.clear()
                parts.append(chunk.tokens)
                context_routing = chunk.prompt_routing or context_routing
                stop_reason = chunk.stop_reason
                self.on_tokens(len(chunk.tokens))
        finally:
            turn = Turn(
                author="policy",
                tokens=Tokens.concat(parts),
                parent=parent,
                stop_reason=stop_reason,
                context_routing=context_routing,
            )
            self.sampled.append(turn)
        return turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunner:
    """Runs episodes of one environment against one engine."""

    engine: Engine
    env: Env
    sampling: Sampling
    run_seed: int
    on_tokens: Callable[[int], None]
    """Told how many tokens have arrived, as they arrive."""

    async def run(self, key: EpisodeKey, task: Task) -> Episode:
        """One attempt at ``task``. A request that the engine refuses, and whatever the environment raises, fails this
        episode only; the death of a part is not its failure and goes on to whoever runs it."""
        policy = EnginePolicy(
            engine=self.engine, sampling=self.sampling, run_seed=self.run_seed, key=key, on_tokens=self.on_tokens
        )
        episode = Episode(key=key)
        try:
            episode.turns = await self.env.run(task, policy)
        except RequestError as error:
            begun = bool(policy.sampled) and len(policy.sampled[-1].tokens) > 0
            reason = "engine_failed" if begun else "request_refused"
            return _failed(episode, policy, f"{reason}: {error.problem}")
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of an environment: its failure is a record
            return _failed(episode, policy, f"env_error: {type(error).__name__}: {error}")
        episode.status = EpisodeStatus.FINISHED
        return episode


def _failed(episode: Episode, policy: EnginePolicy, cause: str) -> Episode:
    """What was sampled stays with it, so that it is counted; what it answered is gone with the environment's turns."""
    episode.turns = [replace(turn, parent=None) for turn in policy.sampled]
    episode.status, episode.cause = EpisodeStatus.FAILED, cause
    return episode
