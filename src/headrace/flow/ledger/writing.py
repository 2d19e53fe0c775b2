"""Translation of operations into rows of a ledger's SQLite database.

The operations of one transaction are combined: rows of one table are written together, and if a group changes its state
several times, only the last state is written. A *part* is a chunk of the tokens of a running turn; a *bundle* contains
the turns of episodes that were recorded together.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from headrace.base.types.episode import EpisodeKey
from headrace.base.types.group import GroupState
from headrace.flow.ledger.base import (
    CommitVersion,
    DropEpisodes,
    EndEpisode,
    EndStep,
    Move,
    Note,
    Operation,
    Stream,
    Submit,
)
from headrace.flow.ledger.bundles import encode_bundle, split_by_tokens
from headrace.flow.ledger.rows import insert, next_id, seal_rows
from headrace.flow.ledger.turns import encode_part, encode_token_results


class Writing:
    """A writer of the operations of one transaction into the tables of a ledger. The caller begins and commits the
    transaction, and calls :meth:`finish` after the last operation. Methods raise ``sqlite3.Error``."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Create the writer. ``db`` is the connection to the ledger's database, in which the caller has begun a
        transaction."""
        self._db = db
        self._ended: list[EndEpisode] = []
        """Operations of ended episodes that are not written yet."""
        self._moves: dict[int, Move] = {}
        """The last move of each group that is not written yet, by the number of the group. It includes the version and
        the step of earlier moves."""
        self.num_bytes = 0
        """Number of bytes of encoded tokens and results that were written."""

    def add(self, operation: Operation) -> None:
        """Add one operation. Ended episodes and moves of groups are written later, together; other operations are
        written at once."""
        self._HANDLERS[type(operation)](self, operation)

    def finish(self) -> None:
        """Write the ended episodes and the moves of groups that are not written yet."""
        self._write_ended()
        self._write_moves()

    def _submit(self, op: Submit) -> None:
        """Write the rows of new groups."""
        rest = (GroupState.SUBMITTED, "", 0, None, float(op.at_s), float(op.at_s))
        rows = [(number, row, *rest) for number, row in zip(op.numbers, op.rows, strict=True)]
        self._db.executemany(insert("groups"), rows)

    def _move(self, op: Move) -> None:
        """Store the new state of the groups, combined with earlier moves of this transaction, for :meth:`finish`."""
        for number in op.numbers:
            earlier = self._moves.get(number)
            self._moves[number] = op if earlier is None else _merge_moves(earlier, op)

    def _write_moves(self) -> None:
        """Write the latest state of each group that has moved since the last call, and the new checksums of these
        rows."""
        moves, self._moves = self._moves, {}
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ?, oldest_version = coalesce(?, oldest_version), moved_s = ?"
            " WHERE number = ?",
            [(op.state, op.reason, op.oldest_version, op.at_s, number) for number, op in moves.items()],
        )
        steps = [(op.step, number) for number, op in moves.items() if op.step is not None]
        # a separate statement, because assigning an indexed column updates the index even if the value is the same
        if steps:
            self._db.executemany("UPDATE groups SET step = ? WHERE number = ?", steps)
        self._db.executemany(seal_rows("groups", "number = ?"), [(number,) for number in moves])

    def _stream(self, op: Stream) -> None:
        """Write parts of running turns. If a part says that its sequence was lost, for example because the engine
        restarted it, delete the earlier parts of that turn first."""
        self._write_ended()
        for part in op.parts:
            if part.lost:
                self._delete_parts(part.key, part.lost, turn=part.turn)
            if not len(part.tokens) and part.stop_reason is None:
                continue
            blob = encode_part(part)
            self.num_bytes += len(blob)
            row = (next_id(self._db, "parts"), *part.key, part.turn, part.prompt, len(part.tokens), blob)
            self._db.execute(insert("parts"), row)

    def _delete_parts(self, key: EpisodeKey, reason: str, *, turn: int | None = None, kept: int = 0) -> None:
        """Delete the recorded parts of the episode ``key``; with ``turn``, only the parts of this sampled turn. Count
        their tokens as lost under ``reason``, except for ``kept`` tokens, which the recorded episode contains."""
        where = "WHERE group_number = ? AND position = ? AND coalesce(turn = ?, 1)"
        parameters = (*key, turn)
        (tokens,) = self._db.execute(f"SELECT sum(sampled_tokens) FROM parts {where}", parameters).fetchone()
        if tokens is None:
            return
        self._db.execute(f"DELETE FROM parts {where}", parameters)
        if tokens > kept:
            self._db.execute(
                "INSERT INTO lost_tokens (reason, tokens) VALUES (?, ?)"
                " ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
                (reason, tokens - kept),
            )
            self._db.execute(seal_rows("lost_tokens", "reason = ?"), (reason,))

    def _end_episode(self, op: EndEpisode) -> None:
        """Store an ended episode, which :meth:`_write_ended` writes in a bundle with other episodes."""
        self._ended.append(op)

    def _write_ended(self) -> None:
        """Write the episodes that have ended since the last call, in bundles, and delete the recorded parts of their
        turns."""
        if not self._ended:
            return
        operations, self._ended = self._ended, []
        (any_parts,) = self._db.execute("SELECT EXISTS (SELECT 1 FROM parts)").fetchone()
        in_order = iter(operations)
        rows = []
        for episodes in split_by_tokens([op.episode for op in operations]):
            blob, counts = encode_bundle(episodes)
            self.num_bytes += len(blob)
            bundle = next_id(self._db, "bundles")
            self._db.execute(insert("bundles"), (bundle, blob))
            for entry, (episode, sampled) in enumerate(zip(episodes, counts, strict=True)):
                if any_parts:
                    self._delete_parts(episode.key, "discarded", kept=sampled.count)
                rows.append(
                    (
                        *episode.key, episode.status, episode.cause, _as_stored(episode.reward),
                        sampled.count, sampled.oldest, sampled.newest, _as_stored(next(in_order).at_s),
                        _rewards_json(episode.parts), _rewards_json(episode.agent_rewards), bundle, entry,
                    )
                )  # fmt: skip
        self._db.executemany(insert("episodes", otherwise="OR REPLACE"), rows)

    def _drop_episodes(self, op: DropEpisodes) -> None:
        """Write the new status of ended episodes and its reason. Raises ``sqlite3.IntegrityError`` for an episode that
        has not ended."""
        self._write_ended()
        for place in op.places:
            changed = self._db.execute(
                "UPDATE episodes SET status = ?, cause = ? WHERE group_number = ? AND position = ?",
                (op.status, op.reason, op.number, place),
            )
            if changed.rowcount != 1:
                raise sqlite3.IntegrityError(f"episode {EpisodeKey(op.number, place)} has not ended")
            self._db.execute(seal_rows("episodes", "group_number = ? AND position = ?"), (op.number, place))

    def _end_step(self, op: EndStep) -> None:
        """Write the results of the step of ``op``, and move its groups to the state TRAINED."""
        self._db.execute(
            insert("steps", otherwise="OR REPLACE"),
            (
                op.step,
                op.trained_tokens,
                json.dumps(op.dropped_tokens),
                json.dumps(op.ages),
                float(op.at_s),
                op.updates,
                msgspec.json.encode(op.lost).decode(),
            ),
        )
        if op.learned is not None:
            blob = encode_token_results(op.learned)
            self.num_bytes += len(blob)
            self._db.execute(insert("learned", otherwise="OR REPLACE"), (op.step, blob))
        self._move(Move(numbers=op.numbers, state=GroupState.TRAINED, at_s=op.at_s))

    def _commit_version(self, op: CommitVersion) -> None:
        """Write the checksum of a committed version, and move the groups that are released to the state RELEASED."""
        self._db.execute(insert("versions", otherwise="OR REPLACE"), (op.version, op.checksum, float(op.at_s)))
        self._move(Move(numbers=op.numbers, state=GroupState.RELEASED, at_s=op.at_s))

    def _note(self, op: Note) -> None:
        """Write a note about an event of the run."""
        self._db.execute(insert("notes"), (next_id(self._db, "notes"), op.kind, op.detail, float(op.at_s)))

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Submit: _submit,
        Move: _move,
        Stream: _stream,
        EndEpisode: _end_episode,
        DropEpisodes: _drop_episodes,
        EndStep: _end_step,
        CommitVersion: _commit_version,
        Note: _note,
    }


def _merge_moves(before: Move, op: Move) -> Move:
    """Return one move that replaces two moves of the same group, ``before`` and then ``op``: a copy of ``op`` with the
    version and the step of ``before`` where ``op`` has none."""
    if (before.oldest_version is None or op.oldest_version is not None) and before.step is None:
        return op
    return Move(
        numbers=op.numbers,
        state=op.state,
        at_s=op.at_s,
        oldest_version=before.oldest_version if op.oldest_version is None else op.oldest_version,
        step=before.step if op.step is None else op.step,
        reason=op.reason,
    )


def _as_stored(value: float | None) -> float | None:
    """Return the number as SQLite returns it from a REAL column, which stores no negative zero, so that the checksum of
    the row matches later; ``None`` for ``None``."""
    return None if value is None else float(value) + 0.0


def _rewards_json(rewards: Mapping[str, float]) -> str:
    """Return ``rewards``, values by name, as JSON text."""
    return json.dumps(rewards) if rewards else "{}"
