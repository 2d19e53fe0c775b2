"""What an environment worker receives."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.chat import Reply
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class RunEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attempt one row."""

    call: int
    row: dict[str, Any]
    """The row of the dataset."""
    prompt_ids_T: IntColumn
    """Its prompt as the model reads it; empty where rows have none."""
    seed: int
    """For the environment's own draws."""
    variables: dict[str, str] = {}
    """Environment variables for programs that the episode starts."""


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's answer."""

    ask: int
    """What is answered, by the worker's number."""
    reply: Reply


class AnswerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is no answer."""

    ask: int
    """What is refused, by the worker's number."""
    reason: str
    """What the episode is counted by, where nobody catches this."""
    spent: bool
    """Whether the episode has used up what it may have."""
    problem: str
    remedy: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for that episode any more."""

    call: int


Message = RunEpisode | Replied | AnswerRefused | Cancel | Shutdown
