"""The registration of vLLM as an engine, which samples and receives new weights through vLLM's HTTP and weight-transfer
API."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.base.types.weights import Interrupt
from headrace.wings.servers import open_server
from headrace.wings.servers.client.kind import BY_ABORT, SERVED, ServerKind

if TYPE_CHECKING:
    from headrace.wings.servers.client.server import ServerParts


def _parts() -> ServerParts:
    """Return the parts of an engine that is a vLLM server: its API, its address, its start command and the way to call
    its workers. They are imported only when such an engine is opened."""
    from headrace.wings.servers.client.server import ServerParts
    from headrace.wings.servers.vllm.command import command, own_address
    from headrace.wings.servers.vllm.dialect import VllmDialect, call_workers

    return ServerParts(dialect=VllmDialect(), own_address=own_address, command=command, call_workers=call_workers)


VLLM = ServerKind(
    # answers end with the spans of their versions, so they may continue across a commit
    capabilities=replace(
        SERVED,
        interrupts=BY_ABORT | {Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE, Interrupt.SLEEP},
        releases=True,
        truncates=True,
        kept_sets=True,
        routing=True,
        adapters=True,
        max_rank=512,
    ),
    open=open_server,
    parts=_parts,
)
