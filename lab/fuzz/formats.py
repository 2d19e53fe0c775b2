"""The byte formats that the library reads from other processes, each with the code that reads it.

A reader returns whether it accepted an input. Errors that its caller expects count as refusals; any other exception is
a crash, and :class:`Forged` means that it accepted something that was never sent.
"""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import DataError, LedgerError, RunError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.messages import controller, engine, environment, learner, node, rollout, scorer
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.scored import TokenResults
from headrace.flow.ledger.base import Move, Operation, Submit
from headrace.flow.ledger.bundles import GroupBundle, decode_episode, encode_bundle, encode_group
from headrace.flow.ledger.redis import RollBack, encode_operation, replay
from headrace.flow.ledger.sqlite import IN_MEMORY, SqliteLedger
from headrace.flow.ledger.turns import decode_token_results, decode_turns, encode_token_results, encode_turns
from headrace.wings.bridges.atropos import Answers, read_batch
from lab.fuzz.change import mutate, mutate_json, mutate_msgpack
from lab.fuzz.examples import make_example
from lab.fuzz.weights import weight_formats

EXAMPLES = 8
"""Number of examples of each message type."""
LEDGER_LIFE = 500
"""Number of inputs after which a new ledger is created, since it keeps the accepted ones."""
MESSAGES = {
    "messages to the controller": controller.Message,
    "messages to the engine": engine.Message,
    "messages to the learner": learner.Message,
    "messages to the scorer": scorer.Message,
    "messages to a rollout shard": rollout.Message,
    "messages to the environment": environment.Message,
    "messages to a machine that has joined": node.Message,
    "knocks of machines that want to": node.JoinRequest,
    "the answers": node.JoinAnswer,
}
"""Message types between processes, by their receiver."""
MESSAGES_SHARE = 0.65
"""Fraction of all inputs that are messages."""

Reader = Callable[[bytes], bool]
Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A byte format and its reader."""

    name: str
    share: float
    """Fraction of all inputs that have this format."""
    seeds: Sequence[bytes]
    """Valid inputs."""
    change: Mutation
    """Function that returns a modified copy of an input."""
    read: Reader
    """Function that returns whether it accepted the input."""


def byte_formats(scratch: Path) -> list[Format]:
    """Return the formats that need no server; ``scratch`` is a working directory."""
    rng = random.Random(0)
    return [
        *(_messages(name, kinds, rng) for name, kinds in MESSAGES.items()),
        _operations(rng),
        _turns(rng),
        _bundles(rng),
        _groups(rng),
        _token_results(rng),
        _batches(),
        *(Format(name=name, share=share, seeds=seeds, change=change, read=read)
          for name, share, seeds, change, read in weight_formats(scratch)),
    ]  # fmt: skip


def valid_examples(message_type: Any, rng: random.Random, count: int = EXAMPLES) -> list[Any]:
    """Return ``count`` examples of a type, drawn with ``rng``, without those whose fields contradict each other."""
    examples: list[Any] = []
    while len(examples) < count:
        try:
            examples.append(make_example(message_type, rng))
        except ValueError:
            continue
    return examples


def make_reader(*errors: type[Exception]) -> Callable[[Callable[[bytes], object]], Reader]:
    """Return a decorator that turns a parser into a reader, for which ``errors`` are refusals."""

    def decorate(parse: Callable[[bytes], object]) -> Reader:
        def read(data: bytes) -> bool:
            try:
                parse(data)
            except errors:
                return False
            return True

        return read

    return decorate


def _messages(name: str, message_type: Any, rng: random.Random) -> Format:
    """Return the format of the messages to one receiver: ``message_type`` is their type, or the union of their
    types."""
    codec = MessageCodec(message_type)
    kinds = typing.get_args(message_type) or (message_type,)
    seeds = [codec.encode(message) for kind in kinds for message in valid_examples(kind, rng)]
    return Format(
        name=name,
        share=MESSAGES_SHARE / len(MESSAGES),
        seeds=seeds,
        change=mutate_msgpack,
        read=make_reader(msgspec.MsgspecError)(codec.decode),
    )


def _operations(rng: random.Random) -> Format:
    """Return the format of ledger operations in a Redis stream: the kind, a NUL, the content. ``rng`` draws the valid
    inputs."""
    kinds = (*typing.get_args(Operation), RollBack)
    seeds = [b"\0".join(encode_operation(operation)) for kind in kinds for operation in valid_examples(kind, rng)]
    ledgers: list[SqliteLedger] = []
    count = 0

    def parse(data: bytes) -> None:
        nonlocal count
        if count % LEDGER_LIFE == 0:
            for ledger in ledgers:
                ledger.close()
            ledgers[:] = [_new_ledger()]
        count += 1
        kind, _, content = data.partition(b"\0")
        replay(ledgers[0], kind, content)

    def change(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        kind, _, content = data.partition(b"\0")
        return b"\0".join((kind, mutate_msgpack(rng, content, [other.partition(b"\0")[2] for other in others])))

    read = make_reader(msgspec.MsgspecError, LedgerError)(parse)
    return Format(name="operations of the ledger", share=0.06, seeds=seeds, change=change, read=read)


def _new_ledger() -> SqliteLedger:
    ledger = SqliteLedger(IN_MEMORY, group_size=2, groups_per_step=1)
    ledger.apply(Submit(numbers=(0, 1, 7), rows=(0, 1, 2), at_s=0.0))
    ledger.apply(Move(numbers=(0, 1), state=GroupState.ADMITTED, at_s=0.0, oldest_version=0))
    return ledger


def _turns(rng: random.Random) -> Format:
    seeds = [encode_turns(valid_examples(Turn, rng, 2)) for _ in range(4 * EXAMPLES)]
    read = make_reader(msgspec.MsgspecError)(decode_turns)
    return Format(name="turns of an episode", share=0.03, seeds=seeds, change=mutate_msgpack, read=read)


def _bundles(rng: random.Random) -> Format:
    def make_episodes() -> list[EpisodeGraph]:
        return [EpisodeGraph(key=EpisodeKey(0, index), turns=valid_examples(Turn, rng, 2)) for index in range(2)]

    seeds = [encode_bundle(make_episodes())[0] for _ in range(4 * EXAMPLES)]
    read = make_reader(msgspec.MsgspecError)(partial(decode_episode, index=1))
    return Format(name="episodes in a bundle", share=0.01, seeds=seeds, change=mutate_msgpack, read=read)


def _groups(rng: random.Random) -> Format:
    def make_episodes() -> list[EpisodeGraph]:
        return [EpisodeGraph(key=EpisodeKey(0, index), turns=valid_examples(Turn, rng, 2)) for index in range(2)]

    seeds = [encode_group(make_episodes()) for _ in range(4 * EXAMPLES)]

    def parse(data: bytes) -> None:
        bundle = GroupBundle(memoryview(data))
        for entry in range(2):
            bundle.plain_tokens(entry)
            bundle.turns(entry)

    read = make_reader(msgspec.MsgspecError, IndexError)(parse)
    return Format(name="episodes of a group", share=0.02, seeds=seeds, change=mutate, read=read)


def _token_results(rng: random.Random) -> Format:
    seeds = [encode_token_results(results) for results in valid_examples(TokenResults, rng)]
    read = make_reader(msgspec.MsgspecError)(decode_token_results)
    return Format(name="what a step made of tokens", share=0.02, seeds=seeds, change=mutate_msgpack, read=read)


def _batches() -> Format:
    group = {"tokens": [[1, 2, 3], [4, 5]], "masks": [[-100, 2, 3], [-100, 5]], "scores": [1.0, 0.0], "env_id": 0}
    examples = [{"batch": [group, group]}, {"batch": None}, {"status": "error", "message": "no trainer"}]

    def parse(data: bytes) -> None:
        for scored in read_batch(json.loads(data)):
            for ids, mask in zip(scored.tokens, scored.masks, strict=True):
                Answers().sampled(ids, mask)

    # the JSON parser raises the last two errors
    read = make_reader(RunError, DataError, ValueError, RecursionError)(parse)
    seeds = [json.dumps(tree).encode() for tree in examples]
    return Format(name="batches of Atropos", share=0.02, seeds=seeds, change=mutate_json, read=read)
