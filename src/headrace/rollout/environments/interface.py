"""What people write: an environment of several turns.

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

Spoken = Message | Mapping[str, Any]
"""A message, as a record or as ``{"role": ..., "content": ...}``."""
Messages = str | Spoken | Sequence[Spoken]
"""One message or several; text alone is said by the user."""
Task = Mapping[str, Any]
"""The row of the dataset that is attempted."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer of the model has led to."""

    messages: Messages = ()
    """What the model reads next; nothing where the episode is done."""
    reward: float | None = None
    """What this answer earned; an episode earns the sum of its answers, and one that is cut off by a budget what it has
    earned by then. ``None``: nothing is said about it."""
    done: bool = False
    """Whether the episode is over."""


class Env:
    """An environment of several turns; one object per episode, so that it may keep what it likes.

    ``reset`` and ``step`` may be ``async def``. Plain ones run in a thread, one call of an object after the other.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Functions with types and docstrings that the model may call, methods of the object too: what they return, or
    raise, is the tool's answer, and the model is asked again. :meth:`step` gets the answers that call nothing."""
    seed: int = 0
    """For draws of the environment: another one for every episode of a run, and the same in a repetition."""

    def reset(self, task: Task) -> Messages | Awaitable[Messages]:
        """Begin: what the model reads first."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """Go on after an answer of the model. Here the first answer ends the episode."""
        return StepResult(done=True)

    def close(self) -> Awaitable[None] | None:
        """Let go of what it holds: called once at the end, however that came."""


def as_messages(spoken: Messages) -> tuple[Message, ...]:
    """Messages as records.

    >>> [(message.role, message.content) for message in as_messages("hello")]
    [('user', 'hello')]
    """
    if isinstance(spoken, str):
        return (Message(role="user", content=spoken),)
    if isinstance(spoken, Message | Mapping):
        return (as_message(spoken),)
    if not isinstance(spoken, Sequence):
        raise _wrong(f"messages are a {type(spoken).__name__}, not a list")
    return tuple(as_message(each) for each in spoken)


def as_message(spoken: Any) -> Message:
    """One message as a record; :class:`~headrace.base.errors.EpisodeError` for what is none."""
    if isinstance(spoken, Message):
        spoken = msgspec.structs.asdict(spoken)  # its fields may hold anything
    if not isinstance(spoken, Mapping):
        raise _wrong(f"a message is a {type(spoken).__name__}, not a dict")
    tree = {**spoken, "content": spoken.get("content") or ""}
    tree["tool_calls"] = [_as_call(call) for call in spoken.get("tool_calls") or ()]
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
    """A call as OpenAI's protocol nests it, or flat."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {"id": call.get("id", ""), **call["function"]}
    return msgspec.structs.asdict(call) if isinstance(call, ToolCall) else call


def _wrong(words: str) -> EpisodeError:
    return EpisodeError(words, remedy='write {"role": "user", "content": "..."}')
