"""Operations to bytes and back, for ledgers that keep the operations themselves."""

from __future__ import annotations

import msgspec

from headrace.base.errors import LedgerError
from headrace.base.types.messages.codec import MessageCodec
from headrace.flow.ledger.base import (
    CommitVersion,
    DropEpisodes,
    EndEpisode,
    EndStep,
    Move,
    Note,
    Operation,
    Stream,
    Submit,
)
from headrace.flow.ledger.sqlite import SqliteLedger


class RollBack(msgspec.Struct, frozen=True, kw_only=True):
    """The run went on from a checkpoint at ``step``."""

    step: int


_KINDS = (Submit, Move, Stream, EndEpisode, DropEpisodes, EndStep, CommitVersion, Note, RollBack)
_CODECS = {kind.__name__.encode(): MessageCodec(kind) for kind in _KINDS}


def encode_operation(operation: Operation | RollBack) -> tuple[bytes, bytes]:
    """Its kind and what it says."""
    kind = type(operation).__name__.encode()
    return kind, _CODECS[kind].encode(operation)


def decode_operation(kind: bytes, data: bytes) -> Operation | RollBack:
    """The operation; ``msgspec.MsgspecError`` where there is none."""
    codec = _CODECS.get(kind)
    if codec is None:
        raise msgspec.ValidationError(f"unknown operation {kind!r}: a newer version of headrace wrote it")
    operation: Operation | RollBack = codec.decode(data)
    return operation


def replay(index: SqliteLedger, kind: bytes, data: bytes) -> None:
    """Do what an operation says. ``msgspec.MsgspecError`` where it says nothing,
    :class:`~headrace.base.errors.LedgerError`
    where it cannot be; ``index`` is as before then."""
    operation = decode_operation(kind, data)
    try:
        if isinstance(operation, RollBack):
            index.recall(operation.step)
        else:
            index.apply(operation)
    except (ValueError, OverflowError) as error:  # lists that do not fit one another, numbers that no ledger holds
        raise LedgerError(f"{type(operation).__name__}: {error}", remedy="it was not written by a run") from None
