"""The registration of SGLang as an engine, which samples and receives new weights through SGLang's HTTP API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.base.types.weights import Interrupt
from headrace.wings.servers import open_server
from headrace.wings.servers.client.config import SharedFolderConfig
from headrace.wings.servers.client.kind import BY_ABORT, SERVED, ServerKind

if TYPE_CHECKING:
    from headrace.wings.servers.client.server import ServerParts


def _parts() -> ServerParts:
    """Return the parts of an engine that is an SGLang server: its API, its address and its start command. They are
    imported only when such an engine is opened."""
    from headrace.wings.servers.client.server import ServerParts
    from headrace.wings.servers.sglang.command import command, own_address
    from headrace.wings.servers.sglang.dialect import SglangDialect

    return ServerParts(dialect=SglangDialect(), own_address=own_address, command=command)


SGLANG = ServerKind(
    capabilities=replace(SERVED, interrupts=BY_ABORT | {Interrupt.SLEEP}, routing=True, releases=True),
    settings=SharedFolderConfig,
    open=open_server,
    parts=_parts,
)
