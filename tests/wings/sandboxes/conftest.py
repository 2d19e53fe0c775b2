"""One driver of each local kind for the tests of a module, with calls that wait for its event loop."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.rollout.scoring.sandbox import Finished, SandboxLimits
from headrace.wings.sandboxes import LIMITS, SandboxDriver, SandboxSession, SandboxSpec, open_sandboxes
from tests.wings.sandboxes import fake_docker, image_tree

T = TypeVar("T")
KINDS = ("jail", "bubblewrap")
"""The local kinds, in which the system is the machine's own and cannot be changed."""
CONTAINERS = ("docker", "podman")
"""Kinds that own their system: docker is a stand-in for its command line, podman is real."""
SERVICES = ("kubernetes",)
"""Kinds of remote services, by their real clients. Their stand-ins run containers of the stand-in for docker."""
HOSTED = ("e2b", "modal", "daytona")
"""Kinds that run elsewhere: their real clients reach stand-ins for the services."""


def skip_missing(kind: str) -> None:
    """Skip the test where a local kind cannot be."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")


class Sandboxes:
    """A driver in an event loop of its own."""

    def __init__(self, kind: str, runner: asyncio.Runner, options: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.options = options or {}
        self.owns_system = kind in (*CONTAINERS, *HOSTED, *SERVICES)
        self.pace = {"docker": 2.0, "podman": 8.0, "e2b": 4.0, "modal": 4.0, "kubernetes": 4.0, "daytona": 4.0}.get(
            kind, 1.0
        )
        """How much longer a start takes than in the jail."""
        self._runner = runner
        self.driver: SandboxDriver = self(open_sandboxes(kind, (), self.options))

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def another(self) -> Sandboxes:
        """Another driver with the same settings."""
        return Sandboxes(self.kind, self._runner, self.options)

    def start(self, limits: SandboxLimits = LIMITS, **spec: Any) -> SandboxSession:
        return self(self.driver.start(SandboxSpec(limits=limits, **spec)))

    def python(self, session: SandboxSession, code: str) -> Finished:
        """Run a program of this Python in a session."""
        self(session.write({"/tmp/main.py": textwrap.dedent(code)}))
        return self(session.run(f"{sys.executable} -I -B /tmp/main.py"))


def container_options(kind: str, folder: Path) -> dict[str, Any]:
    """The settings of a kind of containers, with an image that is made in ``folder``; skips where it cannot be."""
    if os.getuid() != 0:
        pytest.skip("only root can make the image's overlays and containers here")
    try:
        image_tree.build(folder / "tree")
    except OSError as error:
        pytest.skip(str(error))
    client = folder / kind
    if kind == "docker":
        fake_docker.write_client(folder / "store", [folder / "tree"], client)
        return {"client": str(client), "image": "tree:base"}
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    words = ["podman", "--root", folder / "root", "--runroot", folder / "run", "--cgroup-manager", "cgroupfs"]
    words += ["--events-backend", "none", "--storage-driver", "overlay"]
    words += ["--runtime", "runc"] if shutil.which("runc") else []
    client.write_text(f'#!/bin/bash\nexec {" ".join(map(str, words))} "$@"\n')
    client.chmod(0o755)
    subprocess.run(["tar", "-C", folder / "tree", "-cf", folder / "tree.tar", "."], check=True)
    subprocess.run([client, "import", folder / "tree.tar", "tree:base"], check=True, capture_output=True)
    # this machine may refuse a container more of these than it has itself
    return {"client": str(client), "image": "localhost/tree:base", "arguments": ["--ulimit", "nproc=4096:4096"]}


@contextmanager
def start_service(kind: str, folder: Path) -> Iterator[Any]:
    """A stand-in for the service of a kind, with an image made in ``folder``; ``options()`` are settings for it."""
    pytest.importorskip({"kubernetes": "kubernetes.aio"}[kind])
    container_options("docker", folder)
    module = importlib.import_module(f"tests.wings.sandboxes.fake_{kind}")
    service = module.SERVICE(folder, folder / "docker")
    try:
        yield service
    finally:
        service.close()


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory: overlays want a file system that is none itself."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--quiet", folder / "root/overlay"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def hosted_service(kind: str, folder: Path) -> Iterator[Any]:
    """A stand-in for a service, in whose environment its client package reaches it; skips where it cannot be."""
    if os.getuid() != 0:
        pytest.skip("only root can make the machines of the stand-in here")
    pytest.importorskip(kind)  # the client of Daytona is no part of the `dev` extra
    module = importlib.import_module(f"tests.wings.sandboxes.fake_{kind}")
    try:
        service = module.SERVICE(folder)
    except OSError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in service.environment.items():
            patched.setenv(name, value)
        try:
            yield service
        finally:
            service.stop()


@pytest.fixture(
    scope="module",
    params=[*KINDS, "docker", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("podman", *HOSTED, *SERVICES))],
)
def any_sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    """A driver of each kind: what is tested with it is the contract."""
    skip_missing(request.param)
    with asyncio.Runner() as runner, memory_folder() as folder, ExitStack() as services:
        options = container_options(request.param, folder) if request.param in CONTAINERS else {}
        if request.param in HOSTED:
            services.enter_context(hosted_service(request.param, folder))
            options = {"image": "tree:base"}
        if request.param in SERVICES:
            options = services.enter_context(start_service(request.param, folder)).options()
        made = Sandboxes(request.param, runner, options)
        yield made
        made(made.driver.close())


@pytest.fixture(scope="module", params=KINDS)
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    """A driver of each local kind."""
    skip_missing(request.param)
    with asyncio.Runner() as runner:
        made = Sandboxes(request.param, runner)
        yield made
        made(made.driver.close())


@pytest.fixture
def session(sandboxes: Sandboxes) -> Iterator[SandboxSession]:
    started = sandboxes.start()
    yield started
    sandboxes(started.stop())


@pytest.fixture(scope="module")
def long_session(sandboxes: Sandboxes) -> SandboxSession:
    """One session for many tests, each of which must leave it as it was: able to work."""
    return sandboxes.start()
