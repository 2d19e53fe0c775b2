"""What may be asked of a sandbox, and what it answers. Loads with the standard library and msgspec."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one run may use; what is over is killed, and the reason told."""

    wall_s: float = 10.0
    """Seconds from its start to its end."""
    cpu_s: int = 10
    """Seconds of processor time of each of its processes."""
    memory_bytes: int = 512 * MIB
    """Address space of each of its processes, and memory of all of them together."""
    file_bytes: int = 16 * MIB
    """Longest that one file may become."""
    disk_bytes: int = 64 * MIB
    """All of its files together."""
    processes: int = 32
    """Processes and threads at once."""
    open_files: int = 64
    """Open files of each of its processes."""
    output_bytes: int = 1 * MIB
    """Standard output and standard error, each; more ends it."""


class Reason(enum.StrEnum):
    """Why a run ended."""

    EXITED = "exited"
    """By itself, with an exit code."""
    SIGNALLED = "signalled"
    """By a signal: a crash, or its own wish."""
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    DISK = "disk"
    OUTPUT = "output"
    """It wrote more than may be kept."""
    NOT_STARTED = "not_started"
    """The command could not be started at all: ``detail`` says why."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    reason: Reason
    stdout: str
    """At most ``limits.output_bytes`` of it; bytes that are no UTF-8 are replaced."""
    stderr: str
    """Likewise."""
    exit_code: int | None = None
    """Of a run that exited by itself; ``None`` otherwise."""
    signal: int | None = None
    """That ended it; ``None`` where none did."""
    detail: str = ""
    """More words on the reason, where there are any."""
    cpu_s: float = 0.0
    """Processor time of the command itself."""
    missing: dict[str, str] = {}
    """Guards that this system refuses, and why; empty where all of them stand."""

    @property
    def ok(self) -> bool:
        """Whether it exited by itself, with code 0."""
        return self.reason is Reason.EXITED and self.exit_code == 0
