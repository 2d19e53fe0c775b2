"""The codec of messages between processes. An array is encoded as one raw buffer, and decoding cannot execute code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Never

import msgspec
import numpy as np

_ARRAY = 1
"""The code of arrays among the extension types of MessagePack."""
_BAR = b"|"
"""The end of the header of an array. The search for it starts at index 1, since some dtypes begin with it: |b1."""
_HEADER_BYTES = 256
"""Greatest number of bytes of the header of an array."""
_DTYPES = frozenset({"|b1", "|u1", "<u2", "<i4", "<i8", "<f4", "<f8"})
"""The element types of arrays that may be decoded, in NumPy's notation."""


def _encode_array(value: Any) -> Any:
    """Return the array ``value`` as a MessagePack extension: its header, then its raw bytes. msgspec calls this
    function for a value that it cannot encode itself. Raises ``NotImplementedError`` for any value that is not an
    array."""
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _encode_header(value.dtype, value.shape) + value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot travel between processes")


@lru_cache(maxsize=4096)
def _encode_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of an encoded array: its dtype and shape, as in ``<f4:2,3|``."""
    return f"{dtype.str}:{','.join(map(str, shape))}|".encode()


def _decode_copy(code: int, data: memoryview) -> Any:
    """Return the array in a MessagePack extension; msgspec calls this function with the extension's ``code`` and bytes.
    Raises ``msgspec.ValidationError`` for any other extension."""
    copied = bytes(data)
    end = copied.find(_BAR, 1)
    return _read_array(code, end, copied[:end], copied[end + 1 :])  # a second copy, which is aligned


def _decode_view(code: int, data: memoryview) -> Any:
    """Return the array in a MessagePack extension as :func:`_decode_copy` does, but as a view of ``data``."""
    end = bytes(data[:_HEADER_BYTES]).find(_BAR, 1)
    return _read_array(code, end, bytes(data[:end]), data[end + 1 :])


def _read_array(code: int, end: int, head: bytes, data: bytes | memoryview) -> Any:
    """Return the array whose header is ``head`` and whose raw bytes are ``data``. ``end`` is the index of the bar
    between the two; −1 if there is none. Raises ``msgspec.ValidationError`` for invalid data."""
    if code != _ARRAY:
        _refuse(f"unknown extension code {code}")
    if end < 0:
        _refuse("an array with an unknown header")
    dtype, sizes = _parse_header(head)
    try:
        array = np.frombuffer(data, dtype)
        return array if sizes == array.shape else array.reshape(sizes)
    except (ValueError, OverflowError) as error:
        _refuse(str(error))


@lru_cache(maxsize=4096)
def _parse_header(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the shape in the header ``head``. Raises ``msgspec.ValidationError`` for an invalid
    header."""
    dtype, colon, shape = head.partition(b":")
    if not colon or dtype.decode("ascii", "replace") not in _DTYPES:
        _refuse("an array with an unknown header")
    try:
        sizes = tuple(int(size) for size in shape.split(b",") if size)
    except ValueError as error:
        _refuse(str(error))
    if any(size < 0 for size in sizes):
        _refuse(f"an array of shape {list(sizes)}")
    return np.dtype(dtype.decode()), sizes


def _refuse(reason: str) -> Never:
    """Raise ``msgspec.ValidationError`` for data that is not a valid message. ``reason`` says what is invalid."""
    raise msgspec.ValidationError(reason)


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to terminate, which every kind of process of a run accepts."""


ENCODING_ERRORS = (NotImplementedError, TypeError, ValueError, OverflowError)
"""The errors that :meth:`MessageCodec.encode` raises for a value that cannot be sent to another process."""


class MessageCodec:
    """A codec that encodes any message, and decodes exactly the messages of one receiver.

    >>> import numpy as np
    >>> from headrace.base.types.messages import engine
    >>> codec = MessageCodec(engine.Message)
    >>> codec.decode(codec.encode(engine.Abort(request_ids=(1, 2))))
    Abort(request_ids=(1, 2))
    """

    def __init__(self, message_type: Any, *, views: bool = False) -> None:
        """Create the codec of one receiver. ``message_type`` is the union of the message types that it may decode. With
        ``views``, decoded arrays are views of the data, which may be unaligned; otherwise they are copies."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoder = msgspec.msgpack.Decoder(message_type, ext_hook=_decode_view if views else _decode_copy)

    def encode(self, message: Any) -> bytes:
        """Return ``message``, a record of any type, as bytes (MessagePack)."""
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the message that ``data`` encodes. Raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``
        for other data."""
        try:
            return self._decoder.decode(data)
        except (RecursionError, UnicodeDecodeError) as error:
            raise msgspec.DecodeError(str(error)) from None
