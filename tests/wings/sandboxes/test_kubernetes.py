"""What is special about sessions in Kubernetes: what its service refuses, and what dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.wings.sandboxes import SandboxSpec, SessionEnded, open_sandboxes
from headrace.wings.sandboxes.served.owners import make_owner_name
from tests.wings.sandboxes.conftest import memory_folder, start_service


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with memory_folder() as folder, start_service("kubernetes", folder) as made:
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


def test_jobs_of_dead_owners_are_removed_and_those_of_others_left(cluster: Any) -> None:
    machine, boot, space, *_ = make_owner_name().split("-")
    owners = {
        "killed": f"{machine}-{boot}-{space}-{os.getpid()}-1",
        "restarted": f"{machine}-0-{space}-1-1",
        "elsewhere": f"0-{boot}-{space}-1-1",
        "alive": make_owner_name(),
        "nameless": "",
    }
    for name, owner in owners.items():
        labels = {"headrace.owner": owner} if owner else {}
        cluster.do(
            lambda name=name, labels=labels: cluster.jobs.update({name: {"metadata": {"name": name, "labels": labels}}})
        )

    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()):
            pass

    asyncio.run(body())
    left = set(cluster.jobs)
    cluster.do(cluster.jobs.clear)
    assert left == {"elsewhere", "alive", "nameless"}


def test_a_missing_client_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.aio.client", None)
    monkeypatch.delitem(sys.modules, "headrace.wings.sandboxes.served.cluster", raising=False)
    with pytest.raises(EnvError, match=r"need the package kubernetes.*not installed") as error:
        asyncio.run(open_sandboxes("kubernetes", ()))
    assert "headrace[kubernetes]" in error.value.remedy


def test_a_silent_cluster_is_told_after_its_time(cluster: Any) -> None:
    async def body() -> None:
        async with asyncio.timeout(20):
            with pytest.raises(EnvError, match=r"did not list jobs: no answer within 0.2 s"):
                await open_sandboxes("kubernetes", (), {**cluster.options(), "call_s": 0.2})

    cluster.silent = True
    try:
        asyncio.run(body())
    finally:
        cluster.silent = False


def test_a_network_that_nothing_closes_is_missing_by_name(cluster: Any) -> None:
    """Where this user may make no policy, where the network does not carry it out, and where it is left open."""

    async def missing(**options: Any) -> Mapping[str, str]:
        async with await open_sandboxes(
            "kubernetes", (), {**cluster.options(), "snapshots": False, **options}
        ) as driver:
            return (await driver.start(SandboxSpec())).missing

    cluster.policies.clear()
    cluster.allows_policies = False
    assert "cannot create resource" in asyncio.run(missing())["network"]
    cluster.allows_policies = True
    assert "network" not in asyncio.run(missing())
    cluster.address = tuple(cluster.url.removeprefix("http://").split(":"))
    cluster.carries_out_policies = False
    found = asyncio.run(missing())
    assert f"a pod reaches {'/'.join(cluster.address)}" in found["network"]
    cluster.address = ("", "")
    assert "cannot be tried" in asyncio.run(missing())["network"]
    assert "network" not in asyncio.run(missing(network="open"))
    cluster.address, cluster.carries_out_policies = ("192.0.2.1", "443"), True


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_a_cancelled_start_leaves_no_job(cluster: Any, after_s: float) -> None:
    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await driver.start(SandboxSpec())
                    await asyncio.Event().wait()

    asyncio.run(body())
    assert not cluster.jobs
    cluster.settle()  # a pod that was deleted while it began ends a moment later
    assert not cluster.pids


def test_a_start_that_is_cancelled_before_its_job_is_made_leaves_none(cluster: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            cluster.create_s = 0.3
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await driver.start(SandboxSpec())
            cluster.create_s = 0.0
            assert not cluster.jobs

    asyncio.run(body())
    assert not cluster.jobs


def test_a_start_that_is_cancelled_stays_cancelled_though_its_job_is_then_refused(cluster: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            cluster.create_s, cluster.refuses_jobs = 0.3, True
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await driver.start(SandboxSpec())
            cluster.create_s = 0.0
            with pytest.raises(EpisodeError, match="exceeded quota"):
                await driver.start(SandboxSpec())

    try:
        asyncio.run(body())
    finally:
        cluster.create_s, cluster.refuses_jobs = 0.0, False
    assert not cluster.jobs


def test_a_fork_of_an_image_that_has_changed_is_refused(cluster: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("kubernetes", (), cluster.options()) as driver:
            snapshot = await (await driver.start(SandboxSpec())).snapshot()
            cluster.digest = "sha256:34"
            with pytest.raises(EpisodeError, match=r"has changed since the snapshot: '.*sha256:12', now '.*sha256:34'"):
                await driver.fork(snapshot)
            cluster.digest = "sha256:12"
            await driver.fork(snapshot)

    asyncio.run(body())
    assert not cluster.jobs
