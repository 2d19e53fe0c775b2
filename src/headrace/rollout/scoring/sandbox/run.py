"""The functions that run untrusted programs in the sandbox: each in a new process without network, in a file system of
its own, with resource limits."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.rollout.scoring.sandbox.base import Finished, Reason, SandboxLimits

LAUNCHER = Path(__file__).with_name("launcher.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""System folders that can be read in the sandbox."""
DETAILS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
"""Other files and folders that can be read in the sandbox."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment variables of a command in the sandbox."""
LAUNCH_S = 10.0
"""How long to wait for the launcher's report after the run, in seconds."""
CHUNK_BYTES = 1 << 16
"""The largest number of bytes per read."""


def run(
    argv: Sequence[str],
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
    readable: Sequence[str] = (),
) -> Finished:
    """Run the command ``argv`` and wait until it and all processes that it has started have ended. The call blocks; in
    asynchronous code, use ``asyncio.to_thread``.

    ``argv[0]`` is the absolute path of a program. ``stdin`` is its standard input. ``files`` maps plain names to
    contents; the files are written into the working directory, which is the only writable directory. Only system
    folders, this Python and the paths in ``readable`` can be read. The command inherits no environment variables of
    this process. ``limits`` are the limits of the run; ``None`` means the defaults. Raises
    :class:`~headrace.base.errors.ConfigError` for invalid arguments. Failures of the program are part of the result.

    >>> run(["/bin/sh", "-c", "cat note; echo $HOME"], files={"note": "hi "}).stdout
    'hi /tmp\\n'
    """
    limits = limits or SandboxLimits()
    _refuse_invalid(argv, files or {}, limits)
    with tempfile.TemporaryDirectory(prefix="headrace-jail-", ignore_cleanup_errors=True) as scratch:
        order = {
            "jailed": True,
            "argv": list(argv),
            "env": ENVIRONMENT,
            "stdin": _encode_base64(stdin),
            "files": {name: _encode_base64(content) for name, content in (files or {}).items()},
            "readable": readable_paths(readable),
            "scratch": scratch,
            "limits": {name: getattr(limits, name) for name in SandboxLimits.__slots__},
        }
        return _RunningLauncher(order, limits).finish()


def run_python(
    code: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: SandboxLimits | None = None,
) -> Finished:
    """Run ``code`` as a Python program with this interpreter, in isolated mode, and return the result. Installed
    packages can be imported. ``stdin``, ``files`` and ``limits`` are those of :func:`run`.

    >>> run_python("print(6 * 7)").stdout
    '42\\n'
    >>> run_python("while True: pass", limits=SandboxLimits(wall_s=0.5)).reason
    <Reason.WALL_TIME: 'wall_time'>
    """
    return run(
        [sys.executable, "-I", "-B", "main.py"], stdin=stdin, files={**(files or {}), "main.py": code}, limits=limits
    )


def _refuse_invalid(argv: Sequence[str], files: Mapping[str, str | bytes], limits: SandboxLimits) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a command, a file name or a limit that cannot be used."""
    if isinstance(argv, str) or not argv or not os.path.isabs(argv[0]):
        raise ConfigError(f"argv={argv!r} does not begin with the path of a program", remedy="give the whole path")
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"files={name!r} is not a plain name", remedy="give names without folders")
    limits.refuse_empty()


def _encode_base64(content: str | bytes) -> str:
    """Return ``content`` as base64 text, which can be part of an order in JSON."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return base64.b64encode(data).decode()


def readable_paths(additional: Sequence[str]) -> list[str]:
    """Return the folders and files that can be read in a sandbox: the paths of the system and of this Python, and
    ``additional``. No path in the list is below another path in it."""
    python = (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent))
    paths: list[str] = []
    for path in map(os.path.normpath, (*SYSTEM, *DETAILS, *python, *additional)):
        if os.path.lexists(path) and not any(path == other or path.startswith(f"{other}/") for other in paths):
            paths.append(path)
    return paths


class _RunningLauncher:
    """The launcher process of one run, which starts and watches the command, and the command's output so far."""

    def __init__(self, order: dict[str, Any], limits: SandboxLimits) -> None:
        """Start the launcher process and send it ``order``, the description of the run. ``limits`` are the limits that
        this process enforces: the wall-clock time and the size of the output."""
        self._limits = limits
        report, write_end = os.pipe()
        try:
            self._launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(LAUNCHER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=(write_end,), env={}, cwd="/",
            )  # fmt: skip
        except OSError:
            os.close(report)
            raise
        finally:
            os.close(write_end)
        self._report = os.fdopen(report, "rb")
        """The read end of the pipe through which the launcher reports the result."""
        assert self._launcher.stdout is not None
        assert self._launcher.stderr is not None
        self._output = {self._launcher.stdout: bytearray(), self._launcher.stderr: bytearray()}
        """The data that was read so far, by stream."""
        order["report"] = write_end
        self._send(json.dumps(order).encode())

    def _send(self, data: bytes) -> None:
        """Send ``data`` to the launcher, after its length in 8 bytes."""
        assert self._launcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the launcher did not start: then its report is missing
            self._launcher.stdin.write(len(data).to_bytes(8, "big") + data)
            self._launcher.stdin.flush()

    def finish(self) -> Finished:
        """Read the output until the command ends or a limit is exceeded, end the launcher, and return the result."""
        try:
            stop_reason = self._read_until_end()
            assert self._launcher.stdin is not None
            self._launcher.stdin.close()  # the launcher then kills all processes of the run
            report = self._read_report()
        finally:
            self._launcher.kill()
            self._launcher.wait()
            for stream in (self._report, self._launcher.stdin, *self._output):
                assert stream is not None
                _close(stream)
        return self._build_result(stop_reason, report)

    def _read_until_end(self) -> Reason | None:
        """Read the output until the command and all its processes have ended, or a limit is exceeded. Return the limit
        for which the run must be killed, or ``None`` if it has ended by itself."""
        clock = RealClock()
        deadline_s = clock.now() + self._limits.wall_s
        with selectors.DefaultSelector() as selector:
            for stream in (*self._output, self._report):
                selector.register(stream, selectors.EVENT_READ)
            while True:
                left_s = deadline_s - clock.now()
                if left_s <= 0:
                    return Reason.WALL_TIME
                ready: list[Any] = [key.fileobj for key, _ in selector.select(left_s)]
                if self._report in ready:  # the command and all its processes have ended
                    return self._read_rest()
                if any(self._read_available(stream, selector) for stream in ready):
                    return Reason.OUTPUT

    def _read_available(self, stream: Any, selector: selectors.BaseSelector) -> bool:
        """Read the available data of the output ``stream``, and return whether the output exceeds the limit. A stream
        at its end is removed from ``selector``."""
        data = os.read(stream.fileno(), CHUNK_BYTES)
        if not data:
            selector.unregister(stream)
        return self._exceeds_limit(stream, data)

    def _read_rest(self) -> Reason | None:
        """Read the output that was written before the end. Return ``Reason.OUTPUT`` if it exceeds the limit, else
        ``None``."""
        for stream in self._output:
            while data := os.read(stream.fileno(), CHUNK_BYTES):
                if self._exceeds_limit(stream, data):
                    return Reason.OUTPUT
        return None

    def _exceeds_limit(self, stream: Any, data: bytes) -> bool:
        """Append ``data`` to the output of ``stream``, up to the limit, and return whether the limit was exceeded."""
        output = self._output[stream]
        remaining = self._limits.output_bytes - len(output)
        output += data[:remaining]
        return len(data) > remaining

    def _read_report(self) -> dict[str, Any]:
        """Return the launcher's report, or a report of an error if it does not arrive within ``LAUNCH_S`` seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            line = self._report.readline() if selector.select(LAUNCH_S) else b""
        report: dict[str, Any] = json.loads(line) if line else {"error": "the launcher has ended without a word"}
        return report

    def _build_result(self, stop_reason: Reason | None, report: dict[str, Any]) -> Finished:
        """Return the result of the run, from the launcher's report and the output. ``stop_reason`` is the limit for
        which this process ended the run, or ``None``."""
        stdout, stderr = (bytes(output).decode("utf-8", "replace") for output in self._output.values())
        status, excess = report.get("status"), report.get("reason", "")
        finished = Finished(
            reason=Reason.EXITED,
            stdout=stdout,
            stderr=stderr,
            cpu_s=report.get("cpu_s", 0.0),
            missing=report.get("missing", {}),
        )
        # a limit is the reason even if the command also ended by itself at that moment
        change: dict[str, Any]
        if "error" in report:
            change = {"reason": Reason.NOT_STARTED, "detail": report["error"]}
        elif stop_reason is not None:
            change = {"reason": stop_reason}
        elif excess not in ("", "asked"):
            change = {"reason": Reason(excess)}
        elif status is None:
            change = {"reason": Reason.NOT_STARTED, "detail": "it ended before the command began"}
        elif status >= 0:
            change = {"exit_code": status}
        else:
            change = {"reason": reason_for_signal(-status, finished.cpu_s, self._limits), "signal": -status}
        return msgspec.structs.replace(finished, **change)


def reason_for_signal(number: int, cpu_s: float, limits: SandboxLimits) -> Reason:
    """Return the reason to report for a run that signal ``number`` has ended. ``cpu_s`` is the processor time of the
    command in seconds, and ``limits`` are the limits of the run: if the kernel has sent the signal because the
    processor time was used up, the reason is ``CPU_TIME``, and otherwise ``SIGNALLED``."""
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limits.cpu_s):
        return Reason.CPU_TIME
    return Reason.SIGNALLED


def _close(stream: Any) -> None:
    """Close a stream. Data that the launcher has not received is lost if the launcher has ended."""
    with contextlib.suppress(BrokenPipeError):
        stream.close()
