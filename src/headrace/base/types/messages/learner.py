"""The messages that a learner receives."""

from __future__ import annotations

import msgspec

from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.weights import Interrupt


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to make one optimizer step on a batch."""

    call: int
    batch: Batch


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute log π of a batch's tokens under the current weights, without training."""

    call: int
    batch: Batch


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to copy the weights into a shared buffer (first answer), then hash and announce them (second
    answer)."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()
    """The addresses of the engines, for transports that send the weights to each receiver."""
    announce_to: dict[str, str] = {}
    """The engines to which the learner itself announces the version: the address of each for orders, mapped to its
    address among ``to``. The latter is empty for transports that do not send to each receiver."""
    commit: Interrupt | None = None
    """The mode in which those engines commit the version as soon as it is staged; ``None``: the controller orders
    it."""


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to announce a snapshot once more, as a full image, since an engine could not use its difference."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to write a snapshot of model, optimizer, schedule and random state into this new directory."""

    call: int
    directory: str


Message = Train | Logprobs | Publish | Resend | Save | Shutdown
