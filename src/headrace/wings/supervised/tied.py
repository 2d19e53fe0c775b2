"""A child process of a run on given rows, which ends when the run's own process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.launch.hosts.main import die_with_starter


class TiedProcess:
    """A child process in a new session (process group), so that Ctrl-C does not reach it, and it can be killed together
    with its own child processes. It is killed when this process ends, for whatever reason."""

    def __init__(
        self,
        module: str,
        order: bytes,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a Python interpreter that calls the function ``main`` of ``module``, which must read ``order``, one
        line, with :func:`read_order`. Its output is appended to the file ``log``. ``environment`` are its environment
        variables, by default the variables of this process; ``pass_fds`` are file descriptors that it inherits.
        ``arguments`` are its command-line arguments."""
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main()", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(order + b"\n")
        self._process.stdin.flush()  # the pipe stays open: its end notifies the child that this process has ended

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, without waiting for it."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the process has ended, and return its exit code, which is negative for a signal; ``None`` if it
        has not ended within ``timeout_s`` seconds."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self, count: int = 3) -> str:
        """Return the last ``count`` lines of the log, joined by slashes; empty if it has none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-count:])

    def end(self) -> None:
        """Kill the process and its child processes, if it has not ended, and close the pipe to it."""
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def read_order() -> bytes:
    """Return the order with which this process was started as a :class:`TiedProcess`. From now on this process and its
    child processes are killed as soon as the parent process ends."""
    order = sys.stdin.buffer.readline()
    die_with_starter(sys.stdin.fileno())
    return order
