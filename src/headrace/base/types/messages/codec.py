"""Encode messages to bytes and decode them. An array becomes one raw buffer; decoding cannot run code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Never

import msgspec
import numpy as np

_ARRAY = 1
"""The code of an array among the extension types of MessagePack."""
_DTYPES = frozenset({"|b1", "|u1", "<u2", "<i4", "<i8", "<f4", "<f8"})
"""The types of array elements that are decoded, in NumPy's notation."""


def _encode_array(value: Any) -> Any:
    """Return an array as an extension of MessagePack: its header, then its raw bytes. msgspec calls this for a value
    that it cannot encode itself; any value but an array is an error."""
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _head(value.dtype, value.shape) + value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot travel between processes")


@lru_cache(maxsize=4096)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of an encoded array: its dtype and shape, as in ``<f4:2,3|``."""
    return f"{dtype.str}:{','.join(map(str, shape))}|".encode()


def _decode_array(code: int, data: memoryview) -> Any:
    """Return the array that an extension of MessagePack contains; msgspec calls this with the extension's ``code`` and
    bytes. Any code but that of arrays is refused."""
    if code != _ARRAY:
        _refuse(f"unknown extension code {code}")
    return _read_array(bytes(data))


def _read_array(data: bytes) -> Any:
    """Return the array that ``data`` encodes: a header with dtype and shape, then the raw bytes. Invalid data is
    refused."""
    end = data.find(b"|", 1)  # the dtype of bytes begins with this sign
    if end < 0:
        _refuse("an array with an unknown header")
    dtype, sizes = _parsed(data[:end])
    try:
        array = np.frombuffer(data[end + 1 :], dtype)  # a copy, which is aligned
        return array if sizes == array.shape else array.reshape(sizes)
    except (ValueError, OverflowError) as error:
        _refuse(str(error))


@lru_cache(maxsize=4096)
def _parsed(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and the shape that a header says. An invalid one is refused."""
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
    """Raise the error for data that is not a valid message; ``reason`` says what is wrong."""
    raise msgspec.ValidationError(reason)


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to end, which every kind of process of a run understands."""


class MessageCodec:
    """Encodes any message and decodes exactly the messages of one receiver.

    >>> import numpy as np
    >>> from headrace.base.types.messages import engine
    >>> codec = MessageCodec(engine.Message)
    >>> codec.decode(codec.encode(engine.Abort(request_ids=(1, 2))))
    Abort(request_ids=(1, 2))
    """

    def __init__(self, receives: Any) -> None:
        """Make a codec for one receiver. ``receives`` is the union of the message types that it may decode."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoder = msgspec.msgpack.Decoder(receives, ext_hook=_decode_array)

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
