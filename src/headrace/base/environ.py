"""Access to environment variables, and storage of the run's token. No other module reads environment variables.

The run's token must not be an environment variable: a program that a process starts can read the environment and the
arguments of that process (``/proc``). So each process of a run receives the token through a pipe, and stores it in
memory. The pipe is called the lifeline: the process ends when its other end is closed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

PART_OF_A_RUN = "HEADRACE_PART_OF_A_RUN"
"""The name of an environment variable that is set in every process of a run and in the programs that it starts."""


def is_part_of_a_run() -> bool:
    """Return whether this process belongs to a run, or was started by a process that does."""
    return bool(os.environ.get(PART_OF_A_RUN))


_stored_token: list[str] = []
"""The token of the run that this process belongs to, as the only element; empty outside a run."""


def write_token(lifeline: int, token: str) -> None:
    """Write ``token`` into the pipe with the file descriptor ``lifeline``. The new process at the other end reads it
    with :func:`read_token`."""
    os.write(lifeline, token.encode() + b"\n")


def read_token(lifeline: int) -> None:
    """Read the run's token from the pipe with the file descriptor ``lifeline``, and store it for :func:`run_token`. The
    token is empty if the other end of the pipe is closed."""
    data = b""
    while not data.endswith(b"\n") and (byte := os.read(lifeline, 1)):
        data += byte
    _stored_token[:] = [data.decode().strip()]


def run_token() -> str:
    """Return the token of the run that this process belongs to; empty outside a run."""
    return "".join(_stored_token)


def forget_token() -> None:
    """Delete the token from memory. A process calls this after it has authenticated itself with the token, and before
    it runs code of the user."""
    _stored_token.clear()


def secret(name: str) -> str:
    """Return the value of the environment variable ``name``; empty if it is not set. Settings contain the name of such
    a variable instead of a secret."""
    return os.environ.get(name, "")


def visible_gpus() -> str | None:
    """Return the value of ``CUDA_VISIBLE_DEVICES``, the list of GPUs that a program may use; ``None`` if it is not set,
    which means that all GPUs may be used."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(num_threads: int) -> dict[str, str]:
    """Return all environment variables for a new process of the run that may use ``num_threads`` threads: the variables
    of this process and those of :func:`part_environment`."""
    return {**os.environ, **part_environment(num_threads)}


def part_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that a process of the run needs in addition to the controller's variables. They mark it as
    part of a run, set its number of threads to ``num_threads``, and forbid access to the model hub."""
    return {
        PART_OF_A_RUN: "1",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_environment() -> dict[str, str]:
    """Return the variables that an engine's process needs before it loads torch; empty if the user has set one of them.

    After each parallel operation, the OpenMP threads of torch spin for milliseconds on the cores that the kernels' own
    threads wait for. With these variables they spin for about 30 microseconds instead.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return {} if chosen else {"GOMP_SPINCOUNT": "2000"}


def fork_server_environment() -> dict[str, str]:
    """Return the environment of the fork server, the process from which all other processes of a run are forked. The
    fork server loads OpenMP, which then reads its variables, on behalf of all of them; each process sets its own number
    of threads later."""
    return {**child_environment(1), **engine_environment()}


def apply_part_environment(variables: Mapping[str, str]) -> None:
    """Set ``variables`` in the environment of this process, which was just forked and inherits the environment of the
    fork server."""
    os.environ.update(variables)


@contextlib.contextmanager
def no_cuda_calls() -> Iterator[None]:
    """A context in which torch checks for a GPU through NVML and not through CUDA: a process that has called CUDA
    cannot be forked."""
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
    """Return the environment of a program that a run starts for an episode, such as an agent. It consists of this
    process's variables and of ``variables``, which the episode sets. Variables of the run itself and the keys of
    Headrace's servers (``HEADRACE_VIEW_TOKEN`` and similar names) are removed.

    ``python`` is the interpreter of the run in this environment. Requests to this machine and to the run's model server
    use no proxy.
    """
    hidden = (PART_OF_A_RUN, "ANTHROPIC_AUTH_TOKEN")  # an Anthropic client would send it along with the episode's key
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and not (name.startswith("HEADRACE_") and name.endswith("_TOKEN"))
    }
    host = urlsplit(variables.get("OPENAI_BASE_URL", "")).hostname
    hosts = dict.fromkeys(["127.0.0.1", "localhost", host, inherited.get("NO_PROXY") or inherited.get("no_proxy")])
    no_proxy = ",".join(filter(None, hosts))
    path = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), inherited.get("PATH")]))
    return {**inherited, "PATH": path, "NO_PROXY": no_proxy, "no_proxy": no_proxy, **variables}


def shared_memory_root() -> Path:
    """Return the folder for shared-memory buffers: ``/dev/shm`` if it exists and is writable, else the temporary
    directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # gate: getattr - not every system can tell
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


PROCESS_GONE = (psutil.Error, OSError)
"""The errors that psutil raises for a process that has ended or must not be inspected: an error of its own, or an
error of the system if another process has received the same id since."""


def thread_times_ns(pid: int) -> dict[str, tuple[int, int]]:
    """Return two times of each thread of the process ``pid``, by the thread's id: its processor time, and the time for
    which it waited for a processor, both in nanoseconds. The result is empty for a process that has ended, and on
    systems other than Linux."""
    times: dict[str, tuple[int, int]] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return times
    for thread in threads:
        # a thread, or the whole process, can end between the listing and the read
        with contextlib.suppress(OSError, ValueError):
            used, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            times[thread] = (int(used), int(waited))
    return times


def cache_root() -> Path:
    """Return the folder for files that can be created again, such as compiled kernels: ``$XDG_CACHE_HOME/headrace``, or
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
    """Return the position of this process that its launcher (torchrun, Ray, Headrace) has set in environment variables;
    without these variables, this process is the only rank."""
    read = os.environ.get
    return RankPlace(
        rank=int(read("RANK", "0")), local_rank=int(read("LOCAL_RANK", "0")), world=int(read("WORLD_SIZE", "1"))
    )


def rank_environment(place: RankPlace, interface: str = "") -> dict[str, str]:
    """Return the environment variables that set the rank of a process, ``place``, and the network interface through
    which it connects to the other ranks. An empty ``interface`` means that all ranks are on this machine."""
    known = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "GLOO_SOCKET_IFNAME": interface or ("lo0" if sys.platform == "darwin" else "lo"),
    }
    return {**known, "NCCL_SOCKET_IFNAME": interface} if interface else known


def raise_file_limit(most: int) -> int:
    """Raise this process's limit of open files to at most ``most``, if the system allows it, and return the limit, at
    most ``most`` if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    limit = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)
