"""Programs of real workers: what becomes of their requests when the worker goes."""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import signal
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients import EnvPeer, EnvPool, EnvPoolConfig
from headrace.launch.local_process import LocalStarter
from headrace.launch.starts import EnvironmentStart
from headrace.wings.agents import Endpoint
from tests.launch.workers import find_processes
from tests.wings.agents.harness import HANG, SAMPLING, TASK, ScriptedEngine, open_episode, sampled_in

PROGRAM = """
    import json, os, urllib.error, urllib.request

    def ask(content):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            data=json.dumps({"messages": [{"role": "user", "content": content}]}).encode(),
            headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

    with open(os.environ["HEADRACE_TEST_LOG"], "a") as log:
        print(os.environ["OPENAI_API_KEY"], file=log)
    ask("first")
    print(json.dumps({"reward": len(ask("second"))}))
"""


@dataclass(slots=True, kw_only=True)
class RunningPool:
    pool: EnvPool
    children: list[Child] = field(default_factory=list)


@asynccontextmanager
async def running_pool(directory: Path) -> AsyncIterator[RunningPool]:
    """A worker that runs the program above, and is replaced."""
    (directory / "agent.py").write_text(textwrap.dedent(PROGRAM))
    command = shlex.join([sys.executable, str(directory / "agent.py")])
    start = EnvironmentStart(kind="program", entry=command, concurrency=8, block_s=30.0)
    terms = EnvPoolConfig(num_workers=1, concurrency=8, block_s=30.0, start_timeout_s=60.0, scored=False)
    with tempfile.TemporaryDirectory() as sockets:
        site = Rendezvous(directory=Path(sockets), logs=directory, token="t", on_spans=lambda _: None)
        children: list[Child] = []
        numbers = itertools.count()

        async def start_worker() -> Child:
            name = f"environment-{next(numbers)}"
            peer = partial(EnvPeer, name, token=site.token, on_spans=site.on_spans)
            spec = ProcessSpec(name=name, start=start, num_threads=1, make_peer=peer)
            children.append(await Child.start(site, spec, LocalStarter()))
            return children[-1]

        pool = EnvPool(
            start_worker,
            terms,
            warn=lambda _: None,
            listening=lambda warn: Endpoint.listening(SAMPLING, clock=RealClock(), warn=warn),
        )
        try:
            async with asyncio.timeout(100), asyncio.TaskGroup() as group:
                keeping = group.create_task(pool.keep())
                await pool.wait_until_started()
                yield RunningPool(pool=pool, children=children)
                keeping.cancel()
        finally:
            await asyncio.gather(*(child.kill() for child in children))
            for child in children:
                child.close()


def test_a_worker_that_is_killed_takes_its_programs_along_and_the_episode_goes_on_with_what_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("HEADRACE_TEST_LOG", str(log))

    async def main() -> None:
        engine = ScriptedEngine(lambda text: HANG * 9 if "second" in text else "hello")
        episode = open_episode(engine)
        async with running_pool(tmp_path) as here:
            running = asyncio.ensure_future(here.pool.run(TASK, episode))
            await engine.hung.wait()
            engine.patient = False
            os.kill(here.children[0].working_pid, signal.SIGKILL)
            outcome = await running
        assert outcome.reward == len(HANG) * 9
        assert [turn.author for turn in episode.turns] == ["task", "policy", "task", "policy"]
        assert sampled_in(episode.turns) == engine.sampled  # the first answer and the part of the second were kept
        assert engine.num_running == 0

    asyncio.run(main())
    first, second = log.read_text().splitlines()
    assert first != second
    assert not find_processes(tmp_path / "agent.py")
