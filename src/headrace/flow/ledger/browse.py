"""A read-only view of a ledger file for the dashboard and other tools: it returns pages of episodes and never loads all
of them.

The SQLite file is opened by a connection that cannot change it. So it can be read while a run still writes to it, and
in a directory without write permission.
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

from headrace.base.errors import LedgerError, StoreError
from headrace.base.store import COLUMNS, StoreReader
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.scored import TokenResults
from headrace.flow.ledger.base import Conservation, Lengths
from headrace.flow.ledger.books import TRAINED, Books
from headrace.flow.ledger.opening import REDIS_FILE, SQLITE_FILE
from headrace.flow.ledger.sqlite import schema_version, steps
from headrace.flow.ledger.turns import EPISODE_COLUMNS, decode_episode_row, decode_token_results


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of one ended episode, without its tokens: one row of the list of episodes in the dashboard."""

    group: int
    """The number of its group in the run."""
    place: int
    """Position of the episode in its group, from 0."""
    row: int
    """The index of its dataset row."""
    state: str
    """State of its group: a :class:`~headrace.base.types.group.GroupState`."""
    reason: str
    """Why its group was dropped; empty if it was not."""
    step: int | None
    """The step that took its group; ``None`` if no step did."""
    status: str
    """Status of the episode: an :class:`~headrace.base.types.episode.EpisodeStatus`."""
    cause: str
    """Why the episode failed, was left out or was masked; empty otherwise."""
    reward: float | None
    """Reward of the episode; ``None`` if it has none."""
    tokens: int
    """Number of sampled tokens."""
    oldest: int | None
    """The oldest version that sampled a token of it; ``None`` if none did."""
    newest: int | None
    """The newest version that sampled a token of it; ``None`` if none did."""
    ended_s: float
    """The Unix time at which the episode ended, in seconds."""
    parts: dict[str, float]
    """The components of its reward by name."""


Stored = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that SQLite can store: 64 bits with sign."""


class EpisodeQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions that an episode must meet to be listed; a field that is ``None`` is no condition. Bounds are
    inclusive."""

    status: str | None = None
    """Status of the episode (``scored``, ``failed``, ``left_out``, ``masked``) or of its group (``trained``,
    ``dropped``, ``waiting``)."""
    step: Stored | None = None
    """The step that took its group."""
    group: Stored | None = None
    """The number of its group."""
    row: Stored | None = None
    """The index of its dataset row."""
    reward_from: float | None = None
    """The smallest reward."""
    reward_to: float | None = None
    """The largest reward."""
    tokens_from: Stored | None = None
    """The smallest number of sampled tokens."""
    tokens_to: Stored | None = None
    """The largest number of sampled tokens."""
    age_from: Stored | None = None
    """The smallest age of its oldest token, in versions, at the step that took it."""
    cause: str | None = None
    """Text that the cause of the episode, or the reason why its group was dropped, must contain. Case is ignored."""


ORDERS = {
    "newest": "group_number DESC, position DESC",
    "oldest": "group_number, position",
    "reward": "reward DESC NULLS LAST, group_number DESC, position",
    "least_reward": "reward NULLS LAST, group_number DESC, position",
    "tokens": "sampled_tokens DESC, group_number DESC, position",
    "age": "step - e.oldest_version DESC NULLS LAST, group_number DESC, position",
}
"""The sort orders of a list, as SQL by name. The first two use an index, so they are fast for a ledger of any size."""

_ROW = (
    "SELECT group_number, position, row, state, reason, step, status, cause, reward, sampled_tokens, e.oldest_version,"
    " newest_version, ended_s, reward_parts"
)
_FROM = " FROM episodes e JOIN groups ON number = group_number"
_STATUS_CONDITIONS = {
    "trained": TRAINED,
    "dropped": "state = 'dropped'",
    "waiting": f"state != 'dropped' AND NOT {TRAINED}",
}
_FIELD_CONDITIONS = {
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
    """A read-only view of a ledger file, for tools that show the episodes of a run. It is thread-safe; queries run one
    at a time. Every method raises :class:`~headrace.base.errors.LedgerError` for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        """Open the ledger file ``path``. Raises :class:`~headrace.base.errors.LedgerError` if it does not exist, is not
        a ledger, or has another format."""
        self._path = path
        self._lock = threading.Lock()
        """The lock that is held during a query."""
        if not path.is_file():
            raise LedgerError(f"{path} is not there", remedy="a run with flow.ledger = 'sqlite' keeps one")
        with self._translated_errors():
            self._db = _connect(path)
        try:
            with self._translated_errors():
                self._refuse_other_format()
                meta = dict(self._db.execute("SELECT key, value FROM meta"))
                self.group_size = int(meta["group_size"])
        except BaseException:
            self._db.close()
            raise
        self._books = Books(self._db, self.group_size)
        """The queries that count the ledger's contents."""

    @classmethod
    def open_run(cls, run_dir: Path) -> Browser:
        """Return a view of the ledger of the run in ``run_dir``. Raises :class:`~headrace.base.errors.LedgerError` if
        the run keeps its ledger on a Redis server, or has no ledger file."""
        if (run_dir / REDIS_FILE).exists() and not (run_dir / SQLITE_FILE).exists():
            raise LedgerError(
                "this run keeps its ledger on a Redis server, and only ledger files can be looked through",
                remedy=f"headrace ledger {run_dir} prints its figures",
            )
        return cls(run_dir / SQLITE_FILE)

    def page(self, query: EpisodeQuery, *, order: str = "newest", offset: int = 0, limit: int = 50) -> list[EpisodeRow]:
        """Return up to ``limit`` of the episodes that match ``query``, from index ``offset`` (from 0) on, in an
        ``order`` of :data:`ORDERS`."""
        where, values = _where(query)
        sql = f"{_ROW}{_FROM}{where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
        return [_row(row) for row in self._fetch_all(sql, (*values, limit, offset))]

    def count(self, query: EpisodeQuery) -> int:
        """Return how many episodes match ``query``."""
        where, values = _where(query)
        return int(self._fetch_all(f"SELECT count(*){_FROM}{where}", values)[0][0])

    def episode(self, key: EpisodeKey) -> EpisodeGraph | None:
        """Return the episode ``key`` with all its turns; ``None`` if it does not exist or has not ended."""
        query = (
            f"SELECT {EPISODE_COLUMNS} FROM episodes JOIN bundles ON id = bundle"
            " WHERE group_number = ? AND position = ?"
        )
        rows = self._fetch_all(query, key)
        with self._translated_errors():
            return decode_episode_row(key, rows[0]) if rows else None

    def token_results(self, group: int) -> TokenResults | None:
        """Return the learner's results for the tokens of the step that trained the group with the number ``group``;
        ``None`` if they are not recorded, or lie in the store of the run and cannot be read there."""
        rows = self._fetch_all("SELECT tokens FROM learned JOIN groups USING (step) WHERE number = ?", (group,))
        with self._translated_errors():
            found = decode_token_results(rows[0][0]) if rows else None
            if found is None or isinstance(found, TokenResults):
                return found
            try:
                read = decode_token_results(StoreReader(self._path.parent / COLUMNS).part(found[0]))
            except StoreError:
                return None
        return read if isinstance(read, TokenResults) else None

    def episodes_before(self, key: EpisodeKey | None, limit: int) -> list[EpisodeGraph]:
        """Return up to ``limit`` episodes, with their turns, that precede the episode ``key`` in the order of groups
        and positions, in descending order. If ``key`` is ``None``, begin with the last episode of the ledger."""
        bound = (2**62, 0) if key is None else tuple(key)
        keys = self._fetch_all(
            "SELECT group_number, position FROM episodes WHERE (group_number, position) < (?, ?)"
            " ORDER BY group_number DESC, position DESC LIMIT ?",
            (*bound, limit),
        )
        listed = (self.episode(EpisodeKey(*each)) for each in keys)
        return [episode for episode in listed if episode is not None]

    def conservation(self) -> Conservation:
        """Return the counts of groups, episodes and tokens by outcome, all counted at the same moment."""
        with self._translated_errors(), self._one_snapshot():
            return self._books.conservation()

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of all episodes of groups that were trained or dropped, and the
        lengths of the trained episodes."""
        with self._translated_errors(), self._one_snapshot():
            return self._books.lengths()

    def num_running(self) -> int:
        """Return the number of episodes that have recorded tokens and have not ended."""
        return int(self._fetch_all("SELECT count(*) FROM (SELECT DISTINCT group_number, position FROM parts)")[0][0])

    def notes(self) -> list[tuple[str, str, float]]:
        """Return the kind, the detail and the Unix time in seconds of the last hundred notes about events of the run,
        oldest first."""
        return self._fetch_all("SELECT kind, detail, at_s FROM notes ORDER BY id DESC LIMIT 100")[::-1]

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()

    def _refuse_other_format(self) -> None:
        """Raise :class:`~headrace.base.errors.LedgerError` if the file is not a ledger, or its format is not the format
        that this program reads."""
        version, newest = schema_version(self._db), len(steps())
        if version == 0:
            raise LedgerError(f"{self._path} is not a ledger", remedy="restore it from a copy")
        if version != newest:
            older = f"'headrace ledger {self._path.parent}' brings it up to date when the run has ended"
            raise LedgerError(
                f"{self._path} has ledger format {version}, this program reads {newest}",
                remedy=older if version < newest else "use the version of headrace that wrote it",
            )

    def _fetch_all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows of ``query``, with ``values`` for its parameters."""
        with self._translated_errors():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _one_snapshot(self) -> Iterator[None]:
        """Run the body in one read transaction, so that all of its queries see the same state of the ledger."""
        self._db.execute("BEGIN DEFERRED")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Run the body while holding the lock, and convert each error of the database or of decoding to a
        :class:`~headrace.base.errors.LedgerError`."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, KeyError) as error:
            if isinstance(error, LedgerError):
                raise
            raise LedgerError(
                f"{self._path} cannot be read: {error}", remedy="restore it from a copy; the other files still show"
            ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to the SQLite file ``path``. The file is opened as immutable, which creates no
    files beside it, if no process writes it or if SQLite cannot create its shared-memory index. Raises
    ``sqlite3.Error`` if the file cannot be opened or is truncated."""
    modes = ("mode=ro&immutable=1",) if not is_written(path) else ("mode=ro", "mode=ro&immutable=1")
    failure: sqlite3.Error | None = None
    for mode in modes:
        name = f"file:{quote(str(path.resolve()))}?{mode}"
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
    """Return whether the write-ahead log of the ledger at ``path`` exists: a process has the ledger open for writing,
    or was killed while it had it open."""
    return path.with_name(f"{path.name}-wal").exists()


def _where(query: EpisodeQuery) -> tuple[str, list[Any]]:
    """Return the SQL ``WHERE`` clause for the conditions of ``query``, empty if there are none, and the values of its
    parameters."""
    clauses: list[str] = []
    values: list[Any] = []
    if query.status is not None:
        clauses.append(_STATUS_CONDITIONS.get(query.status, "status = ?"))
        values += [] if query.status in _STATUS_CONDITIONS else [query.status]
    for name, clause in _FIELD_CONDITIONS.items():
        value = getattr(query, name)
        if value is not None:
            clauses.append(clause)
            values.append(value)
    if query.cause:
        clauses.append("(instr(lower(cause), lower(?)) > 0 OR instr(lower(reason), lower(?)) > 0)")
        values += [query.cause, query.cause]
    return (f" WHERE {' AND '.join(clauses)}" if clauses else ""), values


def _row(row: Sequence[Any]) -> EpisodeRow:
    """Return the record of a database row with the columns of ``_ROW``. The last column contains the components of the
    reward as JSON."""
    *values, parts = row
    names = EpisodeRow.__struct_fields__[:-1]
    return EpisodeRow(**dict(zip(names, values, strict=True)), parts=json.loads(parts))
