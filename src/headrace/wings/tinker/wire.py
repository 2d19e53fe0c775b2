"""The encoding and decoding of the protobuf messages of the Tinker protocol, without the protobuf library.

A message is a sequence of fields, each a tag (its number and the kind of its value) and the value. The field numbers
are defined in ``tinker_public.proto`` (Apache-2.0). Kinds of the wire format: 0 varint (an integer of variable length),
1 eight bytes, 2 a length and as many bytes, 5 four bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError
from headrace.wings.tinker.data import Datum, TrainRequest

Array = npt.NDArray[Any]
FLOAT32, INT64 = 1, 2
_DTYPES: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64, 3: np.int32}
VERSIONS_FIELD = 1001
"""The field of a sampled sequence with the version that sampled each token, as int32. It is an extension of Headrace,
which the client skips as an unknown field."""

MOST_NUMBERS = 2**22
"""The largest count of numbers in the decoded tensors of one request. A request with more bytes than this may have as
many numbers as bytes. Without the limit, a sparse tensor of a few bytes could decode to more numbers than the memory
can hold."""
MOST_FIELDS = 2**17
"""The largest number of fields of a message. The limit exists because empty fields have only two bytes, so that a long
message of them would take long to decode."""
_REMEDY = "use a client of the protocol that docs/tinker.md names"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseCells:
    """The positions of the listed cells of a sparse matrix in the CSR format (compressed sparse rows), without their
    values."""

    row_starts: Array
    """The index in :attr:`columns` at which each row begins, followed by the number of cells."""
    columns: Array
    """The column of each cell, row after row."""

    def dense(self, values: Array, shape: Sequence[int], *, elsewhere: float, max_entries: int) -> Array:
        """Return the dense matrix of the given ``shape`` with ``values`` in these cells and ``elsewhere`` in all
        others. Raises ``ValueError`` if the cells do not fit the shape, or if the shape has more than ``max_entries``
        entries; no memory is allocated in that case."""
        if len(shape) != 2 or math.prod(shape) > max_entries:
            raise ValueError(f"a sparse tensor of shape {[*shape]}")
        counts = np.diff(self.row_starts)
        ordered = len(self.row_starts) == shape[0] + 1 and self.row_starts[0] == 0 and (counts >= 0).all()
        inside = ((self.columns >= 0) & (self.columns < shape[1])).all()
        if not (ordered and inside and self.row_starts[-1] == len(self.columns) == len(values)):
            raise ValueError(f"a sparse tensor of shape {[*shape]} whose indices do not fit it")
        dense = np.full(shape, elsewhere, values.dtype)
        dense[self._rows(), self.columns] = values
        return dense

    def listed(self, dense: Array) -> Array:
        """Return the values that a ``dense`` matrix has in these cells, in the order of the cells."""
        listed: Array = dense[self._rows(), self.columns]
        return listed

    def _rows(self) -> Array:
        """Return the row index of each cell."""
        return np.repeat(np.arange(len(self.row_starts) - 1), np.diff(self.row_starts))


def read_model_and_seq(body: bytes) -> tuple[str, int]:
    """Return the id of the model and the number of the forward_backward request in ``body``. The rest of the body may
    be invalid or cut off. Raises :class:`~headrace.base.errors.DataError` if the two fields cannot be read."""
    model, seq_id = "", 0
    try:
        for number, value in _iterate_fields(body):
            if number == 1:
                model = _decode_text(value)
            elif number == 2:
                seq_id = int(value)
            if model and seq_id:  # the client writes these two fields first
                break
    except (IndexError, ValueError, struct.error, UnicodeDecodeError, KeyError, TypeError) as error:
        if not (model and seq_id):
            raise DataError(f"the body is no forward_backward request: {error}", remedy=_REMEDY) from None
    return model, seq_id


def is_forward_only(body: bytes) -> bool:
    """Return whether the training request in ``body`` asks for no gradient. The body must be valid: the caller has
    decoded it before."""
    return any(number == 6 and bool(value) for number, value in _iterate_fields(body))


def read_train_request(body: bytes) -> TrainRequest:
    """Decode the training request in ``body``. Raises :class:`~headrace.base.errors.DataError` for invalid bytes."""
    try:
        return _decode_train_request(body)
    except (IndexError, ValueError, struct.error, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"the body is no forward_backward request: {error}", remedy=_REMEDY) from None


def _decode_train_request(body: bytes) -> TrainRequest:
    """Decode the protobuf message of a training request. Raises ``ValueError`` for unknown fields, and for tensors with
    more than :data:`MOST_NUMBERS` numbers in total. ``body`` is the encoded message."""
    texts, data, config = {1: "", 4: ""}, list[Datum](), dict[str, float | str]()
    seq_id, forward_only, left = 0, False, max(MOST_NUMBERS, len(body))
    for number, value in _iterate_fields(body):
        if number in texts:
            texts[number] = _decode_text(value)
        elif number == 2:
            seq_id = int(value)
        elif number == 3:
            data.append(_decode_datum(value, left))
            left -= sum(values.size for values in data[-1].inputs.values())
        elif number == 5:
            key, number_ = _decode_entry(value)
            config.setdefault(key, float(number_))
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            key, option = _decode_entry(value)
            ((kind, given),) = _iterate_fields(option)
            config[key] = bytes(given).decode() if kind == 2 else float(given)
        else:
            raise ValueError(f"unknown field {number}")
    return TrainRequest(
        model_id=texts[1], seq_id=seq_id, data=data, loss_fn=texts[4], loss_fn_config=config, forward_only=forward_only
    )


def _decode_datum(body: memoryview, max_numbers: int) -> Datum:
    """Decode one datum: its tokens, its loss inputs by name, and the provenance of its positions. For an image or
    sound, only its presence is recorded. Raises ``ValueError`` if a sparse tensor increases the count of numbers above
    ``max_numbers``."""
    ids, inputs, problem = list[Array](), dict[str, Array](), ""
    spans: dict[int, list[int]] = {3: [], 4: []}
    for number, value in _iterate_fields(body):
        if number == 1:
            ((kind, chunk),) = _iterate_fields(value)
            if kind == 1:
                ids += [np.frombuffer(tokens, np.int32) for _, tokens in _iterate_fields(chunk)]
            else:
                problem = "an image" if kind == 2 else "sound"
        elif number == 2:
            key, tensor = _decode_entry(value)
            inputs[key] = _decode_tensor(tensor, max_numbers)
            max_numbers -= inputs[key].size
        elif number in spans:
            ((_, span),) = _iterate_fields(value)
            spans[number].append(int(dict(_iterate_fields(span)).get(3, 0)))
    joined = np.concatenate([*ids, np.zeros(0, np.int32)])
    return Datum(ids_N=joined, inputs=inputs, input_spans=spans[3], target_spans=spans[4], foreign=problem)


def _decode_tensor(body: memoryview, max_entries: int) -> Array:
    """Decode a tensor as a dense array. Entries that a sparse tensor does not list are 0. Raises ``ValueError`` if a
    sparse tensor has more than ``max_entries`` entries."""
    found: dict[int, Any] = {}
    shape: list[int] = []
    for number, value in _iterate_fields(body):
        if number == 4:
            shape += _decode_varints(value) if isinstance(value, memoryview) else [int(value)]
        else:
            found[number] = value
    dtype = _DTYPES[found.get(3, 0)]
    if 2 not in found:
        flat = np.frombuffer(found.get(1, b""), dtype)
        return flat.reshape(shape) if shape else flat
    parts = dict(_iterate_fields(found[2]))
    cells = SparseCells(
        row_starts=np.frombuffer(parts.get(2, b""), np.int64), columns=np.frombuffer(parts.get(3, b""), np.int64)
    )
    return cells.dense(np.frombuffer(parts.get(1, b""), dtype), shape, elsewhere=0, max_entries=max_entries)


def _decode_text(value: object) -> str:
    """Return the value of a field as text. Raises ``ValueError`` for a number, which ``bytes`` would silently convert
    to that many zero bytes."""
    if not isinstance(value, memoryview):
        raise ValueError("a number in place of text")
    return bytes(value).decode()


def _decode_entry(body: memoryview) -> tuple[str, Any]:
    """Decode an entry of a protobuf map, and return its key and its value. A missing value is 0, the default of
    protobuf."""
    found = dict(_iterate_fields(body))
    return bytes(found.get(1, b"")).decode(), found.get(2, 0)


def _iterate_fields(body: bytes | memoryview | float) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message. A value is an integer, a float, or a view of the bytes
    of a text, a tensor or a nested message. Raises ``ValueError`` for a broken message. ``body`` is the encoded
    message."""
    if isinstance(body, int | float):  # the default 0 of :func:`_decode_entry` stands for a message without fields
        return
    view, index, left = memoryview(body), 0, MOST_FIELDS
    while index < len(view):
        left -= 1
        if left < 0:
            raise ValueError(f"a message of more than {MOST_FIELDS:,} fields")
        tag, index = _decode_varint(view, index)
        kind = tag & 7
        if kind == 0:
            value, index = _decode_varint(view, index)
            yield tag >> 3, value - (1 << 64) if value >> 63 else value
            continue
        size = 8
        if kind == 2:
            size, index = _decode_varint(view, index)
        elif kind != 1:
            size = 4
        if kind not in (1, 2, 5) or index + size > len(view):
            raise ValueError(f"broken field {tag >> 3}")
        part = view[index : index + size]
        index += size
        yield tag >> 3, part if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", part)[0]


def _decode_varint(view: memoryview, index: int) -> tuple[int, int]:
    """Decode the variable-length integer at the index ``index`` of ``view``, and return its value and the index after
    it. Raises ``ValueError`` if it has more than 64 bits."""
    value = shift = 0
    while True:
        byte = view[index]
        index += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _decode_varints(view: memoryview) -> list[int]:
    """Decode a packed list of variable-length integers."""
    values, index = list[int](), 0
    while index < len(view):
        value, index = _decode_varint(view, index)
        values.append(value)
    return values


def _encode_number(field: int, value: int) -> bytes:
    """Encode the field with the number ``field`` and a whole number ≥ 0 as its value."""
    return _encode_varint(field << 3) + _encode_varint(value)


def _encode_bytes(field: int, value: bytes | str) -> bytes:
    """Encode the field with the number ``field`` and bytes or text as its value."""
    given = value.encode() if isinstance(value, str) else value
    return _encode_varint(field << 3 | 2) + _encode_varint(len(given)) + given


def _encode_varint(value: int) -> bytes:
    """Encode a whole number ≥ 0 as a variable-length integer (varint)."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_train_result(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return an encoded ForwardBackwardOutput, the result of a training request. ``logprobs`` are the log-probabilities
    of the targets of each datum, ``[N]`` or ``[N, K]``, and ``metrics`` are values by name."""
    records, start = list[bytes](), 0
    while start < len(logprobs):  # one record for consecutive data of the same trailing shape
        shape, end = logprobs[start].shape[1:], start
        while end < len(logprobs) and logprobs[end].shape[1:] == shape:
            end += 1
        part = [np.ascontiguousarray(each, np.float32) for each in logprobs[start:end]]
        offsets = np.cumsum([0, *(each.nbytes for each in part)]).astype(np.int64)
        tensor = _encode_bytes(1, b"".join(each.tobytes() for each in part)) + _encode_bytes(2, offsets.tobytes())
        tensor += _encode_number(3, FLOAT32) + b"".join(_encode_number(4, size) for size in shape)
        records.append(
            _encode_bytes(2, _encode_bytes(1, "logprobs") + _encode_bytes(2, tensor)) + _encode_number(3, end - start)
        )
        start = end
    out = _encode_bytes(1, "ArrayRecord") + b"".join(_encode_bytes(2, record) for record in records)
    for name, value in metrics.items():
        out += _encode_bytes(3, _encode_bytes(1, name) + _encode_varint(2 << 3 | 1) + struct.pack("<d", value))
    return out


def read_metrics(result: bytes) -> dict[str, float]:
    """Return the metrics, by name, of the encoded ForwardBackwardOutput ``result``."""
    return {
        key: float(value)
        for number, part in _iterate_fields(result)
        if number == 3
        for key, value in [_decode_entry(part)]
    }


def write_tensor(values: Array, cells: SparseCells | None = None) -> bytes:
    """Return ``values`` as an encoded Tensor, of int64 for integers and else of float32. The tensor is dense or, if
    ``cells`` are given, sparse with only the values in these cells."""
    whole = np.issubdtype(values.dtype, np.integer)
    given = np.ascontiguousarray(values, np.int64 if whole else np.float32)
    dims = _encode_number(3, INT64 if whole else FLOAT32) + b"".join(_encode_number(4, size) for size in given.shape)
    if cells is None:
        return _encode_bytes(1, given.tobytes()) + dims
    indices = [part.astype(np.int64).tobytes() for part in (cells.row_starts, cells.columns)]
    parts = (cells.listed(given).tobytes(), *indices)
    return _encode_bytes(2, b"".join(_encode_bytes(number, part) for number, part in enumerate(parts, start=1))) + dims


def write_top(ids_TK: Array, logprobs_TK: Array) -> bytes:
    """Return an encoded TopkLogprobs: the ids of the K likeliest tokens at each of T positions, and their
    log-probabilities."""
    count, k = ids_TK.shape
    ids, logs = np.ascontiguousarray(ids_TK, np.int32), np.ascontiguousarray(logprobs_TK, np.float32)
    return (
        _encode_bytes(1, ids.tobytes())
        + _encode_bytes(2, logs.tobytes())
        + _encode_number(3, k)
        + _encode_number(4, count)
    )


def write_sequence(*, stopped: bool, ids_T: Array, logprobs_T: Array, versions_T: Array, top: bytes | None) -> bytes:
    """Return an encoded SampledSequence: token ids, logprobs and, in :data:`VERSIONS_FIELD`, the version of the weights
    that sampled each token. ``stopped`` is true if a stop token or string ended the sequence, and false if the length
    limit did; ``top`` is an encoded TopkLogprobs, or ``None``."""
    out = _encode_number(1, 0 if stopped else 1)
    out += _encode_bytes(2, ids_T.astype(np.int32).tobytes()) + _encode_bytes(
        3, logprobs_T.astype(np.float32).tobytes()
    )
    if top is not None:
        out += _encode_bytes(4, top)
    return out + _encode_bytes(VERSIONS_FIELD, versions_T.astype(np.int32).tobytes())


def write_samples(
    sequences: Sequence[bytes], *, prompt_logprobs_T: Array | None, top: bytes | None, targets: bytes | None
) -> bytes:
    """Return an encoded SampleResponse: the encoded sampled ``sequences`` and, where they are not ``None``, the
    logprobs of the prompt's tokens, an encoded TopkLogprobs of their places, and an encoded Tensor with the logprobs of
    the targets."""
    out = b"".join(_encode_bytes(1, sequence) for sequence in sequences)
    if prompt_logprobs_T is not None:
        out += _encode_bytes(2, prompt_logprobs_T.astype(np.float32).tobytes())
    for field, part in ((3, top), (5, targets)):
        out += b"" if part is None else _encode_bytes(field, part)
    return out
