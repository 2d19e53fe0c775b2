"""The only module that reads environment variables, and the holder of the run's token, which must not be one of them.

A program that a process starts can read the environment and the arguments of that process (``/proc``). So the token
comes through the pipe that keeps a process of the run alive, and is kept in memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

PART_OF_A_RUN = "HEADRACE_PART_OF_A_RUN"
"""An environment variable that is set in every process of a run and in the programs that these start."""


def is_part_of_a_run() -> bool:
    """Return whether this process belongs to a run, or was started by a process that does."""
    return bool(os.environ.get(PART_OF_A_RUN))


_held: list[str] = []
"""The token of the run that this process belongs to, as its only element; empty outside a run."""


def write_token(lifeline: int, token: str) -> None:
    """Write ``token`` into the pipe with the file descriptor ``lifeline``. A new process reads it from the other end
    with :func:`read_token`."""
    os.write(lifeline, token.encode() + b"\n")


def read_token(lifeline: int) -> None:
    """Read the run's token from the pipe with the file descriptor ``lifeline``, and keep it for :func:`run_token`. The
    token is empty if the other end is closed."""
    data = b""
    while not data.endswith(b"\n") and (byte := os.read(lifeline, 1)):
        data += byte
    _held[:] = [data.decode().strip()]


def run_token() -> str:
    """Return the token of the run that this process belongs to; empty outside a run."""
    return "".join(_held)


def forget_token() -> None:
    """Delete the token from memory. A process calls this after it has proved its identity with the token and before it
    runs code of the user."""
    _held.clear()


def secret(name: str) -> str:
    """Return the value of the environment variable ``name``; empty if it is not set. A setting names this variable
    instead of containing the secret itself."""
    return os.environ.get(name, "")


def visible_gpus() -> str | None:
    """Return the value of ``CUDA_VISIBLE_DEVICES``, the list of the GPUs that a program may use; ``None`` if it is not
    set, so that all may be used."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(num_threads: int) -> dict[str, str]:
    """Return all environment variables for a new process of the run that may use ``num_threads`` threads: those of this
    process and those of :func:`part_environment`."""
    return {**os.environ, **part_environment(num_threads)}


def part_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that a process of the run has in addition to those of the controller's process: the mark
    that it is part of a run, its number of threads, and the order not to contact the model hub."""
    return {
        PART_OF_A_RUN: "1",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_environment() -> dict[str, str]:
    """Return the variables that an engine's process needs before it loads torch, unless the user has set them.

    After each parallel operation, the threads of torch's OpenMP spin for milliseconds, on the cores that the
    kernels' own threads wait for. With these variables they spin for about 30 microseconds instead.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": "2000"}


def fork_server_environment() -> dict[str, str]:
    """Return the environment of the fork server, the process from which all other processes of a run are forked. OpenMP
    reads its variables when it is loaded, which happens here for all of them; each sets its own number of threads
    later."""
    return {**child_environment(1), **engine_environment()}


def apply_part_environment(variables: Mapping[str, str]) -> None:
    """Set ``variables`` in the environment of this process, which has just been forked and has the variables of the
    fork server."""
    os.environ.update(variables)


@contextlib.contextmanager
def no_cuda_calls() -> Iterator[None]:
    """Keep torch from calling CUDA within this context when code asks it whether there is a GPU: a process that has
    called CUDA cannot be forked."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def apply_engine_environment() -> None:
    """Set the variables of :func:`engine_environment` in this process. This has no effect after torch is loaded."""
    os.environ.update(engine_environment())


def program_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that a run starts for an episode, such as an agent: this process's variables
    without those that belong to the run itself and the keys of our servers (``HEADRACE_VIEW_TOKEN`` and the like), and
    ``variables``, which the episode sets.

    Its ``python`` is the interpreter of the run. Its requests to this machine and to the run's model server use no
    proxy.
    """
    hidden = (PART_OF_A_RUN, "ANTHROPIC_AUTH_TOKEN")  # an Anthropic client would send it along with the episode's key
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not (name.startswith("HEADRACE_") and name.endswith("_TOKEN"))
    }
    run = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    own = dict.fromkeys(["127.0.0.1", "localhost", run, inherited.get("NO_PROXY") or inherited.get("no_proxy")])
    direct = ",".join(filter(None, own))
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), inherited.get("PATH")]))
    return {**inherited, "PATH": path, "NO_PROXY": direct, "no_proxy": direct, **variables}


def shared_memory_root() -> Path:
    """Return the folder for buffers that processes share: ``/dev/shm`` if it exists and is writable, else the temporary
    directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # gate: getattr - not every system can tell
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


PROCESS_GONE = (psutil.Error, OSError)
"""What psutil raises about a process that has ended or may not be read: an error of its own or, where another process
has got the same number by then, that of the system."""


def thread_times_ns(pid: int) -> dict[str, tuple[int, int]]:
    """Return two times of each thread of the process ``pid``, by the thread's id: the processor time it has used, and
    the time it has waited for a processor, both in nanoseconds. The result is empty for a process that has ended, and
    on systems other than Linux."""
    times: dict[str, tuple[int, int]] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return times
    for thread in threads:
        # a thread, or the whole process, can end between the listing and the reading
        with contextlib.suppress(OSError, ValueError):
            used, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            times[thread] = (int(used), int(waited))
    return times


def cache_root() -> Path:
    """Return the folder for files that can be recreated, such as compiled kernels: ``$XDG_CACHE_HOME/headrace``, or
    ``~/.cache/headrace``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "headrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The position of this process among the ranks (distributed worker processes) of a learner."""

    rank: int
    """The number of the rank over all machines, from 0."""
    local_rank: int
    """The number of the rank on this machine, from 0, which is also the number of its device."""
    world: int
    """The number of ranks on all machines."""


def rank_place() -> RankPlace:
    """Return the position that the launcher (torchrun, Ray, Headrace) gave this process through environment variables;
    without them, this process is the only rank."""
    read = os.environ.get
    return RankPlace(
        rank=int(read("RANK", "0")), local_rank=int(read("LOCAL_RANK", "0")), world=int(read("WORLD_SIZE", "1"))
    )


def rank_environment(place: RankPlace, interface: str = "") -> dict[str, str]:
    """Return the environment variables that tell a process its rank and the network interface through which it reaches
    the other ranks. An empty ``interface`` means that all ranks are on this machine."""
    known = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "GLOO_SOCKET_IFNAME": interface or ("lo0" if sys.platform == "darwin" else "lo"),
    }
    return {**known, "NCCL_SOCKET_IFNAME": interface} if interface else known
