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
from headrace.rollout.answers import ContentFilter, ReasoningFilter
from headrace.rollout.chat import Chat, Reading
from headrace.rollout.environments.base import AnswerPiece, OnPiece


class _Part:
    """The reasoning or the content of an answer, of which some has been passed on to the client. An answer whose
    sampling is started again must begin with that."""

    def __init__(self) -> None:
        """Begin with no text."""
        self._passed_on: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Begin the text anew, as at the first chunk or at a restart: what was passed on is expected again."""
        self._expected = self.passed_on
        self._new: list[str] = []
        self._num_new = 0
        self._differs = False

    @property
    def passed_on(self) -> str:
        """The text that has been passed on."""
        return "".join(self._passed_on)

    def push(self, text: str) -> None:
        """Append text that later tokens cannot change."""
        self._new.append(text)
        self._num_new += len(text)

    def continues(self) -> bool:
        """Return whether the text so far continues what has been passed on. They are compared once, when the new text
        is as long; until then, and if they differ, nothing can be passed on."""
        if self._expected and not self._differs and self._num_new >= len(self._expected):
            text = "".join(self._new)
            self._differs = not text.startswith(self._expected)
            if not self._differs:
                self._new, self._expected = [text[len(self._expected) :]], ""
        return not self._expected

    def take(self) -> str:
        """Return the text to pass on to the client now, and count it as passed on."""
        text, self._new = "".join(self._new), []
        self._passed_on.append(text)
        return text


class AnswerStream:
    """A stream of one answer while it is sampled: it calls ``on_piece`` with each piece that later tokens cannot
    change. ``reading`` says how the whole answer will be read as a message."""

    def __init__(self, chat: Chat, reading: Reading, on_piece: OnPiece, *, num_prompt_tokens: int) -> None:
        """Begin the stream of an answer to a prompt of ``num_prompt_tokens`` tokens."""
        self._chat = chat
        self._reading = reading
        self._on_piece = on_piece
        self._num_prompt_tokens = num_prompt_tokens
        self._has_sent = False
        self._reasoning, self._content = _Part(), _Part()
        self._begin()

    def _begin(self) -> None:
        """Begin an answer with no text, as at the first chunk or after a restart."""
        self._detokenizer = Detokenizer(partial(self._chat.tokenizer.decode, skip_special_tokens=False))
        self._stops = StopFinder(self._reading.stop)
        self._split = ReasoningFilter(opened=self._reading.opened)
        self._certain = ContentFilter(self._chat.parser) if self._reading.calls else None
        self._reasoning.begin()
        self._content.begin()
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
            self._stopped = cut.stopped
            reasoning, content = self._split.push(cut.text)
            self._reasoning.push(reasoning)
            self._content.push(content if self._certain is None else self._certain.push(content))
        if self._reasoning.continues() and self._content.continues():
            self._pass_on(self._reasoning.take(), self._content.take())

    def end(self, message: Message) -> None:
        """Pass on the rest of the complete answer, which was read as ``message``."""
        reasoning, content = self._reasoning.passed_on, self._content.passed_on
        if not (message.reasoning.startswith(reasoning) and message.content.startswith(content)):
            raise SequenceFailed(
                "the answer was started again after the first of it had been streamed, or its tokens have other text "
                "together than one by one",
                remedy="ask again, or without a stream",
            )
        self._pass_on(message.reasoning[len(reasoning) :], message.content[len(content) :])

    def _pass_on(self, reasoning: str, content: str) -> None:
        """Pass on new text of reasoning and content to the client as a piece; the first piece even if it is empty."""
        if reasoning or content or not self._has_sent:
            self._has_sent = True
            self._on_piece(AnswerPiece(num_prompt_tokens=self._num_prompt_tokens, reasoning=reasoning, content=content))
