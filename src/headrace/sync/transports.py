"""The construction of both sides of the transport that a run has chosen, from the registry in ``config``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.sync.codecs import codec_of
from headrace.sync.config import TRANSPORTS, Route
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver


def make_publisher(route: Route, tensors: Mapping[str, Tensor], token: str = "") -> Publisher:
    """Return the learner's side of the weight sync for ``tensors``, the weights by name, with the transport and codec
    of ``route``. ``token`` is the run's token, for transports that other machines can reach.

    Raises :class:`~headrace.base.errors.ConfigError` if the transport cannot be used here, and
    :class:`~headrace.base.errors.WeightsError` if there is too little memory.
    """
    return Publisher(tensors, codec_of(route.codec), TRANSPORTS.load(route.transport).open_outbox(route, token))


def make_receiver(route: Route, tensors: Mapping[str, Tensor], token: str = "") -> Receiver:
    """Return the engine's side of the weight sync for ``tensors``, the model's parameters and buffers by name. The
    other arguments and the errors are those of :func:`make_publisher`."""
    transport = TRANSPORTS.load(route.transport)
    return Receiver(tensors, codec_of(route.codec), lambda limit_bytes: transport.open_inbox(route, token, limit_bytes))
