"""What is special about sessions in Kubernetes: what its service refuses, and what dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.wings.sandboxes import SandboxSpec, SessionEnded, open_sandboxes
from tests.wings.sandboxes.conftest import memory_folder, service_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with memory_folder() as folder, service_of("kubernetes", folder) as made:
        yield made


def test_a_cluster_that_refuses_or_is_not_there_is_told_by_name(cluster: Any) -> None:
    for options, words in (
        ({"kubeconfig": cluster.kubeconfig("wrong", token="wrong")}, "401 Unauthorized"),
        ({"kubeconfig": cluster.kubeconfig("gone", server="http://127.0.0.1:1")}, "did not list jobs"),
        ({"kubeconfig": "/nowhere/config"}, "find no cluster"),
    ):
        with pytest.raises(EnvError, match=words):
            asyncio.run(open_sandboxes("kubernetes", (), options))
    with pytest.raises(ConfigError, match="nodeSelektor"):
        asyncio.run(open_sandboxes("kubernetes", (), {**cluster.options(), "pod": {"nodeSelektor": {}}}))


def test_what_cannot_start_or_dies_ends_by_name_and_leaves_no_job(cluster: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            with pytest.raises(EpisodeError, match="ErrImagePull: pull access denied"):
                await driver.start(SandboxSpec(image="nothing:here"))
            cluster.quota = 0
            with pytest.raises(EpisodeError, match="exceeded quota") as error:
                await driver.start(SandboxSpec())
            cluster.quota = 1000
            assert error.value.reason == "session_start"
            session = await driver.start(SandboxSpec())
            asyncio.get_running_loop().call_later(0.3, cluster.kill, next(iter(cluster.pids)))
            with pytest.raises(SessionEnded, match="its processes were killed"):
                await session.run("sleep 1000")
            session = await driver.start(SandboxSpec())
            cluster.cut_after = 20_000
            with pytest.raises(SessionEnded, match="its processes were killed"):
                await session.run("head -c 500000 /dev/zero")
            cluster.cut_after = None

    asyncio.run(body())
    assert not cluster.jobs


def test_a_fork_is_an_exact_copy_of_what_was_changed(cluster: Any) -> None:
    """Times to the nanosecond, links, modes that shut out their owner, changed and deleted files of the image."""
    change = """
    mkdir d shut; echo 1 > d/f; ln d/f hard; ln -s d/f soft; mkfifo pipe; echo x > secret; chmod 000 secret shut
    touch -d '2001-02-03 04:05:06.123456789' d/f; rm /usr/bin/wc; echo more >> /usr/bin/seq
    head -c 20000000 /dev/zero > big
    """
    look = (
        "cd /; find workspace usr/bin tmp -printf '%p %y %m %U %G %n %T@ %l\\n' | sort; "
        "tail -n 1 usr/bin/seq | tail -c 5"
    )

    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            session = await driver.start(SandboxSpec())
            await session.run(change)
            seen = (await session.run(look)).stdout
            fork = await driver.fork(await session.snapshot())
            assert (await session.run(look)).stdout == seen
            again = await driver.fork(await fork.snapshot())
            for each in (fork, again):
                assert (await each.run(look)).stdout == seen
            assert seen.endswith("more\n")

    asyncio.run(body())
