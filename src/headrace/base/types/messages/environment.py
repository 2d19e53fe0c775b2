"""The messages that an environment worker receives. An environment worker is a process that executes the code of an
environment. ``call`` is the number of an order; the worker's answer repeats it."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.types.chat import Reply
from headrace.base.types.episode import AttemptKind
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.tokens import IntColumn


class RunEpisode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to run one episode of the environment on one row of the dataset."""

    call: int
    row: dict[str, Any]
    """The row of the dataset."""
    prompt_ids_T: IntColumn
    """The token ids of the prompt; empty if the rows have no prompt."""
    seed: int
    """The seed of the random numbers that the environment draws."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Whether branches may be created from the episode, or whether it is a branch itself."""
    variables: dict[str, str] = {}
    """Environment variables for the programs that the episode starts."""


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's reply to a ``ModelQuery`` of an episode in this worker."""

    ask: int
    """The worker's own number of the answered ``ModelQuery``."""
    reply: Reply


class AnswerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The refusal of a ``ModelQuery`` of an episode in this worker. The worker raises it as an error in the code of the
    episode."""

    ask: int
    """The worker's own number of the refused ``ModelQuery``."""
    reason: str
    """The short name under which the run counts the failure, if the code of the episode does not catch the error."""
    spent: bool
    """Whether the episode has used up its budget of turns, tokens, tool calls or context."""
    problem: str
    """What is wrong, in words."""
    remedy: str
    """What the user can do about it, in words."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stop the episode with the order number ``call``, whose result is no longer needed."""

    call: int


Message = RunEpisode | Replied | AnswerRefused | Cancel | Shutdown
