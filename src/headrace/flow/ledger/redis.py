"""The ledger on a Redis server: one stream of operations, which any machine can read.

Every operation is one entry of the stream. A script on the server appends an entry only if the last entry of the stream
has the number that the writer expects. So an operation that was sent twice because a reply was lost is recorded once; a
second run on the same stream is detected by the first operation of either run; and a server that restarted with fewer
entries is detected by the next operation. A process that opens the stream reads it from the beginning into a temporary
SQLite file, the *index*, and answers all queries from that file.

The entries have the ids ``1-0``, ``2-0``, ... without a gap. A *decided* episode is one whose group was trained or
dropped.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import xxhash

from headrace.base.clock import RealClock
from headrace.base.environ import secret
from headrace.base.errors import ConfigError, LedgerError
from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.outline import LostGroup
from headrace.flow.ledger.base import (
    CommitVersion,
    Conservation,
    DropEpisodes,
    EndEpisode,
    EndStep,
    GroupAttempt,
    Lengths,
    Move,
    Note,
    Operation,
    ResumeState,
    Stream,
    Submit,
)
from headrace.flow.ledger.sqlite import UNNAMED, SqliteLedger


def redis_package(setting: str) -> Any:
    """Import and return the package ``redis``. Raises :class:`ConfigError` if it is not installed; ``setting`` names
    the setting that needs it."""
    try:
        import redis
    except ImportError:
        raise ConfigError(f"{setting} needs the package redis", remedy="pip install 'headrace[redis]'") from None
    return redis


def read_password(setting: str, variable: str) -> str | None:
    """Return the password in the environment variable ``variable``, which the setting ``setting`` names; ``None`` if
    ``variable`` is empty. Raises :class:`ConfigError` if the variable is not set."""
    if variable and not secret(variable):
        raise ConfigError(
            f"{setting}={variable!r}, and that environment variable is not set",
            remedy=f"export {variable}=..., or leave {setting} out",
        )
    return secret(variable) or None


def hide_password(url: str) -> str:
    """Return ``url`` without its user name and password, so that it can be shown.

    >>> hide_password("redis://me:hush@10.0.0.9:6379/0")
    'redis://10.0.0.9:6379/0'
    """
    scheme, separator, location = url.partition("://")
    return f"{scheme}{separator}{location.rpartition('@')[2]}"


T = TypeVar("T")

FORMAT = 1
"""The version of the format of entries."""
OUTAGE_S = 60.0
"""Seconds for which the server may be unreachable; after that the run ends."""
ANSWER_S = 30.0
"""Timeout of one reply of the server, in seconds."""
FIRST_WAIT_S = 0.05
"""Seconds before the first retry of a call to a server that cannot be reached; the wait doubles at each further
retry."""
LONGEST_WAIT_S = 2.0
"""The longest wait between two retries, in seconds."""
PAGE = 256
"""Number of entries that are read with one call."""

_APPEND = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local tip = 0
if #last > 0 then tip = tonumber(string.match(last[1][1], '^%d+')) end
local number = tonumber(ARGV[1])
if tip == number and last[1][2][2] == ARGV[2] then return 'recorded' end
if tip ~= number - 1 then return 'tip ' .. tip end
redis.call('XADD', KEYS[1], number .. '-0', 'writer', ARGV[2], 'kind', ARGV[3], 'data', ARGV[4], 'checksum', ARGV[5])
return 'recorded'
"""


def _checksum(kind: bytes, data: bytes) -> bytes:
    """Return the checksum of an entry as hexadecimal text. It covers ``kind``, the name of the operation, and ``data``,
    its encoded fields."""
    return xxhash.xxh3_64_hexdigest(kind + data).encode()


class RedisLedger:
    """A ledger on a Redis server, as a stream of operations. Queries are answered from a local index, a temporary
    SQLite file with the same operations.

    The server must write an append-only file (``appendonly yes``), or a restart would lose the run. With ``appendfsync
    everysec``, which is Redis's default, a power failure can lose the operations of the last second.
    """

    def __init__(
        self, url: str, name: str, *, group_size: int | None = None, groups_per_step: int | None = None,
        outage_s: float = OUTAGE_S, password_env: str = "", exists: bool = False,
    ) -> None:  # fmt: skip
        """Open the ledger ``name`` on the server at ``url``, and read all of its entries. If it does not exist, create
        it, provided that both sizes are given and ``exists`` is false.

        ``group_size`` and ``groups_per_step`` are the sizes of this run, which must equal the ledger's; ``None``
        accepts any size. ``outage_s`` is the number of seconds for which the server may be unreachable.
        ``password_env`` names the environment variable of the password; empty if the server needs none. ``exists`` says
        that the run already has a ledger. Raises :class:`ConfigError` or :class:`~headrace.base.errors.LedgerError` if
        the ledger cannot be used.
        """
        self._redis = redis_package("flow.ledger='redis'")
        self._description = f"{name} at {hide_password(url)}"
        self._stream, self._meta = f"headrace:{name}:operations", f"headrace:{name}:meta"
        self._writer = secrets.token_hex(8)
        self._outage_s = outage_s
        self._number = 0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        try:
            self._server = self._redis.Redis.from_url(
                url,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                password=read_password("flow.ledger_password_env", password_env),
            )
        except ValueError as error:
            raise ConfigError(
                f"flow.ledger_url={hide_password(url)!r}: {error}", remedy="give redis://host:port/db, or unix:///path"
            ) from None
        self._append = self._server.register_script(_APPEND)
        self._require_append_only_file()
        sizes = self._load_sizes(group_size, groups_per_step, begin=not exists)
        self._index = SqliteLedger(
            UNNAMED, group_size=sizes["group_size"], groups_per_step=sizes["groups_per_step"]
        )  # fmt: skip
        self._read_new_entries()

    @classmethod
    def open(cls, url: str, name: str, password_env: str = "") -> RedisLedger:
        """Return the existing ledger ``name`` on the Redis server ``url`` for reading. ``password_env`` names the
        environment variable of the password. Raises :class:`~headrace.base.errors.LedgerError` if there is no such
        ledger."""
        return cls(url, name, password_env=password_env)

    def apply(self, *operations: Operation) -> None:
        """Record ``operations``: apply each operation to the local index, and append it to the stream on the server."""
        for operation in operations:
            with self._lock:
                self._index.apply(operation)  # an invalid operation is rejected before the server gets it
                self._record(operation)

    def roll_back(self, step: int) -> ResumeState:
        """Restore the state of the checkpoint of ``step``, and record the roll-back in the stream. Return the groups
        and counts with which the run continues."""
        with self._lock:
            resumed = self._index.roll_back(step)
            self._record(RollBack(step=step))
            return resumed

    def episodes(self, number: int) -> list[EpisodeGraph]:
        """Return the episodes of the group ``number`` that have ended, in the order of their positions."""
        return self._index.episodes(number)

    def conservation(self) -> Conservation:
        """Return the counts of groups, episodes and tokens by outcome."""
        return self._index.conservation()

    def ages(self) -> dict[int, int]:
        """Return the number of trained tokens by age, in versions."""
        return self._index.ages()

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of the decided episodes and of the trained ones."""
        return self._index.lengths()

    def attempts(self, first: int) -> list[GroupAttempt]:
        """Return the groups from number ``first`` on, with the rewards of their episodes."""
        return self._index.attempts(first)

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the groups that each step trained, by step."""
        return self._index.steps()

    def updates(self) -> dict[int, int]:
        """Return the number of updates of the weights that each step made with its batch, by step."""
        return self._index.updates()

    def lost(self) -> dict[int, tuple[LostGroup, ...]]:
        """Return the groups that carried no loss in their step because columns of them could not be read, by step;
        none for a step of an older version of Headrace, which recorded only that there were such groups."""
        return self._index.lost()

    def checksums(self) -> dict[int, str]:
        """Return the checksum of the weights of every committed version, by version."""
        return self._index.checksums()

    def notes(self) -> list[tuple[str, str, float]]:
        """Return the kind, the detail and the Unix time in seconds of every note, oldest first."""
        return self._index.notes()

    def persist(self) -> None:
        """Wait until the server has synced its append-only file to the disk. A server before Redis 7.2 has no command
        for this and syncs the file every second; then return at once."""
        try:
            self._call_with_retry(lambda: self._server.execute_command("WAITAOF", 1, 0, int(1e3 * ANSWER_S)))
        except LedgerError as error:
            if "unknown command" not in error.problem:
                raise

    def close(self) -> None:
        """Close the connection and the local index. A call that is being retried in another thread fails."""
        self._closed.set()
        self._index.close()
        self._server.close()

    def _record(self, operation: Operation | RollBack) -> None:
        """Append ``operation`` to the stream as the next entry. Raises :class:`~headrace.base.errors.LedgerError` if
        the stream has lost operations, or another run has written to it."""
        kind, data = encode_operation(operation)
        number = self._number + 1
        reply = self._call_with_retry(
            lambda: self._append(keys=[self._stream], args=[number, self._writer, kind, data, _checksum(kind, data)])
        ).decode()  # fmt: skip
        if reply != "recorded":
            tip = int(reply.removeprefix("tip "))
            if tip < self._number:
                raise LedgerError(
                    f"the ledger {self._description} has lost operations: {self._number} were recorded, "
                    f"{tip} are there",
                    remedy="the server came back without its file: restore it (appendonly yes), then --resume",
                )
            raise LedgerError(
                f"another run writes the ledger {self._description}: operation {number} is not the next",
                remedy="end one of the two; give each run a directory of its own",
            )
        self._number = number

    def _read_new_entries(self) -> None:
        """Read the entries of the stream that the local index does not have yet, and apply them to it."""
        while True:
            begin = f"({self._number}-0" if self._number else "-"
            entries = self._call_with_retry(partial(self._server.xrange, self._stream, min=begin, count=PAGE))
            for entry, fields in entries:
                self._apply_entry(int(entry.split(b"-")[0]), fields)
            if len(entries) < PAGE:
                return

    def _apply_entry(self, number: int, fields: dict[bytes, bytes]) -> None:
        """Apply the entry ``number`` of the stream, with its ``fields`` by name, to the local index. Raises
        :class:`~headrace.base.errors.LedgerError` if an entry before it is missing, or the entry is not valid."""
        try:
            if number != self._number + 1:
                raise msgspec.ValidationError(f"entry {self._number + 1} is missing")
            kind, data = fields[b"kind"], fields[b"data"]
            if fields.get(b"checksum", _checksum(kind, data)) != _checksum(kind, data):  # older programs wrote none
                raise msgspec.ValidationError("it has changed since it was written, its checksum says")
            replay(self._index, kind, data)
        except (msgspec.MsgspecError, KeyError, LedgerError) as error:
            raise LedgerError(
                f"the ledger {self._description} is damaged at operation {number}: {error}",
                remedy="restore the server's file, or start a new run directory from the newest checkpoint",
            ) from None
        self._number = number

    def _require_append_only_file(self) -> None:
        """Raise :class:`~headrace.base.errors.LedgerError` if the server does not write an append-only file, so that a
        restart would lose the ledger."""
        info = self._call_with_retry(lambda: self._server.info("persistence"))
        if not info.get("aof_enabled"):
            raise LedgerError(
                f"the ledger {self._description} would not outlive the server: it keeps no file (appendonly no)",
                remedy="redis-cli config set appendonly yes, and appendonly yes in its redis.conf",
            )

    def _load_sizes(self, group_size: int | None, groups_per_step: int | None, *, begin: bool) -> dict[str, int]:
        """Return the ``group_size`` and ``groups_per_step`` that the server stores for the ledger. With ``begin``, a
        ledger that does not exist is created. Raises :class:`~headrace.base.errors.LedgerError` if the ledger does not
        exist, has a newer format, or has other sizes than the arguments; ``None`` accepts any size."""
        given = {"group_size": group_size, "groups_per_step": groups_per_step}
        new = {"format": FORMAT, **{key: value for key, value in given.items() if value is not None}}
        if begin and len(new) == 3:
            for key, value in new.items():
                self._call_with_retry(partial(self._server.hsetnx, self._meta, key, value))
        stored = {
            key.decode(): int(value)
            for key, value in self._call_with_retry(lambda: self._server.hgetall(self._meta)).items()
        }
        if not stored:
            raise LedgerError(f"no ledger {self._description}", remedy="give its server, and the directory of its run")
        if stored["format"] > FORMAT:
            raise LedgerError(
                f"{self._description} has ledger format {stored['format']}, this program writes {FORMAT}",
                remedy="use the version of headrace that wrote it, or start a new run directory",
            )
        for key, asked in given.items():
            if asked not in (None, stored[key]):
                raise LedgerError(
                    f"flow.{key}={asked}, but the run {self._description} was begun with {stored[key]}",
                    remedy=f"set flow.{key}={stored[key]} to resume it, or start a new run directory",
                )
        return {key: stored[key] for key in given}

    def _call_with_retry(self, call: Callable[[], T]) -> Any:
        """Return the result of ``call``, which sends a request to the server. While the server cannot be reached, retry
        for at most ``outage_s`` seconds. Raises :class:`~headrace.base.errors.LedgerError` after that time, after
        :meth:`close`, and for any other error of Redis."""
        clock, wait_s = RealClock(), FIRST_WAIT_S
        start_s = clock.now()
        errors = self._redis.exceptions
        while True:
            try:
                return call()
            except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
                waited_s = clock.now() - start_s  # a call to a server that hangs takes time, too
                if isinstance(error, errors.AuthenticationError) or waited_s >= self._outage_s or self._closed.is_set():
                    raise LedgerError(
                        f"the ledger {self._description} cannot be reached for {waited_s:.0f} s: {error}",
                        remedy="bring the Redis server back with its file, then --resume",
                    ) from None
                self._closed.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except errors.RedisError as error:
                raise LedgerError(
                    f"the ledger {self._description} cannot be kept: {error}",
                    remedy="fix the server (redis-cli info; is its memory or its disk full?), then --resume",
                ) from None


class RollBack(msgspec.Struct, frozen=True, kw_only=True):
    """The operation that records that the run was resumed from the checkpoint of ``step``, the first step to repeat."""

    step: int


_KINDS = (Submit, Move, Stream, EndEpisode, DropEpisodes, EndStep, CommitVersion, Note, RollBack)
_CODECS = {kind.__name__.encode(): MessageCodec(kind) for kind in _KINDS}


def encode_operation(operation: Operation | RollBack) -> tuple[bytes, bytes]:
    """Return the name of the kind of ``operation``, and its fields as MessagePack: the two data fields of an entry."""
    kind = type(operation).__name__.encode()
    return kind, _CODECS[kind].encode(operation)


def decode_operation(kind: bytes, data: bytes) -> Operation | RollBack:
    """Return the operation in an entry of the stream. ``kind`` is the name of its class, ``data`` its encoded fields.
    Raises ``msgspec.MsgspecError`` if they are not valid."""
    codec = _CODECS.get(kind)
    if codec is None:
        raise msgspec.ValidationError(f"unknown operation {kind!r}: a newer version of headrace wrote it")
    operation: Operation | RollBack = codec.decode(data)
    return operation


def replay(index: SqliteLedger, kind: bytes, data: bytes) -> None:
    """Decode one operation of the kind ``kind`` from ``data`` and apply it to ``index``, the local copy of the ledger.
    Raises ``msgspec.MsgspecError`` if ``data`` is not valid, and :class:`~headrace.base.errors.LedgerError` if the
    operation is impossible. After an error, ``index`` is unchanged."""
    operation = decode_operation(kind, data)
    try:
        if isinstance(operation, RollBack):
            index.roll_back(operation.step)
        else:
            index.apply(operation)
    except (ValueError, OverflowError) as error:  # lists of different lengths, numbers that are too large
        raise LedgerError(f"{type(operation).__name__}: {error}", remedy="it was not written by a run") from None
