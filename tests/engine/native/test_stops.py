"""Stop strings end an answer at the very token that completes one, however text and tokens are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from headrace.base.types.sampling import Sampling
from headrace.engine.native.stops import Stops

Decode = Callable[[list[int]], str]
SMALL = "ab é€𝄞—"
"""Characters of one to four bytes."""


def byte_level() -> Tokenizer:
    """Tokens of one byte, and of two bytes that belong to different characters."""
    alphabet = {byte: char for char, byte in _byte_chars().items()}
    singles = [alphabet[byte] for byte in range(256)]
    pieces = [
        "a" + alphabet[0xE2],
        alphabet[0x80] + alphabet[0x94] + "b" + alphabet[0xC3],
        alphabet[0xA9] + alphabet[0xF0],
    ]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(singles + pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with their space before them, single bytes for what is in no word; the first space is dropped."""
    words = ["▁a", "▁b", "a", "b", "▁", "é", "▁—"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _byte_chars() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def decode_of(tokenizer: Tokenizer, *, skip_special: bool = False) -> Decode:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special)


BYTES = byte_level()
FALLBACK = byte_fallback()
DECODERS = [decode_of(BYTES), decode_of(BYTES, skip_special=True), decode_of(FALLBACK)]
INTERESTING = [*b"ab ", *"é€𝄞—".encode(), 256, 257, 258, 259, 260, 261, 262]


def naive(decode: Decode, ids: Sequence[int], strings: Sequence[str]) -> int | None:
    """The first place whose text, without what may be incomplete, holds one of the strings."""
    for place in range(len(ids)):
        text = decode(list(ids[: place + 1])).rstrip("\ufffd")
        if any(string in text for string in strings):
            return place
    return None


def add(stops: Stops, row: int, strings: Sequence[str], answer_ids: Sequence[int] = ()) -> None:
    sampling = Sampling(max_new_tokens=1, stop=tuple(strings))
    stops.add(row, sampling, np.zeros(0, np.int32), np.array(answer_ids, np.int32))


def first_stop(stops: Stops, ids: Sequence[int], strings: Sequence[str]) -> int | None:
    add(stops, 0, strings)
    return next((place for place, token in enumerate(ids) if stops.push(0, token)), None)


@pytest.mark.parametrize("which", range(len(DECODERS)))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_incremental_text_stops_where_the_whole_text_would(which: int, data: st.DataObject) -> None:
    known = INTERESTING if which == 2 else [token for token in INTERESTING if token < 260]
    ids = data.draw(st.lists(st.sampled_from(known), max_size=80))
    strings = data.draw(st.lists(st.text(SMALL, min_size=1, max_size=5), min_size=1, max_size=3))
    decode = DECODERS[which]
    assert first_stop(Stops(decode), ids, strings) == naive(decode, ids, strings)


def test_a_first_space_that_decoders_drop_is_there_before_the_second_one() -> None:
    decode = decode_of(FALLBACK)
    assert first_stop(Stops(decode), [ord(" "), 256], [" "]) == naive(decode, [ord(" "), 256], [" "]) == 1


@settings(max_examples=100, deadline=None)
@given(st.text(SMALL, min_size=30, max_size=60), st.integers(0, 25), st.integers(1, 30))
@example("€" * 60, 20, 30)
def test_a_string_longer_than_the_window_is_found(text: str, start: int, length: int) -> None:
    wanted = text[start : start + length]
    decode, ids = decode_of(BYTES), list(text.encode())
    found = first_stop(Stops(decode), ids, [wanted])
    assert found == naive(decode, ids, [wanted])
    assert found is not None


def test_an_incomplete_character_is_not_final() -> None:
    stops = Stops(decode_of(BYTES))
    add(stops, 0, ["a\ufffd", "é"])
    assert [stops.push(0, byte) for byte in "aé".encode()] == [False, False, True]


def test_long_runs_of_invalid_bytes_do_not_make_the_window_grow() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(BYTES.decode(ids))

    stops = Stops(decode)
    add(stops, 0, ["ab"])
    ids = [0x80] * 300 + [0xE2] * 300 + [*b"ab"]
    assert [stops.push(0, token) for token in ids].index(True) == len(ids) - 1
    assert longest <= 30


def test_tokens_without_text_do_not_make_the_window_grow_or_lose_a_space() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join({7: "", 8: " a", 9: "b"}[token] for token in ids).removeprefix(" ")

    stops = Stops(decode)
    add(stops, 0, ["b a"])
    ids = [9] + [7] * 300 + [8]
    assert [stops.push(0, token) for token in ids].index(True) == len(ids) - 1
    assert longest <= 3


def test_special_tokens_stop_where_they_are_decoded() -> None:
    ids = [*b"ab", 259]
    assert first_stop(Stops(decode_of(BYTES)), ids, ["<end>"]) == 2
    assert first_stop(Stops(decode_of(BYTES, skip_special=True)), ids, ["<end>"]) is None


def test_rows_without_strings_are_never_decoded() -> None:
    def decode(ids: list[int]) -> str:
        raise AssertionError(f"decoded {ids}")

    stops = Stops(decode)
    add(stops, 0, ())
    assert not stops.push(0, 5)


def test_rows_take_their_text_along_when_they_move_and_leave_none_behind() -> None:
    stops = Stops(lambda ids: "".join(map(chr, ids)))
    for row, string in enumerate(("xy", "zw", "xy")):
        add(stops, row, [string])
    assert [stops.push(row, token) for row, token in enumerate(b"xzx")] == [False, False, False]
    stops.move(np.array([2]), np.array([0]), 2)
    assert [stops.push(row, token) for row, token in enumerate(b"yy")] == [True, False]
    add(stops, 1, ())
    assert not stops.push(1, ord("w"))
    add(stops, 1, ["zw"], [ord("z")])
    assert stops.push(1, ord("w"))


def test_a_row_that_leaves_last_takes_its_strings_with_it() -> None:
    stops = Stops(lambda ids: "".join(map(chr, ids)))
    add(stops, 0, ["x"])
    add(stops, 1, ["x"])
    nobody = np.zeros(0, np.int64)
    stops.move(nobody, nobody, 1)
    assert not stops.push(1, ord("x"))
    assert stops.push(0, ord("x"))
