"""A process that a run on given rows starts, and that lives only as long as the run's own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.launch.hosts.main import die_with_starter


class TiedProcess:
    """A process with a session (process group) of its own, so that Ctrl-C does not reach it and it can be killed
    together with everything it has started. It ends when this process ends, whatever ends this one."""

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
        """Start a new interpreter that calls the function ``main`` of ``module``, which reads ``order``, one line, with
        :func:`read_order`. Its output is appended to the file ``log``. ``environment`` are its environment variables,
        by default those of this process; ``pass_fds`` are descriptors that it keeps open."""
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
        self._process.stdin.flush()  # and stays open: its end tells the process that this one has ended

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
        """Return the last lines of the log, joined by slashes; empty if it has none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-count:])

    def end(self) -> None:
        """Kill the process and everything it has started, if it has not ended, and close the pipe to it."""
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def read_order() -> bytes:
    """Return the order with which this process was started as a :class:`TiedProcess`. From now on it is killed,
    together with everything it starts, as soon as the process that started it has ended."""
    order = sys.stdin.buffer.readline()
    die_with_starter(sys.stdin.fileno())
    return order
