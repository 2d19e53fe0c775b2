"""A transport over process groups of torch.distributed, in which every rank of the learner sends its own part.

    learner rank 0 ═══ group 0 ═══▶ engine a, engine b, ...       each group: one rank of the learner, all engines
    learner rank 1 ═══ group 1 ═══▶ engine a, engine b, ...
           └─ store ─┘  where all of them meet: rank 0 opens it

The ranks copy only what they hold; nothing is gathered. A version is sent in a thread of each rank, bucket by bucket,
while training continues; an engine receives from all ranks at once, directly into the free image, while it decodes.
With ``sync.codec = "delta"`` each bucket is sent as its difference from the version before, where that is shorter.

If anything fails in a group, all of its members leave it, and the next update names new groups. Where groups of the
same engines fail :data:`MOST_FAILURES` times in a row, every rank writes what it would have broadcast to a file from
then on, and engines read the files: the way changes, and nothing else. The backend is Gloo: with CUDA devices, too, the
image is in the host's memory.

    group ──MOST_FAILURES in a row──▶ files, until the learner starts again
      ▲ │ one failure: new groups
      └─┘ other engines: the count begins again, since one has died or come
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
from headrace.base.errors import ConfigError, HeadraceError, NeedsFull, WeightsError
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
    torch_distributed,
)
from headrace.sync.manifest import private_memory
from headrace.sync.pieces import Bucket, box_of, buckets

MOST_FAILURES = 2
"""How often in a row a transfer to the same engines may fail before the versions go through files. One failure may be
the death of a member, which is known when the version is sent again; one version is sent four times at most."""
_FILES = "files|"
"""The beginning of the path of an update whose parts are in files; the name of the files follows, without the rank."""
_RAW, _DIFFERENCE = 0, 1
"""How a bucket is sent: as it is, or as its difference from the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """The groups over which versions are sent, as ``WeightUpdate.path`` says it to engines."""

    host: str
    """The address of the store."""
    port: int
    """The port of the store."""
    name: str
    """The name of the groups, which no other groups of the run have."""
    engines: tuple[str, ...]
    """The addresses of the engines, in the order of their ranks in each group."""

    @property
    def path(self) -> str:
        """Return the path of an update that is sent over these groups."""
        return f"{self.host}|{self.port}|{self.name}|{','.join(self.engines)}"

    @classmethod
    def of(cls, path: str) -> _Meeting:
        """Return the meeting that ``path`` describes. Raises :class:`~headrace.base.errors.WeightsError` if it
        describes none."""
        try:
            host, port, name, engines = path.split("|")
            return cls(host=host, port=int(port), name=name, engines=tuple(engines.split(",")))
        except ValueError:
            raise WeightsError(
                f"{path!r} names no process group of the weights", remedy="use one version of headrace everywhere"
            ) from None

    def join(self, store: Any, sender: int, rank: int, deadline_s: float) -> ProcessGroup:
        """Return the group of the learner's rank ``sender``, as its member ``rank``: 0 for the sender, then the
        engines. ``store`` is a connection to the store. Raises ``RuntimeError`` if not all members come within
        ``deadline_s`` seconds."""
        own = torch_distributed.PrefixStore(f"{self.name}.{sender}", store)
        return gloo_group(own, (rank, 1 + len(self.engines)), deadline_s, _own_address(self.host, self.port))


class GroupOutbox:
    """One learner rank's side of the transport. It sends in a thread of its own: an update is announced before it is
    sent, because a broadcast needs both sides at the same time.

    The ranks agree over the store, for each version: each writes the hashes of its pieces and whether its last version
    arrived; rank 0 decides by that which groups are used, and announces the version with the hashes of all.
    """

    def __init__(self, route: Route, rank: LearnerRank) -> None:
        """Open the store at the host of ``route`` on rank 0, and connect the other ranks to it; ``rank`` is this one,
        and all ranks make this call together."""
        host, deadline_s = route.host, _silence_s(route)
        self._deadline_s, self._rank, self._writing_s = deadline_s, rank, route.deadline_s
        self._folder = VersionFolder(route.fallback) if route.fallback else None
        if self._folder is not None and rank.index == 0:  # the others are not past ``share`` yet
            self._folder.remove_left()
        self._listening = _open_store(host, deadline_s) if rank.index == 0 else None
        port = str(self._listening.port).encode() if self._listening else None
        opened = rank.share(None if port is None else f"{host}|".encode() + port).decode()
        self._host, _, found = opened.partition("|")
        self._port = int(found)
        # a wait occupies a connection: the thread that sends has one of its own
        self._agreeing, self._joining = (_connect(self._host, self._port, deadline_s) for _ in range(2))
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._transfer: Future[None] | None = None
        self._meeting: _Meeting | None = None
        self._group: tuple[str, ProcessGroup] | None = None
        self._attempt = 0
        """How often the present version was sent before."""
        self._told = ""
        """On rank 0, the key of the store under which the other ranks found the path of the last version."""
        self._failures = 0
        """On rank 0, how many transfers to the present engines have failed since the last one that did not."""
        self._last_failure = "an engine could not use what it received"
        """The reason for the last failure that this rank has noticed."""
        self._by_files = False
        """On rank 0, whether versions go through files."""
        self._note = ""
        """On rank 0, what the user has not been told yet about that."""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of this process for the slots."""
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Begin to send this rank's part of a version to its receivers in the thread, and return at once with the
        groups and, on rank 0, the hashes of all pieces. New groups are used if the receivers have changed, the last
        version did not arrive, or the version is sent again. Raises :class:`~headrace.base.errors.WeightsError` if the
        other ranks do not agree in time."""
        if not request.to:
            raise WeightsError(
                f"version {request.version} has no receiver to be sent to", remedy="start an engine with this transport"
            )
        key = self._key(request)
        succeeded = self._previous_succeeded(request.version)
        with self._hearing_others(request.version, 2 * self._deadline_s):
            path, hashes = self._agree(key, request, succeeded)
        if path.startswith(_FILES):
            self._write(key, path, request)
        else:
            self._transfer = self._sender.submit(self._send, path, request)
        note, self._note = self._note, ""
        return Sent(path=path, checksums=hashes, note=note)

    def close(self) -> None:
        """Stop the thread, without waiting for a transfer that runs."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._group = None
        if self._folder is not None:
            self._folder.close()

    def _previous_succeeded(self, version: int) -> bool:
        """Wait for the end of this rank's previous transfer, and return whether it succeeded; true if there was none.
        Raises :class:`~headrace.base.errors.WeightsError` if it does not end; ``version`` is the next one, for the
        message."""
        if self._transfer is None:
            return True
        try:
            self._transfer.result(2 * self._deadline_s)  # the transfer's own deadline ends it after half of that
        except TimeoutError:
            raise WeightsError(
                f"version {version} cannot be sent: the transfer before has not ended for {2 * self._deadline_s:g} s",
                remedy="look at the engine's log",
            ) from None
        except (RuntimeError, OSError) as error:  # the receivers have left or never joined, and report that themselves
            self._transfer, self._last_failure = None, _first_line(error)
            return False
        return True

    def _agree(self, key: str, request: SendRequest, succeeded: bool) -> tuple[str, tuple[int, ...]]:
        """Exchange the hashes of ``request`` and whether the previous transfers have ``succeeded`` with the other
        ranks, by messages whose names begin with ``key``. Return the path that rank 0 has chosen and, on rank 0, the
        hashes of all ranks' pieces. Raises ``RuntimeError`` if a rank is not heard of in time."""
        own = np.array([int(succeeded), *request.checksums], np.uint64)
        if self._rank.index:
            self._agreeing.set(f"{key}/{self._rank.index}", own.tobytes())
            return self._agreeing.get(f"{key}/path").decode(), ()
        words = [own]
        for rank in range(1, self._rank.world):
            words.append(np.frombuffer(self._agreeing.get(f"{key}/{rank}"), np.uint64))
            self._agreeing.delete_key(f"{key}/{rank}")
        path = self._choose_path(request, failed=request.again or not all(int(one[0]) for one in words))
        self._agreeing.set(f"{key}/path", path)
        if self._told:
            self._agreeing.delete_key(self._told)
        self._told = f"{key}/path"
        return path, tuple(int(each) for one in words for each in one[1:])

    def _choose_path(self, request: SendRequest, *, failed: bool) -> str:
        """Return the path of ``request``, on rank 0: the present groups, new ones if the transfer before has ``failed``
        or the engines have changed, or files if groups of these engines fail again and again."""
        engines = tuple(request.to)
        same = self._meeting is not None and self._meeting.engines == engines
        self._failures = self._failures + 1 if same and failed else 0
        if self._folder is not None and self._failures >= MOST_FAILURES and not self._by_files:
            self._by_files, self._note = True, self._fallback_note(request.version)
        if self._by_files:
            return f"{_FILES}{VersionFolder.new_name(request.version)}"
        if self._meeting is None or not same or failed:
            self._meeting = _Meeting(host=self._host, port=self._port, name=secrets.token_hex(6), engines=engines)
        return self._meeting.path

    def _fallback_note(self, version: int) -> str:
        """Return the sentence that tells the user that versions go through files from ``version`` on."""
        return (
            f"weights go through files from version {version} on, until the learner starts again: process groups with "
            f"the same engines failed {self._failures} times in a row ({self._last_failure}); see that learner and "
            f"engines reach each other at any TCP port on the network of sync.host={self._host}"
        )

    def _write(self, key: str, path: str, request: SendRequest) -> None:
        """Write this rank's part of ``request`` to its file of ``path``, and let rank 0 know by a message whose name
        begins with ``key``. Rank 0 waits for all of them, since the version is announced then. Raises
        :class:`~headrace.base.errors.WeightsError` on rank 0 if a part could not be written."""
        assert self._folder is not None
        error = ""
        try:
            name = _file_of(path, self._rank.index)
            with self._folder.writing(name, request.version, len(request.payload)) as file:
                self._broadcast(WrittenBroadcasts(file), request)
        except WeightsError as problem:
            error = problem.problem
        if self._rank.index:
            self._agreeing.set(f"{key}/{self._rank.index}/written", error.encode())
            return
        with self._hearing_others(request.version, self._writing_s):
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
    def _hearing_others(self, version: int, wait_s: float) -> Iterator[None]:
        """Within this context, raise a :class:`~headrace.base.errors.WeightsError` about ``version`` if the other ranks
        are not heard of for ``wait_s`` seconds."""
        try:
            yield
        except RuntimeError as error:
            raise WeightsError(
                f"version {version} cannot be sent: rank {self._rank.index} of the learner did not hear from the "
                f"others for {wait_s:g} s ({_first_line(error)})",
                remedy="look at the logs of the learner's ranks",
            ) from None

    def _key(self, request: SendRequest) -> str:
        """Return the name under which the ranks agree on ``request``, the same on each of them. A version that is sent
        again gets another name each time."""
        self._attempt = self._attempt + 1 if request.again else 0
        return f"{request.version}.{self._attempt}"

    def _send(self, path: str, request: SendRequest) -> None:
        """Send the part of ``request`` to the groups of ``path``, which are joined first if they are new. This runs in
        the thread."""
        try:
            if self._group is None or self._group[0] != path:
                self._group = None
                group = _Meeting.of(path).join(self._joining, self._rank.index, 0, self._deadline_s)
                self._group = (path, group)
            self._broadcast(self._group[1], request)
        except (RuntimeError, OSError):
            self._group = None
            raise

    def _broadcast(self, group: Broadcasts, request: SendRequest) -> None:
        """Send this rank's part of ``request`` through ``group``, a process group or the file in its place."""
        base = -1 if request.previous is None else request.base_version
        group.broadcast_one(_numbers(request.version, base))
        for bucket in buckets(request.layout):
            self._send_bucket(group, bucket, request)

    def _send_bucket(self, group: Broadcasts, bucket: Bucket, request: SendRequest) -> None:
        """Send one bucket of ``request``; one of a difference as whichever of both is shorter."""
        span = slice(bucket.start, bucket.start + bucket.num_bytes)
        payload = request.payload[span]
        if request.previous is not None:
            encoded = delta.encode(payload, request.previous[span], bucket.manifest)
            payload, how = (payload, _RAW) if encoded is None else (memoryview(encoded), _DIFFERENCE)
            group.broadcast_one(_numbers(how, len(payload)))
        group.broadcast(payload)


@dataclass(slots=True, kw_only=True)
class _Joined:
    """The groups that an engine has joined, one for each rank of the learner."""

    path: str
    """The path of the updates that are sent over them."""
    stores: list[Any]
    """For each rank of the learner a connection to the store: the groups are joined at the same time."""
    groups: dict[int, ProcessGroup] = field(default_factory=dict)
    """The groups that have been joined, by the learner's ranks."""


class GroupInbox:
    """The engine's side of the transport. Its address is a random name that no other receiver ever had."""

    lasting = False

    def __init__(self, route: Route) -> None:
        """Make a receiver for updates over ``route``; it joins a group when an update names one, and reads files of the
        fallback folder of ``route`` only."""
        self._deadline_s, self._folder = _silence_s(route), route.fallback
        self.address = secrets.token_hex(8)
        self._joined: _Joined | None = None

    def view(self, update: WeightUpdate) -> None:
        return None  # ``None``: a broadcast has to be fetched

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Receive the parts of all ranks into the image ``into``, which holds the version ``update.base`` if ``update``
        is a difference. Raises :class:`~headrace.base.errors.NeedsFull` if a rank does not send in time, or sends
        another version."""
        try:
            self._receive(update, into)
        except (RuntimeError, OSError) as error:  # ``OSError``: no network leads to the learner
            raise NeedsFull(
                f"version {update.version} ({update.manifest.total_bytes} bytes) did not arrive within "
                f"{self._deadline_s:g} s of silence: {_first_line(error)}",
                remedy="look at the learner's log: it may have ended; raise sync.deadline_s on a slow network",
            ) from None

    def skip(self, update: WeightUpdate) -> None:
        """Receive the parts of all ranks and discard them, since the broadcasts are already on their way and need every
        member of the groups."""
        if update.layouts and not update.path.startswith(_FILES):
            with contextlib.suppress(RuntimeError, OSError, HeadraceError):
                self._receive(update, None)

    def close(self) -> None:
        """Leave the process groups."""
        self._joined = None

    def _receive(self, update: WeightUpdate, into: memoryview | None) -> None:
        """Receive the parts of all ranks at once, a thread for each; ``into`` is ``None`` if they are discarded. The
        groups are left if a part does not arrive, since its rank has left its group, too."""
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

    def _groups(self, update: WeightUpdate) -> _Joined:
        """Return the groups that ``update`` names, to be joined by the threads that receive. Raises
        :class:`~headrace.base.errors.WeightsError` if this engine is not one of their members."""
        if self._joined is None or self._joined.path != update.path:
            self._joined = None
            meeting = _Meeting.of(update.path)
            if self.address not in meeting.engines:
                raise WeightsError(
                    f"version {update.version} is sent to {', '.join(meeting.engines)}, and this engine is "
                    f"{self.address}",
                    remedy="send it again, to the engines that are there now",
                )
            stores = [_connect(meeting.host, meeting.port, self._deadline_s) for _ in update.layouts]
            self._joined = _Joined(path=update.path, stores=stores)
        return self._joined

    def _read(self, update: WeightUpdate, into: memoryview | None) -> None:
        """Read the parts of all ranks from their files, one after the other."""
        folder = VersionFolder(self._folder)
        for rank in range(len(update.layouts)):
            with folder.reading(_file_of(update.path, rank), update.version) as (file, _):
                _receive_part(ReadBroadcasts(file), rank, update, into)

    def _receive_from(self, joined: _Joined, rank: int, update: WeightUpdate, into: memoryview | None) -> None:
        """Receive the part of the learner's ``rank`` over its group, which is joined if it is new, into ``into``."""
        if rank not in joined.groups:
            meeting = _Meeting.of(update.path)
            member = 1 + meeting.engines.index(self.address)
            joined.groups[rank] = meeting.join(joined.stores[rank], rank, member, self._deadline_s)
        _receive_part(joined.groups[rank], rank, update, into)


def _receive_part(group: Broadcasts, rank: int, update: WeightUpdate, into: memoryview | None) -> None:
    """Receive the part of the learner's ``rank`` from ``group``, and put each bucket where it belongs in ``into``,
    unless that is ``None``. Raises :class:`~headrace.base.errors.NeedsFull` if the rank sends another version."""
    header = _numbers(0, 0)
    group.broadcast_one(header)
    version, base = (int(number) for number in header)
    if version != update.version or base != (-1 if update.base is None else update.base):
        raise NeedsFull(
            f"announced was version {update.version}, and rank {rank} of the learner sends version {version}",
            remedy="send the version again",
        )
    image = None if into is None else _Image(into, update.manifest)
    announced = buckets(update.layouts[rank])
    scratch = private_memory(max((bucket.num_bytes for bucket in announced), default=0))
    for bucket in announced:
        how, size = _announced_size(group, bucket) if base >= 0 else (_RAW, bucket.num_bytes)
        places = [] if image is None else image.places(bucket)
        if how == _RAW and len(places) == 1 and places[0].is_contiguous():
            group.broadcast_tensor(places[0])
            continue
        payload = scratch[:size]
        group.broadcast(payload)
        if places:
            _put(bucket, payload, how, places)


class _Image:
    """The image that an engine receives, and where the buckets belong in it."""

    def __init__(self, memory: memoryview, manifest: Manifest) -> None:
        """``manifest`` is the layout of the image in ``memory``."""
        self._memory = memory
        self._entries = {entry.name: entry for entry in manifest.entries}

    def places(self, bucket: Bucket) -> list[Tensor]:
        """Return the place of each block of ``bucket``, as a view into the image."""
        return [
            box_of(self._memory, self._entries[block.name], block.starts, block.entry.shape) for block in bucket.blocks
        ]


def _announced_size(group: Broadcasts, bucket: Bucket) -> tuple[int, int]:
    """Receive how ``bucket`` of a difference is sent, and the number of bytes that follow. Raises
    :class:`~headrace.base.errors.NeedsFull` for a number that does not fit."""
    header = _numbers(0, 0)
    group.broadcast_one(header)
    how, size = (int(number) for number in header)
    if not 0 <= size <= bucket.num_bytes or (how == _RAW and size != bucket.num_bytes):
        raise NeedsFull(
            f"a rank of the learner sends {size} bytes for a bucket of {bucket.num_bytes}",
            remedy="send the version again, whole",
        )
    return how, size


def _put(bucket: Bucket, payload: memoryview, how: int, places: Sequence[Tensor]) -> None:
    """Put the blocks of ``bucket``, which have come as ``payload``, into their ``places``. A difference is applied to
    what is there."""
    if how == _DIFFERENCE:
        old, new = private_memory(bucket.num_bytes), private_memory(bucket.num_bytes)
        for place, there in zip(places, bucket.views(old), strict=True):
            there.copy_(place)
        delta.decode(payload, old, new, bucket.manifest)
        payload = new
    for place, arrived in zip(places, bucket.views(payload), strict=True):
        place.copy_(arrived)


def _numbers(first: int, second: int) -> Tensor:
    """Return the tensor that is broadcast before a version (its number and its base, −1 for a whole one) or before a
    bucket of a difference (how it is sent, and its size)."""
    return torch.tensor([first, second], dtype=torch.int64)


def _open_store(host: str, deadline_s: float) -> Any:
    """Open the store of a run at a free port of ``host``. Raises :class:`~headrace.base.errors.ConfigError` if this
    machine cannot listen there."""
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"sync.host={host!r}: the learner cannot listen there: {error}",
            remedy="name the address of one interface of the learner's machine",
        ) from None
    port = listener.getsockname()[1]
    return torch_distributed.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=2 * deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(host: str, port: int, deadline_s: float) -> Any:
    """Return a connection to the store at ``host`` and ``port``. Raises ``RuntimeError`` if nobody answers there within
    ``deadline_s`` seconds."""
    # not twice as long, as other waits: an engine that cannot connect has to say so before it counts as silent
    store = torch_distributed.TCPStore(host, port, None, False, timedelta(seconds=deadline_s), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=2 * deadline_s))
    return store


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine on the way to ``host``, at which processes that reach ``host`` reach this one.
    Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _file_of(path: str, rank: int) -> str:
    """Return the name of the file with the part of ``rank`` of an update with this ``path``."""
    return f"{path.removeprefix(_FILES)}.rank{rank}"


def _silence_s(route: Route) -> float:
    """Return how long, in seconds, learner and engines wait for a sign of each other."""
    return route.silence_s or route.deadline_s


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


def _check(sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a host to which no process can connect."""
    if sync.host in EVERYWHERE:
        raise ConfigError(
            f"sync.host={sync.host!r} is not an address that an engine could connect to",
            remedy="name the address of one interface of the learner's machine",
        )


def _open_rank(route: Route, rank: LearnerRank) -> GroupOutbox:
    """Return the side of one rank of the learner."""
    return GroupOutbox(route, rank)


GROUP = Transport(
    open_outbox=lambda route, token: _open_rank(route, ALONE),
    open_rank_outbox=_open_rank,
    open_inbox=lambda route, token, limit_bytes: GroupInbox(route),
    fallback=folder_of_run,
    settings={"host": "opens no port", "directory": "writes no files", "network_gb_s": "uses no network"},
    check=_check,
    cost=TransportCost(gb_s=0.0, fixed_s=0.05, proposed=True),
)
