"""Mutations of valid inputs: bytes are flipped, cut, spliced and inflated, and values in trees are replaced. All
randomness comes from the generator that is passed in."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

DEEP = (50, 500, 20_000)
"""Depths of nesting that are tried."""
_NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308, math.inf, math.nan)
_TEXTS = ("", "\x00", "é☃\U0001f511", "../../etc/passwd", "{{7*7}}", "__import__('os')", "a" * 5000, "NaN", "1e9999")
_HEAD = b"\x00\x01\x7f\x80\x90\xc1\xc4\xc6\xc7\xc9\xd9\xdb\xdc\xdd\xde\xdf\xff"
"""Bytes that are type codes in msgpack."""

Change = Callable[[random.Random, bytearray, bytes], None]


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return ``data`` after one to four mutations, drawn with ``rng``, which may insert parts of ``others``."""
    mutated = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(rng, mutated, rng.choice(others))
    return bytes(mutated)


def _flip(rng: random.Random, data: bytearray, _: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(_HEAD)


def _cut(rng: random.Random, data: bytearray, _: bytes) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _drop(rng: random.Random, data: bytearray, _: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 2, 4, 16))]


def _insert(rng: random.Random, data: bytearray, _: bytes) -> None:
    index = rng.randrange(len(data) + 1)
    data[index:index] = rng.randbytes(rng.choice((1, 2, 4, 64)))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    index, start = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    data[index:] = other[start:]


def _repeat(rng: random.Random, data: bytearray, _: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + 64] * rng.choice((1, 3, 50))


def _inflate(rng: random.Random, data: bytearray, _: bytes) -> None:
    """Overwrite four bytes, where a length may be, with an extreme one."""
    index = rng.randrange(len(data) + 1)
    data[index : index + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"9999"))


def _nest(rng: random.Random, data: bytearray, _: bytes) -> None:
    data[0:0] = rng.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a")) * rng.choice(DEEP)


_CHANGES: tuple[Change, ...] = (_flip, _flip, _flip, _set, _cut, _drop, _insert, _splice, _repeat, _inflate, _nest)


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Return a copy of ``tree`` with one to three of its values replaced, drawn with ``rng``."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _replace_value(rng, tree)
    return tree


def _replace_value(rng: random.Random, tree: Any) -> Any:
    """Return a copy of ``tree`` in which a value, drawn with ``rng``, is replaced or removed; or another value in its
    place."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        choice, rest = rng.random(), {name: value for name, value in tree.items() if name != key}
        if choice < 0.1:
            return rest
        if choice < 0.2:
            return {**tree, rng.choice(_TEXTS): tree[key]}
        return {**tree, key: _replace_value(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        index, choice = rng.randrange(len(tree)), rng.random()
        if choice < 0.1:
            return tree[:index] + tree[index + 1 :]
        if choice < 0.2:
            return tree + tree[index : index + 1] * rng.choice((1, 10, 1000))
        return [*tree[:index], _replace_value(rng, tree[index]), *tree[index + 1 :]]
    if isinstance(tree, msgspec.msgpack.Ext) and rng.random() < 0.9:
        return msgspec.msgpack.Ext(rng.choice((tree.code, tree.code, 2)), mutate(rng, bytes(tree.data), [b"<i4:3|"]))
    return _make_odd(rng, tree)


def _make_odd(rng: random.Random, value: Any) -> Any:
    """Return a value that a reader would not expect in place of ``value``, drawn with ``rng``."""
    match rng.randrange(6):
        case 0:
            return rng.choice(_NUMBERS)
        case 1:
            return rng.choice(_TEXTS)
        case 2:
            return rng.choice((None, True, [], {}, [None], {"": {}}))
        case 3:
            return [value] * rng.choice((2, 100))
        case 4:
            for _ in range(rng.choice((2, 60, 400))):
                value = [value] if rng.random() < 0.5 else {"a": value}
            return value
    return str(value)


def mutate_json(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return the JSON text ``data`` after mutations, drawn with ``rng``, which may insert parts of ``others``. Half of
    the results are still valid JSON."""
    if rng.random() < 0.5:
        return mutate(rng, data, others)
    try:
        return json.dumps(mutate_tree(rng, json.loads(data))).encode("utf-8", "surrogatepass")
    except RecursionError:  # a depth that cannot be written
        return mutate(rng, data, others)


def mutate_msgpack(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return ``data``, encoded with msgpack, after mutations, drawn with ``rng``, which may insert parts of ``others``.
    Half of the results are still valid msgpack."""
    if rng.random() < 0.5:
        return mutate(rng, data, others)
    try:
        return msgspec.msgpack.encode(mutate_tree(rng, msgspec.msgpack.decode(data)))
    except (OverflowError, ValueError, RecursionError):  # a number, or a depth, that cannot be written
        return mutate(rng, data, others)
