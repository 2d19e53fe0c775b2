"""The messages that a learner receives. ``call`` is the number of an order; the learner's answer repeats it.

The learner has several buffers for published weights; a *slot* is the index of a buffer. An *address* is the address at
which an engine receives weights or orders.
"""

from __future__ import annotations

import msgspec

from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.weights import Interrupt


class BatchPart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Some of the samples of the batch of the order ``call``, which follows later. A batch is sent in several messages,
    so that the size of a message is bounded."""

    call: int
    batch: Batch


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to make one step on a batch: one update of the weights, or several, as the settings say."""

    call: int
    batch: Batch
    """The last part of the batch, or the whole batch."""
    num_parts: int = 0
    """The number of ``BatchPart`` messages that were sent before with the other samples."""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute log π, the log-probability under the learner's present weights, of a batch's tokens, without
    training."""

    call: int
    batch: Batch
    """The last part of the batch, or the whole batch."""
    num_parts: int = 0
    """The number of ``BatchPart`` messages that were sent before with the other samples."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to publish the weights as ``version``: to copy them into the buffer ``slot`` (first answer), then to
    hash and announce them (second answer)."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()
    """The addresses of the engines, for transports that send the weights to each receiver separately."""
    announce_to: dict[str, str] = {}
    """The engines to which the learner itself announces the version: the address of each engine for orders, mapped to
    its address in ``to``, which is empty for transports that do not send to each receiver separately."""
    commit: Interrupt | None = None
    """The mode in which those engines commit the version as soon as it is staged; ``None``: the controller orders the
    commit."""


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to send a published version once more, as the full weights, since an engine could not use the
    difference to an earlier version."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()
    """The addresses of the engines that lack the version, for transports that send to each receiver separately."""


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to write a checkpoint (model, optimizer, schedule and random state) into the new directory
    ``directory``."""

    call: int
    directory: str


Message = BatchPart | Train | Logprobs | Publish | Resend | Save | Shutdown
