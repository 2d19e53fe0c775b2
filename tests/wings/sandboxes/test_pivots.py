"""A branch of an episode in a shell: world and tokens continue from one moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.types.episode import AttemptKind, EpisodeGraph, EpisodeKey, EpisodeStatus, TokenChunk
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions
from headrace.launch.inprocess import LocalEngine
from headrace.models import ModelConfig, load_tokenizer
from headrace.models.tiny import TinySpec, make_tiny
from headrace.rollout import Chat, EpisodeRunner
from headrace.rollout.branches import Forking
from headrace.rollout.environments import AttemptOutcome, OpenEpisode
from headrace.rollout.environments.data import load_rows
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import EpisodePolicy
from headrace.wings.sandboxes.environment import ShellEnv
from headrace.wings.sandboxes.world import close_shared_worlds
from tests.engine.native.harness import Weights, make_engine
from tests.wings.bridges.conftest import TEMPLATE
from tests.wings.sandboxes.task_files import HARBOR, write_task

COMMANDS, DRAWN, ANSWER_TOKENS = 4, 2, 4
HANDLE = f"""
exec 2> /dev/null
if [ "$(cat /app/log 2> /dev/null | wc -l)" -lt {DRAWN} ]; then
    echo "$1 $(head -c 30 /dev/urandom | cksum)" >> /app/log
else
    echo "$1" >> /app/log; mkdir -p "/app/d$1" && cd "/app/d$1"
fi
{{ cat /app/log; pwd; }} | cksum | cut -c 1-3
"""
"""Every shell begins with this, and has the command as its first argument. The first results are drawn; each later one,
and the directory, follow from the commands so far."""
FILES = {
    "instruction.md": "W1",
    "task.toml": "",
    "environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY handle /app/\nENV BASH_ENV=/app/handle\n",
    "environment/handle": HANDLE,
    "tests/test.sh": "find /app | sort | cat - /app/log | cksum | cut -f 1 -d ' ' > /logs/verifier/reward.txt\n",
}


class InThisProcess:
    """The shell as an environment without a worker process."""

    begins_with_prompt = False

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        options = {"image": "machine", "action": "line", "system": "", "commands": COMMANDS}
        self._rollout = as_rollout(partial(ShellEnv, **options), executor)

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        policy = EpisodePolicy(episode, attempt_kind=episode.attempt_kind)
        return AttemptOutcome(reward=(await self._rollout(task.row, policy)).reward)


class SameDraws:
    """Forks a sequence as branches do, and leaves it the seed that the episode had."""

    def __init__(self, engine: LocalEngine, parent: int) -> None:
        self._engine, self._seed, self.by_prefix = engine, 0, 0
        self._forking = Forking(_Inner(self), parent=parent, name="0/0", on_prefix=self._count)

    def _count(self) -> None:
        self.by_prefix += 1

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self._seed = sampling.seed
        async for chunk in self._forking.generate(prompt_ids_T, sampling, options):
            yield chunk


class _Inner:
    def __init__(self, outer: SameDraws) -> None:
        self._outer = outer

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        sampling = msgspec.structs.replace(sampling, seed=self._outer._seed)
        async for chunk in self._outer._engine.generate(prompt_ids_T, sampling, options):
            yield chunk


@dataclass
class Bench:
    """An engine of a small random model, and a runner of episodes."""

    engine: LocalEngine
    runner: EpisodeRunner

    async def origin(self, key: EpisodeKey, task: Task) -> tuple[EpisodeGraph, list[TokenChunk]]:
        """An episode, and its answers with the ids of their requests."""
        parts: dict[int, list[TokenChunk]] = {}
        runner = replace(
            self.runner,
            attempt_kind=AttemptKind.ORIGIN,
            on_part=lambda part: parts.setdefault(part.turn, []).append(part),
        )
        return await runner.run(key, task), [TokenChunk.concat(parts[turn]) for turn in sorted(parts)]

    async def branch(
        self, key: EpisodeKey, task: Task, prefix: Sequence[TokenChunk], kind: AttemptKind = AttemptKind.BRANCH
    ) -> EpisodeGraph:
        """The episode again, from the last of its answers in ``prefix``, with the draws that it had."""
        same = SameDraws(self.engine, prefix[-1].request_id)
        episode = await replace(self.runner, engine=same, attempt_kind=kind).run(key, task, partial_turns=prefix)
        assert same.by_prefix == 0 or kind is not AttemptKind.BRANCH
        return episode


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    spec = TinySpec(
        vocab="WXYZ0123456789", hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, max_positions=256,
        init_std=0.3, chat_template=TEMPLATE,
    )  # fmt: skip
    return make_tiny(tmp_path / "model", spec)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def run_bench(
    directory: Path, buffer: Path, executor: ThreadPoolExecutor, body: Callable[[Bench], Awaitable[None]]
) -> None:
    config, tokenizer = ModelConfig(path=str(directory)), load_tokenizer(str(directory))
    core, weights = make_engine(config, flush_tokens=1), Weights(config, buffer)
    weights.send(core, 0)

    async def run() -> None:
        async with asyncio.timeout(120), LocalEngine(core, clock=RealClock()) as engine:
            runner = EpisodeRunner(
                engine=engine,
                env=InThisProcess(executor),
                sampling=Sampling(max_new_tokens=ANSWER_TOKENS, stop_ids=(tokenizer.eos_token_id,)),
                run_seed=0,
                on_tokens=lambda _: None,
                chat=Chat.create(tokenizer, [tokenizer.eos_token_id]),
            )
            await body(Bench(engine, runner))
        await close_shared_worlds()

    asyncio.run(run())


@pytest.mark.parametrize("num_tasks", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_branch_with_the_same_draws_continues_as_its_episode_did(
    chat_model: Path, tmp_path: Path, executor: ThreadPoolExecutor, num_tasks: int
) -> None:
    rng = np.random.default_rng(0)
    rows = [load_rows(write_task(tmp_path / f"{n}", {**HARBOR, **FILES}))[0] for n in range(num_tasks)]

    async def body(bench: Bench) -> None:
        ends = set()
        for number, row in enumerate(rows):
            key = EpisodeKey(number, 0)
            task = Task(row_index=number, row=row, prompt="", prompt_ids_T=np.zeros(0, np.int32))
            episode, answers = await bench.origin(key, task)
            assert (episode.status, len(answers)) == (EpisodeStatus.FINISHED, COMMANDS), episode.cause
            ends.add(episode.reward)
            place = int(rng.integers(DRAWN, COMMANDS))
            at = int(rng.integers(1, len(answers[place].tokens))) if len(answers[place].tokens) > 1 else 0
            kept = msgspec.structs.replace(answers[place], tokens=answers[place].tokens[:at], stop_reason=None)
            branch = await bench.branch(key, task, [*answers[:place], kept])
            assert branch.status is EpisodeStatus.FINISHED, branch.cause
            assert [turn.tokens.ids_T.tolist() for turn in branch.turns] == [
                turn.tokens.ids_T.tolist() for turn in episode.turns
            ]
            assert branch.reward == episode.reward  # the sum of all files and their content
        assert len(ends) == num_tasks

    run_bench(chat_model, tmp_path / "buffer", executor, body)
