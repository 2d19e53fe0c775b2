"""The building of OpenAI's JSON answers: whole answers and events of a stream, for completions and chat completions. An
answer has one or several choices. A piece is a part of a choice that the engine returns at once.

In addition to OpenAI's fields every choice has ``token_ids``, ``versions`` (the version of the weights that sampled
each token), Headrace's ``stop_reason`` and, if requested, ``kept_sizes``. A logprob that is not finite is ``null``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.types.chat import ToolCall
from headrace.base.types.episode import StopReason
from headrace.wings.agents.reading import encode_call, logprob_entry
from headrace.wings.serve.choices import ChoicePiece

Json = dict[str, Any]

FINISH = {
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.DEADLINE: "length",
    StopReason.ABORTED: "length",
}
"""OpenAI's ``finish_reason`` for each of Headrace's stop reasons. OpenAI has no value for a deadline or a withdrawn
request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """A builder of the JSON of one answer, with the values that all its parts share: its identity, and the fields that
    its choices have."""

    id: str
    """The id of the answer, such as ``chatcmpl-...``."""
    model: str
    """The model's name in the request, or the served model's name if the request has none."""
    created_s: int
    """The time at which the request arrived, in seconds since 1970."""
    is_chat: bool
    """Whether the answer has the format of chat completions; otherwise it has the format of completions."""
    with_logprobs: bool
    """Whether choices have log-probabilities."""
    with_kept_sizes: bool
    """Whether choices have the size of each token's kept-set (the tokens that remained after top-k, top-p and
    min-p)."""
    spell: Callable[[int], str]
    """A function that returns the text of one token alone, or ``token_id:N``."""

    def frame(self, choices: list[Json], *, streaming: bool) -> Json:
        """Return the JSON object of an answer or, with ``streaming``, of an event of a stream, with these
        ``choices``."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if streaming else "chat.completion"
        return {
            "id": self.id, "object": kind, "created": self.created_s, "model": self.model, "choices": choices
        }  # fmt: skip

    def event_choice(self, piece: ChoicePiece, *, first: bool) -> Json:
        """Return ``piece`` as a choice of an event; the ``first`` event of a chat choice also has the role."""
        content: Json = {"text": piece.text}
        if self.is_chat:
            content = {"delta": {**({"role": "assistant"} if first else {}), **self._content(piece, streaming=True)}}
        return self._choice(content, piece)

    def whole_choice(self, pieces: Sequence[ChoicePiece]) -> Json:
        """Return all pieces of one choice, joined, as a choice of an answer."""
        whole = ChoicePiece.concat(pieces)
        content: Json = {"text": whole.text}
        if self.is_chat:
            content = {"message": {"role": "assistant", **self._content(whole)}}
        return self._choice(content, whole)

    def calls(self, piece: ChoicePiece) -> list[ToolCall]:
        """Return the tool calls of ``piece``, each with a unique id."""
        stem = f"call_{self.id.rpartition('-')[2]}_{piece.index}"
        return [
            ToolCall(id=f"{stem}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(piece.calls)
        ]

    def _content(self, piece: ChoicePiece, *, streaming: bool = False) -> Json:
        """Return ``content`` and, if there are any, ``tool_calls`` of one piece of a chat choice: fields of the message
        or, with ``streaming``, of an event's ``delta``. The content of a message that only calls tools is ``null``.
        With ``streaming``, each call has an ``index`` from 0, as OpenAI's events require."""
        if not piece.calls:
            return {"content": piece.text}
        calls = [
            {**({"index": number} if streaming else {}), **encode_call(call)}
            for number, call in enumerate(self.calls(piece))
        ]
        return {"content": piece.text or None, "tool_calls": calls}

    def _choice(self, content: Json, piece: ChoicePiece) -> Json:
        """Return the JSON of a choice or of one of its pieces: ``content``, which has its text or message, with the
        fields that every choice has."""
        tokens, reason = piece.tokens, piece.stop_reason
        choice = {
            "index": piece.index,
            **content,
            "logprobs": self._logprobs(piece) if self.with_logprobs else None,
            "finish_reason": self._finish(piece),
            "stop_reason": reason,
            "token_ids": tokens.ids_T.tolist(),
            "versions": tokens.versions_T.tolist(),
        }
        if self.with_kept_sizes:
            choice["kept_sizes"] = tokens.kept.sizes_T.tolist() if tokens.kept else [0] * len(tokens)
        return choice

    def _finish(self, piece: ChoicePiece) -> str | None:
        """Return OpenAI's reason why the choice ended; ``None`` before its last piece."""
        if piece.calls and piece.stop_reason is StopReason.STOP:
            return "tool_calls"
        return FINISH[piece.stop_reason] if piece.stop_reason else None

    def _logprobs(self, piece: ChoicePiece) -> Json:
        """Return the log-probabilities of a piece in OpenAI's format, which differs between completions and chats."""
        spelled = [self.spell(token) for token in piece.tokens.ids_T.tolist()]
        logprobs = [value if math.isfinite(value) else None for value in piece.tokens.logprobs_T.tolist()]
        tops = self._tops(piece)
        if not self.is_chat:
            by_text = (
                None
                if tops is None
                else [_index_by_text(top, logprob) for top, logprob in zip(tops, logprobs, strict=True)]
            )
            return {
                "tokens": spelled, "token_logprobs": logprobs, "top_logprobs": by_text, "text_offset": piece.offsets
            }  # fmt: skip
        content = [
            {
                **logprob_entry(token, logprob),
                "top_logprobs": [] if tops is None else [logprob_entry(*each) for each in tops[place]],
            }
            for place, (token, logprob) in enumerate(zip(spelled, logprobs, strict=True))
        ]
        return {"content": content, "refusal": None}

    def _tops(self, piece: ChoicePiece) -> list[list[tuple[str, float]]] | None:
        """Return the likeliest entries at each token of a piece as pairs of text and log-probability, with the token
        itself added if it is not among them; ``None`` unless requested."""
        top = piece.top
        if top is None:
            return None
        rows: list[list[tuple[str, float]]] = []
        for place, token in enumerate(piece.tokens.ids_T.tolist()):
            ids, logs = top.ids_TK[place].tolist(), top.logs_TK[place].tolist()
            pairs = list(zip(ids, logs, strict=True))
            if token not in ids:
                pairs.append((token, float(top.logprobs_T[place])))
            rows.append([(self.spell(each), log) for each, log in pairs if math.isfinite(log)])
        return rows


def _index_by_text(top: list[tuple[str, float]], logprob: float | None) -> dict[str, float] | None:
    """Return the likeliest entries ``top`` at one token as an object, log-probability by text. Of two entries with the
    same text, keep the likelier entry. Return ``None`` for the first token of a prompt, which has no entries and whose
    ``logprob`` is ``None``."""
    if logprob is None:
        return None
    return dict(reversed(top))


def make_usage(num_prompt: int, num_sampled: int) -> Json:
    """Return the numbers of prompt tokens (``num_prompt``) and of sampled tokens (``num_sampled``) as OpenAI's object
    ``usage``. A prompt with several choices counts once."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled
    }  # fmt: skip
