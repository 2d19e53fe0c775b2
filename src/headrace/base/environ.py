"""The only place that reads environment variables; and the run's token, which must not be one.

Programs that a process starts can read its environment and its arguments (``/proc``). So the token comes through the
pipe that keeps a process of the run alive, and is kept in memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

PART_OF_A_RUN = "HEADRACE_PART_OF_A_RUN"
"""Set in every process of a run, and in what those start."""


def is_part_of_a_run() -> bool:
    """Whether this process belongs to a run, or was started by one that does."""
    return bool(os.environ.get(PART_OF_A_RUN))


_held: list[str] = []
"""The secret of the run that this process belongs to; empty outside a run."""


def write_token(lifeline: int, token: str) -> None:
    """Put ``token`` into the pipe ``lifeline``, whose other end a new process will have."""
    os.write(lifeline, token.encode() + b"\n")


def read_token(lifeline: int) -> None:
    """Take the token out of the pipe ``lifeline``; none comes where its other end is closed."""
    data = b""
    while not data.endswith(b"\n") and (byte := os.read(lifeline, 1)):
        data += byte
    _held[:] = [data.decode().strip()]


def run_token() -> str:
    """Return the secret of the run that this process belongs to; empty outside a run."""
    return "".join(_held)


def forget_token() -> None:
    """Let go of the token, in a process that runs code of others and has shown it."""
    _held.clear()


def secret(name: str) -> str:
    """A key that a setting names instead of holding it; empty where it is not set."""
    return os.environ.get(name, "")


def child_environment(num_threads: int) -> dict[str, str]:
    """The environment of a process of the run."""
    return {**os.environ, **part_environment(num_threads)}


def part_environment(num_threads: int) -> dict[str, str]:
    """What a process of the run has beyond the controller's environment: its share of the cores, no hub."""
    return {
        PART_OF_A_RUN: "1",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_environment() -> dict[str, str]:
    """What a process with an engine needs before it loads torch, unless its user has said otherwise.

    The threads of torch's OpenMP spin for milliseconds after each operation that they shared, on the cores that the
    kernels' own threads are waiting for. They spin for some 30 microseconds instead.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": "2000"}


def fork_server_environment() -> dict[str, str]:
    """The environment of the process that parts are forked from. What OpenMP reads when it is loaded, it reads here,
    for all of them; how many threads they have each part says itself."""
    return {**child_environment(1), **engine_environment()}


def become_part(variables: Mapping[str, str]) -> None:
    """Give this process, which was forked, the environment of a part."""
    os.environ.update(variables)


@contextmanager
def no_cuda_calls() -> Iterator[None]:
    """Within this, whoever asks torch whether there is a GPU is answered without CUDA: a process that has called it
    cannot be forked."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def become_engine() -> None:
    """Give this process :func:`engine_environment`; too late once torch is loaded."""
    os.environ.update(engine_environment())


def program_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that a run starts for an episode: ``variables``, and nothing of the run's own.

    Its ``python`` is the one that runs the run. What it asks of this machine, and of the run, goes through no proxy.
    """
    hidden = (PART_OF_A_RUN, "ANTHROPIC_AUTH_TOKEN")  # a client would send that one, too
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    run = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    own = dict.fromkeys(["127.0.0.1", "localhost", run, inherited.get("NO_PROXY") or inherited.get("no_proxy")])
    direct = ",".join(filter(None, own))
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), inherited.get("PATH")]))
    return {**inherited, "PATH": path, "NO_PROXY": direct, "no_proxy": direct, **variables}


def shared_memory_root() -> Path:
    """Where shared buffers live: ``/dev/shm`` where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def num_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # gate: getattr - not every system can tell
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_root() -> Path:
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/headrace``, ``~/.cache/headrace`` where that is unset."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "headrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which of a learner's ranks this process is."""

    rank: int
    """From 0, over all machines."""
    local_rank: int
    """From 0, on this machine: the number of its device."""
    world: int
    """Ranks altogether."""


def rank_place() -> RankPlace:
    """What the launcher of ranks (torchrun, Ray, ours) says of this process; the only one if it says nothing."""
    read = os.environ.get
    return RankPlace(
        rank=int(read("RANK", "0")), local_rank=int(read("LOCAL_RANK", "0")), world=int(read("WORLD_SIZE", "1"))
    )


def rank_environment(place: RankPlace, interface: str = "") -> dict[str, str]:
    """What a rank is told: its place, and which network interface leads to the others; without one they are on this
    machine, too."""
    known = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "GLOO_SOCKET_IFNAME": interface or ("lo0" if sys.platform == "darwin" else "lo"),
    }
    return {**known, "NCCL_SOCKET_IFNAME": interface} if interface else known
