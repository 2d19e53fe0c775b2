"""A model that says what it is told to, behind a tokenizer of characters and a few special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerFast

from headrace.base.types.episode import EpisodeKey, StopReason, Turn
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.models.tiny import char_tokenizer
from headrace.rollout import Chat, Conversations, EpisodeLimits
from headrace.rollout.conversations import TurnRequest

CHATML = (
    "{%- if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool.function.name }}{% endfor %} "
    "as <tool_call>{}</tool_call><|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ends a turn with more than the token that stops the model."""
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?+-=<>/|_{}[]()\"'\n⟪⟫"


def tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Characters, ``<|im_start|>`` and ``<|im_end|>``, which stops."""
    made = char_tokenizer(LETTERS, template)
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    return made


class Speaker:
    """A :class:`~headrace.rollout.conversations.TurnSampler` that says what ``says`` gives for the text that it reads,
    and
    ends with the tokenizer's stop token unless ``says`` ends with "…", which is cut off."""

    def __init__(self, says: Callable[[str], str], spoken: PreTrainedTokenizerFast) -> None:
        self.key = EpisodeKey(0, 0)
        self.sampling = Sampling(max_new_tokens=100, stop_ids=(spoken.eos_token_id,))
        self.turns: list[Turn] = []
        self.wanted: list[TurnRequest] = []
        self._says = says
        self._tokenizer = spoken

    async def sample(self, wanted: TurnRequest) -> int:
        self.wanted.append(wanted)
        text = self._says(self._tokenizer.decode(wanted.prompt_ids_T.tolist()))
        ids = self._tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        reason = StopReason.LENGTH
        if not text.endswith("…"):
            ids, reason = [*ids, self._tokenizer.eos_token_id], StopReason.STOP
        ids = ids[: wanted.sampling.max_new_tokens]
        count = len(self.turns) + 1  # marks the tokens: no two turns have the same logprobs
        tokens = Tokens(ids_T=ids, logprobs_T=-np.full(len(ids), count, np.float32), versions_T=np.full(len(ids), 3))
        turn = Turn(
            author=wanted.author, tokens=tokens, parent=wanted.parent, stop_reason=reason, untrained=wanted.untrained
        )
        self.turns.append(turn)
        return len(self.turns) - 1

    def restart(self) -> None:
        self.turns.clear()


def conversations(
    says: Callable[[str], str],
    limits: EpisodeLimits | None = None,
    *,
    template: str = CHATML,
    notes: list[str] | None = None,
) -> Conversations:
    """A conversation with a :class:`Speaker`."""
    spoken = tokenizer(template)
    speaker = Speaker(says, spoken)
    chat = Chat.create(spoken, speaker.sampling.stop_ids)
    note = ([] if notes is None else notes).append
    return Conversations(speaker, limits or EpisodeLimits(), chat=chat, seed=7, note=note)


def render_text(talk: Conversations, path: Sequence[int]) -> str:
    """What the model has read and said on a path."""
    ids = [token for index in path for token in talk.turns[index].tokens.ids_T.tolist()]
    return str(tokenizer().decode(ids))
