"""The contracts of the weight sync: transports, which send bytes from the learner to the engines, and codecs, which
represent weights as bytes.

    learner                                          engine
    copy(slot)     one copy, then training continues
    announce()     hash, encode, send: background ─▶ stage(update)    fetch, decode, verify, while decoding continues
                                                     commit(version)  between two steps: from now on these weights

An *image* is a buffer with all tensors of one version. A *payload* is the bytes that are sent: an image, or its
difference from the previous version. A *slot* is one of two images of the learner. The newest committed version is in
one slot; the learner fills the other slot, and may fill the first one again only when the newer version is in use. An
update that is refused does not change the weights in use.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.base.types.weights import Manifest, RankLayout, WeightUpdate

if TYPE_CHECKING:
    # a run file is read without torch
    from torch import Tensor


class Phase(enum.StrEnum):
    """The state of an engine's receiver of weight updates.

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
    """The bytes of the update have arrived, and their hashes equal the announced ones."""
    COMMITTED = "committed"
    """The update is in use."""
    REFUSED = "refused"
    """The last update did not fit the model or was not newer than the committed version. The next one can be staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRequest:
    """A request of the publisher to the learner's side of a transport to send one version of the weights, whole or as a
    difference."""

    version: int
    """The number of the version."""
    slot: int
    """The index of the slot that holds the version."""
    payload: memoryview
    """The bytes to send."""
    manifest: Manifest
    """The layout of the image: name, dtype, shape and offset of each tensor."""
    whole: bool
    """Whether the payload is the whole image of the slot; false for a difference."""
    to: Sequence[str]
    """The addresses of the receivers, for transports that send to addresses; else empty."""
    checksums: Sequence[int]
    """xxh3 (64 bits) of each tensor in the payload's image, or of each of this rank's pieces."""
    layout: RankLayout
    """The layout of the pieces that this rank sends. It covers all weights unless every rank of the learner sends."""
    previous: memoryview | None = None
    """The image of the previous version, if every rank sends and the ranks may send differences; else ``None``."""
    base_version: int = -1
    """The number of the previous version; −1 if ``previous`` is ``None`` and the payload is whole."""
    again: bool = False
    """Whether the version was sent before and a receiver could not use it. The transport then discards the state that
    it keeps between versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The result of sending one payload."""

    path: str
    """The location of the payload for receivers, in a format of the transport; copied to ``WeightUpdate.path``."""
    missed_by: Mapping[str, str] = field(default_factory=dict)
    """The addresses of receivers that the payload did not reach, each with the reason."""
    checksums: tuple[int, ...] = ()
    """On rank 0, the hashes of the pieces of all ranks, for a transport over which every rank sends; else empty."""
    note: str = ""
    """A sentence for the user about the way in which the payload was sent; copied to ``WeightUpdate.note``. Empty:
    nothing to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRank:
    """One of the processes of a learner, for transports over which every rank sends."""

    index: int
    """The index of this rank, from 0."""
    world: int
    """The number of ranks."""
    share: Callable[[bytes | None], bytes]
    """A broadcast that all ranks call together: rank 0 passes a message, the other ranks ``None``, and all get the
    message."""


ALONE = LearnerRank(index=0, world=1, share=lambda message: message or b"")
"""The single rank of a learner that is one process."""


class Outbox(Protocol):
    """The contract of the learner's side of a transport. Failures are raised as
    :class:`~headrace.base.errors.WeightsError`."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of memory, in which the publisher keeps its slots; called once. Raises
        :class:`~headrace.base.errors.WeightsError` if there is too little memory."""
        ...

    def send(self, request: SendRequest) -> Sent:
        """Make the payload of ``request`` available to the receivers, and return its location. The payload's memory
        does not change until the slot is filled again. Raises :class:`~headrace.base.errors.WeightsError` if the
        payload reaches no receiver; receivers that it did not reach are in :attr:`Sent.missed_by`."""
        ...

    def close(self) -> None:
        """Release all resources, and remove the files that this side has created."""
        ...


class Inbox(Protocol):
    """The contract of the engine's side of a transport. Failures are raised as
    :class:`~headrace.base.errors.NeedsFull`."""

    @property
    def address(self) -> str:
        """Return the address to which the learner can send updates; empty for a transport that does not send to
        addresses."""
        ...

    @property
    def lasting(self) -> bool:
        """Return whether :meth:`view` returns the same memory for every version in a slot, so that views into it can be
        kept."""
        ...

    def view(self, update: WeightUpdate) -> memoryview | None:
        """Return the payload of ``update`` without a copy, if it is in memory already; ``None`` if it has to be
        fetched. The bytes do not change while they are referenced (``shm``: until the learner may fill the slot
        again)."""
        ...

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Write the payload of ``update``, which has ``update.num_bytes`` bytes, to the memory ``into``. Raises if it
        does not arrive before the transport's deadline."""
        ...

    def skip(self, update: WeightUpdate) -> None:
        """Release the bytes that were received of ``update``, because the engine has refused it and will not fetch
        it."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Form(Protocol):
    """The contract of a form: the representation of one tensor in the image by one or more tensors, called its
    parts."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the parts that represent the tensor called ``name``, by their names in the image. Only the dtypes and
        shapes of the parts are used."""
        ...

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill ``parts``, views into the learner's slot, from ``tensor``. The learner waits for this call."""
        ...

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Restore a tensor from ``parts``, the views of its entries in the engine's image, and write it to ``out``,
        rounded to the dtype of ``out`` and moved to its device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A way to represent the weights of a model as bytes (``sync.codec``)."""

    form: Form
    """The representation of each tensor in the image."""
    differences: bool = False
    """Whether a version is sent as its difference from the previous version, if that is shorter."""
    adapters_only: bool = False
    """Whether only adapters are sent: a model that trains other weights is refused, and each version of the adapter
    gets a name."""
