"""The classes of a user's environment with several turns.

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
"""One message or several; plain text is a message of the user."""
Task = Mapping[str, Any]
"""The row of the dataset that is attempted."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one answer of the model."""

    messages: Messages = ()
    """The messages that the model reads next; none where the episode is done."""
    reward: float | None = None
    """The reward of this answer. An episode earns the sum over its answers; one that a budget cuts off keeps what it
    has earned so far. ``None``: no statement about this answer."""
    done: bool = False
    """Whether the episode is over."""
    extra: Mapping[str, str | float] = {}
    """Columns about this answer that are shown with the episode, such as what a command has changed."""


class Env:
    """An environment of several turns. There is one object per episode, so it may keep state.

    ``reset`` and ``step`` may be ``async def``. Plain ones run in a thread, one call of an object after the other.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions with types and docstrings that the model may call, methods of the object included. The returned value,
    or the error, is the tool's answer, and the model continues. A tool that has a description already is a
    :class:`~headrace.rollout.environments.tools.DescribedTool`. :meth:`step` gets the answers that call no tool."""
    seed: int = 0
    """A seed for draws of the environment. It differs between the episodes of a run, and is the same in a
    repetition."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Whether branches may leave this episode later, or it is a branch of an earlier one with the same seed
    (``flow.pivots``). An environment that ignores it is attempted again up to the pivot; one that keeps its moments can
    resume them. Set before :meth:`reset`, like the seed."""

    def reset(self, task: Task) -> Messages | Awaitable[Messages]:
        """Begin an episode of ``task``, and return the first messages for the model. A user's environment must define
        it."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """Return the result of an answer of the model. By default the first answer ends the episode."""
        return StepResult(done=True)

    def close(self) -> Awaitable[None] | None:
        """Release all resources. Called once at the end of every episode, however it ends."""


def as_messages(given: Messages) -> tuple[Message, ...]:
    """Return messages as records.

    >>> [(message.role, message.content) for message in as_messages("hello")]
    [('user', 'hello')]
    """
    if isinstance(given, str):
        return (Message(role="user", content=given),)
    if isinstance(given, Message | Mapping):
        return (as_message(given),)
    if not isinstance(given, Sequence):
        raise _wrong(f"messages are a {type(given).__name__}, not a list")
    return tuple(as_message(each) for each in given)


def as_message(given: Any) -> Message:
    """Return one message as a record. Raises :class:`~headrace.base.errors.EpisodeError` for an invalid one."""
    if isinstance(given, Message):
        given = msgspec.structs.asdict(given)  # its fields may hold anything
    if not isinstance(given, Mapping):
        raise _wrong(f"a message is a {type(given).__name__}, not a dict")
    tree = {**given, "content": given.get("content") or ""}
    tree["tool_calls"] = [_as_call(call) for call in given.get("tool_calls") or ()]
    if tree.get("role") not in ROLES:
        raise _wrong(f"a message has the role {str(tree.get('role'))[:40]!r}; known are {', '.join(ROLES)}")
    strange = tree.keys() - set(Message.__struct_fields__)
    if strange:
        raise _wrong(f"a message has unknown fields: {', '.join(sorted(map(str, strange)))}")
    try:
        return msgspec.convert(tree, Message)
    except msgspec.ValidationError as error:
        raise _wrong(f"a message cannot be used: {error}") from None


ROLES = ("system", "user", "assistant", "tool")


def _as_call(call: Any) -> Any:
    """Return a call of a tool with its name and arguments at the top level, from the nested form of OpenAI's protocol
    or from that form itself."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {"id": call.get("id", ""), **call["function"]}
    return msgspec.structs.asdict(call) if isinstance(call, ToolCall) else call


def _wrong(text: str) -> EpisodeError:
    """Return the error for messages that cannot be used, whose problem is ``text``."""
    return EpisodeError(text, remedy='write {"role": "user", "content": "..."}')
