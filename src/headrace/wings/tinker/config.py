"""The limits of ``headrace tinker``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """One base model of a server."""

    path: Path
    """Its directory."""
    names: tuple[str, ...]
    """The names under which clients may ask for it."""
    whole: bool = False
    """Whether one client at a time trains all its weights; otherwise many train adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerConfig:
    """The settings of one server."""

    bases: tuple[BaseConfig, ...]
    """The base models, each with names that no other has."""
    state: Path
    """The directory of the journal, the checkpoints and the key."""
    host: str = "127.0.0.1"
    port: int = 8642
    """The port to listen on; 0 for a free one."""
    device: str = "auto"
    max_body_bytes: int = 64 * 2**20
    """The largest body of a request; the client's chunks have 5 MB at most."""
    max_waiting: int = 1024
    """The most requests of one model that wait; one more is answered with status 429, and the client repeats it."""
    max_samples: int = 1024
    """The most samples that run or wait, of all sessions."""
    max_models: int = 256
    """The most models of sessions that have not ended."""
    max_resident: int = 32
    """The most models in training, and the most samplers, of all bases, that stay in memory while they are not used."""
    max_rank: int = 256
    """The largest rank of an adapter."""
    tokens_per_microbatch: int = 4096
    """The most positions of one training pass, unless one datum has more."""
    session_s: float = 120.0
    """Seconds without a heartbeat after which the models of a session move to the disk."""
    ephemeral_s: float = 86400.0
    """Seconds for which the weights of a sampler without a name are kept after the last heartbeat of its session."""
    poll_s: float = 30.0
    """Seconds for which a request for a result is held while there is none; the client waits 45."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(flush_tokens=64))
