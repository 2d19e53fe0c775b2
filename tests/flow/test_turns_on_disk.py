"""Turns to bytes and back, token for token."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.base.types.episode import StopReason, Turn
from headrace.base.types.tokens import Tokens
from headrace.flow.ledger.turns import decode_turns, encode_turns


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    made: list[Turn] = []
    for index in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 6))
        tokens = Tokens(
            ids_T=draw(arrays.arrays(np.int32, size)),
            logprobs_T=draw(arrays.arrays(np.float32, size)),
            versions_T=draw(arrays.arrays(np.int32, size)),
        )
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        reason = draw(st.none() | st.sampled_from(StopReason))
        made.append(Turn(author=draw(st.text(max_size=5)), tokens=tokens, parent=parent, stop_reason=reason))
    return made


def columns(turn: Turn) -> list[bytes]:
    return [turn.tokens.ids_T.tobytes(), turn.tokens.logprobs_T.tobytes(), turn.tokens.versions_T.tobytes()]


@given(turns())
def test_turns_come_back_bit_for_bit(given_turns: list[Turn]) -> None:
    back = decode_turns(encode_turns(given_turns))
    assert [(t.author, t.parent, t.stop_reason, columns(t)) for t in back] == [
        (t.author, t.parent, t.stop_reason, columns(t)) for t in given_turns
    ]


def test_logprobs_that_are_not_finite_survive_the_disk() -> None:
    odd = Tokens(ids_T=[1, 2, 3], logprobs_T=[np.nan, -np.inf, -0.0], versions_T=[0, 0, 0])
    (back,) = decode_turns(encode_turns([Turn(author="policy", tokens=odd)]))
    assert back.tokens.logprobs_T.tobytes() == odd.logprobs_T.tobytes()


@pytest.mark.parametrize("data", [b"", b"\x91", b"\x93\x01\x02\x03", b"\x91\x81\xa6author\x01"])
def test_bytes_that_are_no_turns_are_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_turns(data)
