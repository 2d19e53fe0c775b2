"""Settings of the weight sync."""

from __future__ import annotations

from typing import Literal, Self

import msgspec
from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import EVERYWHERE, LOOPBACK
from headrace.base.config.tls import refuse_half
from headrace.base.errors import ConfigError
from headrace.base.types.weights import Interrupt


class SyncConfig(Section):
    """How weights travel. Every transport goes with every codec and every interrupt."""

    transport: Literal["shm", "files", "http", "collective"] = "shm"
    """``shm``: two packed buffers in shared memory; the engine's parameters are views of the committed one, nothing is
    moved. ``files``: a folder. ``http``: an upload to the engine, with the run's token. ``collective``:
    torch.distributed, in a process group of its own."""
    codec: Literal["full", "cast_bf16", "cast_fp8", "delta", "adapter"] = "full"
    """``full``: every tensor as it is. ``cast_bf16``, ``cast_fp8``: rounded on the way, the latter with a scale per row
    of each matrix. ``delta``: lossless differences from the version before. ``adapter``: insists that only adapters are
    trained; under LoRA the other codecs, too, send nothing else."""
    host: str = LOOPBACK
    """``http`` only: the address of this machine at which the engine takes uploads, for a learner on another one. Every
    upload has to carry the run's token; without ``tls_certificate`` token and weights travel as clear text, so the
    network must be a trusted one."""
    tls_certificate: str = ""
    """``http`` only: PEM file with the certificate that the engines show, and the only one that the learner believes;
    on each of their machines under this path. Unset: no TLS."""
    tls_key: str = ""
    """PEM file with its key, without a password; the engines read it."""
    directory: str = ""
    """``files`` only: folder or fsspec URL in which one folder per run is made; empty: ``weights`` in the run
    directory."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of the running sequences when new weights are committed."""
    rolling: int | None = Field(default=None, ge=1)
    """How many of several engines may commit at once, while the others serve. Unset: one where ``interrupt`` stops
    generation, all where it does not (``inflight``, ``stream``)."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for one stage or commit. Within it, learner and engine wait for each other for half as long."""

    @model_validator(mode="after")
    def _directory_is_used(self) -> Self:
        if self.directory and self.transport != "files":
            raise ConfigError(
                f"sync.directory={self.directory!r} is set, and sync.transport={self.transport!r} writes no files",
                remedy="set sync.transport = 'files', or leave sync.directory out",
            )
        return self

    @model_validator(mode="after")
    def _host_is_used(self) -> Self:
        if self.host != LOOPBACK and self.transport != "http":
            raise ConfigError(
                f"sync.host={self.host!r} is set, and sync.transport={self.transport!r} takes no uploads",
                remedy="set sync.transport = 'http', or leave sync.host out",
            )
        refuse_half("sync", self.tls_certificate, self.tls_key)
        if self.tls_certificate and self.transport != "http":
            raise ConfigError(
                f"sync.tls_certificate={self.tls_certificate!r} is set, and sync.transport={self.transport!r} takes no "
                "uploads",
                remedy="set sync.transport = 'http', or leave sync.tls_certificate and sync.tls_key out",
            )
        if self.host in EVERYWHERE:
            raise ConfigError(
                f"sync.host={self.host!r} is no address that a learner could send to",
                remedy="name the address of one interface of the engine's machine",
            )
        return self


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """How weights get from one learner to its engines; the same on both sides."""

    transport: str = "shm"
    codec: str = "full"
    address: str = ""
    """Where to meet: the shared buffers' file, a folder, the directory of a rendezvous; each transport says."""
    host: str = LOOPBACK
    """Where an engine listens, if its transport does that."""
    tls_certificate: str = ""
    """What it shows, and what a learner believes: a PEM file; empty: no TLS."""
    tls_key: str = ""
    """PEM file with its key."""
    deadline_s: float = 60.0
    """Longest wait of one side for the other."""
