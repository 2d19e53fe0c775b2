"""The formats of the weight sync: announcements, full images, differences and files; and the receiver, which must
accept only the learner's weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.weights import WeightUpdate
from headrace.sync.base import Inbox, SendRequest, Sent
from headrace.sync.codecs import get_codec
from headrace.sync.files import FilesInbox, FilesOutbox
from headrace.sync.manifest import private_memory
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from lab.fuzz.change import mutate, mutate_msgpack

Row: TypeAlias = tuple[
    str, float, Sequence[bytes], Callable[[random.Random, bytes, Sequence[bytes]], bytes], Callable[[bytes], bool]
]


class ForgedInput(Exception):
    """Raised when a receiver accepted something that was never sent."""


class _MemoryTransport:
    """A transport in memory: the payload that was set last is the one that arrives."""

    address = ""
    lasting = False

    def __init__(self) -> None:
        self.payload = b""

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        self.payload = bytes(request.payload)
        return Sent(path="hand")

    def view(self, update: WeightUpdate) -> memoryview:
        if len(self.payload) != update.num_bytes:  # every transport checks the length
            raise NeedsFull("another length than was announced", remedy="send it again")
        return memoryview(bytearray(self.payload))

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        raise AssertionError("it is viewed in place")

    def skip(self, update: WeightUpdate) -> None:
        """Do nothing for ``update``: there is no state to skip."""

    def close(self) -> None:
        """Do nothing: there are no resources."""


class _TwoVersions:
    """A learner that has published two versions, and engines that use the first."""

    def __init__(self, outbox: Any, inbox: Callable[[], Inbox], payload: Callable[[], bytes]) -> None:
        """Publish both versions into ``outbox``. ``inbox`` opens the engines' side, and ``payload`` returns the bytes
        that were sent last."""
        draws = torch.Generator().manual_seed(0)
        shapes = {"a": (8, 4), "b": (3,), "c": (2, 2, 2)}
        self._weights = {name: torch.randn(shape, generator=draws).bfloat16() for name, shape in shapes.items()}
        """The weights of the second version, by name."""
        self._inbox = inbox
        """Opens the receiving side of the transport."""
        publisher = Publisher(self._weights, get_codec("delta"), outbox)
        publisher.copy(0)
        self.first, self._first_bytes = publisher.announce(0, 0), payload()
        self._weights["a"][3, 1] += 0.5
        publisher.copy(1)
        self.difference, self.difference_bytes = publisher.announce(1, 1), payload()
        self.whole, self.whole_bytes = publisher.resend(1, 1), payload()

    def engine(self, deliver: Callable[[bytes], None]) -> Receiver:
        """Return the receiver of a new engine that uses the first version; ``deliver`` sets the payload that it
        receives."""
        model = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        receiver = Receiver(model, get_codec("delta"), lambda _: self._inbox())
        deliver(self._first_bytes)
        receiver.stage(self.first)
        receiver.commit(0)
        return receiver

    def refuse_others(self, staged: dict[str, Tensor]) -> None:
        """Raise :class:`ForgedInput` if ``staged`` differs from the weights of the second version."""
        for name, tensor in self._weights.items():
            if not torch.equal(staged[name].view(torch.int16), tensor.view(torch.int16)):
                raise ForgedInput(f"other weights than were sent were taken for {name}")


class _TestedReceiver:
    """A receiver that gets one input after another. If it needs the full image, it accepts no ``differences`` any more
    and is replaced."""

    def __init__(self, versions: _TwoVersions, deliver: Callable[[bytes], None], *, differences: bool) -> None:
        """Create the receiver, which uses the first of ``versions``. ``deliver`` sets the payload that it receives."""
        self._versions, self._deliver, self._differences = versions, deliver, differences
        self._receiver = versions.engine(deliver)
        """The receiver in use, which uses the first version."""

    def accepts(self, update: WeightUpdate, payload: bytes) -> bool:
        """Return whether the receiver accepts ``update`` with this ``payload``; raise :class:`ForgedInput` if it should
        not have."""
        self._deliver(payload)
        try:
            self._receiver.stage(update)
        except WeightsError as refusal:
            if self._differences and isinstance(refusal, NeedsFull):
                self._renew()
            return False
        self._versions.refuse_others(self._receiver.staged_tensors())
        return True

    def _renew(self) -> None:
        self._receiver.close()
        self._receiver = self._versions.engine(self._deliver)


def weight_formats(scratch: Path) -> list[Row]:
    """Return name, share, seeds, mutation and reader of each format; ``scratch`` is a directory for files."""
    transport = _MemoryTransport()

    def deliver(payload: bytes) -> None:
        transport.payload = payload

    versions = _TwoVersions(transport, lambda: transport, lambda: transport.payload)
    receiver, full_receiver, codec = (
        _TestedReceiver(versions, deliver, differences=True),
        _TestedReceiver(versions, deliver, differences=False),
        MessageCodec(WeightUpdate),
    )

    def announcement(data: bytes) -> bool:
        try:
            update = codec.decode(data)
        except msgspec.MsgspecError:
            return False
        return receiver.accepts(update, versions.whole_bytes if update.base is None else versions.difference_bytes)

    def difference(data: bytes) -> bool:
        return receiver.accepts(msgspec.structs.replace(versions.difference, num_bytes=len(data)), data)

    def image(data: bytes) -> bool:
        return full_receiver.accepts(versions.whole, data)

    announcements = [codec.encode(versions.whole), codec.encode(versions.difference)]
    return [
        ("announcements of weights", 0.03, announcements, mutate_msgpack, announcement),
        ("weights as a difference", 0.03, [versions.difference_bytes], mutate, difference),
        ("weights as a whole", 0.02, [versions.whole_bytes], _slightly, image),
        _files(scratch),
    ]


def _files(scratch: Path) -> Row:
    """Return the format of safetensors files in a directory below ``scratch``."""
    folder = scratch / "weights"
    outbox = FilesOutbox(str(folder))

    def newest() -> bytes:
        return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).read_bytes()

    versions = _TwoVersions(outbox, lambda: FilesInbox(str(folder)), newest)

    def deliver(payload: bytes) -> None:
        for update in (versions.first, versions.whole):
            (folder / update.path).write_bytes(payload)

    receiver = _TestedReceiver(versions, deliver, differences=False)
    return (
        "weights as safetensors",
        0.01,
        [versions.whole_bytes],
        _slightly,
        lambda data: receiver.accepts(versions.whole, data),
    )


def _slightly(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate ``data``; half of the results keep its length, so that they are read and not refused for their length."""
    mutated = mutate(rng, data, others)
    return mutated if rng.random() < 0.5 else mutated[: len(data)].ljust(len(data), b"\0")
