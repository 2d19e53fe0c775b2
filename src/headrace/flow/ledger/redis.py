"""The ledger on a Redis server: one stream of operations, which any machine can read.

The stream is the ledger. Every operation is one entry, appended by one script that succeeds only directly behind the
entry before it, as the writer knows it: what was sent twice because an answer was lost is recorded once; a second run
on the same stream is found out by the first operation of either; a server that came back with less than it had been
given is found out by the next one. Whoever opens the stream reads it from its beginning into a SQLite file that only
this process sees, and answers every question from there.

The script's entries have the ids ``1-0``, ``2-0``, ... without a gap.
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
from headrace.base.config.redis import password_in, redis_package, without_password
from headrace.base.errors import ConfigError, LedgerError
from headrace.base.types.episode import EpisodeGraph
from headrace.flow.ledger.base import Conservation, GroupAttempt, Lengths, Operation, Recalled
from headrace.flow.ledger.sqlite import UNNAMED, SqliteLedger
from headrace.flow.ledger.wire import RollBack, encode_operation, replay

T = TypeVar("T")

FORMAT = 1
OUTAGE_S = 60.0
"""How long a server may be away before the run ends."""
ANSWER_S = 30.0
"""How long one answer may take."""
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
PAGE = 256
"""Entries that are read at once."""

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
    return xxhash.xxh3_64_hexdigest(kind + data).encode()


class RedisLedger:
    """The ledger ``name`` on the server at ``url``; begun where there is none, if the sizes of the run are given and it
    is not said to have ``begun``.

    The server must append to a file (``appendonly yes``), or a restart would lose the run; with ``appendfsync
    everysec``, its default then, a loss of power can cost the last second.
    """

    def __init__(
        self, url: str, name: str, *, group_size: int | None = None, groups_per_step: int | None = None,
        outage_s: float = OUTAGE_S, password_env: str = "", begun: bool = False,
    ) -> None:  # fmt: skip
        self._redis = redis_package("flow.ledger='redis'")
        self._where = f"{name} at {without_password(url)}"
        self._stream, self._meta = f"headrace:{name}:operations", f"headrace:{name}:meta"
        self._writer = secrets.token_hex(8)
        self._outage_s = outage_s
        self._number = 0
        self._one_at_a_time = threading.RLock()
        self._closed = threading.Event()
        try:
            self._server = self._redis.Redis.from_url(
                url,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                password=password_in("flow.ledger_password_env", password_env),
            )
        except ValueError as error:
            raise ConfigError(
                f"flow.ledger_url={without_password(url)!r}: {error}",
                remedy="give redis://host:port/db, or unix:///path",
            ) from None
        self._append = self._server.register_script(_APPEND)
        self._refuse_forgetful()
        sizes = self._sizes(group_size, groups_per_step, begin=not begun)
        self._index = SqliteLedger(
            UNNAMED, group_size=sizes["group_size"], groups_per_step=sizes["groups_per_step"]
        )  # fmt: skip
        self._read_on()

    @classmethod
    def open(cls, url: str, name: str, password_env: str = "") -> RedisLedger:
        """An existing ledger, for reading. :class:`~headrace.base.errors.LedgerError` if there is none."""
        return cls(url, name, password_env=password_env)

    def apply(self, *operations: Operation) -> None:
        for operation in operations:
            with self._one_at_a_time:
                self._index.apply(operation)  # what cannot be is refused before anybody else has it
                self._record(operation)

    def recall(self, step: int) -> Recalled:
        with self._one_at_a_time:
            recalled = self._index.recall(step)
            self._record(RollBack(step=step))
            return recalled

    def episodes(self, number: int) -> list[EpisodeGraph]:
        return self._index.episodes(number)

    def conservation(self) -> Conservation:
        return self._index.conservation()

    def ages(self) -> dict[int, int]:
        return self._index.ages()

    def lengths(self) -> Lengths:
        return self._index.lengths()

    def attempts(self, first: int) -> list[GroupAttempt]:
        return self._index.attempts(first)

    def steps(self) -> dict[int, tuple[int, ...]]:
        return self._index.steps()

    def checksums(self) -> dict[int, str]:
        return self._index.checksums()

    def notes(self) -> list[tuple[str, str, float]]:
        return self._index.notes()

    def persist(self) -> None:
        """The server's file is synced each second; from Redis 7.2 on this waits until it has been."""
        try:
            self._ask(lambda: self._server.execute_command("WAITAOF", 1, 0, int(1e3 * ANSWER_S)))
        except LedgerError as error:
            if "unknown command" not in error.problem:
                raise

    def close(self) -> None:
        self._closed.set()
        self._index.close()
        self._server.close()

    def _record(self, operation: Operation | RollBack) -> None:
        kind, data = encode_operation(operation)
        number = self._number + 1
        said = self._ask(
            lambda: self._append(keys=[self._stream], args=[number, self._writer, kind, data, _checksum(kind, data)])
        ).decode()  # fmt: skip
        if said != "recorded":
            tip = int(said.removeprefix("tip "))
            if tip < self._number:
                raise LedgerError(
                    f"the ledger {self._where} has lost operations: {self._number} were recorded, {tip} are there",
                    remedy="the server came back without its file: restore it (appendonly yes), then --resume",
                )
            raise LedgerError(
                f"another run writes the ledger {self._where}: operation {number} is not the next",
                remedy="end one of the two; give each run a directory of its own",
            )
        self._number = number

    def _read_on(self) -> None:
        """Take in the stream up to its end."""
        while True:
            begin = f"({self._number}-0" if self._number else "-"
            entries = self._ask(partial(self._server.xrange, self._stream, min=begin, count=PAGE))
            for entry, fields in entries:
                self._take(int(entry.split(b"-")[0]), fields)
            if len(entries) < PAGE:
                return

    def _take(self, number: int, fields: dict[bytes, bytes]) -> None:
        try:
            if number != self._number + 1:
                raise msgspec.ValidationError(f"entry {self._number + 1} is missing")
            kind, data = fields[b"kind"], fields[b"data"]
            if fields.get(b"checksum", _checksum(kind, data)) != _checksum(kind, data):  # older programs wrote none
                raise msgspec.ValidationError("it has changed since it was written, its checksum says")
            replay(self._index, kind, data)
        except (msgspec.MsgspecError, KeyError, LedgerError) as error:
            raise LedgerError(
                f"the ledger {self._where} is damaged at operation {number}: {error}",
                remedy="restore the server's file, or start a new run directory from the newest checkpoint",
            ) from None
        self._number = number

    def _refuse_forgetful(self) -> None:
        info = self._ask(lambda: self._server.info("persistence"))
        if not info.get("aof_enabled"):
            raise LedgerError(
                f"the ledger {self._where} would not outlive the server: it keeps no file (appendonly no)",
                remedy="redis-cli config set appendonly yes, and appendonly yes in its redis.conf",
            )

    def _sizes(self, group_size: int | None, groups_per_step: int | None, *, begin: bool) -> dict[str, int]:
        given = {"group_size": group_size, "groups_per_step": groups_per_step}
        new = {"format": FORMAT, **{key: value for key, value in given.items() if value is not None}}
        if begin and len(new) == 3:
            for key, value in new.items():
                self._ask(partial(self._server.hsetnx, self._meta, key, value))
        found = {key.decode(): int(value) for key, value in self._ask(lambda: self._server.hgetall(self._meta)).items()}
        if not found:
            raise LedgerError(f"no ledger {self._where}", remedy="give its server, and the directory of its run")
        if found["format"] > FORMAT:
            raise LedgerError(
                f"{self._where} has ledger format {found['format']}, this program writes {FORMAT}",
                remedy="use the version of headrace that wrote it, or start a new run directory",
            )
        for key, asked in given.items():
            if asked not in (None, found[key]):
                raise LedgerError(
                    f"flow.{key}={asked}, but the run {self._where} was begun with {found[key]}",
                    remedy=f"set flow.{key}={found[key]} to resume it, or start a new run directory",
                )
        return {key: found[key] for key in given}

    def _ask(self, question: Callable[[], T]) -> Any:
        """Ask until the server answers, for as long as it may be away."""
        clock, wait_s = RealClock(), FIRST_WAIT_S
        asked_s = clock.now()
        errors = self._redis.exceptions
        while True:
            try:
                return question()
            except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
                waited_s = clock.now() - asked_s  # a server that hangs lets each question wait, too
                if isinstance(error, errors.AuthenticationError) or waited_s >= self._outage_s or self._closed.is_set():
                    raise LedgerError(
                        f"the ledger {self._where} cannot be reached for {waited_s:.0f} s: {error}",
                        remedy="bring the Redis server back with its file, then --resume",
                    ) from None
                self._closed.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except errors.RedisError as error:
                raise LedgerError(
                    f"the ledger {self._where} cannot be kept: {error}",
                    remedy="mend the server (redis-cli info; is its memory or its disk full?), then --resume",
                ) from None
