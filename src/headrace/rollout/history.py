"""The tree of an episode's turns, and the search for the turns that a list of messages continues.
:class:`~headrace.rollout.conversations.Conversations` stores the turns of an episode in it.

root (given: system, user) ── answer ──┬── given: tool ── answer        a path is a conversation:
                              answer   └── given: user ── answer        the messages of its turns in order
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
    """A turn in the tree of an episode's turns. Other turns may continue it."""

    turn: int
    """The index of the turn in the episode's list of turns."""
    parent: HistoryNode | None
    """The node that this turn continues; ``None`` for a root."""
    messages: tuple[Message, ...] | None
    """The messages that this turn adds to the messages of its parent, in canonical spelling; ``None`` for a turn that
    has tokens but no messages."""
    sampled: bool
    """Whether the model sampled the turn. Otherwise the task, the user or a tool provided it."""
    length: int
    """The number of tokens from the root up to the end of this turn."""
    hashed: hashlib.blake2b
    """The hash state after all tokens from the root up to the end of this turn. :func:`prompt_digest` returns its
    digest. A child copies this state and adds only its own tokens."""
    children: list[HistoryNode] = field(default_factory=list)
    """The nodes that continue this turn."""

    def path(self) -> list[int]:
        """Return the indices of the turns from the root to this node, the root first."""
        turns: list[int] = []
        node: HistoryNode | None = self
        while node is not None:
            turns.append(node.turn)
            node = node.parent
        return turns[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrefix:
    """The part at the beginning of a conversation that the history of an episode already contains."""

    node: HistoryNode | None
    """The last node of the longest path that is a beginning of the conversation; ``None`` if there is no such path."""
    length: int
    """The number of messages on that path, or of tokens if tokens were searched."""


class History:
    """The turns of one episode as a forest of :class:`HistoryNode`. It shares the list ``turns`` with the sampler of
    the episode."""

    def __init__(self, turns: list[Turn]) -> None:
        """Create a history without nodes. ``turns`` is the episode's list of turns; :meth:`add_given` appends to it."""
        self.turns = turns
        self._roots: dict[bytes, list[HistoryNode]] = {}
        """The first turns of all conversations, by the encoded list of tools with which a conversation began."""

    def add_given(
        self, turn: Turn, parent: HistoryNode | None, messages: Sequence[Message] | None, tools: Sequence[Tool] = ()
    ) -> HistoryNode:
        """Append ``turn``, which was not sampled, to ``turns``, and return its new node. The node becomes a child of
        ``parent``, or a root for conversations with ``tools`` if ``parent`` is ``None``. ``messages`` are the messages
        that the turn represents; ``None`` for a turn of token ids."""
        canonical_messages = None if messages is None else tuple(map(canonical, messages))
        self.turns.append(turn)
        node = self._new_node(len(self.turns) - 1, parent, canonical_messages, sampled=False)
        siblings = self._roots.setdefault(_CODEC.encode(tools), []) if parent is None else parent.children
        siblings.append(node)
        return node

    def add_sampled(self, turn: int, parent: HistoryNode, message: Message) -> HistoryNode:
        """Add a node for the sampled turn with the index ``turn``, which represents ``message``, as a child of
        ``parent``, and return the node."""
        messages = None if parent.messages is None else (canonical(message),)
        node = self._new_node(turn, parent, messages, sampled=True)
        parent.children.append(node)
        return node

    def _new_node(
        self, turn: int, parent: HistoryNode | None, messages: tuple[Message, ...] | None, *, sampled: bool
    ) -> HistoryNode:
        """Return a new node for the turn with the index ``turn``. The caller adds it to the children of ``parent``.
        ``messages`` are the messages of the turn, and ``sampled`` says whether the model sampled it."""
        ids_T = self.turns[turn].tokens.ids_T
        hashed = _hash(ids_T, None if parent is None else parent.hashed)
        length = len(ids_T) + (0 if parent is None else parent.length)
        return HistoryNode(
            turn=turn, parent=parent, messages=messages, sampled=sampled, length=length, hashed=hashed
        )  # fmt: skip

    def find_messages(self, messages: Sequence[Message], tools: Sequence[Tool], agent: str = POLICY) -> HeldPrefix:
        """Return the longest path whose messages are a beginning of ``messages``, among the conversations that began
        with the same ``tools``.

        A path may end with a sampled answer, or where ``messages`` ends. Among paths of equal length, the path with the
        most answers of ``agent`` is returned; if several have equally many, the path whose last turn has the fewest
        continuations.
        """
        canonical_messages = tuple(map(canonical, messages))
        best, best_num_own = HeldPrefix(node=None, length=0), 0
        pending = [(root, 0, 0) for root in self._roots.get(_CODEC.encode(tools), ())]
        while pending:
            node, start, num_own = pending.pop()
            if node.messages is None:
                continue
            length = start + len(node.messages)
            given = canonical_messages[start:length]
            if len(given) < len(node.messages) or not all(map(_is_same, node.messages, given)):
                continue
            num_own += node.sampled and self.turns[node.turn].author == agent
            ends = node.sampled or length == len(canonical_messages)
            if ends and _rank(node, length, num_own) > _rank(best.node, best.length, best_num_own):
                best, best_num_own = HeldPrefix(node=node, length=length), num_own
            # a node at the end of the list often has thousands of answers as children: they need no visit
            goes_deeper = length < len(canonical_messages)
            pending.extend((child, length, num_own) for child in node.children if goes_deeper or not child.messages)
        return best

    def find_tokens(self, ids_T: IntColumn) -> HeldPrefix:
        """Return the longest path whose tokens are a beginning of ``ids_T``. Among paths of equal length, the path
        whose last turn has the fewest continuations is returned."""
        best = HeldPrefix(node=None, length=0)
        whole = ids_T.tobytes()  # comparing bytes takes a tenth of the time of comparing arrays
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
        """Return the token ids of all turns from the root up to ``node``, concatenated."""
        return np.concatenate([self.turns[index].tokens.ids_T for index in node.path()])


def prompt_digest(prompt_ids_T: IntColumn) -> str:
    """Return a digest of a prompt, in hexadecimal. After a restart it identifies the recorded tokens that were sampled
    after this prompt."""
    return _hash(prompt_ids_T).hexdigest()


def _hash(ids_T: IntColumn, before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return the hash state after ``ids_T``. If ``before`` is given, the state continues from a copy of it."""
    hashed = hashlib.blake2b(digest_size=8) if before is None else before.copy()
    hashed.update(np.ascontiguousarray(ids_T, np.int32).data)
    return hashed


def canonical(message: Message) -> Message:
    """Return the message in the spelling in which messages are compared. A client may send the arguments of a tool call
    back as different text that represents the same JSON.

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
    """Return the approximate number of characters of messages and tool descriptions."""
    text_chars = sum(len(message.content) + len(message.reasoning) for message in messages)
    calls = sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    return text_chars + calls + (len(_CODEC.encode(tools)) if tools else 0)


def _canonical_json(arguments: str) -> str:
    """Return the JSON text with sorted keys, so that equal arguments have equal text. Text that is not JSON is returned
    unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _is_same(held: Message, given: Message) -> bool:
    """Return whether the message ``held`` of the history equals the message ``given`` by a client. An answer from a
    client may lack the reasoning, because some protocols cannot carry it."""
    if held.reasoning and not given.reasoning and held.role == given.role == "assistant":
        held = msgspec.structs.replace(held, reasoning="")
    return held == given


def _rank(node: HistoryNode | None, length: int, num_own: int = 0) -> tuple[int, int, int, int]:
    """Return the sort key of a path that ends at ``node``; the best path has the largest key. Longer paths are better,
    then paths with more answers of the agent (``num_own``), then with fewer continuations, then with an older last
    turn."""
    return (-1, 0, 0, 0) if node is None else (length, num_own, -len(node.children), -node.turn)
