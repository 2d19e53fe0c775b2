"""What is told of an answer while it is sampled is, put together, the answer."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import SequenceFailed
from headrace.base.types.chat import Message
from headrace.base.types.episode import EpisodeKey, StopReason, TokenChunk
from headrace.base.types.tokens import Tokens
from headrace.models.tiny import char_tokenizer
from headrace.rollout.chat import Chat, Reading
from headrace.rollout.environments.base import AnswerPiece
from headrace.rollout.streaming import AnswerStream

LETTERS = "abcdefghijklmnopqrstuvwxyz<>/_{}\"':,`|0123456789 \n"
TOKENIZER = char_tokenizer(LETTERS, "{{ messages }}")
EOS = TOKENIZER.eos_token_id
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name":'),
        *(
            "```json\n",
            "```",
            "<|python_tag|>",
            "STOP",
            "<",
            "</",
            "`",
            "{",
            " ",
            "\n",
            "\n\n",
            "so",
            "be it",
            "S",
            "<th",
        ),
    ]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
CHATS = {
    parser: Chat.create(char_tokenizer(LETTERS + "STOP", "{{ messages }}"), (EOS,), parser)
    for parser in ("hermes", "json")
}


def parts_of(chat: Chat, text: str, size: int, *, ended: bool = True, lost: str = "") -> list[TokenChunk]:
    ids = chat.tokenizer.encode(text, add_special_tokens=False) + ([EOS] if ended else [])
    return [
        TokenChunk(
            key=EpisodeKey(0, 0), turn=0, prompt="", lost=lost if not at else "",
            tokens=Tokens(ids_T=ids[at : at + size], logprobs_T=[-1.0] * len(ids[at : at + size]),
                          versions_T=[0] * len(ids[at : at + size])),
            stop_reason=StopReason.STOP if at + size >= len(ids) else None,
        )
        for at in range(0, len(ids), size)
    ]  # fmt: skip


def streamed(chat: Chat, how: Reading, parts: list[TokenChunk]) -> tuple[list[AnswerPiece], Message]:
    """What is told of these parts, and the message that they are."""
    pieces: list[AnswerPiece] = []
    stream = AnswerStream(chat, how, pieces.append, num_prompt_tokens=3)
    ids: list[int] = []
    for part in parts:
        if part.lost:
            ids.clear()
        ids += part.tokens.ids_T.tolist()
        stream.push(part)
    message = chat.read(1, ids, how).message
    stream.end(message)
    return pieces, message


@settings(max_examples=500)
@given(text=TEXTS, size=st.integers(1, 9), parser=st.sampled_from(["hermes", "json"]), data=st.data())
def test_the_pieces_are_the_message_however_it_is_cut(text: str, size: int, parser: str, data: st.DataObject) -> None:
    how = Reading(
        stop=("STOP",) if data.draw(st.booleans()) else (),
        calls=data.draw(st.booleans()),
        opened=data.draw(st.booleans()),
    )
    parts = parts_of(CHATS[parser], text, size, ended=data.draw(st.booleans()))
    pieces, message = streamed(CHATS[parser], how, parts)
    assert "".join(piece.reasoning for piece in pieces) == message.reasoning
    assert "".join(piece.content for piece in pieces) == message.content
    said = [bool(piece.content) for piece in pieces]
    first = said.index(True) if True in said else len(said)
    assert not any(piece.reasoning for piece in pieces[first + 1 :])


def test_text_is_told_as_it_comes_and_what_may_become_something_else_is_held_back() -> None:
    chat, how = CHATS["hermes"], Reading(stop=("STOP",), calls=True)
    text = '<think>a b</think>\n\nlet me see <b> ST now <tool_call>{"name": "add"}</tool_call>'
    pieces, message = streamed(chat, how, parts_of(chat, text, 1))
    told = [piece.reasoning + piece.content for piece in pieces if piece.reasoning or piece.content]
    assert told[:3] == ["a", " ", "b"] or told[:2] == ["a", " b"]
    content = [piece.content for piece in pieces if piece.content]
    assert "".join(content) == message.content == "let me see <b> ST now"
    assert content[:4] == ["l", "e", "t", " m"]
    assert not re.search("<t|tool", "".join(content))
    (call,) = message.tool_calls
    assert call.name == "add"


def test_it_is_told_at_once_that_an_answer_has_begun() -> None:
    chat = CHATS["hermes"]
    pieces: list[AnswerPiece] = []
    stream = AnswerStream(chat, Reading(calls=True), pieces.append, num_prompt_tokens=3)
    stream.push(parts_of(chat, "<tool_call>{", 12)[0])
    assert pieces == [AnswerPiece(num_prompt_tokens=3)]


def test_an_answer_that_is_begun_anew_goes_on_if_it_is_the_same_and_else_fails_in_words() -> None:
    chat, how = CHATS["hermes"], Reading()
    first = parts_of(chat, "so be it", 4)[:1]
    pieces, _ = streamed(chat, how, [*first, *parts_of(chat, "so be it", 4, lost="restarted")])
    assert "".join(piece.content for piece in pieces) == "so be it"
    with pytest.raises(SequenceFailed, match="started again"):
        streamed(chat, how, [*first, *parts_of(chat, "not so", 4, lost="restarted")])


def test_a_thought_that_the_prompt_has_begun_is_reasoning_and_other_text_is_not() -> None:
    chat = CHATS["hermes"]
    prompt_ids_T = np.array(chat.tokenizer.encode("a<think>\n", add_special_tokens=False), np.int32)
    assert chat.opens_thought(prompt_ids_T)
    assert not chat.opens_thought(prompt_ids_T[:-3])
    ids = chat.tokenizer.encode("so</think>b", add_special_tokens=False)
    opened = chat.read(1, ids, Reading(opened=True)).message
    assert (opened.reasoning, opened.content) == ("so", "b")
    plain = chat.read(1, ids, Reading()).message
    assert (plain.reasoning, plain.content) == ("", "so</think>b")
