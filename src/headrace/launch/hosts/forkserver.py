"""The process that parts are forked from: ``python -m headrace.launch.hosts.forkserver CONTROL LIFELINE ROOM``.

It imports what engines and learners need, and does nothing else: one thread, no computation, no GPU, no code of the
user's, no randomness that two parts could share. Then it forks on request, and tells how each fork ends.

CONTROL and LIFELINE are file descriptors; ROOM is room for the command lines of its forks.
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

from headrace.base.environ import become_part, no_cuda_calls
from headrace.base.heap import growing_heap
from headrace.launch.forking import MAX_BYTES, MODULE, ForkExit, ForkOrder, ForkReply, Report, Unforked
from headrace.launch.hosts import main as part
from headrace.models.devices import has_gpu_driver

IMPORTED = (
    *("headrace.launch.hosts.engine", "headrace.launch.hosts.learner", "headrace.models.check"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.modeling_layers", "transformers.modeling_utils", "transformers.generation.utils"),
    *("numpy.ctypeslib", "numpy.ma"),
)
"""What an engine and a learner import whatever their model is."""
FOR_GPUS = "triton"
"""torch imports it wherever it is installed: 100 MB that serve nobody where there is no GPU."""


def serve(control: socket.socket, lifeline: int) -> None:
    """Fork on request, until the controller has gone."""
    children: dict[int, int] = {}
    """The pid of each fork, by its pidfd."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in children:
                poller.unregister(descriptor)
                os.close(descriptor)
                _say(control, _reaped(children.pop(descriptor)))
                continue
            data, given, _, _ = socket.recv_fds(control, MAX_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            pidfd, pid = _asked(control, msgspec.json.decode(data, type=ForkOrder), given, (lifeline, *children))
            for each in given:
                os.close(each)
            if pid:
                children[pidfd] = pid
                poller.register(pidfd, select.POLLIN)


def _asked(control: socket.socket, asked: ForkOrder, given: list[int], mine: tuple[int, ...]) -> tuple[int, int]:
    """Fork, and say so: the pidfd and the pid; zeros where the system refuses."""
    try:
        pid = _forked(asked, given, (control.fileno(), *mine))
    except OSError as error:
        _say(control, Unforked(call=asked.call, number=error.errno or 0))
        return 0, 0
    pidfd = os.pidfd_open(pid)
    _say(control, ForkReply(call=asked.call, pid=pid), pidfd)
    return pidfd, pid


def _say(control: socket.socket, report: Report, *descriptors: int) -> None:
    socket.send_fds(control, [msgspec.json.encode(report)], descriptors)


def _reaped(pid: int) -> ForkExit:
    _, status = os.waitpid(pid, 0)
    return ForkExit(pid=pid, code=os.waitstatus_to_exitcode(status))


def _forked(asked: ForkOrder, given: list[int], mine: tuple[int, ...]) -> int:
    """A fork, and its pid. When this returns it is a session of its own, which can be ended with all that it starts,
    and bears its name."""
    waiting, apart = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            part.end_with(lambda: _part(asked, given, (*mine, waiting), apart))
    finally:
        os.close(apart)
        with open(waiting, "rb") as pipe:
            pipe.read()  # until it has closed its end, or has died
    return pid


def _part(asked: ForkOrder, given: list[int], not_mine: tuple[int, ...], apart: int) -> int:
    """The life of the part, from its fork on; its exit code."""
    os.setsid()
    for each in not_mine:
        os.close(each)
    lifeline, log = given
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    become_part(asked.environment)
    _entitle(f"{sys.executable} -m headrace.launch.hosts.main {asked.directory} {asked.name} {lifeline}")
    os.close(apart)
    _draw_anew()
    return part.main(Path(asked.directory), asked.name, lifeline)


def _draw_anew() -> None:
    """numpy has drawn the seed of its global generator when it was imported: two parts of which one's code uses it must
    not draw the same. Python's own is seeded anew by every fork, and torch's is the same in every process."""
    import numpy as np

    np.random.seed()  # noqa: NPY002 - whoever uses the old generator would draw from it


def _entitle(words: str) -> None:
    """What ``ps`` shows as this process's command line: ``words``, over those that the fork server was started with.

    The kernel reads them from the process's memory; where the last byte is not zero, up to the first zero (proc(5),
    fs/proc/base.c).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: 48 and 49, counted from 1 with the pid
    size = end - start
    if start and size > 1:
        ctypes.memmove(start, words.encode()[: size - 2].ljust(size - 1, b"\0") + b".", size)


def _import() -> None:
    blocked: dict[str, Any] = {} if has_gpu_driver() else {FOR_GPUS: None}  # importlib's word for: there is none
    sys.modules.update(blocked)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in blocked:
        del sys.modules[name]


def main() -> None:
    """Import, then serve."""
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    part.bind_to(lifeline)
    _entitle(f"{sys.executable} -m {MODULE} {sys.argv[3].rstrip('.')}")
    with no_cuda_calls(), growing_heap():
        _import()
    serve(control, lifeline)


if __name__ == "__main__":
    main()
