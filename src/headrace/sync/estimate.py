"""Estimates before a run starts: the least time in which a version of the weights reaches the engines, and the disk
space or memory that it needs.

    bytes of a version ──┬─▶ pass the network, at sync.network_gb_s     if that is set
                         └─▶ are hashed once by every engine            at the rate measured on this machine
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.sync.config import GB, TRANSPORTS, RunPlaces, SyncConfig

NUMBER_BYTES = {"cast_bf16": 2, "cast_fp8": 1}
"""The bytes of one number of a version, by codec, for the codecs that round. Under all other codecs, the bytes of the
model's dtype count, since the first version is sent whole."""
PROBE_BYTES = 32 << 20
"""The number of bytes that are hashed to measure the rate: more than most caches hold, and hashed in milliseconds."""
PROBES = 3
"""The number of measurements. The shortest time is used, since other processes can only make it longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEstimate:
    """The least time, in seconds, in which one version of the weights gets from the learner to an engine."""

    hash_s: float
    """The time in which an engine hashes the version."""
    network_s: float | None
    """The time in which the version passes the network; ``None`` if ``sync.network_gb_s`` is not set."""

    @property
    def seconds(self) -> float:
        """Return the sum of both times, since an engine hashes a version after it has arrived."""
        return self.hash_s + (self.network_s or 0.0)

    def __str__(self) -> str:
        """Return the whole time, and in brackets how much of it is for the network and for hashing. It completes the
        sentence "a version takes …".

        >>> str(VersionEstimate(hash_s=0.5, network_s=None))
        '0.5 s at least (to hash it on this machine)'
        >>> str(VersionEstimate(hash_s=0.5, network_s=128.0))
        '128 s at least (128 s at sync.network_gb_s, 0.5 s to hash it on this machine)'
        """
        parts = "" if self.network_s is None else f"{_format_seconds(self.network_s)} at sync.network_gb_s, "
        parts += "to hash it" if self.network_s is None else f"{_format_seconds(self.hash_s)} to hash it"
        return f"{_format_seconds(self.seconds)} at least ({parts} on this machine)"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRoom:
    """The needed and the free space in a folder of this machine for the versions that a transport stores there."""

    folder: Path
    """The folder, or its nearest parent that exists."""
    copies: int
    """The number of whole versions that are stored there at the same time."""
    needed_bytes: float
    """The size of all these versions."""
    free_bytes: int
    """The number of free bytes, including the files of earlier versions of this run, which will be removed."""


def estimate_version(sync: SyncConfig, num_bytes: float, clock: Clock) -> VersionEstimate:
    """Return the least time for a version of ``num_bytes`` bytes under the settings ``sync``. The rate of hashing is
    measured with ``clock``. No transport is faster, since engines hash every byte."""
    network_s = None if sync.network_gb_s is None else num_bytes / (sync.network_gb_s * GB)
    return VersionEstimate(hash_s=num_bytes * _hash_s(clock) / PROBE_BYTES, network_s=network_s)


def refuse_short_deadline(sync: SyncConfig, num_bytes: float, clock: Clock) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``sync.deadline_s`` is set and shorter than the least time
    for a version of ``num_bytes`` bytes, measured with ``clock``, so that no engine could ever stage a version."""
    if sync.deadline_s is None:
        return
    time = estimate_version(sync, num_bytes, clock)
    if time.seconds > sync.deadline_s:
        raise ConfigError(
            f"sync.deadline_s={sync.deadline_s:g} is too short: one version of the weights has {num_bytes:,.0f} bytes "
            f"and takes {time}",
            remedy=f"leave sync.deadline_s out, which then is {sync.default_deadline_s(num_bytes):,.0f} s",
        )


def measure_room(sync: SyncConfig, places: RunPlaces, num_bytes: float) -> VersionRoom | None:
    """Return the needed and the free space for versions of ``num_bytes`` bytes in the folder that the transport of the
    settings ``sync`` uses in a run with the directories ``places``; ``None`` if it stores no versions in a folder of a
    local file system."""
    transport = TRANSPORTS.load(sync.transport)
    address, copies = transport.address(sync, places), transport.copies(sync)
    if not copies or "://" in address:
        return None
    folder = Path(address).absolute()
    earlier_bytes = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
    while not folder.is_dir():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free + earlier_bytes
    return VersionRoom(folder=folder, copies=copies, needed_bytes=copies * num_bytes, free_bytes=free_bytes)


def refuse_little_room(sync: SyncConfig, places: RunPlaces, num_bytes: float) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if there is too little space for versions of ``num_bytes`` bytes
    in the folder that the transport uses. The arguments are those of :func:`measure_room`."""
    room = measure_room(sync, places, num_bytes)
    if room is not None and room.free_bytes < room.needed_bytes:
        raise ConfigError(
            f"sync.transport={sync.transport!r} keeps {room.copies} versions of {num_bytes:,.0f} bytes in "
            f"{room.folder}, which need {room.needed_bytes:,.0f} bytes; {room.free_bytes:,.0f} are free there",
            remedy=f"free that much there (df -h {room.folder}), enlarge it (mount -o remount,size=... for /dev/shm), "
            "or choose another sync.transport or sync.directory",
        )


def _format_seconds(seconds: float) -> str:
    """Return a time as text, with a unit.

    >>> _format_seconds(0.00001), _format_seconds(8.54), _format_seconds(1234.5)
    ('under 0.001 s', '8.5 s', '1,234 s')
    """
    if seconds < 0.001:
        return "under 0.001 s"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def _hash_s(clock: Clock) -> float:
    """Return the seconds in which one thread of this machine hashes :data:`PROBE_BYTES` bytes."""
    probe = b"1" * PROBE_BYTES
    times = []
    for _ in range(PROBES):
        start_s = clock.now()
        xxhash.xxh3_64_intdigest(probe)
        times.append(clock.now() - start_s)
    return min(times)
