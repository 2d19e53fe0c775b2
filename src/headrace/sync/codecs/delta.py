"""The encoding of an image (all tensors of one version) as its difference from an earlier image. It is lossless, and
short if few numbers have changed.

    block      4 Mi units of the image                      unit: the size of the smallest element, at most 4 bytes
    payload    for each block  <changed: u32> <length: u32> <zstd frame>
    frame      gaps between changed units as 4 byte planes, then the xor of each with its earlier value, as one byte
               plane for each byte of a unit

After an update with a small learning rate, most bfloat16 weights keep their bits, and the xor of the changed weights
has few distinct values. A byte plane that is zero everywhere compresses to almost nothing. In a float32 image all
weights change, in their low bits: the gaps and the high planes then compress well.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from headrace.base.errors import ConfigError, NeedsFull
from headrace.base.types.weights import Manifest

_HEAD = struct.Struct("<II")
"""The header of a block: the number of changed units and the length of the frame in bytes."""
_BLOCK = 4 << 20
"""The number of units in a block."""
_GAP_BYTES = 4
"""The number of bytes of a gap between two changed units."""
_UNITS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""The unsigned integers in which images are compared, by their size in bytes."""
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def encode(new: memoryview, old: memoryview, manifest: Manifest) -> bytearray | None:
    """Return the difference of the image ``new`` from the image ``old`` as a compressed payload; ``None`` if it is not
    shorter than ``new``. Both images have the layout ``manifest``."""
    compressor = _zstandard().ZstdCompressor(level=1, write_checksum=True)
    unit = _unit(manifest)
    news, olds = np.frombuffer(new, unit), np.frombuffer(old, unit)
    payload = bytearray()
    for start in range(0, len(news), _BLOCK):
        xor = news[start : start + _BLOCK] ^ olds[start : start + _BLOCK]
        changed = np.flatnonzero(xor)
        gaps = np.diff(changed, prepend=0).astype("<u4")
        frame = compressor.compress(_planes(gaps) + _planes(xor[changed])) if len(changed) else b""
        payload += _HEAD.pack(len(changed), len(frame)) + frame
        if len(payload) >= len(new):
            return None
    return payload


def decode(payload: memoryview, old: memoryview, into: memoryview, manifest: Manifest) -> None:
    """Restore the image ``new`` of :func:`encode` into ``into``, from its ``payload`` and the image ``old``. All images
    have the layout ``manifest``.

    Raises :class:`~headrace.base.errors.NeedsFull` for a damaged payload; the contents of ``into`` are then undefined.
    """
    decompressor = _zstandard().ZstdDecompressor()
    unit = _unit(manifest)
    into[:] = old
    image = np.frombuffer(into, unit)
    offset = 0
    for start in range(0, len(image), _BLOCK):
        block = image[start : start + _BLOCK]
        if offset + _HEAD.size > len(payload):
            raise _damaged(f"it ends at byte {offset}, before block {start // _BLOCK}")
        count, length = _HEAD.unpack_from(payload, offset)
        frame = payload[offset + _HEAD.size : offset + _HEAD.size + length]
        offset += _HEAD.size + length
        if len(frame) != length or count > len(block):
            raise _damaged(f"block {start // _BLOCK} claims {count} changes in {length} bytes")
        if count:
            _apply(block, _decompress(decompressor, frame, count * (_GAP_BYTES + unit.itemsize)), count)
    if offset != len(payload):
        raise _damaged(f"{len(payload) - offset} bytes follow its last block")


def _apply(block: Array, planes: Array, count: int) -> None:
    """Apply ``count`` changes to the units of one block, in place. ``planes`` is the decompressed frame of the block.
    Raises :class:`~headrace.base.errors.NeedsFull` if the changes do not fit the block."""
    changed = np.cumsum(_from_planes(planes[: count * _GAP_BYTES], np.dtype("<u4")), dtype=np.int64)
    if changed[-1] >= len(block):
        raise _damaged(f"it changes unit {changed[-1]} of a block of {len(block)}")
    block[changed] ^= _from_planes(planes[count * _GAP_BYTES :], block.dtype)


def _decompress(decompressor: Any, frame: memoryview, num_bytes: int) -> Array:
    """Return the content of a compressed frame, which must have ``num_bytes`` bytes. Raises
    :class:`~headrace.base.errors.NeedsFull` if the frame is damaged."""
    try:
        announced_bytes = _zstandard().frame_content_size(frame)
        if announced_bytes != num_bytes:
            raise _damaged(f"a frame unpacks to {announced_bytes} bytes instead of {num_bytes}")
        return np.frombuffer(decompressor.decompress(frame, max_output_size=num_bytes), np.uint8)
    except _zstandard().ZstdError as error:
        raise _damaged(str(error)) from None


def _planes(numbers: Array) -> bytes:
    """Return the byte planes of ``numbers``: the first bytes of all numbers, then their second bytes, and so on."""
    return numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()


def _from_planes(planes: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of type ``dtype`` whose byte planes are ``planes``: the inverse of :func:`_planes`."""
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


def _unit(manifest: Manifest) -> np.dtype[Any]:
    """Return the dtype in which images with the layout ``manifest`` are compared: an unsigned integer with the size of
    the smallest element of any tensor, at most 4 bytes."""
    sizes = {getattr(torch, entry.dtype).itemsize for entry in manifest.entries}
    return _UNITS[min({4, *sizes})]


def _damaged(reason: str) -> NeedsFull:
    """Return the error for a payload that cannot be decoded; ``reason`` says why."""
    return NeedsFull(f"the difference is damaged: {reason}", remedy="send the whole image")


@lru_cache(maxsize=1)
def _zstandard() -> Any:
    """Import and return the package zstandard. Raises :class:`~headrace.base.errors.ConfigError` if it is not
    installed."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            "sync.codec='delta' compresses with zstandard, which is not installed",
            remedy="pip install 'headrace[delta]', or set sync.codec = 'full'",
        ) from None
    return zstandard
