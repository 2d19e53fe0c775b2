"""Text from tokens, piece by piece: characters of several tokens, and stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from headrace.engine.text import MAX_HELD, Cut, Detokenizer, StopFinder
from headrace.wings.serve.chat import ServedTokenizer

SPECIAL = 256


def byte_words() -> ServedTokenizer:
    """One token per byte, as byte-level tokenizers have them, and one special token."""
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return ServedTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), (SPECIAL,))


def fallback_words() -> ServedTokenizer:
    """Words that begin with a space, and bytes for the rest, as SentencePiece tokenizers have them."""
    tokens = ["<unk>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ServedTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), (260,))


BYTES, FALLBACK = byte_words(), fallback_words()
TEXTS = st.text(st.sampled_from("ab é你🙂\n"), max_size=30)


def pieces(words: ServedTokenizer, ids: list[int], sizes: list[int]) -> tuple[list[str], str]:
    """What comes of ``ids`` in chunks of ``sizes``, and what comes at the end."""
    detokenizer, shown = Detokenizer(words.decode), []
    while ids:
        size = sizes.pop() if sizes else 1
        shown.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return shown, detokenizer.end()


@given(TEXTS, st.lists(st.integers(1, 40), max_size=5))
def test_the_pieces_are_the_text_and_no_character_is_ever_broken(text: str, sizes: list[int]) -> None:
    shown, last = pieces(BYTES, BYTES.encode(text), sizes)
    assert ("".join(shown), last) == (text, "")


@given(st.lists(st.sampled_from([[1], [2], [3], *([b + 4 for b in c.encode()] for c in "é你🙂")]), max_size=20))
def test_leading_spaces_and_bytes_of_other_tokenizers_come_out_whole(characters: list[list[int]]) -> None:
    ids = [token for character in characters for token in character]
    shown, last = pieces(FALLBACK, ids, [])
    assert "".join(shown) + last == FALLBACK.decode(ids)
    assert "\ufffd" not in "".join(shown) + last


@given(st.lists(st.integers(0, SPECIAL), max_size=60), st.lists(st.integers(1, 40), max_size=5))
def test_whatever_bytes_are_sampled_the_readable_ones_come_through(ids: list[int], sizes: list[int]) -> None:
    shown, last = pieces(BYTES, list(ids), sizes)
    whole = BYTES.decode(ids)
    assert "".join(shown).replace("\ufffd", "") + last.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_broken_bytes_are_shown_as_such_before_long() -> None:
    (lone,) = {token for token in range(SPECIAL) if BYTES.decode([token, *BYTES.encode("\u00a9")[1:]]) == "\u00e9"}
    detokenizer = Detokenizer(BYTES.decode)
    shown = [detokenizer.push([lone]) for _ in range(MAX_HELD)]
    assert shown[: MAX_HELD - 1] == [""] * (MAX_HELD - 1)
    assert set(shown[-1]) == {"\ufffd"}
    assert detokenizer.push(BYTES.encode("abc"))[-3:] == "abc"


def test_an_incomplete_character_at_the_end_is_shown_as_one() -> None:
    shown, last = pieces(BYTES, BYTES.encode("a🙂")[:-1], [])
    assert ("".join(shown), last) == ("a", "\ufffd")


def test_special_tokens_are_no_text() -> None:
    shown, last = pieces(BYTES, [*BYTES.encode("a"), SPECIAL, *BYTES.encode("b"), SPECIAL], [])
    assert (shown, last) == (["a", "", "b", ""], "")


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_text_ends_before_the_first_stop_string_however_it_arrives(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    finder, shown, rest, stopped = StopFinder(stops), "", text, False
    while rest and not stopped:
        size = sizes.pop() if sizes else 1
        cut = finder.push(rest[:size])
        shown, rest, stopped = shown + cut.text, rest[size:], cut.stopped
        assert text.startswith(shown)
    if stopped:
        assert any(text.startswith(stop, len(shown)) for stop in stops)
    else:
        shown += finder.last(finder.push("")).text
        assert shown == text
        assert not any(stop in text for stop in stops)


@pytest.mark.parametrize(("stop", "held"), [("END", "E"), ("aab", "aa"), ("xyz", "")])
def test_only_what_may_begin_a_stop_string_is_held_back(stop: str, held: str) -> None:
    assert StopFinder([stop]).push(f"text {held}") == Cut("text ", False)
