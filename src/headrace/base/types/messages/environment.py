"""The messages that an environment worker receives."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.chat import Reply
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class RunEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to run one episode on one row."""

    call: int
    row: dict[str, Any]
    """The row of the dataset."""
    prompt_ids_T: IntColumn
    """The prompt as the model reads it; empty if the rows have none."""
    seed: int
    """The seed of the environment's own random draws."""
    variables: dict[str, str] = {}
    """Environment variables for programs that the episode starts."""


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's reply to a ``ModelQuery``."""

    ask: int
    """The worker's own number of the request that this answers."""
    reply: Reply


class AnswerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The refusal of a ``ModelQuery``."""

    ask: int
    """The worker's own number of the request that is refused."""
    reason: str
    """The reason that the episode is counted by, if its code does not catch the error."""
    spent: bool
    """Whether the episode has used up its budget of turns, tokens, tool calls or context."""
    problem: str
    remedy: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stop an episode whose result is no longer needed."""

    call: int


Message = RunEpisode | Replied | AnswerRefused | Cancel | Shutdown
