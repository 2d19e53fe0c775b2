"""Which transports there are. A new one is a file with ``open_outbox`` and ``open_inbox``, and a row here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headrace.base.errors import ConfigError, nearest
from headrace.sync.codecs import codec_of
from headrace.sync.config import Route
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver

TRANSPORTS = {
    "shm": "headrace.sync.shm",
    "files": "headrace.sync.files",
    "http": "headrace.sync.http",
    "collective": "headrace.sync.collective",
}
"""By the name that ``sync.transport`` gives them, the module; what it needs is imported when it is chosen."""


def make_publisher(route: Route, tensors: Mapping[str, Tensor], token: str = "") -> Publisher:
    """The learner's side. ``token`` is the run's, for transports that others could reach.

    Raises :class:`~headrace.base.errors.ConfigError` for what cannot be used here,
    :class:`~headrace.base.errors.WeightsError` for too little memory.
    """
    return Publisher(tensors, codec_of(route.codec), open_transport(route).open_outbox(route, token))


def make_receiver(route: Route, tensors: Mapping[str, Tensor], token: str = "") -> Receiver:
    """The engine's side."""
    module = open_transport(route)
    return Receiver(tensors, codec_of(route.codec), lambda limit_bytes: module.open_inbox(route, token, limit_bytes))


def open_transport(route: Route) -> Any:
    """The module that has the two sides."""
    if route.transport not in TRANSPORTS:
        raise ConfigError(
            f"sync.transport={route.transport!r} is no transport", remedy=nearest(route.transport, TRANSPORTS)
        )
    return importlib.import_module(TRANSPORTS[route.transport])
