"""Valid example values of any message type, created from the type alone, so that no new message is forgotten."""

from __future__ import annotations

import dataclasses
import enum
import random
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from headrace.base.types.sampling import Sampling

ROWS = 3
"""Length of every axis of an array, and of every column."""
_WORDS = ("", "policy", "a text", "é☃", "[x](y)\n", "0")
_SPECIAL: Mapping[Any, Any] = {Sampling: Sampling(max_new_tokens=4, stop_ids=(1,), stop=("END",), logit_bias={3: 1.5})}


def make_example(annotation: Any, rng: random.Random, name: str = "") -> Any:
    """Return a value of the type ``annotation``, drawn with ``rng``; ``name`` is the field's name, whose suffix gives
    the shape of an array."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SPECIAL:
        return _SPECIAL[annotation]
    if origin is np.ndarray:
        return _array(arguments, rng, name)
    if origin in (typing.Union, types.UnionType):
        return make_example(rng.choice(arguments), rng, name)
    if origin is typing.Literal:
        return rng.choice(arguments)
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not Ellipsis):
        return tuple(make_example(argument, rng, name) for argument in arguments)
    if isinstance(origin, type) and issubclass(origin, Collection):
        return _many(origin, arguments, rng, name)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return rng.choice(list(annotation))
    names = _fields(annotation)
    if names is None:
        return _plain(annotation, rng)
    hints = typing.get_type_hints(annotation)
    return annotation(**{field: make_example(hints[field], rng, field) for field in names})


def _fields(annotation: Any) -> list[str] | None:
    """Return the field names of a record type; ``None`` for other types."""
    if dataclasses.is_dataclass(annotation):
        return [field.name for field in dataclasses.fields(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        return list(typing.get_type_hints(annotation))
    return None


def _array(arguments: tuple[Any, ...], rng: random.Random, name: str) -> Any:
    scalar = typing.get_args(arguments[1])[0]
    dtype = np.dtype(scalar) if scalar in (np.int32, np.int64, np.float32, np.float64, np.bool_) else np.dtype(np.uint8)
    suffix = name.rpartition("_")[2]
    shape = (ROWS,) * (len(suffix) if suffix.isupper() else 1)
    return (np.arange(ROWS ** len(shape)) % 2 + rng.randrange(2)).astype(dtype).reshape(shape)


def _many(origin: Any, arguments: tuple[Any, ...], rng: random.Random, name: str) -> Any:
    count = rng.randrange(3)
    if issubclass(origin, Mapping):
        key, value = arguments
        return {make_example(key, rng): make_example(value, rng) for _ in range(count)}
    values = [make_example(arguments[0], rng, name) for _ in range(count)]
    return values if origin is list else tuple(values)


def _plain(annotation: Any, rng: random.Random) -> Any:
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is bytes:
        return rng.randbytes(rng.randrange(9))
    if annotation is memoryview:
        return memoryview(rng.randbytes(rng.randrange(9)))
    if annotation is int:
        return rng.choice((0, 1, 7, 2**31 - 1))
    if annotation is float:
        return rng.choice((0.0, 0.25, 1e9))
    if annotation is str:
        return rng.choice(_WORDS)
    if annotation in (None, type(None)):
        return None
    if annotation is Any:
        return rng.choice(("x", 1, [{"role": "user", "content": "?"}], {"a": 0.5}))
    raise TypeError(f"no example of {annotation!r}")
