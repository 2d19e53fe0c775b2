"""The base class and the result type of a user's environment with several turns.

class Guess(headrace.Env):
    def reset(self, task):
        self.secret = task["secret"]
        return [{"role": "user", "content": "Guess a digit."}]

    def step(self, message):
        right = message.content == self.secret
        return headrace.StepResult(messages="Try again.", reward=float(right), done=right)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import Message, ToolCall
from headrace.base.types.episode import AttemptKind

MessageLike = Message | Mapping[str, Any]
"""A message, as a record or as ``{"role": ..., "content": ...}``."""
Messages = str | MessageLike | Sequence[MessageLike]
"""One message or a sequence of messages. Plain text is a message of the user."""
Task = Mapping[str, Any]
"""The row of the dataset that an episode attempts."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The environment's result for one answer of the model."""

    messages: Messages = ()
    """The messages that the model reads next; empty if the episode is done."""
    reward: float | None = None
    """The reward of this answer. The reward of an episode is the sum over its answers; an episode that ends because a
    budget is spent keeps the sum so far. ``None`` means that this answer has no reward."""
    done: bool = False
    """Whether the episode is over."""
    extra: Mapping[str, str | float] = {}
    """Columns about this answer that are shown with the episode, such as the files that a command has changed."""


class Env:
    """An environment of several turns. Each episode has its own object, so the object may store state.

    ``reset`` and ``step`` may be ``async def``. Plain methods run in a thread, with one call per object at a time.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions with types and docstrings that the model may call; they may be methods of the object. The returned
    value, or the error, is the tool's answer, and the model continues. A
    :class:`~headrace.rollout.environments.tools.DescribedTool` is a tool that already has a description. :meth:`step`
    receives only the answers that call no tool."""
    seed: int = 0
    """A seed for random draws of the environment. It differs between the episodes of a run, and is the same when the
    run is repeated."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Whether the episode stands alone, may have branches later, or is a branch of an earlier episode with the same
    seed (``flow.pivots``). An environment may ignore this value; a branch is then attempted again from the start up to
    the pivot. An environment that stores snapshots of its state can resume from them. The value is set before
    :meth:`reset`, like the seed."""

    def reset(self, task: Task) -> Messages | Awaitable[Messages]:
        """Begin an episode of ``task``, and return the first messages for the model. A user's environment must define
        this method."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """Return the result of ``message``, an answer of the model. By default the first answer ends the episode."""
        return StepResult(done=True)

    def close(self) -> Awaitable[None] | None:
        """Release all resources. This is called once at the end of every episode, whether it succeeded or failed."""


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Return ``messages`` as records.

    >>> [(message.role, message.content) for message in as_messages("hello")]
    [('user', 'hello')]
    """
    if isinstance(messages, str):
        return (Message(role="user", content=messages),)
    if isinstance(messages, Message | Mapping):
        return (as_message(messages),)
    if not isinstance(messages, Sequence):
        raise _message_error(f"messages are a {type(messages).__name__}, not a list")
    return tuple(as_message(message) for message in messages)


def as_message(message: Any) -> Message:
    """Return ``message`` as a record. Raises :class:`~headrace.base.errors.EpisodeError` for an invalid message."""
    if isinstance(message, Message):
        message = msgspec.structs.asdict(message)  # the record was not validated: its fields are checked below
    if not isinstance(message, Mapping):
        raise _message_error(f"a message is a {type(message).__name__}, not a dict")
    tree = {**message, "content": message.get("content") or ""}
    tree["tool_calls"] = [_flatten_call(call) for call in message.get("tool_calls") or ()]
    if tree.get("role") not in ROLES:
        raise _message_error(f"a message has the role {str(tree.get('role'))[:40]!r}; known are {', '.join(ROLES)}")
    unknown = tree.keys() - set(Message.__struct_fields__)
    if unknown:
        raise _message_error(f"a message has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    try:
        return msgspec.convert(tree, Message)
    except msgspec.ValidationError as error:
        raise _message_error(f"a message cannot be used: {error}") from None


ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message may have."""


def _flatten_call(call: Any) -> Any:
    """Return a tool call with its name and arguments at the top level. OpenAI's protocol nests them under ``function``;
    other calls are returned as they are."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {"id": call.get("id", ""), **call["function"]}
    return msgspec.structs.asdict(call) if isinstance(call, ToolCall) else call


def _message_error(text: str) -> EpisodeError:
    """Return the error for messages that cannot be used. ``text`` is the problem."""
    return EpisodeError(text, remedy='write {"role": "user", "content": "..."}')
