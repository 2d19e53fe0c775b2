"""A transport over torch.distributed: the learner and its engines form a process group of their own.

    learner, rank 0         one thread          engines, ranks 1, 2, ...
    announce: path = group  ──────────────────▶ stage: join the group, once
    header, bucket, bucket, ... ══ broadcast ══▶ directly into the free image

When a learner's ranks gather weights, they use another group in another thread, and have finished before a transfer
begins. If anything fails in a group, both sides leave it, and the next update names a new one. The backend is Gloo;
with CUDA devices, too, the image is in the host's memory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, WeightUpdate
from headrace.sync.base import SendRequest, Sent
from headrace.sync.config import Transport, TransportCost
from headrace.sync.groups import ProcessGroup, join_local_group
from headrace.sync.manifest import private_memory

_SEPARATOR = ","


class CollectiveOutbox:
    """The learner's side of the transport. It sends in a thread of its own: an update is announced before it is sent,
    because a broadcast needs both sides at the same time."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        """Meet the engines in ``directory``, a folder of this machine. ``deadline_s`` is the longest time to wait for
        them."""
        self._directory, self._deadline_s = directory, deadline_s
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._transfer: Future[None] | None = None
        self._group: tuple[str, ProcessGroup] | None = None
        self._name = ""

    def memory(self, num_bytes: int) -> memoryview:
        """Return ``num_bytes`` bytes of this process for the slots."""
        return private_memory(num_bytes)

    def send(self, request: SendRequest) -> Sent:
        """Begin to broadcast a version to its receivers in the thread, and return at once with the name of the process
        group. A new group is named if the receivers have changed, the last broadcast failed, or the version is sent
        again."""
        if not request.to:
            raise WeightsError(
                f"version {request.version} has no receiver to be sent to", remedy="start an engine with this transport"
            )
        previous_succeeded = self._previous_succeeded(request.version)
        if request.again or not previous_succeeded or self._name.partition(".")[2] != _join_names(request.to):
            self._name = f"{secrets.token_hex(4)}.{_join_names(request.to)}"
        self._transfer = self._sender.submit(self._send, self._name, request)
        return Sent(path=self._name)

    def close(self) -> None:
        """Stop the thread, without waiting for a broadcast that runs."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._group = None

    def _previous_succeeded(self, version: int) -> bool:
        """Wait for the end of the previous broadcast, and return whether it succeeded; true if there was none. Raises
        :class:`~headrace.base.errors.WeightsError` if it does not end; ``version`` is the next one, for the message."""
        if self._transfer is None:
            return True
        try:
            self._transfer.result(2 * self._deadline_s)  # the transfer's own deadline ends it after half of that
        except TimeoutError:
            raise WeightsError(
                f"version {version} cannot be sent: the transfer before has not ended for {2 * self._deadline_s:g} s",
                remedy="look at the engine's log",
            ) from None
        except RuntimeError:  # the receivers have left or never joined, and report that themselves
            return False
        return True

    def _send(self, name: str, request: SendRequest) -> None:
        """Broadcast the payload of ``request`` to the group ``name``, which is joined first if it is a new one. This
        runs in the thread."""
        try:
            if self._group is None or self._group[0] != name:
                self._group = None
                rank_and_size = (0, 1 + len(request.to))
                group = join_local_group(self._directory, name.partition(".")[0], rank_and_size, self._deadline_s)
                self._group = (name, group)
            self._group[1].broadcast_one(_header(request.version, len(request.payload)))
            self._group[1].broadcast(request.payload)
        except RuntimeError:
            self._group = None
            raise


class CollectiveInbox:
    """The engine's side of the transport. Its address is a random name that no other receiver ever had."""

    lasting = False

    def __init__(self, directory: Path, deadline_s: float) -> None:
        """Meet the learner in ``directory``, a folder of this machine. ``deadline_s`` is the longest time to wait for
        it."""
        self._directory, self._deadline_s = directory, deadline_s
        self.address = secrets.token_hex(8)
        self._group: tuple[str, ProcessGroup] | None = None

    def view(self, update: WeightUpdate) -> None:
        return None  # ``None``: a broadcast has to be fetched

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
        """Receive the payload of ``update`` into ``into`` by broadcast. Raises :class:`~headrace.base.errors.NeedsFull`
        if it does not arrive in time."""
        try:
            self._receive(update, into)
        except RuntimeError as error:
            self._group = None
            raise NeedsFull(
                f"version {update.version} ({update.num_bytes} bytes) did not arrive within {self._deadline_s:g} s of "
                f"silence: {_first_line(error)}",
                remedy="look at the learner's log: it may have ended; raise sync.deadline_s on a slow network",
            ) from None

    def skip(self, update: WeightUpdate) -> None:
        """Receive the payload of ``update`` and discard it, since the broadcast is already on its way and needs every
        member of the group."""
        scratch = private_memory(min(update.num_bytes, BUCKET_BYTES))
        with contextlib.suppress(RuntimeError, WeightsError):
            group = self._join_group(update)
            if self._receive_header(group) == [update.version, update.num_bytes]:
                for start in range(0, update.num_bytes, BUCKET_BYTES):
                    group.broadcast(scratch[: min(BUCKET_BYTES, update.num_bytes - start)])
                return
        self._group = None

    def close(self) -> None:
        """Leave the process group."""
        self._group = None

    def _receive(self, update: WeightUpdate, into: memoryview) -> None:
        """Receive the payload of ``update`` into ``into``. Raises :class:`~headrace.base.errors.NeedsFull` if the
        learner sends another version."""
        group = self._join_group(update)
        received = self._receive_header(group)
        if received != [update.version, update.num_bytes]:
            self._group = None
            raise NeedsFull(
                f"announced was version {update.version} of {update.num_bytes} bytes, and the learner sends version "
                f"{received[0]} of {received[1]} bytes",
                remedy="send the version again",
            )
        group.broadcast(into)

    def _receive_header(self, group: ProcessGroup) -> list[int]:
        """Receive the header of the next broadcast, and return ``[version, num_bytes]``: the version that the learner
        sends, and the size of its payload."""
        header = _header(0, 0)
        group.broadcast_one(header)
        return header.tolist()

    def _join_group(self, update: WeightUpdate) -> ProcessGroup:
        """Return the process group that ``update.path`` names, and join it if it is a new one. Raises
        :class:`~headrace.base.errors.WeightsError` if this engine is not one of its members."""
        if self._group is not None and self._group[0] == update.path:
            return self._group[1]
        name, _, members = update.path.partition(".")
        addresses = members.split(_SEPARATOR)
        if not name.isalnum() or self.address not in addresses:
            raise WeightsError(
                f"version {update.version} is sent to {members or 'nobody'}, and this receiver is {self.address}",
                remedy="publish to the engines that are there now",
            )
        self._group = None
        rank_and_size = (1 + addresses.index(self.address), 1 + len(addresses))
        group = join_local_group(self._directory, name, rank_and_size, self._deadline_s)
        self._group = (update.path, group)
        return group


def _header(version: int, num_bytes: int) -> Tensor:
    """Return the tensor that is broadcast before a payload: the version, and the number of bytes of the payload."""
    return torch.tensor([version, num_bytes], dtype=torch.int64)


def _join_names(members: Sequence[str]) -> str:
    """Join the addresses of the receivers into one string, the part of their group's name after the dot. The receivers
    split it again to find the members of the group and their ranks."""
    return _SEPARATOR.join(members)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


COLLECTIVE = Transport(
    open_outbox=lambda route, token: CollectiveOutbox(Path(route.address), route.deadline_s),
    open_inbox=lambda route, token, limit_bytes: CollectiveInbox(Path(route.address), route.deadline_s),
    # the members of a group find each other there
    address=lambda sync, places: str(places.private),
    one_machine="meets in a directory of one machine",
    cost=TransportCost(gb_s=0.0, fixed_s=0.05, proposed=True),
)
