"""A Redis server of a test's own, on a socket in its directory."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("redis-server")


class RedisServer:
    """Started, killed and started again with the file it appended to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "r.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, appendonly: str = "yes", **more: str) -> None:
        assert PROGRAM is not None
        options = {"port": "0", "unixsocket": str(self.socket), "dir": str(self.directory), "save": ""}
        options |= {"appendonly": appendonly, "appendfsync": "everysec", "daemonize": "no", **more}
        command = [PROGRAM, *(word for key, value in options.items() for word in (f"--{key}", value))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if b"ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server ended")

    def client(self) -> Any:
        """To look at what it holds."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def started(directory: Path, **options: str) -> RedisServer:
    if PROGRAM is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    pytest.importorskip("redis")
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory)
    server.start(**options)
    return server


@contextmanager
def redis_server(**options: str) -> Iterator[RedisServer]:
    """One that does not outlive the body."""
    with tempfile.TemporaryDirectory(prefix="hr-") as directory:  # a socket's path is short
        server = started(Path(directory), **options)
        try:
            yield server
        finally:
            server.kill()
