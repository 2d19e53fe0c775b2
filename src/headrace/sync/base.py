"""What the parts of the sync promise one another.

    learner                                          engine
    copy(slot)     one copy, then training goes on
    announce()     hash, encode, send: background ─▶ stage(update)    fetch, decode, verify, while decoding goes on
                                                     commit(version)  between two steps: from now on these weights

Two slots. The newest committed version is in one of them; the learner fills the other, and may fill the first again
only when the newer version is in use. A refused update changes nothing that is used.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from headrace.base.types.weights import Manifest, WeightUpdate

NUM_SLOTS = 2


class Phase(enum.StrEnum):
    """Where a receiver stands.

    NEEDS_FULL ──whole update──▶ STAGED ──checksums hold──▶ VERIFIED ──between two steps──▶ COMMITTED
        ▲                          │ ▲                          │                              │
        └── bytes are wrong, or ───┤ └──────── next update ─────┴──────────────────────────────┘
            its base is not here   └──── does not fit, or not newer ──▶ REFUSED ── next update ──▶ STAGED
    """

    NEEDS_FULL = "needs_full"
    """Nothing was ever committed, or an update failed: differences are refused until a whole image is committed."""
    STAGED = "staged"
    """An update fits and is being brought."""
    VERIFIED = "verified"
    """Its bytes are here and hash to what was announced."""
    COMMITTED = "committed"
    """It is in use."""
    REFUSED = "refused"
    """The last update did not fit the model, or was not newer than the committed one; nothing else is the matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One payload on its way."""

    version: int
    slot: int
    payload: memoryview
    manifest: Manifest
    """The layout of the image."""
    whole: bool
    """The payload is the slot itself."""
    to: Sequence[str]
    """The addresses of the receivers, for transports that send to somebody."""
    again: bool = False
    """A receiver could not use it as it came: begin anew, whatever the transport keeps between versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One payload that is available."""

    path: str
    """What the update's ``path`` is to say."""
    missed: Mapping[str, str] = field(default_factory=dict)
    """The receivers that it was sent to and did not reach, and why; by their addresses."""


class Outbox(Protocol):
    """The learner's side of a transport. Failures are :class:`~headrace.base.errors.WeightsError`."""

    def memory(self, num_bytes: int) -> memoryview:
        """Room for the slots. Raises :class:`~headrace.base.errors.WeightsError` where there is too little."""
        ...

    def send(self, parcel: Parcel) -> Sent:
        """Make the payload available. It stays as it is until the slot is filled again. What reaches nobody is a
        failure; what reaches some of ``parcel.to`` is not."""
        ...

    def close(self) -> None:
        """Remove what was made."""
        ...


class Inbox(Protocol):
    """The engine's side of a transport. Failures are :class:`~headrace.base.errors.NeedsFull`."""

    @property
    def address(self) -> str:
        """Where it can be sent to; empty where nobody has to know."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether it lends the same memory again for each version in a slot."""
        ...

    def lend(self, update: WeightUpdate) -> memoryview | None:
        """The payload where it lies, unchanged for as long as somebody holds it (``shm``: until the learner may fill
        the slot again); ``None``: it has to be fetched."""
        ...

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Exactly ``update.num_bytes`` into ``into``, before the deadline."""
        ...

    def skip(self, update: WeightUpdate) -> None:
        """It will not be fetched."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Form(Protocol):
    """How one tensor stands in the image."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Names, dtypes and shapes of what stands for it; their contents are not looked at."""
        ...

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill its parts; the learner waits meanwhile."""
        ...

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """The tensor again, rounded to the dtype of ``out`` and moved to its device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How weights become bytes."""

    form: Form
    differences: bool = False
    """Send the image as its difference from the version before, where that is shorter."""
    adapters_only: bool = False
    """Refuse a model that is trained as a whole, and name each version of the adapter."""
