"""Messages of any size, which are sent in parts, so that no message of a channel grows with the batch of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.base.errors import RunError
from headrace.base.types.messages.codec import MessageCodec

PART_BYTES = 32 * 2**20
"""Greatest number of bytes of an encoded message in one part."""


class MessagePart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One part of an encoded message. The parts of a message are sent in order, directly one after the other."""

    of: int
    """The number of the order that the message contains or answers."""
    number: int
    """The index of the part, from 0."""
    num_parts: int
    """The number of parts of the message."""
    data: memoryview


_ENCODER = MessageCodec(Any)


def split_message(message: Any, call: int) -> Iterator[MessagePart]:
    """Yield the parts of ``message``, at least one. ``call`` is the number of the order that the message contains or
    answers."""
    data = memoryview(_ENCODER.encode(message))
    starts = range(0, len(data), PART_BYTES)
    for number, start in enumerate(starts):
        yield MessagePart(of=call, number=number, num_parts=len(starts), data=data[start : start + PART_BYTES])


class PartCollector:
    """The collector that puts together the parts of messages. It receives the messages of one sender, one after the
    other."""

    def __init__(self, message_type: Any) -> None:
        """Start without parts. ``message_type`` is the union of the message types that may arrive in parts."""
        self._codec = MessageCodec(message_type)
        self._of = 0
        """The number of the order to which the current message belongs."""
        self._number = 0
        """The number of parts of the current message that have arrived."""
        self._data = bytearray()
        """The data of these parts."""

    def add(self, part: MessagePart) -> Any | None:
        """Return the complete message if ``part`` is its last part; ``None`` while parts are missing. Raises
        :class:`~headrace.base.errors.RunError` if the part is not the next part of its message, or if the parts do not
        form a message."""
        if (part.of, part.number) != (self._of if self._number else part.of, self._number):
            raise RunError(
                f"part {part.number + 1} of {part.num_parts} of order {part.of} came after {self._number} parts",
                remedy="resume the run; controller and learner must have the same version of headrace",
            )
        self._of, self._number = part.of, self._number + 1
        # one buffer that grows: the parts and the whole message are never in memory at the same time
        self._data += part.data
        if self._number < part.num_parts:
            return None
        data, self._data, self._number = self._data, bytearray(), 0
        try:
            return self._codec.decode(memoryview(data))
        except msgspec.DecodeError as error:
            raise RunError(
                f"the parts of order {part.of} are not a message: {error}",
                remedy="resume the run; controller and learner must have the same version of headrace",
            ) from None
