"""What a learner receives."""

from __future__ import annotations

import msgspec

from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import Shutdown


class Train(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One optimizer step on this batch."""

    call: int
    batch: Batch


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """log π of the batch's tokens under the current weights; nothing is trained."""

    call: int
    batch: Batch


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Snapshot the weights into a shared buffer (first answer), then hash and announce them (second answer)."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()
    """Where the engines take it, for transports that send to somebody."""


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Announce a snapshot once more, whole: an engine could not use it as it came."""

    call: int
    version: int
    slot: int
    to: tuple[str, ...] = ()


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a snapshot of model, optimizer, schedule and random state into this fresh directory."""

    call: int
    directory: str


Message = Train | Logprobs | Publish | Resend | Save | Shutdown
