"""When ranks of a learner end together, the user hears of the one that ended first."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.base.errors import ComponentDied
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Child
from headrace.launch.clients.peer import Peer
from headrace.launch.hosts import EXIT_RANK_LOST
from headrace.launch.local import _raise_on_death
from headrace.launch.local_process import LocalProcess
from tests.launch.workers import site

WAITS = "import sys; sys.stdin.read()"
FOLLOWS = f"import sys; sys.stdin.read(); sys.exit({EXIT_RANK_LOST})"


async def child(directory: Path, name: str, code: str) -> tuple[Child, asyncio.subprocess.Process]:
    """A process that waits for the end of its standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    theirs, ours = os.pipe()
    os.close(theirs)
    peer = Peer(name, ControllerChannel(directory, name, object), token="t", on_spans=lambda _: None)
    return Child(name, peer, LocalProcess(process, ours), directory / f"{name}.log"), process


async def first_cause(directory: Path, killed: bool | None) -> str:
    """What is said of two ranks of which the first loses the other, which is ``killed`` before (or after) that, or
    lives on."""
    async with site(directory) as place:
        first, follower = await child(place.directory, "learner", FOLLOWS)
        second, other = await child(place.directory, "learner-1", WAITS)

        async def end() -> None:
            if killed is True:
                other.send_signal(signal.SIGKILL)
                await other.wait()
            follower.stdin.close()
            await follower.wait()
            if killed is False:
                other.send_signal(signal.SIGKILL)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(end())
                return await words_of(first, second)
        finally:
            for one in (first, second):
                await one.kill()
                one.close()


async def words_of(*ranks: Child) -> str:
    with pytest.raises(ComponentDied) as died:
        await _raise_on_death(ranks)
    return died.value.problem


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_followed_another_into_its_end_is_not_named(tmp_path: Path, before: bool) -> None:
    words = asyncio.run(first_cause(tmp_path, before))
    assert words.startswith("learner-1 (pid ")
    assert "was killed by SIGKILL" in words


def test_a_rank_that_lost_another_is_named_where_no_other_has_ended(tmp_path: Path) -> None:
    assert asyncio.run(first_cause(tmp_path, None)).startswith("learner (pid ")
