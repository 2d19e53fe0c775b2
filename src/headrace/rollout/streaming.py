"""The streaming of an answer: the part of its message that is certain before its last token is sampled.

    tokens ─▶ text, whole characters ─▶ up to a stop string ─▶ reasoning and content ─▶ up to what may be a call

Text that later tokens may still change is held back: an incomplete character, the beginning of a stop string, the end
of a thought or a call of a tool. So the pieces, one after the other, are the message that the whole answer is read as.
"""

from __future__ import annotations

from functools import partial

from headrace.base.errors import SequenceFailed
from headrace.base.types.chat import Message
from headrace.base.types.episode import TokenChunk
from headrace.engine.text import Detokenizer, StopFinder
from headrace.rollout.answers import certain_split
from headrace.rollout.chat import Chat, Reading
from headrace.rollout.environments.base import AnswerPiece, OnPiece


class AnswerStream:
    """A stream of one answer: it calls ``on_piece`` with each piece that later tokens cannot change."""

    def __init__(self, chat: Chat, reading: Reading, on_piece: OnPiece, *, num_prompt_tokens: int) -> None:
        self._chat = chat
        self._reading = reading
        self._on_piece = on_piece
        self._num_prompt_tokens = num_prompt_tokens
        self._has_sent = False
        self._reasoning = self._content = ""
        self._begin()

    def _begin(self) -> None:
        """Begin an answer with no text, as at the first chunk or after a restart."""
        self._detokenizer = Detokenizer(partial(self._chat.tokenizer.decode, skip_special_tokens=False))
        self._stops = StopFinder(self._reading.stop)
        self._text = ""
        self._stopped = False
        self._last: int | None = None  # a stop token is not part of the text where it is the last

    def push(self, chunk: TokenChunk) -> None:
        """Append sampled tokens, and pass on the text that has become certain. The first call always passes on a piece,
        which may be empty."""
        if chunk.lost:
            self._begin()
        spoken = [token for token in chunk.tokens.ids_T.tolist() if token not in self._chat.hidden_ids]
        if self._last is not None:
            spoken.insert(0, self._last)
        self._last = spoken.pop() if spoken and spoken[-1] in self._chat.stop_ids else None
        if not self._stopped:
            cut = self._stops.push(self._detokenizer.push(spoken))
            self._text += cut.text
            self._stopped = cut.stopped
        reasoning, content = certain_split(self._text, opened=self._reading.opened)
        if self._reading.calls:
            content = content[: self._chat.parser.num_certain(content)]
        self._pass_on(reasoning, content)

    def end(self, message: Message) -> None:
        """Pass on the rest of the complete answer, which was read as ``message``."""
        if not (message.reasoning.startswith(self._reasoning) and message.content.startswith(self._content)):
            raise SequenceFailed(
                "the answer was started again after the first of it had been streamed, or its tokens have other text "
                "together than one by one",
                remedy="ask again, or without a stream",
            )
        self._pass_on(message.reasoning, message.content)

    def _pass_on(self, reasoning: str, content: str) -> None:
        """Pass on the new text of both parts; nothing, if they do not continue the text passed on before."""
        if not (reasoning.startswith(self._reasoning) and content.startswith(self._content)):
            return
        piece = AnswerPiece(
            num_prompt_tokens=self._num_prompt_tokens,
            reasoning=reasoning[len(self._reasoning) :],
            content=content[len(self._content) :],
        )
        if piece.reasoning or piece.content or not self._has_sent:
            self._reasoning, self._content, self._has_sent = reasoning, content, True
            self._on_piece(piece)
