"""The limits of a sandbox, and the result of a run. This module needs only the standard library and msgspec."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from headrace.base.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one run. A run that exceeds one is killed, and its result has the reason."""

    wall_s: float = 10.0
    """The wall-clock time, in seconds."""
    cpu_s: int = 10
    """The processor time of each of its processes, in seconds."""
    memory_bytes: int = 512 * MIB
    """The memory of all of its processes together, and the address space of each, unless that has a limit of its own.
    """
    address_bytes: int | None = None
    """The address space of each of its processes; ``None``: ``memory_bytes``. Programs of Node.js and Go reserve far
    more than they use."""
    file_bytes: int = 16 * MIB
    """The size of one file."""
    disk_bytes: int = 64 * MIB
    """The size of all files together."""
    processes: int = 32
    """The number of processes and threads at once."""
    open_files: int = 64
    """The number of open files of each of its processes."""
    output_bytes: int = 1 * MIB
    """The size of standard output, and that of standard error."""

    def refuse_empty(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for a limit that leaves nothing."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"limits.{name}={value} leaves nothing", remedy=f"set {name} > 0")


class Reason(enum.StrEnum):
    """The reason why a run ended."""

    EXITED = "exited"
    """The command exited with an exit code."""
    SIGNALLED = "signalled"
    """A signal ended the command: a crash, or a signal that it sent itself."""
    WALL_TIME = "wall_time"
    """It took longer than the limit."""
    CPU_TIME = "cpu_time"
    """A process used more processor time than the limit."""
    MEMORY = "memory"
    """Its processes used more memory than the limit."""
    PROCESSES = "processes"
    """It started more processes than the limit."""
    DISK = "disk"
    """Its files took more space than the limit."""
    OUTPUT = "output"
    """It wrote more to standard output or standard error than the limit."""
    NOT_STARTED = "not_started"
    """The command could not be started; ``detail`` has the cause."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: how the command ended, and what it wrote."""

    reason: Reason
    """Why the run ended."""
    stdout: str
    """The standard output, at most ``limits.output_bytes`` of it; bytes that are not UTF-8 are replaced."""
    stderr: str
    """The standard error, with the same limit."""
    exit_code: int | None = None
    """The exit code of a command that exited; ``None`` otherwise."""
    signal: int | None = None
    """The signal that ended it; ``None`` otherwise."""
    detail: str = ""
    """More details about the reason, if there are any."""
    cpu_s: float = 0.0
    """The processor time of the command itself."""
    missing: dict[str, str] = {}
    """Guards that this system refused, each with the cause; empty if all of them were in place."""

    @property
    def ok(self) -> bool:
        """Whether it exited by itself, with code 0."""
        return self.reason is Reason.EXITED and self.exit_code == 0
