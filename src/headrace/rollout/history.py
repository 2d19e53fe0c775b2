"""The tree of an episode's turns, and the search for the turns that a list of messages continues.

root (given: system, user) ── answer ──┬── given: tool ── answer        a path is a conversation:
                              answer   └── given: user ── answer        its messages one after the other
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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
    """A turn in the tree of an episode's turns, which others may continue."""

    turn: int
    """The index of the turn."""
    parent: HistoryNode | None
    """The turn that it continues; ``None`` for a root."""
    messages: tuple[Message, ...] | None
    """The messages that it adds to those of its parent, in canonical spelling; ``None`` for a turn of tokens only."""
    sampled: bool
    """Whether the model sampled it; otherwise it was given by the task, the user or a tool."""
    length: int
    """The number of tokens from the root up to the end of this turn."""
    hashed: hashlib.blake2b
    """The hash of these tokens, of which :func:`prompt_digest` is the digest. A turn's own tokens are all that it costs
    to go on from the hash of its parent."""
    children: list[HistoryNode] = field(default_factory=list)
    """The turns that continue it."""

    def path(self) -> list[int]:
        """Return the indices of the turns from the root to this node."""
        turns: list[int] = []
        node: HistoryNode | None = self
        while node is not None:
            turns.append(node.turn)
            node = node.parent
        return turns[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrefix:
    """The beginning of a conversation that the history of an episode holds already."""

    node: HistoryNode | None
    """The last node of the longest path that begins the conversation; ``None``: no path does."""
    length: int
    """The number of messages, or of tokens, on that path."""


class History:
    """The ended turns of one episode, as a forest of :class:`HistoryNode`. It shares the list ``turns`` with the
    sampler of the episode."""

    def __init__(self, turns: list[Turn]) -> None:
        """Begin without nodes. Given turns are appended to ``turns``, the list of the episode's turns."""
        self.turns = turns
        self._roots: dict[bytes, list[HistoryNode]] = {}

    def add_given(
        self, turn: Turn, parent: HistoryNode | None, messages: Sequence[Message] | None, tools: Sequence[Tool] = ()
    ) -> HistoryNode:
        """Append a turn that was not sampled, as a child of ``parent``, or as a root for conversations with
        ``tools``."""
        canonical_messages = None if messages is None else tuple(map(canonical, messages))
        self.turns.append(turn)
        node = self._node(len(self.turns) - 1, parent, canonical_messages, sampled=False)
        siblings = self._roots.setdefault(_CODEC.encode(tools), []) if parent is None else parent.children
        siblings.append(node)
        return node

    def add_sampled(self, turn: int, parent: HistoryNode, message: Message) -> HistoryNode:
        """Add a sampled turn, which represents ``message``, as a child of ``parent``."""
        messages = None if parent.messages is None else (canonical(message),)
        node = self._node(turn, parent, messages, sampled=True)
        parent.children.append(node)
        return node

    def _node(
        self, turn: int, parent: HistoryNode | None, messages: tuple[Message, ...] | None, *, sampled: bool
    ) -> HistoryNode:
        """Return a new node for the turn with the index ``turn``, which is not yet among the children of ``parent``."""
        ids_T = self.turns[turn].tokens.ids_T
        hashed = _hash(ids_T, None if parent is None else parent.hashed)
        length = len(ids_T) + (0 if parent is None else parent.length)
        return HistoryNode(
            turn=turn, parent=parent, messages=messages, sampled=sampled, length=length, hashed=hashed
        )  # fmt: skip

    def find_messages(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str = POLICY) -> HeldPrefix:
        """Return the longest path whose messages begin this list, and that began with the same tools.

        It ends with an answer, or with the last of the messages. Among paths of equal length the one with the most
        answers of ``agent`` is returned, and among those the one with the fewest continuations.
        """
        canonical_messages = tuple(map(canonical, messages))
        best, best_num_own = HeldPrefix(node=None, length=0), 0
        pending = [(root, 0, 0) for root in self._roots.get(_CODEC.encode(tools), ())]
        while pending:
            node, start, num_own = pending.pop()
            if node.messages is None:
                continue
            length = start + len(node.messages)
            if not _are_same(node.messages, canonical_messages[start:length]):
                continue
            num_own += node.sampled and self.turns[node.turn].author == agent
            ends = node.sampled or length == len(canonical_messages)
            if ends and _rank(node, length, num_own) > _rank(best.node, best.length, best_num_own):
                best, best_num_own = HeldPrefix(node=node, length=length), num_own
            # at the end of the list, the children are thousands of answers at most times: they are not visited
            goes_deeper = length < len(canonical_messages)
            pending.extend((child, length, num_own) for child in node.children if goes_deeper or not child.messages)
        return best

    def find_tokens(self, ids_T: IntColumn) -> HeldPrefix:
        """Return the longest path whose tokens begin ``ids_T``. Among paths of equal length the one with the fewest
        continuations is returned."""
        best = HeldPrefix(node=None, length=0)
        whole = ids_T.tobytes()  # bytes are compared in a tenth of the time of arrays
        pending = [root for roots in self._roots.values() for root in roots]
        while pending:
            node = pending.pop()
            own_T = self.turns[node.turn].tokens.ids_T
            if not whole.startswith(own_T.tobytes(), (node.length - len(own_T)) * own_T.itemsize):
                continue
            if _rank(node, node.length) > _rank(best.node, best.length):
                best = HeldPrefix(node=node, length=node.length)
            pending.extend(node.children)
        return best

    def ids(self, node: HistoryNode) -> IntColumn:
        """Return the token ids of all turns from the root up to ``node``, one after the other."""
        return np.concatenate([self.turns[index].tokens.ids_T for index in node.path()])


def prompt_digest(prompt_ids_T: IntColumn) -> str:
    """Return a digest of a prompt, in hexadecimal, by which the tokens that were sampled after it are found again."""
    return _hash(prompt_ids_T).hexdigest()


def _hash(ids_T: IntColumn, before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return the hash of ``ids_T``, after the tokens of the hash ``before``, if there are any."""
    hashed = hashlib.blake2b(digest_size=8) if before is None else before.copy()
    hashed.update(np.ascontiguousarray(ids_T, np.int32).data)
    return hashed


def canonical(message: Message) -> Message:
    """Return the message in the spelling in which messages are compared: programs may write the arguments of a call
    back as different text of the same JSON.

    >>> from headrace.base.types.chat import ToolCall
    >>> call = ToolCall(id="0", name="add", arguments='{"a":1}')
    >>> canonical(Message(role="assistant", tool_calls=(call,))).tool_calls[0].arguments
    '{"a": 1}'
    """
    if not message.tool_calls:
        return message
    calls = tuple(
        msgspec.structs.replace(call, arguments=_canonical_json(call.arguments)) for call in message.tool_calls
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def num_chars(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """Return the approximate number of characters of messages and tools."""
    text_chars = sum(len(message.content) + len(message.reasoning) for message in messages)
    calls = sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    return text_chars + calls + (len(_CODEC.encode(tools)) if tools else 0)


def _canonical_json(arguments: str) -> str:
    """Return JSON with sorted keys, so that equal arguments are equal as text; other text is returned unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _are_same(held: Sequence[Message], given: Sequence[Message]) -> bool:
    """Return whether the ``held`` messages of a node equal the ``given`` ones, one by one, in canonical spelling."""
    return len(held) == len(given) and all(map(_is_same, held, given))


def _is_same(held: Message, given: Message) -> bool:
    """Return whether a message that the history holds equals a given one. A given answer may lack the reasoning, which
    some protocols cannot carry."""
    if held.reasoning and not given.reasoning and held.role == given.role == "assistant":
        held = msgspec.structs.replace(held, reasoning="")
    return held == given


def _rank(node: HistoryNode | None, length: int, num_own: int = 0) -> tuple[int, int, int, int]:
    """Return the key by which paths are compared; the largest is the best. Longer paths come first, then those with
    more answers of the agent (``num_own``), with fewer continuations, and with an older last turn."""
    return (-1, 0, 0, 0) if node is None else (length, num_own, -len(node.children), -node.turn)
