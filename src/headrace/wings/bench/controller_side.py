"""The program of one run of the controller benchmark: a whole controller with its ledger, over real sockets to engines
without a model. It uses only parts that earlier versions of the package have too, so that another interpreter can
measure an earlier version with the same file.

    python controller_side.py '{"engines": 1000, "tokens": 4, ...}'

The argument is the specification (``spec``) of the run. The program prints one JSON object with the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.clock import RealClock
from headrace.base.heap import gc_frozen
from headrace.base.types.batch import Batch
from headrace.base.types.messages import controller as reports
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.control import Components, Controller, ControlSettings, RunSection
from headrace.control.observer import Observers
from headrace.control.recovery import find_starting_point
from headrace.engine.fleet import Fleet
from headrace.flow import FlowConfig
from headrace.flow.ledger import SqliteLedger, ThreadedWriter
from headrace.flow.pacing import Eager
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.engine import EngineClient
from headrace.learner.base import Publication
from headrace.rollout.environments import AttemptOutcome, SingleTurn
from headrace.rollout.scoring import NO_CONTEXT, Scores, ScoringContext

ENGINES = Path(__file__).with_name("controller_engines.py")
"""The program that runs the engines, in another process."""
PROMPT_TOKENS = 16
NUM_TASKS = 64


class IdleLearner:
    """A learner without a model: its steps take no time, and its weights are empty."""

    def __init__(self) -> None:
        """Create the learner, without trained tokens."""
        self.ends: list[tuple[float, float, int]] = []
        """For the end of each step: the time, the processor time of this process so far, both in seconds, and the
        number of tokens trained so far."""

    async def step(self, outline: Any) -> StepReport:
        """Lay out the batch of ``outline``, and return the report of a step that takes no time."""
        from headrace.flow.layout import inline, lay_out  # earlier versions of the package call ``train`` instead

        laid_out = lay_out(outline, inline)
        return laid_out.complete_report(await self.train(laid_out.batch))

    async def train(self, batch: Batch) -> StepReport:
        """Record the end of a step on ``batch``, and return the report of a step that took no time."""
        before = self.ends[-1][2] if self.ends else 0
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.ends.append((RealClock().now(), used.ru_utime + used.ru_stime, before + batch.num_tokens))
        return StepReport(
            step=batch.step,
            metrics={},
            trained_tokens=batch.num_loss_tokens,
            dropped_tokens={},
            log_pi_N=batch.logprobs_N,
            seconds=0.0,
        )

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Return the logprobs that the engine recorded for the tokens of ``batch``."""
        return batch.logprobs_N

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Return the publication of ``version`` in ``slot``, without weights."""
        return Publication(version=version, slot=slot, exposed_s=0.0)

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        """Return the weight update of a publication, without weights."""
        empty = Manifest(entries=(), total_bytes=0)
        return WeightUpdate(
            version=publication.version, slot=publication.slot, path="", manifest=empty, checksums=()
        )  # fmt: skip

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Return the weight update of ``publication`` again."""
        return await self.wait_until_published(publication)

    async def save(self, directory: Path) -> None:
        """Write nothing to ``directory``: there are no weights."""

    async def wait_until_saved(self, directory: Path) -> None:
        """Return at once: nothing was written to ``directory``."""


class AlternatingScorer:
    """A scorer that returns at once, with the rewards 0 and 1 in turn."""

    by_group = False

    def __init__(self) -> None:
        """Create the scorer; its first reward is 0."""
        self._numbers = itertools.count()
        """Counts the scored completions; the reward is the number modulo 2."""

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Return a reward of 0 or 1 for each of ``completions``; ``task`` and ``context`` are ignored."""
        return Scores(rewards=tuple([float(next(self._numbers) % 2) for _ in completions]))


class MultiTurnEnv:
    """An environment of many turns, like an agent with tools: the model reads new tokens before every answer."""

    begins_with_prompt = False
    asks_prompt = False  # the name of earlier versions of the package

    def __init__(self, turns: int, num_new: int) -> None:
        """Create an environment whose episodes have ``turns`` answers, with ``num_new`` new tokens before each."""
        self._turns = turns
        self._new_ids_T = np.arange(num_new, dtype=np.int32) % 89
        """The ids of the tokens that the model reads before each answer."""

    async def run(self, task: Task, episode: Any) -> AttemptOutcome:
        """Sample all answers of an episode for ``task``, one after the other; return its outcome, with reward 0 or
        1."""
        ids_T = np.concatenate([task.prompt_ids_T, self._new_ids_T])
        for _ in range(self._turns):
            reply = await episode.sample(ids_T)
            ids_T = np.concatenate([ids_T, np.array(reply.token_ids, np.int32), self._new_ids_T])
        return AttemptOutcome(reward=float(sum(map(ord, str(episode.key))) % 2))


def center_rewards(groups: Sequence[ScoredGroup]) -> list[float]:
    """Return the reward of each counted episode minus the mean of its group."""
    found: list[float] = []
    for group in groups:
        rewards = [episode.reward or 0.0 for episode in group.counted]
        mean = sum(rewards) / len(rewards)
        found += [reward - mean for reward in rewards]
    return found


def make_components(spec: dict[str, Any], fleet: Fleet, directory: Path) -> Components:
    """Return the components of the run that ``spec`` describes, with the engines of ``fleet``. ``directory`` is the run
    directory."""
    prompts = np.arange(NUM_TASKS * PROMPT_TOKENS, dtype=np.int32).reshape(NUM_TASKS, PROMPT_TOKENS)
    turns = int(spec["turns"])
    return Components(
        engine=fleet,
        engine_set=fleet,
        scorer=AlternatingScorer(),
        env=MultiTurnEnv(turns, int(spec["given"])) if turns > 1 else SingleTurn(),
        clock=RealClock(),
        tasks=[
            Task(row_index=index, row={"prompt": ""}, prompt="", prompt_ids_T=prompt_ids_T)
            for index, prompt_ids_T in enumerate(prompts)
        ],
        eval_tasks=[],
        sampling=Sampling(max_new_tokens=spec["tokens"]),
        max_context=1 << 20,
        decode=lambda ids: "x" * len(ids),
        learner=IdleLearner(),
        advantages=center_rewards,
        run_dir=directory,
    )


def make_settings(spec: dict[str, Any]) -> ControlSettings:
    """Return the settings of the controller: enough steps for ``spec["episodes"]`` episodes, with groups that start as
    soon as the staleness bound allows."""
    flow = FlowConfig(groups_per_step=spec["groups"], group_size=spec["group_size"], max_age=2, pacing=Eager())
    steps = spec.get("steps") or max(4, int(spec["episodes"]) // (flow.groups_per_step * flow.group_size))
    run = RunSection(steps=steps, checkpoint_every=10**9)
    return ControlSettings(run=run, flow=flow, order=lambda number: number % NUM_TASKS)


def open_engines(spec: dict[str, Any], directory: Path, stack: ExitStack, token: str) -> list[EngineClient]:
    """Start the process of the engines, and return their clients, which are not ready yet. ``stack`` kills the process
    at its end; ``token`` is the secret of the run. ``spec`` is the case to measure: the number of engines, and the
    options of their process. The sockets lie in ``directory``."""
    names = [f"engine-{number}" for number in range(spec["engines"])]
    channels = [ControllerChannel(directory, name, reports.Message) for name in names]
    numbers = (len(names), spec["flush"], spec.get("layers", 0), spec.get("slots", 1 << 30), spec.get("rate", 0))
    command = [sys.executable, str(ENGINES), str(directory), *map(str, numbers)]
    engines = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    stack.callback(engines.wait)
    stack.callback(engines.kill)
    assert engines.stdin is not None
    engines.stdin.write(f"{token}\n")
    engines.stdin.flush()
    return [
        EngineClient(name, channel, token=token, on_spans=lambda spans: None, deadline_s=120.0)
        for name, channel in zip(names, channels, strict=True)
    ]


async def run_controller(spec: dict[str, Any], directory: Path, stack: ExitStack) -> Any:
    """Run the controller that ``spec`` describes, with its files in ``directory``, and return its learner, which has
    recorded the times of the steps: ``IdleLearner`` or the client of a process. ``stack`` closes the ledger and ends
    the engines."""
    settings, fleet = make_settings(spec), Fleet(RealClock(), size=spec["engines"])
    flow, token = settings.flow, secrets.token_hex(16)
    ledger = SqliteLedger(directory / "ledger.sqlite", group_size=flow.group_size, groups_per_step=flow.groups_per_step)
    stack.callback(ledger.close)
    writer = ThreadedWriter(ledger)
    stack.callback(writer.close)
    clients = open_engines(spec, directory, stack, token)
    async with asyncio.TaskGroup() as group, AsyncExitStack() as ends:
        listening = [group.create_task(client.listen()) for client in clients]
        parts = make_components(spec, fleet, directory)
        if spec.get("rollouts"):  # an earlier version of the package has no shards
            from headrace.wings.bench.controller_shards import open_shards

            shards = open_shards(spec["rollouts"], parts.sampling, fleet, clients, directory, token=token)
            await shards.start()
            for child in shards.children.values():
                ends.push_async_callback(child.kill)
            listening.append(group.create_task(shards.run()))
            await shards.wait_until_complete()
            parts = replace(parts, shards=shards)
        if spec.get("learner"):  # an earlier version of the package lays out no batch there
            from headrace.wings.bench.controller_learner import end_learner, open_learner

            learner = open_learner(directory, stack, token)
            listening.append(group.create_task(learner.listen()))
            ends.callback(end_learner, learner)
            await learner.ready
            parts = replace(parts, learner=learner, columns_shared=True)
        for client in clients:
            await client.ready
            fleet.add(client.name, client)
        controller = Controller(parts, settings, ledger=ledger, writer=writer, observers=Observers([]))
        with gc_frozen():
            await controller.run(find_starting_point(directory))
        for task in listening:
            task.cancel()
    for client in clients:
        client.close()
    return parts.learner


def main(spec: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the run that ``spec`` describes. The first quarter of the steps, in which caches and queues
    are still filling, is not counted."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-")))
        learner = asyncio.run(run_controller(spec, directory, stack))
    ends = learner.ends[len(learner.ends) // 4 :]
    seconds, cpu_s, tokens = (float(last - first) for first, last in zip(ends[0], ends[-1], strict=True))
    episodes = (len(ends) - 1) * spec["groups"] * spec["group_size"]
    return {
        **({} if isinstance(learner, IdleLearner) else learner.figures()),
        "episodes": episodes,
        "seconds": seconds,
        "episodes_s": episodes / seconds,
        "tokens_s": tokens / seconds,
        "cpu_us_per_episode": cpu_s / episodes * 1e6,
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    """Return the most memory that this process has had, in MiB. That of the process which started it does not count,
    as it does in the figure of ``getrusage``."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (line,) = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
