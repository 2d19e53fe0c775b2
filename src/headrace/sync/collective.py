"""Weights by torch.distributed: a process group of the learner and its engines, and nobody else's.

    learner, rank 0         one thread          engines, ranks 1, 2, ...
    announce: path = group  ──────────────────▶ stage: join the group, once
    header, bucket, bucket, ... ══ broadcast ══▶ straight into the free image

The gathers of a learner's ranks use their own group, in another thread, and are over before a transfer begins. A group
in which anything failed is left by both; the next update names a new one. Gloo here; on CUDA devices the image lies in
the host's memory, too.
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
from headrace.sync.base import Parcel, Sent
from headrace.sync.config import Route
from headrace.sync.groups import ProcessGroup, meet
from headrace.sync.manifest import private_memory

_BETWEEN = ","


class CollectiveOutbox:
    """Sends in its own thread: an update is announced before it travels, since both sides must be there for that."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        self._directory, self._deadline_s = directory, deadline_s
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._transfer: Future[None] | None = None
        self._group: tuple[str, ProcessGroup] | None = None
        self._name = ""

    def memory(self, num_bytes: int) -> memoryview:
        return private_memory(num_bytes)

    def send(self, parcel: Parcel) -> Sent:
        if not parcel.to:
            raise WeightsError(
                f"version {parcel.version} has no receiver to be sent to", remedy="start an engine with this transport"
            )
        settled = self._settled(parcel.version)
        if parcel.again or not settled or self._name.partition(".")[2] != _joined(parcel.to):
            self._name = f"{secrets.token_hex(4)}.{_joined(parcel.to)}"
        self._transfer = self._sender.submit(self._send, self._name, parcel)
        return Sent(path=self._name)

    def close(self) -> None:
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._group = None

    def _settled(self, version: int) -> bool:
        """Whether the transfer before has ended well; it has had its time."""
        if self._transfer is None:
            return True
        try:
            self._transfer.result(2 * self._deadline_s)  # its own ends it after one
        except TimeoutError:
            raise WeightsError(
                f"version {version} cannot be sent: the transfer before has not ended for {2 * self._deadline_s:g} s",
                remedy="look at the engine's log",
            ) from None
        except RuntimeError:  # the receivers have left, or were never there: they have said so themselves
            return False
        return True

    def _send(self, name: str, parcel: Parcel) -> None:
        try:
            if self._group is None or self._group[0] != name:
                self._group = None
                made = meet(self._directory, name.partition(".")[0], (0, 1 + len(parcel.to)), self._deadline_s)
                self._group = (name, made)
            self._group[1].broadcast_one(_header(parcel.version, len(parcel.payload)))
            self._group[1].broadcast(parcel.payload)
        except RuntimeError:
            self._group = None
            raise


class CollectiveInbox:
    """Known by a name that no other receiver ever had."""

    lasting = False

    def __init__(self, directory: Path, deadline_s: float) -> None:
        self._directory, self._deadline_s = directory, deadline_s
        self.address = secrets.token_hex(8)
        self._group: tuple[str, ProcessGroup] | None = None

    def lend(self, update: WeightUpdate) -> None:
        return None

    def fetch(self, update: WeightUpdate, into: memoryview) -> None:
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
        """It is on its way: let it in, and forget it."""
        scratch = private_memory(min(update.num_bytes, BUCKET_BYTES))
        with contextlib.suppress(RuntimeError, WeightsError):
            group = self._joined(update)
            if self._heard(group) == [update.version, update.num_bytes]:
                for start in range(0, update.num_bytes, BUCKET_BYTES):
                    group.broadcast(scratch[: min(BUCKET_BYTES, update.num_bytes - start)])
                return
        self._group = None

    def close(self) -> None:
        self._group = None

    def _receive(self, update: WeightUpdate, into: memoryview) -> None:
        group = self._joined(update)
        heard = self._heard(group)
        if heard != [update.version, update.num_bytes]:
            self._group = None
            raise NeedsFull(
                f"announced was version {update.version} of {update.num_bytes} bytes, and the learner sends version "
                f"{heard[0]} of {heard[1]} bytes",
                remedy="send the version again",
            )
        group.broadcast(into)

    def _heard(self, group: ProcessGroup) -> list[int]:
        header = _header(0, 0)
        group.broadcast_one(header)
        return header.tolist()

    def _joined(self, update: WeightUpdate) -> ProcessGroup:
        if self._group is not None and self._group[0] == update.path:
            return self._group[1]
        name, _, members = update.path.partition(".")
        known = members.split(_BETWEEN)
        if not name.isalnum() or self.address not in known:
            raise WeightsError(
                f"version {update.version} is sent to {members or 'nobody'}, and this receiver is {self.address}",
                remedy="publish to the engines that are there now",
            )
        self._group = None
        place = (1 + known.index(self.address), 1 + len(known))
        group = meet(self._directory, name, place, self._deadline_s)
        self._group = (update.path, group)
        return group


def open_outbox(route: Route, token: str) -> CollectiveOutbox:
    """``route.address`` is a directory in which the members of a group find each other."""
    return CollectiveOutbox(Path(route.address), route.deadline_s)


def open_inbox(route: Route, token: str, limit_bytes: int) -> CollectiveInbox:
    """``route.address`` is the same directory."""
    return CollectiveInbox(Path(route.address), route.deadline_s)


def _header(version: int, num_bytes: int) -> Tensor:
    return torch.tensor([version, num_bytes], dtype=torch.int64)


def _joined(members: Sequence[str]) -> str:
    return _BETWEEN.join(members)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
