"""The settings of a server that ``headrace tinker`` starts: its base models, its address and its limits.

A base is a model on the disk. A "model", in the words of the protocol, is what one client trains on a base: an adapter,
or all weights. A session is one run of a client program; a sampler is a set of weights that it samples from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """One base model of a server, from the command line."""

    path: Path
    """The directory of the model."""
    names: tuple[str, ...]
    """The names under which clients may request the model."""
    whole: bool = False
    """Whether one client at a time trains all weights of the model; otherwise many clients train adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerConfig:
    """The settings of one server, from the options of ``headrace tinker``."""

    bases: tuple[BaseConfig, ...]
    """The base models; no two have a common name."""
    state: Path
    """The directory of the journal, the checkpoints and the key; the next start of the server continues from it."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8642
    """The port to listen on; 0 for a free one."""
    device: str = "auto"
    """The device of all bases: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for cuda where there is one."""
    max_body_bytes: int = 64 * 2**20
    """The largest size of the body of a request in bytes; the client sends chunks of at most 5 MB."""
    max_waiting: int = 1024
    """The largest number of requests of one model that may wait to be computed; a further request is answered with
    status 429, and the client repeats it."""
    max_samples: int = 1024
    """The largest number of samples of all sessions that run or wait."""
    max_models: int = 256
    """The largest number of models of sessions that have not ended; a further model is refused."""
    max_resident: int = 32
    """The largest number of models in training, and of samplers, over all bases, whose weights stay in memory while no
    request uses them. Further ones are on the disk until they are used again."""
    max_rank: int = 256
    """The largest rank of an adapter."""
    tokens_per_microbatch: int = 4096
    """The largest number of token positions in one training pass; a single datum may have more."""
    session_s: float = 120.0
    """Seconds without a heartbeat after which the models of a session move to the disk."""
    ephemeral_s: float = 86400.0
    """Seconds for which the weights of a sampler without a name are kept after the last heartbeat of its session."""
    poll_s: float = 30.0
    """Seconds for which the server holds a request for a result while there is no result; the client waits 45 s."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(flush_tokens=64))
    """The settings of the engine of every base."""
