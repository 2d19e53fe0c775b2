"""The encoding of an image as its difference from an earlier one. It is lossless, and small where few numbers changed.

    block      4 Mi units of the image                      unit: as large as the smallest element, at most 4 bytes
    payload    for each block  <changed: u32> <length: u32> <zstd frame>
    frame      gaps between changed units as 4 byte planes, then the xor of each with its earlier value, as one byte
               plane for each byte of a unit

After an update with a small learning rate most bfloat16 weights keep their bits, and the xor of those that change has
few distinct values. A byte plane that is zero everywhere compresses to almost nothing. A float32 image changes
everywhere, in its low bits: the gaps then compress to almost nothing, and the high planes to little.
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
_BLOCK = 4 << 20
_GAP_BYTES = 4
_UNITS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def encode(new: memoryview, old: memoryview, manifest: Manifest) -> bytearray | None:
    """Return the difference of the image ``new`` from the image ``old``, which have the layout ``manifest``, as a
    compressed payload; ``None`` if it is not shorter than ``new`` itself."""
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
    """Restore into ``into`` the image that :func:`encode` was given as ``new``, from its ``payload`` and the image
    ``old``.

    Raises :class:`~headrace.base.errors.NeedsFull` for a payload that :func:`encode` cannot have made; ``into`` is
    undefined then.
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
            _apply(block, _unpacked(decompressor, frame, count * (_GAP_BYTES + unit.itemsize)), count)
    if offset != len(payload):
        raise _damaged(f"{len(payload) - offset} bytes follow its last block")


def _apply(block: Array, planes: Array, count: int) -> None:
    """Apply ``count`` changes to the units of one block, in place. ``planes`` is the decompressed frame of the block.
    Raises :class:`~headrace.base.errors.NeedsFull` if the changes do not fit the block."""
    changed = np.cumsum(_from_planes(planes[: count * _GAP_BYTES], np.dtype("<u4")), dtype=np.int64)
    if changed[-1] >= len(block):
        raise _damaged(f"it changes unit {changed[-1]} of a block of {len(block)}")
    block[changed] ^= _from_planes(planes[count * _GAP_BYTES :], block.dtype)


def _unpacked(decompressor: Any, frame: memoryview, num_bytes: int) -> Array:
    """Return the content of a compressed frame, which must have ``num_bytes`` bytes. Raises
    :class:`~headrace.base.errors.NeedsFull` if the frame is damaged."""
    try:
        claimed = _zstandard().frame_content_size(frame)
        if claimed != num_bytes:
            raise _damaged(f"a frame unpacks to {claimed} bytes instead of {num_bytes}")
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
    """Return the unit in which images of this layout are compared: an unsigned integer as large as the smallest element
    of any tensor, of 4 bytes at most."""
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
