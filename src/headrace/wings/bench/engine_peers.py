"""The worker processes of the benchmarks, one for each *side* of a comparison, such as one engine. A worker process
reads requests, one JSON object per line, from its standard input, and writes one answer to each on its standard
output."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from headrace.base.clock import RealClock
from headrace.base.environ import child_environment, engine_environment
from headrace.base.errors import ComponentDied

VLLM_CACHE_BYTES = 2**30
"""The size of vLLM's key-value cache, in bytes: enough for 64 sequences of 1,024 tokens of the larger model."""
_DEADLINE_S = 1800.0
"""The longest wait for an answer, in seconds."""
_LOG_LINES = 15
"""The number of last lines of a worker's log that an error contains."""
ENGINE = "headrace.wings.bench.engine_worker"
_VLLM = Path(__file__).with_name("engine_vllm.py")


class PeerProcess:
    """The client of a worker process that answers requests of a benchmark; :func:`open_worker` creates it."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        """Create the client of ``process``. ``name`` is the side that the process measures, for messages; ``log`` is
        the file with its standard error."""
        self._name = name
        self._process = process
        self._log = log

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the process, wait for the answer, and return it. Other lines that the process writes before
        the answer are skipped.

        Raises :class:`~headrace.base.errors.ComponentDied` if the process ends, or if it does not answer within half an
        hour, in which case it is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(_DEADLINE_S, self._process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"ok":'):
                    answer: dict[str, Any] = json.loads(line)["ok"]
                    return answer
        except BrokenPipeError:
            pass  # the process has ended: raised below
        finally:
            alarm.cancel()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise ComponentDied(
            f"the benchmark's process {self._name} gave no answer within {_DEADLINE_S:g} s or ended, "
            f"its exit code is {self._process.poll()}:\n{tail}",
            remedy="read its last words above; -9 without any is mostly a lack of memory",
        )

    def resident_bytes(self) -> int:
        """Return the memory in bytes that the process and its children use now (proportional set size: a page that
        several of these processes share counts once)."""
        top = psutil.Process(self._process.pid)
        family = [top, *top.children(recursive=True)]
        return sum(int(one.memory_full_info().pss) for one in family)


class Side(Protocol):
    """The contract of an implementation that a worker process measures."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request, and return the answer to it, a JSON object."""
        ...


@runtime_checkable
class ClosingSide(Side, Protocol):
    """The contract of a side that has to release resources at the end."""

    def close(self) -> None:
        """Release all resources."""
        ...


def answer_requests(open_side: Callable[[dict[str, Any]], Side]) -> None:
    """Open the side that the first argument of this process, a worker, describes in JSON, and answer the requests on
    the standard input until the input ends."""
    import torch

    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    with ExitStack() as stack:
        side = open_side(spec)
        if isinstance(side, ClosingSide):
            stack.callback(side.close)
        for line in sys.stdin:
            sys.stdout.write(json.dumps({"ok": side.handle(json.loads(line))}) + "\n")
            sys.stdout.flush()


@contextmanager
def open_worker(side: str, model: Path, threads: int, *, vllm: str = "", module: str = ENGINE) -> Iterator[PeerProcess]:
    """Start a process that measures ``side`` with the module ``module``, yield its client, and end the process after
    the body of the context. ``model`` is the directory (or file) that the side loads; the log is written beside it.
    ``threads`` is the number of threads. The interpreter ``vllm`` runs the side ``vllm``."""
    log = model.parent / f"{side}.log"
    spec = json.dumps({"side": side, "model": str(model), "threads": threads})
    environment = child_environment(threads)
    command = [sys.executable, "-m", module, spec]
    if side in ("native", "bfloat16", "fed"):
        environment |= engine_environment()  # the environment of a run's engine
    if side == "vllm":
        command = [vllm, "-P", str(_VLLM), spec]
        environment |= _vllm_environment(threads)
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )  # fmt: skip
    try:
        yield PeerProcess(side, process, log)
    finally:
        _end(process)


def cold_first_token_s(side: str, model: Path, threads: int, *, request: Mapping[str, Any], vllm: str = "") -> float:
    """Return the seconds from the start of a process for the engine ``side`` with the ``model`` to its answer to
    ``request``, a request for one token. The process has ``threads`` threads; ``vllm`` is the interpreter of the side
    ``vllm``."""
    clock = RealClock()
    start_s = clock.now()
    with open_worker(side, model, threads, vllm=vllm) as fresh:
        fresh.call(request)
        return clock.now() - start_s


def _end(process: subprocess.Popen[str]) -> None:
    """End the process by closing its standard input; kill it and its children if it does not end within 20 s."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # the process may have ended
        process.stdin.close()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    process.stdout.close()


def _vllm_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of vLLM on ``threads`` cores, without its telemetry."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_BYTES // 2**30),
        # without this, vLLM reserves a core for its server, which is not used here
        "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
        "VLLM_TARGET_DEVICE": "cpu",
    }
