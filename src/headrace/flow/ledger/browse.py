"""Looking through a ledger: pages of episodes, never all of them, without ever writing.

Only the SQLite file is read, by a connection that cannot change it: a run that is still writing does not notice, and
neither does a directory that may not be written to.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from headrace.base.errors import LedgerError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.scored import Learned
from headrace.flow.ledger.base import Conservation, Lengths
from headrace.flow.ledger.books import TRAINED, Books
from headrace.flow.ledger.migrate import schema_version, steps
from headrace.flow.ledger.opening import REDIS_FILE, SQLITE_FILE
from headrace.flow.ledger.turns import decode_learned, decode_turns


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted of an episode that has ended, without its tokens."""

    group: int
    place: int
    """In its group, from 0."""
    row: int
    """Of the dataset."""
    state: str
    """Where its group stands: a :class:`~headrace.base.types.group.GroupState`."""
    reason: str
    """Why its group was dropped; empty where it was not."""
    step: int | None
    """The step that took its group; ``None`` where none did."""
    status: str
    """An :class:`~headrace.base.types.episode.EpisodeStatus`."""
    cause: str
    reward: float | None
    """``None`` where it has none."""
    tokens: int
    """Sampled ones."""
    oldest: int | None
    """The oldest version that sampled it; ``None`` where none did."""
    newest: int | None
    """The newest one."""
    ended_s: float
    """Seconds since 1970."""
    parts: dict[str, float]
    """The components of its reward."""


Stored = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that a column of the ledger can hold."""


class EpisodeQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which episodes; every field that is ``None`` lets all through."""

    status: str | None = None
    """``scored``, ``failed``, ``left_out``, ``masked``, or ``trained``, ``dropped``, ``waiting`` for its group."""
    step: Stored | None = None
    group: Stored | None = None
    row: Stored | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: Stored | None = None
    tokens_to: Stored | None = None
    age_from: Stored | None = None
    """Of its oldest token, at the step that took it."""
    cause: str | None = None
    """Words of its cause, or of the reason why its group was dropped."""


ORDERS = {
    "newest": "group_number DESC, position DESC",
    "oldest": "group_number, position",
    "reward": "reward DESC NULLS LAST, group_number DESC, position",
    "least_reward": "reward NULLS LAST, group_number DESC, position",
    "tokens": "sampled_tokens DESC, group_number DESC, position",
    "age": "step - e.oldest_version DESC NULLS LAST, group_number DESC, position",
}
"""How a list can be sorted; the first two cost nothing at any length."""

_ROW = (
    "SELECT group_number, position, row, state, reason, step, status, cause, reward, sampled_tokens, e.oldest_version,"
    " newest_version, ended_s, reward_parts"
)
_FROM = " FROM episodes e JOIN groups ON number = group_number"
_FATE = {
    "trained": TRAINED,
    "dropped": "state = 'dropped'",
    "waiting": f"state != 'dropped' AND NOT {TRAINED}",
}
_BOUNDS = {
    "step": "step = ?",
    "group": "group_number = ?",
    "row": "row = ?",
    "reward_from": "reward >= ?",
    "reward_to": "reward <= ?",
    "tokens_from": "sampled_tokens >= ?",
    "tokens_to": "sampled_tokens <= ?",
    "age_from": "step - e.oldest_version >= ?",
}


class Browser:
    """The ledger at ``path``, for looking. Safe to use from several threads, one query at a time.

    Raises :class:`~headrace.base.errors.LedgerError` if it is not there, not a ledger, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._one_at_a_time = threading.Lock()
        if not path.is_file():
            raise LedgerError(f"{path} is not there", remedy="a run with flow.ledger = 'sqlite' keeps one")
        with self._explained():
            self._db = _connect(path)
        try:
            with self._explained():
                self._refuse_other_format()
                meta = dict(self._db.execute("SELECT key, value FROM meta"))
                self.group_size = int(meta["group_size"])
        except BaseException:
            self._db.close()
            raise
        self._books = Books(self._db, self.group_size)

    @classmethod
    def of_run(cls, run_dir: Path) -> Browser:
        """That of the run in ``run_dir``."""
        if (run_dir / REDIS_FILE).exists() and not (run_dir / SQLITE_FILE).exists():
            raise LedgerError(
                "this run keeps its ledger on a Redis server, and only ledger files can be looked through",
                remedy=f"headrace ledger {run_dir} prints its figures",
            )
        return cls(run_dir / SQLITE_FILE)

    def page(
        self, wanted: EpisodeQuery, *, order: str = "newest", offset: int = 0, limit: int = 50
    ) -> list[EpisodeRow]:
        """Some of the episodes that are wanted."""
        where, values = _where(wanted)
        query = f"{_ROW}{_FROM}{where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
        return [_row(row) for row in self._all(query, (*values, limit, offset))]

    def count(self, wanted: EpisodeQuery) -> int:
        """How many episodes are wanted."""
        where, values = _where(wanted)
        return int(self._all(f"SELECT count(*){_FROM}{where}", values)[0][0])

    def episode(self, key: EpisodeKey) -> EpisodeGraph | None:
        """One episode with everything it holds; ``None`` where it has not ended, or there is none."""
        query = (
            "SELECT status, cause, reward, reward_parts, agent_rewards, turns, entry FROM episodes"
            " JOIN bundles ON id = bundle WHERE group_number = ? AND position = ?"
        )
        rows = self._all(query, key)
        if not rows:
            return None
        status, cause, reward, parts, agents, turns, entry = rows[0]
        with self._explained():
            return EpisodeGraph(
                key=key,
                turns=decode_turns(turns, entry),
                status=EpisodeStatus(status),
                reward=reward,
                parts=json.loads(parts),
                agent_rewards=json.loads(agents),
                cause=cause,
            )

    def learned(self, group: int) -> Learned | None:
        """What became of all tokens of the step that trained ``group``; ``None`` where that is not recorded."""
        rows = self._all("SELECT tokens FROM learned JOIN groups USING (step) WHERE number = ?", (group,))
        with self._explained():
            return decode_learned(rows[0][0]) if rows else None

    def before(self, key: EpisodeKey | None, limit: int) -> list[EpisodeGraph]:
        """The episodes before ``key`` (``None``: the last ones), backwards, with their turns."""
        at = (2**62, 0) if key is None else tuple(key)
        keys = self._all(
            "SELECT group_number, position FROM episodes WHERE (group_number, position) < (?, ?)"
            " ORDER BY group_number DESC, position DESC LIMIT ?",
            (*at, limit),
        )
        found = (self.episode(EpisodeKey(*each)) for each in keys)
        return [episode for episode in found if episode is not None]

    def conservation(self) -> Conservation:
        """Count everything, as of one moment."""
        with self._explained(), self._moment():
            return self._books.conservation()

    def lengths(self) -> Lengths:
        """How long the episodes were whose fate is decided, and those that were trained."""
        with self._explained(), self._moment():
            return self._books.lengths()

    def num_running(self) -> int:
        """Episodes of which some tokens are recorded, and that have not ended."""
        return int(self._all("SELECT count(*) FROM (SELECT DISTINCT group_number, position FROM parts)")[0][0])

    def notes(self) -> list[tuple[str, str, float]]:
        """Kind, detail and time of the last hundred notes, oldest first."""
        return self._all("SELECT kind, detail, at_s FROM notes ORDER BY id DESC LIMIT 100")[::-1]

    def close(self) -> None:
        """Let go of it."""
        with self._one_at_a_time:
            self._db.close()

    def _refuse_other_format(self) -> None:
        version, known = schema_version(self._db), len(steps())
        if version == 0:
            raise LedgerError(f"{self._path} is not a ledger", remedy="restore it from a copy")
        if version != known:
            older = f"'headrace ledger {self._path.parent}' brings it up to date"
            raise LedgerError(
                f"{self._path} has ledger format {version}, this program reads {known}",
                remedy=older if version < known else "use the version of headrace that wrote it",
            )

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._explained():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _moment(self) -> Iterator[None]:
        self._db.execute("BEGIN DEFERRED")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, KeyError) as error:
            if isinstance(error, LedgerError):
                raise
            raise LedgerError(
                f"{self._path} cannot be read: {error}", remedy="restore it from a copy; the other files still show"
            ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Read only. A file that nobody writes, or whose log's index may not be made, is taken as it stands: that leaves
    nothing behind beside it."""
    ways = ("mode=ro&immutable=1",) if not is_written(path) else ("mode=ro", "mode=ro&immutable=1")
    failure: sqlite3.Error | None = None
    for way in ways:
        name = f"file:{quote(str(path.resolve()))}?{way}"
        db = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        try:
            pages, size = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
            if not is_written(path) and pages * size > path.stat().st_size:
                raise sqlite3.DatabaseError(
                    f"it has lost its end: {path.stat().st_size:,} of {pages * size:,} bytes are there"
                )
            return db
        except sqlite3.OperationalError as error:
            failure = error
            db.close()
        except sqlite3.Error:
            db.close()
            raise
    assert failure is not None
    raise failure


def is_written(path: Path) -> bool:
    """Whether somebody has the ledger at ``path`` open for writing, or was killed while it did: its log is there."""
    return path.with_name(f"{path.name}-wal").exists()


def _where(wanted: EpisodeQuery) -> tuple[str, list[Any]]:
    clauses: list[str] = []
    values: list[Any] = []
    if wanted.status is not None:
        clauses.append(_FATE.get(wanted.status, "status = ?"))
        values += [] if wanted.status in _FATE else [wanted.status]
    for name, clause in _BOUNDS.items():
        value = getattr(wanted, name)
        if value is not None:
            clauses.append(clause)
            values.append(value)
    if wanted.cause:
        clauses.append("(instr(lower(cause), lower(?)) > 0 OR instr(lower(reason), lower(?)) > 0)")
        values += [wanted.cause, wanted.cause]
    return (f" WHERE {' AND '.join(clauses)}" if clauses else ""), values


def _row(row: Sequence[Any]) -> EpisodeRow:
    *values, parts = row
    names = EpisodeRow.__struct_fields__[:-1]
    return EpisodeRow(**dict(zip(names, values, strict=True)), parts=json.loads(parts))
