"""The engines that are servers of their own, vLLM and SGLang. Each folder registers one object."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # a run file is read without torch
    from headrace.engine.config import EngineSetup, OpenedEngine


def open_server(setup: EngineSetup) -> AbstractContextManager[OpenedEngine]:
    """Open the engine of ``engine.kind`` in this process, as a context: start its server or connect to a running one,
    pass requests and new weights on to it, and end it when the context ends."""
    from headrace.wings.servers.client.make import opened

    return opened(setup)
