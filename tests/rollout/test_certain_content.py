"""Content is passed on as soon as it is certain, in time that is linear in its length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.clock import RealClock
from headrace.rollout.answers import PARSERS, ContentFilter, Parser, ReasoningFilter, split_reasoning
from headrace.rollout.chat import Reading
from headrace.wings.serve.calls import CallFinder
from tests.rollout.test_streaming import CHATS, PIECES, parts_of, streamed

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SIZE = 50_000
TIMES = 8.0
"""How often a character may be looked at: the held ones are few, or twice as many each time."""


class Counting:
    """A parser that counts the characters it looks at before the end."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self.markers, self.looked_at = parser, parser.markers, 0

    def __call__(self, text: str) -> Any:
        return self._parser(text)

    def num_certain(self, text: str, **begun: bool) -> int:
        self.looked_at += len(text)
        return self._parser.num_certain(text, **begun)


@settings(max_examples=500)
@given(
    pieces=st.lists(PIECES, max_size=8), parser=st.sampled_from(["hermes", "json"]), opened=st.booleans(), cut=st.data()
)
def test_text_that_comes_in_pieces_is_read_as_the_whole_is(
    pieces: list[str], parser: str, opened: bool, cut: st.DataObject
) -> None:
    text, made = "".join(pieces), PARSERS.load(parser)()
    whole = CallFinder(made, opened=opened).push(text, ended=True)
    finder, told, start = CallFinder(made, opened=opened), "", 0
    while start < len(text):
        size = cut.draw(st.integers(1, 9))
        told += finder.push(text[start : start + size], ended=False)[0]
        assert whole[0].startswith(told)
        start += size
    last, calls = finder.push("", ended=True)
    assert (told + last, calls) == whole


@settings(max_examples=500)
@given(pieces=st.lists(PIECES, max_size=8), opened=st.booleans(), cut=st.data())
def test_reasoning_that_comes_in_pieces_is_that_of_the_whole_as_far_as_nothing_can_change_it(
    pieces: list[str], opened: bool, cut: st.DataObject
) -> None:
    text, told, start = "".join(pieces), ("", ""), 0
    by_piece = ReasoningFilter(opened=opened)
    while start < len(text):
        size = cut.draw(st.integers(1, 9))
        reasoning, content = by_piece.push(text[start : start + size])
        told = told[0] + reasoning, told[1] + content
        start += size
        assert told == ReasoningFilter(opened=opened).push(text[:start])
        for rest in ("", "\n", "x", "</think>", "<think>\nx</think>\ny"):
            whole = split_reasoning(text[:start] + rest, opened=opened)
            assert whole[0].startswith(told[0])
            assert whole[1].startswith(told[1])


@settings(max_examples=500)
@given(pieces=st.lists(PIECES, max_size=8), parser=st.sampled_from(["hermes", "json"]))
def test_content_is_passed_on_at_the_character_that_makes_it_certain(pieces: list[str], parser: str) -> None:
    text, made = "".join(pieces), PARSERS.load(parser)()
    content, told = ContentFilter(made), 0
    for length in range(1, min(len(text), 60) + 1):
        told += len(content.push(text[length - 1]))
        assert told == made.num_certain(text[:length])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("so be it " * (SIZE // 9), id="content"),
        pytest.param(f"so <tool_call>{{{'a' * SIZE}", id="a long call"),
        pytest.param("so" + " " * SIZE, id="space"),
        pytest.param("so\n```json\n" + "{ " * (SIZE // 2), id="a block"),
        pytest.param("< " * (SIZE // 2), id="beginnings"),
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "json"])
def test_no_character_is_looked_at_again_and_again(parser: str, text: str) -> None:
    counting = Counting(PARSERS.load(parser)())
    finder = CallFinder(counting, opened=False)
    told = "".join(finder.push(letter, ended=False)[0] for letter in text)
    last, calls = finder.push(CALL, ended=True)
    assert counting.looked_at < TIMES * len(text)
    assert (told + last, calls) == CallFinder(counting, opened=False).push(text + CALL, ended=True)


def test_an_answer_that_is_streamed_is_looked_at_once() -> None:
    counting = Counting(PARSERS.load("hermes")())
    chat = replace(CHATS["hermes"], parser=counting)
    text = "<think>a</think>" + "so be it " * 500
    pieces, message = streamed(chat, Reading(calls=True), parts_of(chat, text, 1))
    assert "".join(piece.content for piece in pieces) == message.content == text.removeprefix("<think>a</think>")
    assert counting.looked_at < TIMES * len(text)


def test_a_long_thought_is_streamed_in_linear_time() -> None:
    by_piece, clock, number = ReasoningFilter(opened=True), RealClock(), 400_000
    begun_s = clock.now()
    for piece in ("ab", "\n"):
        for _ in range(number):
            by_piece.push(piece)
    assert clock.now() - begun_s < 20.0
    assert by_piece.push("c</think>\nso") == ("\n" * number + "c", "so")


def test_a_long_thought_is_passed_on_in_linear_time() -> None:
    finder, clock, number = CallFinder(PARSERS.load("hermes")(), opened=True), RealClock(), 400_000
    begun_s = clock.now()
    assert all(finder.push("ab", ended=False)[0] == "ab" for _ in range(number))
    assert clock.now() - begun_s < 20.0  # it is a second; if each piece were joined to all before it, minutes
    assert finder.push(f"</think>so{CALL}", ended=True) == ("</think>so", (("add", '{"a": 1}'),))
