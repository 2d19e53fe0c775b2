"""The contracts of the weight sync.

    learner                                          engine
    copy(slot)     one copy, then training continues
    announce()     hash, encode, send: background ─▶ stage(update)    fetch, decode, verify, while decoding continues
                                                     commit(version)  between two steps: from now on these weights

An *image* is a buffer with all tensors of one version; a *payload* is the bytes that are sent: an image, or its
difference from the version before. A *slot* is one of two images of the learner: the newest committed version is in one
of them. The learner fills the other, and may fill the first again only when the newer version is in use. An update that
is refused changes nothing that is in use.
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
    """The bytes of the update have arrived, and their hashes are those announced."""
    COMMITTED = "committed"
    """The update is in use."""
    REFUSED = "refused"
    """The last update did not fit the model or was not newer than the committed version. The next one can be staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRequest:
    """A request of the publisher to the learner's side of a transport: to send one version of the weights, whole or as
    a difference."""

    version: int
    """The number of the version."""
    slot: int
    """The index of the slot that holds the version."""
    payload: memoryview
    """The bytes to send."""
    manifest: Manifest
    """The layout of the image: which tensor is where."""
    whole: bool
    """Whether the payload is the whole image of the slot, and not a difference."""
    to: Sequence[str]
    """The addresses of the receivers, for transports that send to addresses."""
    checksums: Sequence[int]
    """xxh3 (64 bits) of each tensor in the payload's image, or of each of this rank's pieces."""
    layout: RankLayout
    """What this rank sends, for transports that every rank of the learner sends by; otherwise everything."""
    previous: memoryview | None = None
    """For such transports, the image of the version before, if differences from it may be sent."""
    base_version: int = -1
    """The number of that version."""
    again: bool = False
    """Whether a receiver could not use the payload the first time. The transport then discards the state that it keeps
    between versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The result of sending one payload."""

    path: str
    """Where receivers find the payload, in the transport's own form; it becomes ``WeightUpdate.path``."""
    missed: Mapping[str, str] = field(default_factory=dict)
    """The addresses of receivers that the payload did not reach, each with the reason."""
    checksums: tuple[int, ...] = ()
    """On rank 0, the hashes of the pieces of all ranks, for transports that every rank sends by."""
    note: str = ""
    """What the user has to know about the way that the payload took, as a sentence; it becomes
    ``WeightUpdate.note``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRank:
    """One of the processes of a learner, for transports that every rank sends by."""

    index: int
    """The number of this rank; 0 is the leading one."""
    world: int
    """The number of ranks."""
    share: Callable[[bytes | None], bytes]
    """A function that all ranks call together: it returns what rank 0 passes; the others pass ``None``."""


ALONE = LearnerRank(index=0, world=1, share=lambda message: message or b"")
"""The only rank of a learner of one process."""


class Outbox(Protocol):
    """The contract of the learner's side of a transport. Failures are raised as
    :class:`~headrace.base.errors.WeightsError`."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of memory, in which the publisher keeps its slots. It is called once. Raises
        :class:`~headrace.base.errors.WeightsError` if there is too little."""
        ...

    def send(self, request: SendRequest) -> Sent:
        """Make the payload of ``request`` available to the receivers, and return where it is. Its memory does not
        change until the slot is filled again. It is an error if the payload reaches no receiver, but not if it reaches
        some of ``request.to``."""
        ...

    def close(self) -> None:
        """Release all resources, and remove files that were created."""
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
        """Return the payload of ``update`` in the memory where it already is; ``None`` if it has to be fetched. It
        stays unchanged while it is referenced (``shm``: until the learner may fill the slot again)."""
        ...

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Write the payload of ``update``, which has ``update.num_bytes`` bytes, to ``into``, before the transport's
        deadline."""
        ...

    def skip(self, update: WeightUpdate) -> None:
        """Release whatever was received of ``update``, which the engine has refused and will not fetch."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Form(Protocol):
    """The contract of a form: how one tensor is represented in the image, by one or more tensors called its parts."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the parts that represent the tensor called ``name``, by their names in the image. Only the dtypes and
        shapes of the parts are used."""
        ...

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill ``parts``, views into the learner's slot, from ``tensor``. The learner waits for this call."""
        ...

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Restore the tensor from ``parts``, views into the engine's image, into ``out``: rounded to its dtype and
        moved to its device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A way to represent the weights of a model as bytes (``sync.codec``)."""

    form: Form
    """How each tensor is represented in the image."""
    differences: bool = False
    """Whether a version is sent as its difference from the version before, where that is shorter."""
    adapters_only: bool = False
    """Whether only adapters are sent: a model that trains other weights is refused, and each version of the adapter
    gets a name."""
