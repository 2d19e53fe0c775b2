"""The machines of a stand-in for a sandbox service: containers of the stand-in for docker that do nothing by
themselves, in whose namespaces programs are started as root with all rights, as in a virtual machine. Needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.wings.sandboxes import fake_docker, image_tree

T = TypeVar("T")
MIB = 1 << 20


@dataclass(kw_only=True)
class Machine:
    """One machine, and the programs that were started on it."""

    name: str
    pid: int
    client: Process
    tags: dict[str, str] = field(default_factory=dict)
    programs: dict[Any, Process] = field(default_factory=dict)
    over: asyncio.TimerHandle | None = None

    async def start(self, *words: str, user: int = 0) -> Process:
        """Start a program on the machine."""
        enter = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--root",
            "--wdns=/",
        ]
        enter += [f"--setuid={user}", f"--setgid={user}"] if user else []
        enter += ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "FROM_SERVICE=1"]
        return await asyncio.create_subprocess_exec(*enter, *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MIB)

    def kill(self, program: Process) -> None:
        """Kill a program: the child of the one that has entered the namespaces."""
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        for pid in children.read_text().split() if children.exists() else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class Machines:
    """All machines and images of a service, in one folder."""

    def __init__(self, folder: Path) -> None:
        image_tree.build(folder / "tree")
        self.client = folder / "client"
        self.store = folder / "store"
        fake_docker.write_client(self.store, [folder / "tree"], self.client)
        self.alive: dict[str, Machine] = {}
        self.images: dict[str, list[str]] = {"tree:base": []}
        """The names of each image by its id."""
        self._numbers = itertools.count(1)

    async def call(self, *words: str) -> None:
        """Call the stand-in for docker."""
        process = await asyncio.create_subprocess_exec(self.client, *words, stdout=DEVNULL, stderr=PIPE)
        _, words_of_error = await process.communicate()
        if process.returncode:
            raise RuntimeError(words_of_error.decode())

    async def start(self, image: str, tags: dict[str, str], *, life_s: float, network: bool = False) -> Machine:
        """Start a machine that ends after ``life_s``. Raises ``KeyError`` if there is no such image."""
        self.images[image]
        name = f"m{next(self._numbers)}"
        words = [
            "run", "--rm", "--interactive", "--name", name, "--label", "of=service", "--pull", "never",
            "--network", "host" if network else "none", "--hostname", name, "--workdir", "/", "--log-driver", "none",
            "--pids-limit", "1000", "--memory", "1", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--ulimit", "nofile=1024:1024", "--shm-size", str(64 * MIB), "--entrypoint", "bash", image,
            "-c", "echo up; exec sleep infinity",
        ]  # fmt: skip
        client = await asyncio.create_subprocess_exec(self.client, *words, stdin=DEVNULL, stdout=PIPE)
        assert client.stdout is not None
        assert await client.stdout.readline() == b"up\n"
        pid = json.loads((self.store / "containers" / f"{name}.json").read_text())["pid"]
        machine = Machine(name=name, pid=pid, client=client, tags=dict(tags))
        self.alive[name] = machine
        loop = asyncio.get_running_loop()
        machine.over = loop.call_later(life_s, lambda: asyncio.ensure_future(self.end(name)))
        return machine

    async def end(self, name: str) -> bool:
        """End a machine with all that runs on it."""
        machine = self.alive.pop(name, None)
        if machine is None:
            return False
        assert machine.over is not None
        machine.over.cancel()
        await self.call("kill", "--signal", "KILL", name)
        await machine.client.wait()
        return True

    async def keep(self, name: str, called: str) -> str:
        """Make an image of a machine, and return its id."""
        image = f"snap{next(self._numbers)}:kept"
        await self.call("commit", "--change", "LABEL of=service", name, image)
        self.images[image] = [called] if called else []
        return image

    async def remove(self, image: str) -> bool:
        """Remove an image."""
        return self.images.pop(image, None) is not None


class ServiceThread:
    """An event loop in a thread of its own, in which a stand-in for a service runs."""

    def __init__(self, folder: Path) -> None:
        self.machines = Machines(folder)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carry out a call in the loop of the service."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def stop(self) -> None:
        """End all machines, and the loop."""
        for name in list(self.machines.alive):
            self(self.machines.end(name))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()
