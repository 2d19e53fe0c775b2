"""The streaming of an answer to a client while it is sampled. Only text that later tokens cannot change is sent.

    tokens ─▶ text, whole characters ─▶ up to a stop string ─▶ reasoning and content ─▶ up to what may be a call

Text that later tokens may still change is delayed: an incomplete character, the beginning of a stop string, the end of
a thought, or a tool call. Therefore the concatenated pieces equal the message that is read from the complete answer.
"""

from __future__ import annotations

from functools import partial

from headrace.base.errors import SequenceFailed
from headrace.base.types.chat import Message
from headrace.base.types.episode import TokenChunk
from headrace.engine.text import Detokenizer, StopFinder
from headrace.rollout.answers import ContentFilter, ReasoningFilter
from headrace.rollout.chat import Chat, Reading
from headrace.rollout.environments.base import AnswerPiece, OnPiece


class _StreamedText:
    """The reasoning or the content of an answer, and how much of it was sent to the client. If the sampling of the
    answer is started again, the new text must begin with the text that was already sent."""

    def __init__(self) -> None:
        """Create a part without text."""
        self._sent: list[str] = []
        """The pieces of text that were sent, in order."""
        self.begin()

    def begin(self) -> None:
        """Prepare for a new text, at the first chunk or after a restart. After a restart, the text that was sent before
        is expected again."""
        self._expected = self.sent
        """The text with which the new text must begin; empty once it was compared."""
        self._new: list[str] = []
        """The pieces of text that arrived and were not sent."""
        self._num_new = 0
        """The number of characters that arrived since :meth:`begin`."""
        self._differs = False
        """Whether the new text does not begin with the expected text."""

    @property
    def sent(self) -> str:
        """The text that was sent to the client."""
        return "".join(self._sent)

    def push(self, text: str) -> None:
        """Append text that later tokens cannot change."""
        self._new.append(text)
        self._num_new += len(text)

    def continues(self) -> bool:
        """Return whether the new text begins with all text that was sent before. The two are compared once, when the
        new text is at least as long. The result is ``False`` until then, and stays ``False`` if they differ."""
        if self._expected and not self._differs and self._num_new >= len(self._expected):
            text = "".join(self._new)
            self._differs = not text.startswith(self._expected)
            if not self._differs:
                self._new, self._expected = [text[len(self._expected) :]], ""
        return not self._expected

    def pop_unsent(self) -> str:
        """Return the text that can be sent to the client now, and record it as sent."""
        text, self._new = "".join(self._new), []
        self._sent.append(text)
        return text


class AnswerStream:
    """The stream of one answer while it is sampled. It calls ``on_piece`` with each piece of text that later tokens
    cannot change. ``reading`` are the options with which the complete answer will be read as a message."""

    def __init__(self, chat: Chat, reading: Reading, on_piece: OnPiece, *, num_prompt_tokens: int) -> None:
        """Create the stream of an answer to a prompt of ``num_prompt_tokens`` tokens. ``chat`` converts its tokens to
        text."""
        self._chat = chat
        self._reading = reading
        self._on_piece = on_piece
        self._num_prompt_tokens = num_prompt_tokens
        self._has_sent = False
        """Whether a piece was sent."""
        self._reasoning, self._content = _StreamedText(), _StreamedText()
        self._begin()

    def _begin(self) -> None:
        """Reset the parsing of the answer, at the first chunk or after a restart."""
        self._detokenizer = Detokenizer(partial(self._chat.tokenizer.decode, skip_special_tokens=False))
        self._stop_finder = StopFinder(self._reading.stop)
        self._reasoning_filter = ReasoningFilter(opened=self._reading.opened)
        self._content_filter = ContentFilter(self._chat.parser) if self._reading.calls else None
        """The filter that delays text which may be a tool call; ``None`` if no tools were offered."""
        self._reasoning.begin()
        self._content.begin()
        self._stopped = False
        """Whether a stop string has ended the answer."""
        self._delayed_stop_id: int | None = None
        """A stop token at the end of the tokens so far; ``None`` if there is none. It is text only if another token
        follows."""

    def push(self, chunk: TokenChunk) -> None:
        """Append the tokens of ``chunk``, and send the text that can no longer change. The first call always sends a
        piece, which may be empty."""
        if chunk.lost:
            self._begin()
        text_ids = [token for token in chunk.tokens.ids_T.tolist() if token not in self._chat.hidden_ids]
        if self._delayed_stop_id is not None:
            text_ids.insert(0, self._delayed_stop_id)
        self._delayed_stop_id = text_ids.pop() if text_ids and text_ids[-1] in self._chat.stop_ids else None
        if not self._stopped:
            cut = self._stop_finder.push(self._detokenizer.push(text_ids))
            self._stopped = cut.stopped
            reasoning, content = self._reasoning_filter.push(cut.text)
            self._reasoning.push(reasoning)
            self._content.push(content if self._content_filter is None else self._content_filter.push(content))
        if self._reasoning.continues() and self._content.continues():
            self._send(self._reasoning.pop_unsent(), self._content.pop_unsent())

    def end(self, message: Message) -> None:
        """Send the rest of the complete answer, which was read as ``message``. Raises
        :class:`~headrace.base.errors.SequenceFailed` if the text sent before is not its beginning."""
        reasoning, content = self._reasoning.sent, self._content.sent
        if not (message.reasoning.startswith(reasoning) and message.content.startswith(content)):
            raise SequenceFailed(
                "the answer was started again after the first of it had been streamed, or its tokens have other text "
                "together than one by one",
                remedy="ask again, or without a stream",
            )
        self._send(message.reasoning[len(reasoning) :], message.content[len(content) :])

    def _send(self, reasoning: str, content: str) -> None:
        """Send new text of reasoning and content to the client as one piece. The first piece is sent even if it is
        empty."""
        if reasoning or content or not self._has_sent:
            self._has_sent = True
            self._on_piece(AnswerPiece(num_prompt_tokens=self._num_prompt_tokens, reasoning=reasoning, content=content))
