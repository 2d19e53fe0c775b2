"""Settings of the weight sync (``[sync]`` in a run file), and the description of a transport, which sends weights from
the learner to the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headrace.base.config import Section, validate
from headrace.base.config.addresses import LOOPBACK
from headrace.base.config.kinds import NameOf
from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry, make_class_check
from headrace.base.types.weights import Interrupt
from headrace.sync.base import Inbox, LearnerRank, Outbox


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlaces:
    """The files and folders of one run that both sides of a transport can use to exchange weights."""

    run_dir: Path
    """The run directory. It may be on a disk that other machines share."""
    memory: Path
    """A file that the learner may create in the shared memory of its machine."""
    private: Path
    """A directory of this machine that only the user who runs Headrace can enter. It is removed after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCost:
    """The cost that the planner assumes for a transport until a run has measured it."""

    gb_s: float
    """The throughput in 10⁹ bytes per second; 0: the throughput of the network between the machines."""
    fixed_s: float
    """The time in seconds that every version takes, independent of its size."""
    proposed: bool = False
    """Whether the planner may propose this transport instead of the transport in the run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The description of a transport of weights from the learner to the engines.

    A package registers a transport by an entry point in its ``pyproject.toml``,
    ``[project.entry-points."headrace.transports"]``.
    """

    open_outbox: Callable[[Route, str], Outbox]
    """A function that opens the learner's side, from the route and the token of the run. It raises
    :class:`~headrace.base.errors.ConfigError` if the transport cannot be used on this machine."""
    open_inbox: Callable[[Route, str, int], Inbox]
    """A function that opens the engine's side, from the route, the token of the run and the size of the largest update
    in bytes."""
    cost: TransportCost
    """The cost of a version, as the planner assumes it."""
    open_rank_outbox: Callable[[Route, LearnerRank], Outbox] | None = None
    """A function that opens the side of one rank of the learner, for a transport over which every rank sends the parts
    of the weights that it holds; all ranks call it together. ``None``: rank 0 gathers the weights and sends all of
    them."""
    address: Callable[[SyncConfig, RunPlaces], str] = lambda sync, places: ""
    """A function that returns the ``address`` of the run's :class:`~headrace.sync.config.Route`: the file or folder
    that both sides use; empty if they use none."""
    copies: Callable[[SyncConfig], int] = lambda sync: 0
    """A function that returns how many whole versions are stored at the ``address`` of the route, a file or a folder,
    at the same time; 0 if none are. A run with less disk space or memory there is refused before it starts."""
    fallback: Callable[[SyncConfig, RunPlaces], str] = lambda sync, places: ""
    """A function that returns the ``fallback`` of the run's route: a folder for versions that the transport cannot send
    otherwise; empty for a transport without a fallback."""
    one_machine: str = ""
    """The reason why learner and engines must be on one machine, as the end of a sentence: "is memory of one machine".
    Empty if they may be on several."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings of ``[sync]`` that this transport uses and others do not. The value is the end of the error for
    another transport: ``{"directory": "writes no files"}``."""
    check: Callable[[SyncConfig], None] = lambda sync: None
    """A function that raises :class:`~headrace.base.errors.ConfigError` for values of ``[sync]`` that the transport
    cannot use."""
    options: type[Section] | None = None
    """The section by which ``[sync.options]`` is validated; ``None`` if the transport has no settings of its own."""

    @property
    def crosses_machines(self) -> bool:
        """Return whether learner and engines may be on several machines."""
        return not self.one_machine

    def refuse(self, sync: SyncConfig) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for settings of ``sync`` that this transport does not use,
        or whose values it cannot use. Called when the settings are loaded."""
        for name in sync.changed:
            if name not in self.settings:
                raise _unread_setting_error(sync, name)
        if self.options is not None:
            validate(self.options, sync.options, "sync.options")
        elif sync.options:
            raise ConfigError(
                f"sync.options.{min(sync.options)} is set, and sync.transport={sync.transport!r} has no settings of "
                "its own",
                remedy="leave [sync.options] out",
            )
        self.check(sync)


def _unread_setting_error(sync: SyncConfig, name: str) -> ConfigError:
    """Return the error for the setting ``name`` of ``[sync]``, which only another transport than the chosen one
    uses."""
    owner = next(each for each in TRANSPORTS.rows if name in TRANSPORTS.load(each).settings)
    settings = TRANSPORTS.load(owner).settings
    unread = " and ".join(f"sync.{each}" for each in sync.changed if each in settings)
    return ConfigError(
        f"sync.{name}={getattr(sync, name)!r} is set, and sync.transport={sync.transport!r} {settings[name]}",
        remedy=f"set sync.transport = {owner!r}, or leave {unread} out",
    )


TRANSPORTS = Registry[Transport](
    group="headrace.transports",
    setting="sync.transport",
    rows={
        "shm": "headrace.sync.shm:SHM",
        "files": "headrace.sync.files:FILES",
        "http": "headrace.sync.http:HTTP",
        "group": "headrace.sync.group:GROUP",
    },
    former={"collective": "group"},
    check=make_class_check(Transport),
)
"""The registry behind ``sync.transport``. A module is imported when a run names its transport."""


GB = 1e9
"""The number of bytes in the unit of ``sync.network_gb_s``."""
SHORT_VERSION_S = 60.0
"""The longest time for one stage or commit of a version of few bytes, in seconds."""
SLOWEST_BYTES_S = 50e6
"""The lowest throughput, in bytes per second, that is assumed for the default deadline: a third of the slowest measured
throughput for a large model, from sharded ranks through host memory and HTTP to a server."""


class SyncConfig(Section):
    """Settings of the weight sync. Every transport can be combined with every codec and every interrupt."""

    READ_BY_SOME: ClassVar = ("directory", "host", "tls_certificate", "tls_key", "network_gb_s")
    """The settings that only some transports use; :attr:`Transport.settings` lists the settings of each transport."""

    transport: Annotated[str, NameOf(TRANSPORTS)] = "shm"
    """``shm``: two packed buffers in shared memory; the engine's parameters are views of the committed one, and nothing
    is copied. ``files``: files in a folder. ``http``: an upload to the engine, with the run's token. ``group``:
    process groups of torch.distributed, to which every rank of the learner sends the part that it holds. An installed
    package can offer others."""
    codec: Literal["full", "cast_bf16", "cast_fp8", "delta", "adapter"] = "full"
    """``full``: every tensor unchanged. ``cast_bf16``, ``cast_fp8``: rounded for the transfer, the latter with a scale
    per row of each matrix. ``delta``: lossless differences from the version before. ``adapter``: refuses a run that
    trains anything but adapters; under LoRA, the other codecs, too, send only the adapters."""
    host: str = LOOPBACK
    """With ``http``, the address on which the engine accepts uploads, for a learner on another machine. Every upload
    must carry the run's token. Without ``tls_certificate``, token and weights are sent as clear text, so the network
    must be trusted. With ``group``, the address of the learner's machine at which its ranks and the engines meet; torch
    authenticates no client there, so the network must be trusted."""
    tls_certificate: str = ""
    """``http`` only: a PEM file with the certificate of the engines, the only one that the learner accepts. It must
    have this path on each of their machines. Unset: no TLS."""
    tls_key: str = ""
    """A PEM file with the key of the certificate, without a password; the engines read it."""
    directory: str = ""
    """The folder or fsspec URL in which one folder per run is created; empty: ``weights`` in the run directory.
    ``files`` writes every version there, ``group`` the versions that cannot be sent over process groups."""
    network_gb_s: float | None = Field(default=None, gt=0)
    """The throughput of the network between learner and engines, in 10⁹ bytes per second, if you know it. A deadline
    that a version cannot meet at this rate is refused before the run starts, and the default deadline gives a slower
    network more time. Unset: nothing is assumed about the network."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The settings of a transport that an installed package offers, by the names that the package defines."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What happens to the running sequences when new weights are committed."""
    rolling: int | None = Field(default=None, ge=1)
    """The number of engines that may commit at once while the others serve. Unset: one where ``interrupt`` stops
    generation, all where it does not (``inflight``, ``stream``)."""
    deadline_s: float | None = Field(default=None, gt=0)
    """The longest time for one stage or commit. Learner and engine wait for each other for at most half of it. Unset:
    60 s, and one second more for each 50 MB of the weights that a version consists of; with a ``network_gb_s`` below
    0.05, the time in which they pass that network."""

    def default_deadline_s(self, num_bytes: float) -> float:
        """Return the default of ``deadline_s``, in seconds, for a version of ``num_bytes`` bytes.

        >>> slow = SyncConfig(transport="http", network_gb_s=0.01)
        >>> SyncConfig().default_deadline_s(10**9), slow.default_deadline_s(10**9)
        (80.0, 160.0)
        """
        rate = SLOWEST_BYTES_S if self.network_gb_s is None else min(SLOWEST_BYTES_S, self.network_gb_s * GB)
        return SHORT_VERSION_S + num_bytes / rate

    def longest_s(self, num_bytes: float) -> float:
        """Return the longest time, in seconds, that one stage or commit of a version of ``num_bytes`` bytes may take.

        >>> SyncConfig().longest_s(64 * 10**9), SyncConfig(deadline_s=5).longest_s(10**9)
        (1340.0, 5.0)
        """
        return self.deadline_s or self.default_deadline_s(num_bytes)

    def route(self, places: RunPlaces, version_bytes: int) -> Route:
        """Return the settings of both sides of the transport, for versions of ``version_bytes`` bytes and the files and
        folders ``places`` of the run."""
        transport = TRANSPORTS.load(self.transport)
        return Route(
            transport=self.transport,
            codec=self.codec,
            address=transport.address(self, places),
            fallback=transport.fallback(self, places),
            host=self.host,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            options=self.options,
            deadline_s=self.longest_s(version_bytes) / 2,
            silence_s=self.longest_s(0) / 2,  # of any size: the bytes of a large version arrive continuously
        )

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the settings in :attr:`READ_BY_SOME` that differ from their defaults."""
        fields = type(self).model_fields
        return tuple(name for name in self.READ_BY_SOME if self.__dict__[name] != fields[name].default)

    @model_validator(mode="after")
    def _refuse_unread_settings(self) -> Self:
        """Refuse settings that the chosen transport does not use, or whose values it cannot use."""
        TRANSPORTS.load(self.transport).refuse(self)
        return self


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the weight sync for one run, which the learner and all its engines get alike."""

    transport: str = "shm"
    """The name of the transport, as in ``sync.transport``."""
    codec: str = "full"
    """The name of the codec, as in ``sync.codec``."""
    address: str = ""
    """The file or folder that both sides use, returned by :attr:`Transport.address`; empty: none."""
    fallback: str = ""
    """The folder for versions that the transport cannot send otherwise, returned by :attr:`Transport.fallback`; empty:
    there is none. Engines open it only when such a version is announced."""
    host: str = LOOPBACK
    """The address on which an engine listens, for transports that need it."""
    tls_certificate: str = ""
    """A PEM file with the certificate of an engine, the only one that a learner accepts; empty: no TLS."""
    tls_key: str = ""
    """A PEM file with the key of that certificate."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """``sync.options``, for a transport that an installed package offers."""
    deadline_s: float = 60.0
    """The longest time, in seconds, that one side waits for the other side to complete its part of an update."""
    silence_s: float | None = None
    """The longest time, in seconds, without a byte on a connection between both sides; ``None``: ``deadline_s``."""
