"""Which turn stands for which messages, and how much of a list of messages is held already.

root (given: system, user) ── answer ──┬── given: tool ── answer        a path is what one list of messages says
                              answer   └── given: user ── answer        after the other
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.types.chat import Message, Tool
from headrace.base.types.episode import Turn
from headrace.base.types.tokens import IntColumn
from headrace.rollout.environments.agents import POLICY

_CODEC = msgspec.json.Encoder()


@dataclass(slots=True, kw_only=True, eq=False)
class HistoryNode:
    """A turn that others may continue."""

    turn: int
    """Its index."""
    parent: HistoryNode | None
    """The turn that it continues; ``None`` for a root."""
    messages: tuple[Message, ...] | None
    """That it adds to those of its parent, in one spelling; ``None`` where it stands for tokens only."""
    sampled: bool
    children: list[HistoryNode] = field(default_factory=list)

    def path(self) -> list[int]:
        """The turns from the root to here."""
        turns: list[int] = []
        at: HistoryNode | None = self
        while at is not None:
            turns.append(at.turn)
            at = at.parent
        return turns[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrefix:
    """How much of what was asked is held."""

    node: HistoryNode | None
    """Where the longest path ends that begins it; ``None``: nothing is held."""
    length: int
    """Messages, or tokens, of that path."""


class History:
    """The turns of one episode that have ended, as a forest of :class:`HistoryNode`."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turns = turns
        self._roots: dict[bytes, list[HistoryNode]] = {}

    def add_given(
        self, turn: Turn, parent: HistoryNode | None, messages: Sequence[Message] | None, tools: Sequence[Tool] = ()
    ) -> HistoryNode:
        """Append a turn that was not sampled, and hang it below ``parent``, or as a root under ``tools``."""
        spelled = None if messages is None else tuple(map(in_one_spelling, messages))
        self.turns.append(turn)
        node = HistoryNode(turn=len(self.turns) - 1, parent=parent, messages=spelled, sampled=False)
        beside = self._roots.setdefault(_CODEC.encode(tools), []) if parent is None else parent.children
        beside.append(node)
        return node

    def add_sampled(self, turn: int, parent: HistoryNode, message: Message) -> HistoryNode:
        """Hang a turn that was sampled, and stands for ``message``, below ``parent``."""
        messages = None if parent.messages is None else (in_one_spelling(message),)
        node = HistoryNode(turn=turn, parent=parent, messages=messages, sampled=True)
        parent.children.append(node)
        return node

    def find_messages(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str = POLICY) -> HeldPrefix:
        """The longest path whose messages begin these, and that was begun under these tools. It ends with an answer, or
        with the last of the messages; of paths that are equally long, it is the one with the most answers of ``agent``,
        and among those the one that was continued least."""
        spelled = tuple(map(in_one_spelling, messages))
        best, best_own = HeldPrefix(node=None, length=0), 0
        left = [(root, 0, 0) for root in self._roots.get(_CODEC.encode(tools), ())]
        while left:
            node, before, own = left.pop()
            if node.messages is None:
                continue
            length = before + len(node.messages)
            if not _are_same(node.messages, spelled[before:length]):
                continue
            own += node.sampled and self.turns[node.turn].author == agent
            ends = node.sampled or length == len(spelled)
            if ends and _rank(node, length, own) > _rank(best.node, best.length, best_own):
                best, best_own = HeldPrefix(node=node, length=length), own
            on = length < len(spelled)  # else most of the answers, of which there may be thousands, need no look
            left.extend((child, length, own) for child in node.children if on or not child.messages)
        return best

    def find_tokens(self, ids_T: IntColumn) -> HeldPrefix:
        """The longest path whose tokens begin these."""
        best = HeldPrefix(node=None, length=0)
        left = [(root, 0) for roots in self._roots.values() for root in roots]
        while left:
            node, before = left.pop()
            own_T = self.turns[node.turn].tokens.ids_T
            length = before + len(own_T)
            if not np.array_equal(own_T, ids_T[before:length]):
                continue
            if _rank(node, length) > _rank(best.node, best.length):
                best = HeldPrefix(node=node, length=length)
            left.extend((child, length) for child in node.children)
        return best

    def path_ids(self, node: HistoryNode | None) -> Iterator[IntColumn]:
        """The tokens of every turn up to ``node``."""
        return (self.turns[index].tokens.ids_T for index in (node.path() if node is not None else ()))


def in_one_spelling(message: Message) -> Message:
    """The message as it is compared: programs that read the arguments of a call may write the same JSON otherwise.

    >>> from headrace.base.types.chat import ToolCall
    >>> call = ToolCall(id="0", name="add", arguments='{"a":1}')
    >>> in_one_spelling(Message(role="assistant", tool_calls=(call,))).tool_calls[0].arguments
    '{"a": 1}'
    """
    if not message.tool_calls:
        return message
    calls = tuple(msgspec.structs.replace(call, arguments=_respelled(call.arguments)) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def num_chars(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """About how long they are, as text."""
    told = sum(len(message.content) + len(message.reasoning) for message in messages)
    calls = sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    return told + calls + (len(_CODEC.encode(tools)) if tools else 0)


def _respelled(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _are_same(held: Sequence[Message], given: Sequence[Message]) -> bool:
    return len(held) == len(given) and all(map(_is_same, held, given))


def _is_same(held: Message, given: Message) -> bool:
    """Protocols without a place for the reasoning leave it out; the answer is the same."""
    if held.reasoning and not given.reasoning and held.role == given.role == "assistant":
        held = msgspec.structs.replace(held, reasoning="")
    return held == given


def _rank(node: HistoryNode | None, length: int, own: int = 0) -> tuple[int, int, int, int]:
    return (-1, 0, 0, 0) if node is None else (length, own, -len(node.children), -node.turn)
