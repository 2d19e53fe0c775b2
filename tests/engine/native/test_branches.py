"""Branches sampled by the embedded engine: what they cost, and which weights they are of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.launch.inprocess import LocalEngine
from headrace.models import ModelConfig
from headrace.rollout import EpisodeRunner
from headrace.rollout.branches import Forking, repeats
from headrace.rollout.environments import SingleTurn
from tests.engine.native.harness import Weights, make_engine

TASK = Task(row_index=0, row={}, prompt="?", prompt_ids_T=np.arange(3, 25, dtype=np.int32))
KEY = EpisodeKey(4, 1)
AT, BRANCHES = 11, 5


class Bench:
    """One episode, and branches of it."""

    def __init__(self, directory: Path, buffer: Path, **settings: object) -> None:
        config = ModelConfig(path=str(directory))
        self.core, self.weights = make_engine(config, flush_tokens=4, **settings), Weights(config, buffer)
        self.weights.send(self.core, 0)
        self.by_prefix = 0

    async def commit(self, engine: LocalEngine, version: int) -> None:
        self.weights.scale(1.05)
        self.weights._publisher.copy(version % 2)
        await engine.stage(self.weights._publisher.announce(version, version % 2))
        await engine.commit(version)

    async def episode(self, engine: LocalEngine) -> tuple[EpisodeGraph, TokenChunk]:
        parts: list[TokenChunk] = []
        runner = self.runner(engine)
        episode = await replace(runner, on_part=parts.append).run(KEY, TASK)
        assert len({part.request_id for part in parts}) == 1
        return episode, msgspec.structs.replace(parts[-1], tokens=Tokens.concat([part.tokens for part in parts]))

    def runner(self, engine: LocalEngine) -> EpisodeRunner:
        return EpisodeRunner(
            engine=engine, env=SingleTurn(), sampling=Sampling(max_new_tokens=40), run_seed=0, on_tokens=lambda _: None
        )

    async def branches(
        self, engine: LocalEngine, whole: TokenChunk, arrived: asyncio.Event | None = None
    ) -> list[EpisodeGraph]:
        kept = msgspec.structs.replace(whole, tokens=whole.tokens[:AT], stop_reason=None)
        runner = replace(self.runner(engine), on_tokens=lambda _: arrived.set() if arrived else None)

        def told() -> None:
            self.by_prefix += 1

        runs = [
            replace(runner, engine=Forking(engine, parent=whole.request_id, name=f"0/{n}", on_prefix=told)).run(
                KEY, TASK, partial_turns=[kept]
            )
            for n in range(BRANCHES)
        ]
        return list(await asyncio.gather(*runs))


def new_versions(branches: list[EpisodeGraph]) -> set[int]:
    return {version for branch in branches for version in branch.turns[1].tokens.versions_T[AT:].tolist()}


def cost(before: EngineStats, after: EngineStats) -> tuple[int, int]:
    """Tokens of prompts and prefixes that were computed, and tokens that were sampled."""
    prefilled = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    return prefilled, after.generated_tokens - before.generated_tokens


def test_branches_cost_their_new_tokens_and_are_all_of_the_episodes_version(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    bench = Bench(model_dir("qwen3"), tmp_path / "buffer")

    async def run() -> None:
        async with asyncio.timeout(60), LocalEngine(bench.core, clock=RealClock()) as engine:
            episode, whole = await bench.episode(engine)
            before = engine.stats()
            branches = await bench.branches(engine, whole)
            # the last token that is kept is fed to sample the first new one: a token for a token
            assert cost(before, engine.stats()) == (BRANCHES, BRANCHES * (40 - AT))
            assert bench.by_prefix == 0
            assert new_versions(branches) == {0}
            assert all(repeats(episode.turns, 1, AT, branch.turns) for branch in branches)
            answers = [branch.turns[1].tokens.ids_T.tolist() for branch in (*branches, episode)]
            assert len(set(map(tuple, answers))) == BRANCHES + 1

    asyncio.run(run())


def test_branches_stay_under_their_version_while_others_are_committed(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    bench = Bench(model_dir("qwen3"), tmp_path / "buffer")

    async def run() -> None:
        async with asyncio.timeout(60), LocalEngine(bench.core, clock=RealClock()) as engine:
            _, whole = await bench.episode(engine)
            begun = asyncio.Event()
            growing = asyncio.create_task(bench.branches(engine, whole, begun))
            await begun.wait()
            await bench.commit(engine, 1)
            branches = await growing
            assert engine.stats().version == 1
            assert new_versions(branches) == {0}
            assert bench.by_prefix == 0

    asyncio.run(run())


@pytest.mark.parametrize("gone", ["version", "memory"])
def test_branches_whose_cache_is_gone_share_a_version_all_the_same(
    gone: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {"fork_memory": 0} if gone == "memory" else {}
    bench = Bench(model_dir("qwen3"), tmp_path / "buffer", **settings)

    async def run() -> None:
        async with asyncio.timeout(60), LocalEngine(bench.core, clock=RealClock()) as engine:
            episode, whole = await bench.episode(engine)
            if gone == "version":
                await bench.commit(engine, 1)
            before = engine.stats()
            branches = await bench.branches(engine, whole)
            prefilled, sampled = cost(before, engine.stats())
            assert bench.by_prefix == BRANCHES
            assert new_versions(branches) == {1 if gone == "version" else 0}
            assert all(repeats(episode.turns, 1, AT, branch.turns) for branch in branches)
            assert sampled == BRANCHES * (40 - AT)
            assert prefilled < 2 * (len(TASK.prompt_ids_T) + AT) + BRANCHES  # once for all, not once for each

    asyncio.run(run())
