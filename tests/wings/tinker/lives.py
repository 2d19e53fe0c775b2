"""A server in a process of its own, which is killed and started again.

Importing takes seconds, so that one process imports everything, and forks for each life of the server.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from headrace.base.clock import RealClock
from headrace.wings.tinker.run import serve
from tests.wings.tinker.serving import KEY, bind, settings

ROOT = Path(__file__).parents[3]


class Lives:
    """A server that lives again and again at one port, in one state."""

    def __init__(self, forking: subprocess.Popen[str], port: int) -> None:
        self._forking = forking
        self.url = f"http://127.0.0.1:{port}"
        self.begin()

    def begin(self) -> None:
        """Start the server, and wait until it answers."""
        assert self._forking.stdin is not None
        self._forking.stdin.write("begin\n")
        self._forking.stdin.flush()
        self._pid = int(self._line())
        while not self._answers():
            assert self._forking.poll() is None
            os.kill(self._pid, 0)  # raises if the server has ended by itself

    def kill(self) -> None:
        """End the server as kill -9 does."""
        os.kill(self._pid, signal.SIGKILL)
        assert self._line() == str(signal.SIGKILL.value), "it was alive until now"

    def _line(self) -> str:
        assert self._forking.stdout is not None
        return self._forking.stdout.readline().strip()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/healthz", timeout=5):
                return True
        except (URLError, OSError):
            return False


@contextmanager
def living(model: Path, state: Path) -> Iterator[Lives]:
    """Yield a server that answers; it is killed at the end."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.wings.tinker.lives", str(model), str(state), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as forking:
        lives = Lives(forking, port)
        try:
            yield lives
        finally:
            lives.kill()
            forking.kill()


def main() -> None:
    """Fork a server for each line of the standard input; print its process, and the signal that ended it."""
    model, state, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(settings(model, state, port=port), KEY, clock=RealClock(), on_serving=lambda url: None)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) * -1, flush=True)


if __name__ == "__main__":
    main()
