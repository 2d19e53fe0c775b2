"""An answer as it grows: what of its message is certain, before its last token is sampled.

    tokens ─▶ text, whole characters ─▶ up to a stop string ─▶ reasoning and content ─▶ up to what may be a call

Held back is what later tokens may still change: half a character, what may become a stop string, the end of a thought
or a call of a tool. So the pieces, one after the other, are the message that the whole answer is read as.
"""

from __future__ import annotations

from functools import partial

from headrace.base.errors import SequenceFailed
from headrace.base.types.chat import Message
from headrace.base.types.episode import TurnPart
from headrace.engine.text import Detokenizer, StopFinder
from headrace.rollout.answers import certain_split
from headrace.rollout.chat import Chat, Reading
from headrace.rollout.environments.base import AnswerPiece, Hear


class Growing:
    """Tells ``hear`` what becomes certain of one answer, whatever follows."""

    def __init__(self, chat: Chat, how: Reading, hear: Hear, *, num_prompt_tokens: int) -> None:
        self._chat = chat
        self._how = how
        self._hear = hear
        self._num_prompt_tokens = num_prompt_tokens
        self._is_told = False
        self._reasoning = self._content = ""
        self._begin()

    def _begin(self) -> None:
        self._detokenizer = Detokenizer(partial(self._chat.tokenizer.decode, skip_special_tokens=False))
        self._stops = StopFinder(self._how.stop)
        self._text = ""
        self._stopped = False
        self._last: int | None = None  # a stop token is no part of the text where it is the last

    def push(self, part: TurnPart) -> None:
        """More of it was sampled; the first time something is told, if only that it has begun."""
        if part.lost:
            self._begin()
        said = [token for token in part.tokens.ids_T.tolist() if token not in self._chat.hidden_ids]
        if self._last is not None:
            said.insert(0, self._last)
        self._last = said.pop() if said and said[-1] in self._chat.stop_ids else None
        if not self._stopped:
            cut = self._stops.push(self._detokenizer.push(said))
            self._text += cut.text
            self._stopped = cut.stopped
        reasoning, content = certain_split(self._text, opened=self._how.opened)
        if self._how.calls:
            content = content[: self._chat.parser.num_certain(content)]
        self._tell(reasoning, content)

    def end(self, message: Message) -> None:
        """It is whole, and was read as ``message``: tell the rest of it."""
        if not (message.reasoning.startswith(self._reasoning) and message.content.startswith(self._content)):
            raise SequenceFailed(
                "the answer was begun anew after the first of it had been streamed, or its tokens have other text "
                "together than one by one",
                remedy="ask again, or without a stream",
            )
        self._tell(message.reasoning, message.content)

    def _tell(self, reasoning: str, content: str) -> None:
        """What of these was not told; nothing, where they do not go on with it."""
        if not (reasoning.startswith(self._reasoning) and content.startswith(self._content)):
            return
        piece = AnswerPiece(
            num_prompt_tokens=self._num_prompt_tokens,
            reasoning=reasoning[len(self._reasoning) :],
            content=content[len(self._content) :],
        )
        if piece.reasoning or piece.content or not self._is_told:
            self._reasoning, self._content, self._is_told = reasoning, content, True
            self._hear(piece)
