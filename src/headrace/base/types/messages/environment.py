"""The messages that an environment worker receives: a process that runs the environment's code. ``call`` is the number
of an order, which its answer repeats."""

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
    """The prompt as the model reads it; empty if the rows have none."""
    seed: int
    """The seed of the environment's own random draws."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Whether branches may leave the episode, or it is one."""
    variables: dict[str, str] = {}
    """Environment variables for programs that the episode starts."""


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's reply to a ``ModelQuery``, the request of an episode in this worker."""

    ask: int
    """The worker's own number of the request that this answers."""
    reply: Reply


class AnswerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The refusal of a ``ModelQuery``, the request of an episode in this worker for a reply of the model. The episode
    gets it as an error."""

    ask: int
    """The worker's own number of the request that is refused."""
    reason: str
    """The short name under which the failure of the episode is counted, if its code does not catch the error."""
    spent: bool
    """Whether the episode has used up its budget of turns, tokens, tool calls or context."""
    problem: str
    """What is wrong, in words."""
    remedy: str
    """What the user can do about it, in words."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to stop the episode of the order number ``call``, whose result is no longer needed."""

    call: int


Message = RunEpisode | Replied | AnswerRefused | Cancel | Shutdown
