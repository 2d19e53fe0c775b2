"""The limits of a sandbox, and the result of a run in it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from headrace.base.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of one run. A run that exceeds a limit is killed, and its result names the limit as the reason."""

    wall_s: float = 10.0
    """The limit of the wall-clock time, in seconds."""
    cpu_s: int = 10
    """The limit of the processor time of each process, in seconds."""
    memory_bytes: int = 512 * MIB
    """The limit of the memory of all processes together, and of the address space of each process unless
    ``address_bytes`` is set."""
    address_bytes: int | None = None
    """The limit of the address space of each process; ``None`` means ``memory_bytes``. Programs of Node.js and Go
    reserve much more address space than they use."""
    file_bytes: int = 16 * MIB
    """The limit of the size of one file."""
    disk_bytes: int = 64 * MIB
    """The limit of the size of all files together."""
    processes: int = 32
    """The limit of the number of processes and threads at once."""
    open_files: int = 64
    """The limit of the number of open files of each process."""
    output_bytes: int = 1 * MIB
    """The limit of the size of standard output, and separately of standard error."""

    def refuse_empty(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if a limit is 0 or negative."""
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
    """The run took longer than the limit."""
    CPU_TIME = "cpu_time"
    """A process used more processor time than the limit."""
    MEMORY = "memory"
    """The processes used more memory than the limit."""
    PROCESSES = "processes"
    """The command started more processes than the limit."""
    DISK = "disk"
    """The files took more space than the limit."""
    OUTPUT = "output"
    """More was written to standard output or standard error than the limit."""
    NOT_STARTED = "not_started"
    """The command could not be started; ``detail`` contains the cause."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: how the command ended, and its output."""

    reason: Reason
    """The reason why the run ended."""
    stdout: str
    """The standard output, up to ``limits.output_bytes``. Bytes that are not UTF-8 are replaced."""
    stderr: str
    """The standard error, with the same limit."""
    exit_code: int | None = None
    """The exit code of a command that exited; ``None`` otherwise."""
    signal: int | None = None
    """The number of the signal that ended the command; ``None`` if no signal did."""
    detail: str = ""
    """More details about the reason, if there are any."""
    cpu_s: float = 0.0
    """The processor time of the command itself, in seconds."""
    missing: dict[str, str] = {}
    """Guards that this system refused, each with the cause; empty if all guards were installed."""

    @property
    def ok(self) -> bool:
        """Whether the command exited by itself, with code 0."""
        return self.reason is Reason.EXITED and self.exit_code == 0
