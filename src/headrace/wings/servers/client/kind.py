"""The registration of a kind of server as an engine: the facts that a run file and the planner need before a server is
started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.types.weights import Interrupt
from headrace.engine.capabilities import Capabilities
from headrace.engine.config import EngineConfig, EngineKind, EngineSettings
from headrace.wings.servers.client.config import ServerConfig

if TYPE_CHECKING:
    # ServerParts imports torch, so it is imported when a server is started
    from headrace.wings.servers.client.server import ServerParts

BY_ABORT = frozenset({Interrupt.ABORT_RESUME, Interrupt.ABORT_RETRY, Interrupt.DRAIN, Interrupt.BATCH})
"""The commit modes that end or finish every stream, so that each stream has one version. The server need not report the
version of each token then."""
SERVED = Capabilities(
    interrupts=BY_ABORT,
    truncates=False,
    kept_sets=False,
    routing=False,
    adapters=False,
    max_rank=None,
    any_adapters=False,
    entropies=False,
    scores=True,
    exact_scores=False,
    forks=True,
    reuses_stale=False,
    pins=False,
    seeds=False,
    deterministic=False,
    releases=False,
    embedded=False,
    other_models=False,
    gangs=True,
)
"""The capabilities that every supported server has at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind(EngineKind):
    """A kind of server as an engine, such as vLLM, in the registry of engines. To add one, write a dialect, a command,
    and an instance of this class."""

    parts: Callable[[], ServerParts]
    """A function that imports and returns the implementation of this kind of server."""
    settings: type[EngineSettings] = ServerConfig
    """The class of the settings ``[engine.server]``."""
    unread: frozenset[str] = frozenset({
        *("cache_tokens", "max_pinned_versions", "stream_steps", "kernels"),
        *("speculation", "draft_tokens", "history_tokens"),
    })  # fmt: skip
    """Settings of ``[engine]`` that have no effect on a server."""


def get_server_settings(config: EngineConfig) -> ServerConfig:
    """Return the ``[engine.server]`` settings of an engine that is a server."""
    assert isinstance(config.server, ServerConfig)
    return config.server
