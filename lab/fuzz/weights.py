"""Weights on their way to an engine: announcements, whole images, differences and files, changed in every way; and the
receiver, that must take nothing but what the learner has."""

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
from headrace.sync.base import Inbox, Parcel, Sent
from headrace.sync.codecs import codec_of
from headrace.sync.files import FilesInbox, FilesOutbox
from headrace.sync.manifest import private_memory
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from lab.fuzz.change import changed, changed_msgpack

Row: TypeAlias = tuple[
    str, float, Sequence[bytes], Callable[[random.Random, bytes, Sequence[bytes]], bytes], Callable[[bytes], bool]
]


class Forged(Exception):
    """Something was taken that nobody has sent."""


class _Hand:
    """Both ends of a transport: what is in the hand is what arrives."""

    address = ""
    lasting = False

    def __init__(self) -> None:
        self.held = b""

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, parcel: Parcel) -> Sent:
        self.held = bytes(parcel.payload)
        return Sent(path="hand")

    def lend(self, update: WeightUpdate) -> memoryview:
        if len(self.held) != update.num_bytes:  # as every transport does
            raise NeedsFull("another length than was announced", remedy="send it again")
        return memoryview(bytearray(self.held))

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        raise AssertionError("it is lent")

    def skip(self, update: WeightUpdate) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


class _Way:
    """A learner that has published two versions, of which an engine uses the first."""

    def __init__(self, outbox: Any, inbox: Callable[[], Inbox], payload: Callable[[], bytes]) -> None:
        draws = torch.Generator().manual_seed(0)
        shapes = {"a": (8, 4), "b": (3,), "c": (2, 2, 2)}
        self._weights = {name: torch.randn(shape, generator=draws).bfloat16() for name, shape in shapes.items()}
        self._inbox = inbox
        publisher = Publisher(self._weights, codec_of("delta"), outbox)
        publisher.copy(0)
        self.first, self._first_bytes = publisher.announce(0, 0), payload()
        self._weights["a"][3, 1] += 0.5
        publisher.copy(1)
        self.difference, self.difference_bytes = publisher.announce(1, 1), payload()
        self.whole, self.whole_bytes = publisher.resend(1, 1), payload()

    def engine(self, hand: Callable[[bytes], None]) -> Receiver:
        """One that uses the first version."""
        model = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        receiver = Receiver(model, codec_of("delta"), lambda _: self._inbox())
        hand(self._first_bytes)
        receiver.stage(self.first)
        receiver.commit(0)
        return receiver

    def refuse_others(self, staged: dict[str, Tensor]) -> None:
        """Raise :class:`Forged` for other weights than those of the second version."""
        for name, tensor in self._weights.items():
            if not torch.equal(staged[name].view(torch.int16), tensor.view(torch.int16)):
                raise Forged(f"other weights than were sent were taken for {name}")


class _Door:
    """The engine, tried again and again: one that has asked for the whole takes no ``differences`` any more, and is
    made anew."""

    def __init__(self, way: _Way, hand: Callable[[bytes], None], *, differences: bool) -> None:
        self._way, self._hand, self._differences = way, hand, differences
        self._receiver = way.engine(hand)

    def takes(self, update: WeightUpdate, payload: bytes) -> bool:
        """Whether it does; :class:`Forged` if it should not have."""
        self._hand(payload)
        try:
            self._receiver.stage(update)
        except WeightsError as refusal:
            if self._differences and isinstance(refusal, NeedsFull):
                self._renew()
            return False
        self._way.refuse_others(self._receiver.staged())
        return True

    def _renew(self) -> None:
        self._receiver.close()
        self._receiver = self._way.engine(self._hand)


def weight_formats(scratch: Path) -> list[Row]:
    """Name, share, seeds, change and reader of each."""
    hand = _Hand()

    def give(payload: bytes) -> None:
        hand.held = payload

    way = _Way(hand, lambda: hand, lambda: hand.held)
    door, whole, codec = (
        _Door(way, give, differences=True),
        _Door(way, give, differences=False),
        MessageCodec(WeightUpdate),
    )

    def announcement(data: bytes) -> bool:
        try:
            update = codec.decode(data)
        except msgspec.MsgspecError:
            return False
        return door.takes(update, way.whole_bytes if update.base is None else way.difference_bytes)

    def difference(data: bytes) -> bool:
        return door.takes(msgspec.structs.replace(way.difference, num_bytes=len(data)), data)

    def image(data: bytes) -> bool:
        return whole.takes(way.whole, data)

    told = [codec.encode(way.whole), codec.encode(way.difference)]
    return [
        ("announcements of weights", 0.03, told, changed_msgpack, announcement),
        ("weights as a difference", 0.03, [way.difference_bytes], changed, difference),
        ("weights as a whole", 0.02, [way.whole_bytes], _slightly, image),
        _files(scratch),
    ]


def _files(scratch: Path) -> Row:
    """safetensors in a folder, their headers above all."""
    folder = scratch / "weights"
    outbox = FilesOutbox(str(folder))

    def newest() -> bytes:
        return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).read_bytes()

    way = _Way(outbox, lambda: FilesInbox(str(folder)), newest)

    def give(payload: bytes) -> None:
        for update in (way.first, way.whole):
            (folder / update.path).write_bytes(payload)

    door = _Door(way, give, differences=False)
    return ("weights as safetensors", 0.01, [way.whole_bytes], _slightly, lambda data: door.takes(way.whole, data))


def _slightly(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Half of the time of the same length, so that it is read and not only measured."""
    made = changed(rng, data, others)
    return made if rng.random() < 0.5 else made[: len(data)].ljust(len(data), b"\0")
