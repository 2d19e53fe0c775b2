"""The fork server, the process from which parts are forked: ``python -m headrace.launch.hosts.forkserver CONTROL
LIFELINE TITLE``.

It imports the modules that engines and learners need, and then forks parts on request and reports the exit code of each
fork. It has a single thread, computes nothing, uses no GPU, runs no user code, and draws no random numbers that two
parts could share.

CONTROL and LIFELINE are file descriptors: the socket for orders, and a pipe whose closing ends the process. TITLE
reserves space in the command line, into which forks write their own command lines.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.environ import apply_part_environment, no_cuda_calls
from headrace.base.heap import gc_disabled
from headrace.launch.forking import MAX_BYTES, MODULE, ForkExit, ForkOrder, ForkRefused, ForkReply, Report
from headrace.launch.hosts import main as part
from headrace.models.devices import has_gpu_driver

IMPORTED = (
    *("headrace.launch.hosts.engine", "headrace.launch.hosts.learner", "headrace.models.check"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.modeling_layers", "transformers.modeling_utils", "transformers.generation.utils"),
    *("numpy.ctypeslib", "numpy.ma"),
)
"""The modules that an engine and a learner import for every model."""
FOR_GPUS = "triton"
"""A module that torch imports if it is installed. It needs 100 MB and is useless on a machine without a GPU."""
ASKS_FOR_GPUS = "torchao"
"""A module that transformers imports if it is installed, and that queries the GPUs when it is imported. It is needed
only for kinds of checkpoints that are refused, and for one optimizer, which imports it after the fork."""


def serve(control: socket.socket, lifeline: int) -> None:
    """Execute the orders to fork that arrive over the socket ``control``, and report the exit of each fork, until the
    controller closes the socket. ``lifeline`` is the lifeline of this process; forks close it."""
    children: dict[int, int] = {}
    """The pid of each fork, by its pidfd."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in children:
                poller.unregister(descriptor)
                os.close(descriptor)
                _send(control, _reap(children.pop(descriptor)))
                continue
            data, received_fds, _, _ = socket.recv_fds(control, MAX_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            pidfd, pid = _answer_order(
                control, msgspec.json.decode(data, type=ForkOrder), received_fds, (lifeline, *children)
            )
            for each in received_fds:
                os.close(each)
            if pid:
                children[pidfd] = pid
                poller.register(pidfd, select.POLLIN)


def _answer_order(
    control: socket.socket, order: ForkOrder, received_fds: list[int], own_fds: tuple[int, ...]
) -> tuple[int, int]:
    """Fork the part of ``order`` and answer the order. Return the part's pidfd and its process id, or (0, 0) if the
    operating system refuses to fork. ``received_fds`` are the part's lifeline and log. ``own_fds`` belong to this
    process, and the part closes them."""
    try:
        pid = _fork(order, received_fds, (control.fileno(), *own_fds))
    except OSError as error:
        _send(control, ForkRefused(call=order.call, number=error.errno or 0))
        return 0, 0
    pidfd = os.pidfd_open(pid)
    _send(control, ForkReply(call=order.call, pid=pid), pidfd)
    return pidfd, pid


def _send(control: socket.socket, report: Report, *descriptors: int) -> None:
    """Send ``report`` to the controller, together with file descriptors."""
    socket.send_fds(control, [msgspec.json.encode(report)], descriptors)


def _reap(pid: int) -> ForkExit:
    """Collect the exit status of the ended fork ``pid``, and return the report of its exit code."""
    _, status = os.waitpid(pid, 0)
    return ForkExit(pid=pid, code=os.waitstatus_to_exitcode(status))


def _fork(order: ForkOrder, received_fds: list[int], own_fds: tuple[int, ...]) -> int:
    """Fork the part of ``order`` and return its process id. When this returns, the part leads its own session, so that
    it can be killed with all processes that it starts, and shows its own command line. ``received_fds`` are its
    lifeline and log; it closes ``own_fds``."""
    waiting, started = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            part.exit_with(lambda: _run_part(order, received_fds, (*own_fds, waiting), started))
    finally:
        os.close(started)
        with open(waiting, "rb") as pipe:
            pipe.read()  # returns when the part has closed its end or has died
    return pid


def _run_part(order: ForkOrder, received_fds: list[int], fds_to_close: tuple[int, ...], started: int) -> int:
    """Become the part of ``order`` in this new fork, run it to its end, and return its exit code. ``received_fds`` are
    its lifeline and log. ``fds_to_close`` belong to the fork server. Closing ``started`` notifies the fork server that
    the part leads its own session."""
    os.setsid()
    for each in fds_to_close:
        os.close(each)
    lifeline, log = received_fds
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    apply_part_environment(order.environment)
    _set_command_line(f"{sys.executable} -m headrace.launch.hosts.main {order.directory} {order.name} {lifeline}")
    os.close(started)
    _reseed_numpy()
    return part.main(Path(order.directory), order.name, lifeline)


def _reseed_numpy() -> None:
    """Seed numpy's global generator again. numpy has seeded it at import, so without this all forks would draw the same
    numbers. Python reseeds its generator after every fork, and torch's default seed is the same in every process."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - user code may draw from the old global generator


def _set_command_line(words: str) -> None:
    """Make ``ps`` show ``words`` as the command line of this process.

    The words overwrite the original command line in the memory of the process, from which the kernel reads it. If the
    last byte is not zero, the kernel reads up to the first zero (proc(5), fs/proc/base.c).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: 48 and 49, counted from 1 with the pid
    size = end - start
    if start and size > 1:
        ctypes.memmove(start, words.encode()[: size - 2].ljust(size - 1, b"\0") + b".", size)


def _import_modules() -> None:
    """Import the modules that forked parts need. :data:`ASKS_FOR_GPUS` and, on a machine without a GPU driver,
    :data:`FOR_GPUS` are hidden in the meantime, so that they are not imported."""
    blocked: dict[str, Any] = {ASKS_FOR_GPUS: None}  # a module that is None counts as missing
    if not has_gpu_driver():
        blocked[FOR_GPUS] = None
    sys.modules.update(blocked)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in blocked:
        del sys.modules[name]


def main() -> None:
    """Import the modules, and then fork on request until the controller has ended. This is the entry point of the
    process."""
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    part.kill_group_on_close(lifeline)
    _set_command_line(f"{sys.executable} -m {MODULE} {sys.argv[3].rstrip('.')}")
    with no_cuda_calls(), gc_disabled():
        _import_modules()
    serve(control, lifeline)


if __name__ == "__main__":
    main()
