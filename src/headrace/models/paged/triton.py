"""Attention over a cache in blocks with Triton kernels, on CUDA. One kernel writes keys and values, another computes
the attention of decoding rows directly over the pool.

One program computes one row, one key-value head and one part of the context (a *share*), for all query heads of this
key-value head. The shares are combined by their log-sum-exps (Dao et al. 2023, *Flash-Decoding*), together with a
layer's sinks. Rows with several tokens are gathered, as in :mod:`.reference`, and so are all rows if heads are too
large for the kernel. The number of shares depends on the batch, and so do the last bits of a result.

Shape legend: N tokens of the pass, D decoding rows, B blocks of the longest table, P blocks of the pool, S tokens of a
block, K key-value heads, H query heads, G = H / K, E head size, V size of a value, X shares. GP, EP and VP are G, E and
V rounded up to a power of two.
"""

# gate: parameters - a kernel receives every tensor and every stride as an argument of its own

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import Rule
from headrace.models.paged.base import BLOCK, Geometry
from headrace.models.paged.reference import Prompts, ReferenceAttention, Writer

tl: Any = None
"""The module ``triton.language`` after a kernel has been compiled. The kernels read it from this global variable."""

PROGRAMS = 256
"""The number of programs below which parts of the device would be idle. The context is divided into shares to reach
this number."""

TILES = (64, 32, 16)
"""The numbers of columns that a program may read at a time. The first for which keys and values fit is used."""

TILE_BYTES = 64 << 10
"""The largest size of the keys and values of a tile. Every supported device has this much memory per program, together
with the program's other data: the smallest has 99 KiB (compute capability 8.6)."""

LEAST = 16
"""The smallest side of a matrix that the device's matrix units support."""


class TritonAttention:
    """The attention of one pass with Triton kernels (see :class:`headrace.models.paged.base.PagedAttention`)."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Prepare the pass with the layout ``geometry`` on ``device``: its decoding rows for the kernel, the others as
        in :mod:`.reference`."""
        self._geometry, self._device = geometry, device
        self._gathered: ReferenceAttention | None = None
        """The attention without kernels, for layers that the kernel does not support; ``None`` until one is
        computed."""
        split = geometry.num_decode
        self._writer = Writer(geometry, device)
        """The writer of new keys and values into the cache."""
        self._num_decode = split
        self._tables_DB = torch.from_numpy(np.ascontiguousarray(geometry.tables_RB[:split], np.int32)).to(device)
        """The blocks of each decoding row."""
        self._positions_D = torch.from_numpy(geometry.starts_R[:split]).to(device)
        """The position of the new token of each decoding row."""
        self._longest = int(geometry.starts_R[:split].max()) + 1 if split else 0
        """The largest number of tokens of a decoding row, the new one included; 0 without such rows."""
        self._prompts = Prompts(geometry, device) if len(geometry.counts_R) > split else None
        """The attention of the other rows; ``None`` without such rows."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the new keys and values into the cache, and return the attention ``[N, H, E]`` of the pass."""
        if self._num_decode and not columns(qkv[0].shape[2], layer[1].shape[3], qkv[0].itemsize):
            self._gathered = self._gathered or ReferenceAttention(self._geometry, self._device)
            return self._gathered.attend(qkv, layer, rule)
        with torch.cuda.device_of(qkv[0]):  # triton launches on the thread's current device, whatever its arguments
            return self._attend(qkv, layer, rule)

    def _attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the new keys and values into the cache, then compute attention: the kernel computes decoding rows,
        torch computes prompts."""
        query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in qkv)
        for new_NKE, pool in zip((key, value), layer, strict=True):
            self._write(new_NKE, pool)
        split = self._num_decode
        parts = []
        if split:
            parts.append(self._decode(query[:split], layer, rule))
        if self._prompts is not None:
            parts.append(self._prompts.attend((query[split:], key[split:], value[split:]), layer, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write(self, new_NKE: Tensor, pool_PKSE: Tensor) -> None:
        """Write the keys or values of the new tokens into their blocks of the pool."""
        num_tokens, num_heads, size = new_NKE.shape
        kernel("write")[num_tokens, num_heads](
            *(new_NKE, pool_PKSE, self._writer.blocks_N, self._writer.places_N),
            *(new_NKE.stride(0), new_NKE.stride(1)),
            S=BLOCK,
            E=size,
            EP=_power(size),
        )

    def _decode(self, query_DHE: Tensor, layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Return the attention of the decoding rows, which have one query each. One program computes each share of a
        row's context, then the shares are combined."""
        num_heads, size, value_size = layer[0].shape[1], query_DHE.shape[2], layer[1].shape[3]
        constants = decode_constants(query_DHE.shape[1] // num_heads, (size, value_size), query_DHE.itemsize)
        window = self._longest if rule.window is None else min(rule.window, self._longest)
        shares = max(1, min(PROGRAMS // (len(query_DHE) * num_heads), window // (2 * constants["TILE"])))
        parts = query_DHE.new_empty(*query_DHE.shape[:2], shares, value_size, dtype=torch.float32)
        sums = parts.new_empty(parts.shape[:3])
        kernel("decode")[len(query_DHE), num_heads, shares](
            *(query_DHE, *layer, self._tables_DB, self._positions_D, parts, sums),
            *(query_DHE.stride(0), query_DHE.stride(1), self._tables_DB.shape[1]),
            *(rule.scale, rule.softcap or 0.0, window, rule.chunk or self._longest + 1),
            CAPPED=rule.softcap is not None,
            **constants,
        )
        return _join(parts, sums, rule.sinks_H).to(query_DHE.dtype)


def _join(parts_DHXE: Tensor, sums_DHX: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Combine the attention of each share, ``[D, H, X, E]``, with the log-sum-exps of the shares' scores, ``[D, H,
    X]``, into attention over the whole context, ``[D, H, E]``. ``sinks_H`` are the layer's sinks; ``None`` for none."""
    shares = sums_DHX.shape[2]
    if sinks_H is not None:
        sums_DHX = torch.cat([sums_DHX, sinks_H.float()[None, :, None].expand(len(sums_DHX), -1, 1)], dim=2)
    elif shares == 1:
        return parts_DHXE[:, :, 0]
    return (sums_DHX.softmax(2)[:, :, :shares, None] * parts_DHXE).sum(2)


def _power(size: int) -> int:
    """Return ``size``, a side of a tile, rounded up to a power of two that is at least :data:`LEAST`."""
    return max(LEAST, 1 << (size - 1).bit_length())


def columns(size: int, value_size: int, itemsize: int) -> int:
    """Return the number of columns that a program reads at a time, for keys of ``size`` and values of ``value_size``
    numbers with ``itemsize`` bytes per number; 0 if they are too large for the kernel."""
    line = (_power(size) + _power(value_size)) * itemsize
    return next((tile for tile in TILES if tile * line <= TILE_BYTES), 0)


def decode_constants(group: int, sizes: tuple[int, int], itemsize: int) -> dict[str, int]:
    """Return the constants for which the decoding kernel is compiled: ``group`` is the number of query heads per
    key-value head, and ``sizes`` are those of a key and a value, with ``itemsize`` bytes per number."""
    size, value_size = sizes
    padded = {"GP": _power(group), "EP": _power(size), "VP": _power(value_size)}
    return {"TILE": columns(size, value_size, itemsize), "S": BLOCK, "G": group, "E": size, "V": value_size, **padded}


@cache
def kernel(name: str) -> Any:
    """Return the kernel ``name``. It is compiled for a device at its first launch, or interpreted if TRITON_INTERPRET
    is set."""
    global tl  # noqa: PLW0603 - kernels can only access globals of their module, whose import must not need Triton
    import triton
    import triton.language

    tl = triton.language
    return triton.jit({"write": _write, "decode": _decode}[name])


def _write(  # type: ignore[no-untyped-def]
    new, pool, blocks, places, stride_n, stride_k, S: tl.constexpr, E: tl.constexpr, EP: tl.constexpr
):
    """Copy the key or value of one token and head into its block; a Triton kernel."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = tl.arange(0, EP)
    row = (tl.load(blocks + token) * tl.num_programs(1) + head) * S + tl.load(places + token)
    numbers = tl.load(new + token * stride_n + head * stride_k + size, mask=size < E)
    tl.store(pool + row * E + size, numbers, mask=size < E)


def _decode(  # type: ignore[no-untyped-def]
    query, keys, values, tables, positions, parts, sums, stride_n, stride_h, width, scale, softcap, window, chunk,
    CAPPED: tl.constexpr, TILE: tl.constexpr, S: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one row's newest token over one share of its context, for the query heads of one
    key-value head; a Triton kernel. It stores the weighted mean of the share's values in ``parts``, and the logarithm
    of the sum of the weights in ``sums``, with which :func:`_join` combines the shares."""
    row, head, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    first = tl.maximum(position - window + 1, position // chunk * chunk)
    length = tl.cdiv(position + 1 - first, tl.num_programs(2))
    begin = first + share * length
    end = tl.minimum(begin + length, position + 1)
    member, size, place = tl.arange(0, GP), tl.arange(0, EP), tl.arange(0, VP)
    heads = head * G + member
    queries = tl.load(
        query + row * stride_n + heads[:, None] * stride_h + size[None],
        mask=(member[:, None] < G) & (size[None] < E),
        other=0.0,
    )
    highest = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    mixed = tl.zeros([GP, VP], tl.float32)
    for left in range(begin, end, TILE):
        column = left + tl.arange(0, TILE)
        seen = column < end
        block = tl.load(tables + row * width + column // S, mask=seen, other=0).to(tl.int64)
        line = (block * tl.num_programs(1) + head) * S + column % S
        key = tl.load(keys + line[None] * E + size[:, None], mask=seen[None] & (size[:, None] < E), other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if CAPPED:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap  # tanh
        scores = tl.where(seen[None], scores, float("-inf"))
        # online softmax: earlier sums are rescaled to the new maximum
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        value = tl.load(values + line[:, None] * V + place[None], mask=seen[:, None] & (place[None] < V), other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    target = (row * tl.num_programs(1) * G + heads) * tl.num_programs(2) + share
    divisor = tl.where(total > 0, total, 1.0)  # the log-sum-exp of an empty share is -inf
    tl.store(
        parts + target[:, None] * V + place[None],
        mixed / divisor[:, None],
        mask=(member[:, None] < G) & (place[None] < V),
    )
    tl.store(sums + target, highest + tl.log(divisor), mask=member < G)
