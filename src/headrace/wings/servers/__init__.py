"""The engines that sample through a separate server, vLLM or SGLang. Each of the folders ``vllm`` and ``sglang``
registers one engine; ``client`` is their common part."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # these imports would load torch, which reading a run file must not need
    from headrace.engine.config import EngineSetup, OpenedEngine


def open_server(setup: EngineSetup) -> AbstractContextManager[OpenedEngine]:
    """Open the engine of ``engine.kind`` in this process, as a context: start its server or connect to a running one,
    pass requests and new weights on to it, and end it when the context ends."""
    from headrace.wings.servers.client.make import open_engine

    return open_engine(setup)
