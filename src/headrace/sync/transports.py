"""The construction of the publisher (the learner's side of the weight sync) and the receiver (the engine's side), with
the transport and the codec that a run has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from headrace.sync.base import ALONE, LearnerRank
from headrace.sync.codecs import get_codec
from headrace.sync.config import TRANSPORTS, Route
from headrace.sync.pieces import TensorBoxes, whole_boxes
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver


def sent_by_every_rank(route: Route) -> bool:
    """Return whether the transport of ``route`` is one over which every rank of the learner sends the parts of the
    weights that it holds."""
    return TRANSPORTS.load(route.transport).open_rank_outbox is not None


def make_publisher(
    route: Route,
    tensors: Mapping[str, Tensor],
    token: str = "",
    boxes_by_rank: Sequence[TensorBoxes] | None = None,
    rank: LearnerRank = ALONE,
) -> Publisher:
    """Return the learner's side of the weight sync for ``tensors``, the weights by name, with the transport and codec
    of ``route``. ``token`` is the run's token, for transports that authenticate.

    ``boxes_by_rank`` and ``rank`` are for transports over which every rank sends: the parts that each rank sends
    (``None``: this process sends all), and this process as a rank. All ranks must call this together.

    Raises :class:`~headrace.base.errors.ConfigError` if the transport cannot be used here, and
    :class:`~headrace.base.errors.WeightsError` if there is too little memory.
    """
    transport, codec = TRANSPORTS.load(route.transport), get_codec(route.codec)
    if transport.open_rank_outbox is None:
        return Publisher(tensors, codec, transport.open_outbox(route, token))
    boxes_by_rank = [whole_boxes(tensors)] if boxes_by_rank is None else boxes_by_rank
    return Publisher(tensors, codec, transport.open_rank_outbox(route, rank), boxes_by_rank, rank.index)


def make_receiver(route: Route, tensors: Mapping[str, Tensor], token: str = "") -> Receiver:
    """Return the engine's side of the weight sync for ``tensors``, the model's parameters and buffers by name. The
    other arguments and the errors are the same as in :func:`make_publisher`."""
    transport = TRANSPORTS.load(route.transport)
    return Receiver(
        tensors, get_codec(route.codec), lambda limit_bytes: transport.open_inbox(route, token, limit_bytes)
    )
