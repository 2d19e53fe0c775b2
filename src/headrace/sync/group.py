"""A transport over process groups of torch.distributed, over which every rank of the learner sends the parts of the
weights that it holds.

    learner rank 0 ═══ group 0 ═══▶ engine a, engine b, ...       each group: one rank of the learner, all engines
    learner rank 1 ═══ group 1 ═══▶ engine a, engine b, ...
           └─ store ─┘  a key-value server that rank 0 opens, by which all of them find each other

Each rank copies only its own parts; nothing is gathered. A version is sent in a thread of each rank, bucket by bucket,
while training continues. An engine receives from all ranks at the same time, directly into the free image, while it
decodes. With ``sync.codec = "delta"``, each bucket is sent as its difference from the previous version, if that is
shorter.

If a transfer in a group fails, all of its members leave it, and the next update names new groups. If groups of the same
engines fail :data:`MOST_FAILURES` times in a row, every rank from then on writes the same bytes to a file, and engines
read the files. The backend is Gloo, also with CUDA devices, because the image is in the host's memory.

    group ──MOST_FAILURES in a row──▶ files, until the learner starts again
      ▲ │ one failure: new groups
      └─┘ the set of engines has changed: the count starts again from 0
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.base.config.addresses import EVERYWHERE
from headrace.base.errors import ConfigError, HeadraceError, NeedsFull, WeightsError, first_line
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.sync.base import ALONE, LearnerRank, SendRequest, Sent
from headrace.sync.codecs import delta
from headrace.sync.config import Route, SyncConfig, Transport, TransportCost
from headrace.sync.files import VersionFolder, folder_of_run
from headrace.sync.groups import (
    Broadcasts,
    ProcessGroup,
    ReadBroadcasts,
    WrittenBroadcasts,
    gloo_group,
    serve_store,
    torch_distributed,
)
from headrace.sync.manifest import private_memory
from headrace.sync.pieces import Bucket, buckets, view_box

MOST_FAILURES = 2
"""The number of failed transfers to the same engines in a row after which versions are sent through files. A single
failure may be the death of a member, which is known when the version is sent again. One version is sent at most four
times."""
_FILES = "files|"
"""The prefix of the path of an update whose parts are in files; the name of the files follows, without the rank."""
_RAW, _DIFFERENCE = 0, 1
"""The two encodings of a bucket: unchanged, or as its difference from the previous version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupSet:
    """The description of the groups over which versions are sent, one for each rank of the learner. It is encoded in
    ``WeightUpdate.path`` for the engines."""

    host: str
    """The address of the store."""
    port: int
    """The port of the store."""
    name: str
    """The name of these groups, unique in the run."""
    engines: tuple[str, ...]
    """The addresses of the engines, in the order of their ranks in each group."""

    @property
    def path(self) -> str:
        """Return the path of an update that is sent over these groups."""
        return f"{self.host}|{self.port}|{self.name}|{','.join(self.engines)}"

    @classmethod
    def from_path(cls, path: str) -> _GroupSet:
        """Return the groups that ``path`` describes. Raises :class:`~headrace.base.errors.WeightsError` for a path in
        another format."""
        try:
            host, port, name, engines = path.split("|")
            return cls(host=host, port=int(port), name=name, engines=tuple(engines.split(",")))
        except ValueError:
            raise WeightsError(
                f"{path!r} names no process group of the weights", remedy="use one version of headrace everywhere"
            ) from None

    def join(self, store: Any, sender: int, rank: int, deadline_s: float) -> ProcessGroup:
        """Join the group of the learner's rank ``sender`` as its member ``rank`` (0: the sender; the engines follow),
        and return it. ``store`` is a connection to the store. Raises ``RuntimeError`` if not all members join within
        ``deadline_s`` seconds."""
        own = torch_distributed.PrefixStore(f"{self.name}.{sender}", store)
        return gloo_group(own, (rank, 1 + len(self.engines)), deadline_s, _own_address(self.host, self.port))


class GroupOutbox:
    """The side of one learner rank. It sends in a thread of its own, because a broadcast needs both sides at the same
    time: the update is announced first, and sent while the engines receive.

    The ranks exchange messages over the store for each version. Each rank writes the hashes of its pieces and whether
    its last transfer succeeded. Rank 0 then chooses the groups to use, and announces the version with the hashes of all
    ranks.
    """

    def __init__(self, route: Route, rank: LearnerRank) -> None:
        """Open the store at the host of ``route`` on rank 0, and connect the other ranks to it. ``rank`` is this rank;
        all ranks make this call together."""
        host, deadline_s = route.host, _silence_s(route)
        self._deadline_s, self._rank, self._writing_s = deadline_s, rank, route.deadline_s
        """The time in seconds that a waiting call waits, this rank, and the time in which files are written."""
        self._folder = VersionFolder(route.fallback) if route.fallback else None
        """The folder for versions that cannot be broadcast; ``None`` without such a folder."""
        # the other ranks still wait in ``share``, so none writes files yet
        if self._folder is not None and rank.index == 0:
            self._folder.remove_left()
        self._listening = _open_store(host, deadline_s) if rank.index == 0 else None
        """The store that rank 0 serves; ``None`` on other ranks."""
        port = str(self._listening.port).encode() if self._listening else None
        opened = rank.share(None if port is None else f"{host}|".encode() + port).decode()
        self._host, _, found = opened.partition("|")
        self._port = int(found)
        """The port of the store."""
        # a waiting call blocks its connection, so the sending thread has its own
        self._agreeing, self._joining = (_connect(self._host, self._port, deadline_s) for _ in range(2))
        """The connections to the store: one for messages between the ranks, one for joining groups."""
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        """The thread that sends."""
        self._transfer: Future[None] | None = None
        """The transfer of the latest version, in the thread; ``None`` before the first."""
        self._group_set: _GroupSet | None = None
        """The groups over which versions are broadcast to the present engines; ``None`` before the first broadcast."""
        self._group: tuple[str, ProcessGroup] | None = None
        """The path of a set of groups, and this rank's group in it; ``None`` before the first is joined."""
        self._attempt = 0
        """The number of times that the present version was sent before."""
        self._path_key = ""
        """On rank 0, the key in the store under which the path of the last version was announced to the other ranks."""
        self._failures = 0
        """On rank 0, the number of consecutive failed transfers to the present engines."""
        self._last_failure = "an engine could not use what it received"
        """The reason for the last failure on this rank."""
        self._by_files = False
        """On rank 0, whether versions are sent through files."""
        self._note = ""
        """On rank 0, the sentence about the change to files that has not been reported to the user yet; empty: none."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of this process for the slots."""
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Start to send this rank's part of the version in ``request`` to the receivers in the thread. Return at once
        the path that names the groups and, on rank 0, the hashes of all pieces. New groups are used if the receivers
        have changed, the last transfer failed, or the version is sent again. Files are written before the return.
        Raises :class:`~headrace.base.errors.WeightsError` if the other ranks do not agree in time."""
        if not request.to:
            raise WeightsError(
                f"version {request.version} has no receiver to be sent to", remedy="start an engine with this transport"
            )
        key = self._key(request)
        succeeded = self._previous_succeeded(request.version)
        with self._requiring_messages(request.version, 2 * self._deadline_s):
            path, hashes = self._agree(key, request, succeeded)
        if path.startswith(_FILES):
            self._write(key, path, request)
        else:
            self._transfer = self._sender.submit(self._send, path, request)
        note, self._note = self._note, ""
        return Sent(path=path, checksums=hashes, note=note)

    def close(self) -> None:
        """Stop the thread, without waiting for a running transfer, and remove the files that were written."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._group = None
        if self._folder is not None:
            self._folder.close()

    def _previous_succeeded(self, version: int) -> bool:
        """Wait for the end of this rank's previous transfer, and return whether it succeeded; true if there was none.
        Raises :class:`~headrace.base.errors.WeightsError` if it does not end; ``version``, the next version, is named
        in the error."""
        if self._transfer is None:
            return True
        try:
            self._transfer.result(2 * self._deadline_s)  # the transfer's own deadline is half of this time
        except TimeoutError:
            raise WeightsError(
                f"version {version} cannot be sent: the transfer before has not ended for {2 * self._deadline_s:g} s",
                remedy="look at the engine's log",
            ) from None
        except (RuntimeError, OSError) as error:  # the receivers have left or did not join; they report it themselves
            self._transfer, self._last_failure = None, first_line(error)
            return False
        return True

    def _agree(self, key: str, request: SendRequest, succeeded: bool) -> tuple[str, tuple[int, ...]]:
        """Exchange with the other ranks the hashes of ``request`` and whether the previous transfer has ``succeeded``,
        by messages in the store whose names begin with ``key``. Return the path that rank 0 has chosen and, on rank 0,
        the hashes of all ranks' pieces. Raises ``RuntimeError`` if the message of a rank does not arrive in time."""
        own = np.array([int(succeeded), *request.checksums], np.uint64)
        if self._rank.index:
            self._agreeing.set(f"{key}/{self._rank.index}", own.tobytes())
            return self._agreeing.get(f"{key}/path").decode(), ()
        messages = [own]
        for rank in range(1, self._rank.world):
            messages.append(np.frombuffer(self._agreeing.get(f"{key}/{rank}"), np.uint64))
            self._agreeing.delete_key(f"{key}/{rank}")
        path = self._choose_path(request, failed=request.again or not all(int(one[0]) for one in messages))
        self._agreeing.set(f"{key}/path", path)
        if self._path_key:
            self._agreeing.delete_key(self._path_key)
        self._path_key = f"{key}/path"
        return path, tuple(int(each) for one in messages for each in one[1:])

    def _choose_path(self, request: SendRequest, *, failed: bool) -> str:
        """Return the path of ``request``, on rank 0. It names the present groups; new groups if the previous transfer
        has ``failed`` or the engines have changed; or files if groups of these engines have failed
        :data:`MOST_FAILURES` times in a row."""
        engines = tuple(request.to)
        has_same_engines = self._group_set is not None and self._group_set.engines == engines
        self._failures = self._failures + 1 if has_same_engines and failed else 0
        if self._folder is not None and self._failures >= MOST_FAILURES and not self._by_files:
            self._by_files, self._note = True, self._fallback_note(request.version)
        if self._by_files:
            return f"{_FILES}{VersionFolder.make_name(request.version)}"
        if self._group_set is None or not has_same_engines or failed:
            self._group_set = _GroupSet(host=self._host, port=self._port, name=secrets.token_hex(6), engines=engines)
        return self._group_set.path

    def _fallback_note(self, version: int) -> str:
        """Return the sentence for the user that versions are sent through files from ``version`` on."""
        return (
            f"weights go through files from version {version} on, until the learner starts again: process groups with "
            f"the same engines failed {self._failures} times in a row ({self._last_failure}); see that learner and "
            f"engines reach each other at any TCP port on the network of sync.host={self._host}"
        )

    def _write(self, key: str, path: str, request: SendRequest) -> None:
        """Write this rank's part of ``request`` to its file of ``path``, and report the result to rank 0 by a message
        whose name begins with ``key``. Rank 0 waits for the messages of all ranks before the version is announced.
        Raises :class:`~headrace.base.errors.WeightsError` on rank 0 if any rank could not write its part."""
        assert self._folder is not None
        error = ""
        try:
            name = _make_file_name(path, self._rank.index)
            with self._folder.writing(name, request.version, len(request.payload)) as file:
                self._broadcast(WrittenBroadcasts(file), request)
        except WeightsError as problem:
            error = problem.problem
        if self._rank.index:
            self._agreeing.set(f"{key}/{self._rank.index}/written", error.encode())
            return
        with self._requiring_messages(request.version, self._writing_s):
            for rank in range(1, self._rank.world):
                written = f"{key}/{rank}/written"
                self._agreeing.wait([written], timedelta(seconds=self._writing_s))
                error = error or self._agreeing.get(written).decode()
                self._agreeing.delete_key(written)
        if error:
            raise WeightsError(
                f"{error}; process groups failed before: {self._last_failure}",
                remedy="make room in the run directory or set sync.directory, or mend the network of sync.host",
            )

    @contextlib.contextmanager
    def _requiring_messages(self, version: int, wait_s: float) -> Iterator[None]:
        """Return a context for the wait for messages of the other ranks. An error of the store becomes a
        :class:`~headrace.base.errors.WeightsError`, which says that ``version`` cannot be sent since no message arrived
        for ``wait_s`` seconds."""
        try:
            yield
        except RuntimeError as error:
            raise WeightsError(
                f"version {version} cannot be sent: rank {self._rank.index} of the learner did not hear from the "
                f"others for {wait_s:g} s ({first_line(error)})",
                remedy="look at the logs of the learner's ranks",
            ) from None

    def _key(self, request: SendRequest) -> str:
        """Return the prefix of the names of all messages about ``request``, which is the same on all ranks. It differs
        each time a version is sent again."""
        self._attempt = self._attempt + 1 if request.again else 0
        return f"{request.version}.{self._attempt}"

    def _send(self, path: str, request: SendRequest) -> None:
        """Send this rank's part of ``request`` to its group of ``path``, which is joined first if it is new. This runs
        in the thread."""
        try:
            if self._group is None or self._group[0] != path:
                self._group = None
                group = _GroupSet.from_path(path).join(self._joining, self._rank.index, 0, self._deadline_s)
                self._group = (path, group)
            self._broadcast(self._group[1], request)
        except (RuntimeError, OSError):
            self._group = None
            raise

    def _broadcast(self, group: Broadcasts, request: SendRequest) -> None:
        """Send this rank's part of ``request`` through ``group``, which is a process group or a file."""
        base = -1 if request.previous is None else request.base_version
        group.broadcast_one(_numbers(request.version, base))
        for bucket in buckets(request.layout):
            self._send_bucket(group, bucket, request)

    def _send_bucket(self, group: Broadcasts, bucket: Bucket, request: SendRequest) -> None:
        """Send one bucket of ``request``: unchanged or, if differences may be sent, in the shorter of both
        encodings."""
        span = slice(bucket.start, bucket.start + bucket.num_bytes)
        payload = request.payload[span]
        if request.previous is not None:
            encoded = delta.encode(payload, request.previous[span], bucket.manifest)
            payload, encoding = (payload, _RAW) if encoded is None else (memoryview(encoded), _DIFFERENCE)
            group.broadcast_one(_numbers(encoding, len(payload)))
        group.broadcast(payload)


@dataclass(slots=True, kw_only=True)
class _JoinedGroups:
    """The groups that an engine has joined or will join, one for each rank of the learner."""

    path: str
    """The path of the updates that are sent over these groups."""
    stores: list[Any]
    """One connection to the store for each rank of the learner, because the groups are joined at the same time."""
    groups: dict[int, ProcessGroup] = field(default_factory=dict)
    """The groups that have been joined, by the learner's ranks."""


class GroupInbox:
    """The engine's side of the transport over process groups. Its address is a random name, unique to this receiver."""

    lasting = False

    def __init__(self, route: Route) -> None:
        """Create a receiver for updates over ``route``. It joins groups when an update names them, and reads files only
        from the fallback folder of ``route``."""
        self._deadline_s, self._folder = _silence_s(route), route.fallback
        """The time in seconds that a waiting call waits, and the folder from which files may be read."""
        self.address = secrets.token_hex(8)
        self._joined: _JoinedGroups | None = None
        """The groups of the latest update; ``None`` before the first."""

    def view(self, update: WeightUpdate) -> None:
        """Return ``None``: a broadcast has to be fetched."""

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Receive the parts of all ranks into the image ``into``, which must contain the version ``update.base`` if
        ``update`` is a difference. Raises :class:`~headrace.base.errors.NeedsFull` if a rank does not send in time, or
        sends another version."""
        try:
            self._receive(update, into)
        except (RuntimeError, OSError) as error:  # ``OSError``: the learner's address is unreachable
            raise NeedsFull(
                f"version {update.version} ({update.manifest.total_bytes} bytes) did not arrive within "
                f"{self._deadline_s:g} s of silence: {first_line(error)}",
                remedy="look at the learner's log: it may have ended; raise sync.deadline_s on a slow network",
            ) from None

    def skip(self, update: WeightUpdate) -> None:
        """Receive the parts of all ranks and discard them, since the broadcasts have started and need every member of
        the groups."""
        if update.layouts and not update.path.startswith(_FILES):
            with contextlib.suppress(RuntimeError, OSError, HeadraceError):
                self._receive(update, None)

    def close(self) -> None:
        """Leave the process groups."""
        self._joined = None

    def _receive(self, update: WeightUpdate, into: memoryview | None) -> None:
        """Receive the parts of all ranks of ``update`` at the same time, in one thread for each, into the image
        ``into`` (``None``: discard them). If a part does not arrive, leave all groups, since its rank has left its
        group, too."""
        if update.path.startswith(_FILES):
            self._read(update, into)
            return
        joined = self._groups(update)
        ranks = range(len(update.layouts))
        try:
            with ThreadPoolExecutor(max_workers=len(ranks), thread_name_prefix="receive") as threads:
                parts = [threads.submit(self._receive_from, joined, rank, update, into) for rank in ranks]
            for part in parts:
                part.result()
        except BaseException:
            self._joined = None
            raise

    def _groups(self, update: WeightUpdate) -> _JoinedGroups:
        """Return the record of the groups that ``update`` names, which the receiving threads will join. Raises
        :class:`~headrace.base.errors.WeightsError` if this engine is not one of their members."""
        if self._joined is None or self._joined.path != update.path:
            self._joined = None
            group_set = _GroupSet.from_path(update.path)
            if self.address not in group_set.engines:
                raise WeightsError(
                    f"version {update.version} is sent to {', '.join(group_set.engines)}, and this engine is "
                    f"{self.address}",
                    remedy="send it again, to the engines that are there now",
                )
            stores = [_connect(group_set.host, group_set.port, self._deadline_s) for _ in update.layouts]
            self._joined = _JoinedGroups(path=update.path, stores=stores)
        return self._joined

    def _read(self, update: WeightUpdate, into: memoryview | None) -> None:
        """Read the parts of all ranks from their files, one after the other, into ``into`` (``None``: discard them)."""
        folder = VersionFolder(self._folder)
        for rank in range(len(update.layouts)):
            with folder.reading(_make_file_name(update.path, rank), update.version) as (file, _):
                _receive_part(ReadBroadcasts(file), rank, update, into)

    def _receive_from(self, joined: _JoinedGroups, rank: int, update: WeightUpdate, into: memoryview | None) -> None:
        """Receive the part of the learner's ``rank`` over its group, which is joined first if it is new, into
        ``into``."""
        if rank not in joined.groups:
            group_set = _GroupSet.from_path(update.path)
            member = 1 + group_set.engines.index(self.address)
            joined.groups[rank] = group_set.join(joined.stores[rank], rank, member, self._deadline_s)
        _receive_part(joined.groups[rank], rank, update, into)


def _receive_part(group: Broadcasts, rank: int, update: WeightUpdate, into: memoryview | None) -> None:
    """Receive the part of ``update`` that the learner's ``rank`` sends from ``group``, and write each bucket to its
    place in the image ``into`` (``None``: discard it). Raises :class:`~headrace.base.errors.NeedsFull` if the rank
    sends another version."""
    header = _numbers(0, 0)
    group.broadcast_one(header)
    version, base = (int(number) for number in header)
    if version != update.version or base != (-1 if update.base is None else update.base):
        raise NeedsFull(
            f"announced was version {update.version}, and rank {rank} of the learner sends version {version}",
            remedy="send the version again",
        )
    image = None if into is None else _Image(into, update.manifest)
    expected_buckets = buckets(update.layouts[rank])
    scratch = private_memory(max((bucket.num_bytes for bucket in expected_buckets), default=0))
    for bucket in expected_buckets:
        encoding, size = _announced_size(group, bucket) if base >= 0 else (_RAW, bucket.num_bytes)
        places = [] if image is None else image.places(bucket)
        if encoding == _RAW and len(places) == 1 and places[0].is_contiguous():
            group.broadcast_tensor(places[0])
            continue
        payload = scratch[:size]
        group.broadcast(payload)
        if places:
            _put(bucket, payload, encoding, places)


class _Image:
    """The image that an engine receives, and the places of buckets in it."""

    def __init__(self, memory: memoryview, manifest: Manifest) -> None:
        """Describe the image in ``memory``, whose layout is ``manifest``."""
        self._memory = memory
        self._entries = {entry.name: entry for entry in manifest.entries}
        """The place of each tensor in the image, by name."""

    def places(self, bucket: Bucket) -> list[Tensor]:
        """Return for each block of ``bucket`` the view into the image to which it belongs."""
        return [
            view_box(self._memory, self._entries[block.name], block.starts, block.entry.shape)
            for block in bucket.blocks
        ]


def _announced_size(group: Broadcasts, bucket: Bucket) -> tuple[int, int]:
    """Receive the encoding of ``bucket`` and the number of bytes that follow, which precede each bucket if differences
    may be sent. Raises :class:`~headrace.base.errors.NeedsFull` for an invalid number."""
    header = _numbers(0, 0)
    group.broadcast_one(header)
    encoding, size = (int(number) for number in header)
    if not 0 <= size <= bucket.num_bytes or (encoding == _RAW and size != bucket.num_bytes):
        raise NeedsFull(
            f"a rank of the learner sends {size} bytes for a bucket of {bucket.num_bytes}",
            remedy="send the version again, whole",
        )
    return encoding, size


def _put(bucket: Bucket, payload: memoryview, encoding: int, places: Sequence[Tensor]) -> None:
    """Write the blocks of ``bucket``, received as ``payload``, to the views ``places``. A difference is applied to the
    present contents of ``places``."""
    if encoding == _DIFFERENCE:
        old, new = private_memory(bucket.num_bytes), private_memory(bucket.num_bytes)
        for place, there in zip(places, bucket.views(old), strict=True):
            there.copy_(place)
        delta.decode(payload, old, new, bucket.manifest)
        payload = new
    for place, arrived in zip(places, bucket.views(payload), strict=True):
        place.copy_(arrived)


def _numbers(first: int, second: int) -> Tensor:
    """Return the tensor of two numbers that is broadcast before a version (its number and its base version, −1 for a
    whole version) or before a bucket that may be a difference (its encoding and its size in bytes)."""
    return torch.tensor([first, second], dtype=torch.int64)


def _open_store(host: str, deadline_s: float) -> Any:
    """Open the store of a run at a free port of ``host``, and return it; its calls wait for at most ``deadline_s``
    seconds. Raises :class:`~headrace.base.errors.ConfigError` if this machine cannot listen there."""
    try:
        return serve_store(host, timedelta(seconds=2 * deadline_s))
    except OSError as error:
        raise ConfigError(
            f"sync.host={host!r}: the learner cannot listen there: {error}",
            remedy="name the address of one interface of the learner's machine",
        ) from None


def _connect(host: str, port: int, deadline_s: float) -> Any:
    """Return a connection to the store at ``host`` and ``port``. Raises ``RuntimeError`` if no server answers there
    within ``deadline_s`` seconds."""
    # half as long as other waits: an engine that cannot connect must report it before it counts as silent
    store = torch_distributed.TCPStore(host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=2 * deadline_s))
    return store


def _own_address(host: str, port: int) -> str:
    """Return the address of the network interface of this machine that is used for connections to ``host``. Other
    members can connect to this address. No packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _make_file_name(path: str, rank: int) -> str:
    """Return the name of the file with the part of ``rank``, for an update through files with this ``path``."""
    return f"{path.removeprefix(_FILES)}.rank{rank}"


def _silence_s(route: Route) -> float:
    """Return the longest time, in seconds, that learner and engines wait for the next message of each other."""
    return route.silence_s or route.deadline_s


def _check(sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a host to which no process can connect."""
    if sync.host in EVERYWHERE:
        raise ConfigError(
            f"sync.host={sync.host!r} is not an address that an engine could connect to",
            remedy="name the address of one interface of the learner's machine",
        )


GROUP = Transport(
    open_outbox=lambda route, token: GroupOutbox(route, ALONE),
    open_rank_outbox=GroupOutbox,
    open_inbox=lambda route, token, limit_bytes: GroupInbox(route),
    fallback=folder_of_run,
    settings={"host": "opens no port", "directory": "writes no files", "network_gb_s": "uses no network"},
    check=_check,
    cost=TransportCost(gb_s=0.0, fixed_s=0.05, proposed=True),
)
