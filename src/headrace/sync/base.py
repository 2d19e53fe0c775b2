"""The contracts of the weight sync.

    learner                                          engine
    copy(slot)     one copy, then training continues
    announce()     hash, encode, send: background ─▶ stage(update)    fetch, decode, verify, while decoding continues
                                                     commit(version)  between two steps: from now on these weights

There are two slots. The newest committed version is in one of them. The learner fills the other, and may fill the first
again only when the newer version is in use. An update that is refused changes nothing that is in use.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.base.types.weights import Manifest, WeightUpdate

if TYPE_CHECKING:
    # a run file is read without torch
    from torch import Tensor


class Phase(enum.StrEnum):
    """The state of a receiver.

    NEEDS_FULL ──whole update──▶ STAGED ──checksums hold──▶ VERIFIED ──between two steps──▶ COMMITTED
        ▲                          │ ▲                          │                              │
        └── bytes are wrong, or ───┤ └──────── next update ─────┴──────────────────────────────┘
            its base is missing    └──── does not fit, or not newer ──▶ REFUSED ── next update ──▶ STAGED
    """

    NEEDS_FULL = "needs_full"
    """No version was ever committed, or an update failed. Differences are refused until a whole image is committed."""
    STAGED = "staged"
    """An update fits the model and is being fetched."""
    VERIFIED = "verified"
    """The bytes of the update have arrived, and their hashes are those announced."""
    COMMITTED = "committed"
    """The update is in use."""
    REFUSED = "refused"
    """The last update did not fit the model or was not newer than the committed version. The next one can be staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRequest:
    """A request to send one payload: a version of the weights, whole or as a difference."""

    version: int
    slot: int
    payload: memoryview
    manifest: Manifest
    """The layout of the image."""
    whole: bool
    """Whether the payload is the whole image of the slot, and not a difference."""
    to: Sequence[str]
    """The addresses of the receivers, for transports that send to addresses."""
    again: bool = False
    """Whether a receiver could not use the payload the first time. The transport then discards the state that it keeps
    between versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The result of sending one payload."""

    path: str
    """The value for the ``path`` of the update."""
    missed: Mapping[str, str] = field(default_factory=dict)
    """The addresses of receivers that the payload did not reach, each with the reason."""


class Outbox(Protocol):
    """The learner's side of a transport. Failures are raised as :class:`~headrace.base.errors.WeightsError`."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return memory for the slots. Raises :class:`~headrace.base.errors.WeightsError` where there is too little."""
        ...

    def send(self, request: SendRequest) -> Sent:
        """Make the payload available. Its memory does not change until the slot is filled again. It is an error if the
        payload reaches no receiver, and none if it reaches some of ``request.to``."""
        ...

    def close(self) -> None:
        """Release all resources, and remove files that were created."""
        ...


class Inbox(Protocol):
    """The engine's side of a transport. Failures are raised as :class:`~headrace.base.errors.NeedsFull`."""

    @property
    def address(self) -> str:
        """The address to which updates can be sent; empty for a transport that does not send to addresses."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether :meth:`view` returns the same memory for every version in a slot."""
        ...

    def view(self, update: WeightUpdate) -> memoryview | None:
        """Return the payload in the memory where it is already, unchanged while it is referenced (``shm``: until the
        learner may fill the slot again); ``None`` if it has to be fetched."""
        ...

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Write the payload, ``update.num_bytes`` bytes, to ``into``, before the deadline."""
        ...

    def skip(self, update: WeightUpdate) -> None:
        """Record that the update will not be fetched."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Form(Protocol):
    """The representation of one tensor in the image."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors that represent ``tensor``, by name. Only their dtypes and shapes are used."""
        ...

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill the parts from ``tensor``. The learner waits for this call."""
        ...

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Restore the tensor from its parts, rounded to the dtype of ``out`` and moved to its device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A way to represent weights as bytes."""

    form: Form
    differences: bool = False
    """Whether the image is sent as its difference from the version before, where that is shorter."""
    adapters_only: bool = False
    """Whether a model without adapters is refused, and each version of the adapter gets a name."""
