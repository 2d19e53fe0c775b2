"""Sessions in containers, by the command-line client of docker or podman.

    ContainerDriver ── client run ══ server.sh, the first process of a container   one client process for each session
                    ── client commit: a snapshot is an image, and a fork is a container of that image

When this process dies, the kernel closes the client's standard input. Then the server's input ends, the server ends,
and the client removes the container (``--rm``). Images of snapshots may remain: they are labelled with their owner's
name, and the next driver on the machine deletes the images of dead owners (owners.py).
"""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import EnvError, EpisodeError
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSpec
from headrace.wings.sandboxes.served.keeping import KeepingDriver, KeptSession
from headrace.wings.sandboxes.served.owners import LABEL, is_dead
from headrace.wings.sandboxes.served.session import LINE_BYTES, ServerChannel, server_arguments
from headrace.wings.sandboxes.served.settings import validate_driver_settings

SNAPSHOTS = "headrace-snapshot"
"""The repository name of the images of snapshots."""
CALL_S = 120.0
"""The longest time of one call of the client, in seconds."""
END_S = 20.0
"""The time in which a container must end by itself, in seconds; then it is killed."""
OWN_BYTES = 64 * MIB
"""The memory of a container beyond the limit of its session, in bytes: for the server and the outputs of a command."""


class ContainerSettings(Section):
    """The settings of containers: ``env.options.driver``."""

    client: str = ""
    """The client program, by name or path; empty: the program with the name of the kind (docker or podman)."""
    image: str = ""
    """The image of sessions whose task does not name an image."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When an image is downloaded."""
    network: str = "none"
    """The network of the containers, by the client's name for it; ``none``: no network."""
    cpus: float | None = Field(default=None, gt=0)
    """The number of processors that one container may use; unset: all."""
    capabilities: tuple[str, ...] = ()
    """Capabilities of the root user in a container, such as CHOWN or SETUID; none by default."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the client's ``run``."""


class ContainerDriver(KeepingDriver):
    """A driver of sessions in containers, on this machine or on the machine of the client's service. Create it with
    :meth:`open`."""

    def __init__(self, kind: str, client: str, settings: ContainerSettings, readable: Sequence[str]) -> None:
        """Create the driver of ``kind`` with ``settings``, which calls the program ``client``. Containers can read the
        paths ``readable`` of the machine."""
        super().__init__(kind, settings.image, {})
        self.settings = settings
        self._client = client
        self._readable = readable

    @classmethod
    async def open(cls, kind: str, readable: Sequence[str], options: Mapping[str, Any]) -> ContainerDriver:
        """Return the driver of ``kind`` (docker or podman) with the settings ``options``, and delete containers and
        images of dead owners. Raises :class:`~headrace.base.errors.EnvError` if the client is missing or does not reach
        its service. Containers can read the paths ``readable`` of the machine."""
        settings = validate_driver_settings(kind, ContainerSettings, options)
        client = shutil.which(settings.client or kind)
        if client is None:
            raise EnvError(
                f"there is no program {settings.client or kind} here", remedy=f"install it, or set client for {kind!r}"
            )
        driver = cls(kind, client, settings, readable)
        await driver.sweep()
        return driver

    async def call(self, *words: str) -> tuple[int, str, str]:
        """Call the client with these arguments. Return its exit code, its output and its error output."""
        process = await asyncio.create_subprocess_exec(self._client, *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(CALL_S):
                out, err = await process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace").strip()

    async def sweep(self) -> None:
        """Remove containers and images of dead owners. Raises :class:`~headrace.base.errors.EnvError` if the client
        does not reach its service."""
        code, names, words = await self.call(
            "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"
        )  # fmt: skip
        if code:
            raise EnvError(
                f"{self._client} cannot be used: {words[-300:]}",
                remedy="start its service, and allow this user to use it",
            )
        for name in names.split():
            if is_dead(name.removeprefix("headrace-")):
                await self.call("rm", "--force", name)
        _, images, _ = await self.call(
            "images", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}"
        )  # fmt: skip
        for image in images.split():
            if image.rpartition(":")[0].endswith(SNAPSHOTS) and is_dead(image.rpartition(":")[2]):
                await self.call("rmi", image)

    async def keep(self, session: KeptSession, name: str) -> str:
        """Make an image of the present files of a session, and return its name."""
        image = f"{SNAPSHOTS}:{name}"
        code, _, words = await self.call("commit", "--change", f"LABEL {LABEL}={self.owner}", session.name, image)
        if code:
            raise EpisodeError(
                f"the files of a session cannot be kept as an image: {words[-300:]}",
                remedy="look at the disk of the service, and take fewer snapshots in one line",
                reason="session_snapshot",
            )
        return image

    async def remove(self, kept: str) -> None:
        """Remove the image ``kept``. If that fails, a later driver removes it."""
        await self.call("rmi", kept)

    async def begin(self, spec: SandboxSpec, origin: str, *, below: str) -> KeptSession:
        """Start a container for a session with the settings ``spec`` from the image ``origin``; ``below`` is that
        image's name if it is a snapshot's. If the service cannot limit the size of its files, start it without that
        limit, and report so in :attr:`missing`."""
        while True:
            session = self.enter(KeptSession(self, spec, self.next_name(), below))
            bounded = "disk" not in self.missing
            try:
                channel = await self._run(session, origin, bounded=bounded)
            except BaseException:
                await session.give_up("its client did not start")
                raise
            try:
                await session.attach(channel)
            except EpisodeError as error:
                if not bounded or not _is_about_storage(error.problem):
                    raise
                self.missing["disk"] = f"the service cannot bound a container's files: {error.problem[-200:]}"
                continue
            session.missing = dict(self.missing)
            return session

    async def _run(self, session: KeptSession, image: str, *, bounded: bool) -> ContainerChannel:
        """Start a client that runs the container of ``session`` from ``image``, and return the channel to its server.
        ``bounded`` limits the size of the container's files."""
        settings, limits = self.settings, session.spec.limits
        words = [
            "run", "--rm", "--interactive", "--name", session.name, "--label", f"{LABEL}={self.owner}",
            "--pull", settings.pull, "--network", settings.network, "--hostname", "sandbox", "--workdir", "/",
            "--log-driver", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--pids-limit", str(2 * limits.processes + 32), "--memory", str(limits.memory_bytes + OWN_BYTES),
            "--ulimit", f"nofile={max(1024, limits.open_files)}:{max(1024, limits.open_files)}",
            "--ulimit", "core=0:0", "--shm-size", str(OWN_BYTES + 4 * limits.output_bytes),
        ]  # fmt: skip
        words += [word for name in settings.capabilities for word in ("--cap-add", name)]
        words += [word for path in self._readable for word in ("--volume", f"{path}:{path}:ro")]
        if settings.cpus is not None:
            words += ["--cpus", str(settings.cpus)]
        if bounded:
            words += ["--storage-opt", f"size={limits.disk_bytes}"]
        words += [*settings.arguments, "--entrypoint", "bash", image, *server_arguments(session.spec)]
        process = await asyncio.create_subprocess_exec(
            self._client, *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=LINE_BYTES, start_new_session=True
        )
        return ContainerChannel(self, process, session.name)


class ContainerChannel(ServerChannel):
    """The standard streams of a client process that runs a container."""

    def __init__(self, driver: ContainerDriver, process: Process, name: str) -> None:
        """Create the channel over the streams of ``process``, a client that runs the container ``name`` of
        ``driver``."""
        self._driver = driver
        self._process = process
        self._name = name

    async def send(self, data: bytes) -> None:
        """Send the bytes ``data`` to the server."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def line(self) -> bytes:
        """Return the next line of the server."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the server."""
        assert self._process.stdout is not None
        return await self._process.stdout.readexactly(size)

    async def close(self) -> None:
        """Close the server's input, and wait until the client has removed the container."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.communicate()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill the container, and remove it."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # ends a container that is still being created
            await self._driver.call("kill", "--signal", "KILL", self._name)
            try:
                async with asyncio.timeout(END_S):
                    await self._process.communicate()
            except TimeoutError:
                await self._driver.call("rm", "--force", self._name)
                self._process.kill()
                await self._process.wait()

    async def exit_reason(self) -> str:
        """Return the end of the client's error output, or its exit code."""
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(END_S):
                text = (await self._process.stderr.read()).decode("utf-8", "replace")
                await self._process.wait()
        except TimeoutError:
            return "the client does not end"
        return " ".join(text.split())[-500:] or f"the client has ended with exit code {self._process.returncode}"


def _is_about_storage(words: str) -> bool:
    """Return whether a client's error message is about the limit of a container's files."""
    return any(word in words.lower() for word in ("storage-opt", "storage opt", "storage option", "quota", "pquota"))


async def open_docker(readable: Sequence[str] = (), **options: Any) -> ContainerDriver:
    """Open the driver of docker with the settings ``options``; its containers can read the paths ``readable``."""
    return await ContainerDriver.open("docker", readable, options)


async def open_podman(readable: Sequence[str] = (), **options: Any) -> ContainerDriver:
    """Open the driver of podman with the settings ``options``; its containers can read the paths ``readable``."""
    return await ContainerDriver.open("podman", readable, options)
