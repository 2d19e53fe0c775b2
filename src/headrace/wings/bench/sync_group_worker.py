"""The worker processes of the benchmark of process groups: the ranks of a learner, and the engines.

    python -m headrace.wings.bench.sync_group_worker '{"side": "rank-0", "model": PLAN, "threads": 1}'

PLAN is a JSON file with a :class:`~headrace.wings.bench.sync_worker.SyncPlan`. Each of two ranks has half of the rows
of every tensor, as FSDP2 shards them; an engine has all rows. Requests and answers have the format of
:mod:`headrace.wings.bench.engine_worker`; ``do`` in a request names the method that handles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from headrace.base.errors import HeadraceError
from headrace.base.types.weights import WeightUpdate
from headrace.sync.base import LearnerRank
from headrace.sync.config import Route
from headrace.sync.groups import ProcessGroup, join_local_group
from headrace.sync.manifest import private_memory
from headrace.sync.pieces import Box
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_publisher, make_receiver
from headrace.wings.bench.base import measure_s, shortest_s
from headrace.wings.bench.engine_peers import answer_requests
from headrace.wings.bench.sync_worker import DEADLINE_S, SyncPlan, make_tensors

NUM_RANKS = 2


class HalfLearnerRank:
    """One of two ranks of a learner, whose weights change a little before every publication."""

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        """Create the half of the weights of ``plan`` that belongs to this ``rank``, with random values."""
        self._rank = rank
        dtype: torch.dtype = torch.__dict__[plan.dtype]
        self._shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in plan.shapes.items()}
        """All tensors without values, of which this rank has one half."""
        self._boxes_by_rank = [_halves(self._shapes, each) for each in range(NUM_RANKS)]
        """For each rank, the rows of each tensor that belong to this rank, by name."""
        shapes = {name: box.shape for name, box in self._boxes_by_rank[rank].items()}
        self._weights = make_tensors(SyncPlan(shapes=shapes, dtype=plan.dtype), seed=1 + rank)
        """The half of each tensor that belongs to this rank, by name."""
        self._publisher: Publisher | None = None
        """The sending side of the transport; None until a request opens it."""
        self._raw = _RawGroups(rank)
        """The process groups for bare bytes, with which the transport is compared."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer to it. The kinds are: ``open`` a publisher, ``take`` a copy of the
        weights, ``announce`` this copy as a version, ``copy`` the same number of bytes in memory, send them as ``raw``
        bytes, and ``hash`` some bytes."""
        kinds = {
            "open": self._open,
            "take": self._take,
            "announce": self._announce,
            "copy": self._copy,
            "raw": self._send_raw,
            "hash": measure_hash,
        }
        return kinds[request["do"]](request)

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the publisher that the request's ``route`` describes. Rank 0 returns the address at which the ranks
        connect as ``shared``, and the other rank receives this address in the request as ``shared``."""
        shared: list[bytes] = [] if self._rank == 0 else [request["shared"].encode()]

        def share(message: bytes | None) -> bytes:
            """Return the message of rank 0 to the other ranks; ``message`` is this message in rank 0, else ``None``."""
            if message is not None:
                shared.append(message)
            return shared[0]

        rank = LearnerRank(index=self._rank, world=NUM_RANKS, share=share)
        route = msgspec.convert(request["route"], Route)
        self._publisher = make_publisher(route, self._shapes, boxes_by_rank=self._boxes_by_rank, rank=rank)
        for slot in (0, 1):  # the first copy allocates the pages of a slot
            self._publisher.fill(slot, self._weights.values())
        return {"shared": shared[0].decode()}

    @torch.no_grad()
    def _take(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change the weights, and copy them into the slot of the request. Return the seconds of the copy, for which a
        learner would be blocked."""
        assert self._publisher is not None
        for tensor in self._weights.values():
            tensor.view(-1)[request["version"] :: 30] *= 1 + 2**-7
        return {"exposed_s": measure_s(partial(self._publisher.fill, request["slot"], self._weights.values()))}

    def _announce(self, request: dict[str, Any]) -> dict[str, Any]:
        """Announce the copied weights as the version of the request, or with ``again`` send all weights of this version
        again. Return the announcement; the benchmark sends the announcement of rank 0 to the engines."""
        assert self._publisher is not None
        announce = self._publisher.resend if request["again"] else self._publisher.announce
        return {"update": msgspec.to_builtins(announce(request["version"], request["slot"], request["to"]))}

    def _copy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the shortest time of several copies, in one block of memory, of as many bytes as the weights of this
        rank have."""
        source = torch.ones(self._num_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        return {"copy_s": shortest_s(lambda: target.copy_(source), 5), "bytes": self._num_bytes}

    def _send_raw(self, request: dict[str, Any]) -> dict[str, Any]:
        """Broadcast bare bytes of this rank to the engines, in buckets; the request has their number."""
        self._raw.move(request, self._rank)
        return {}

    @property
    def _num_bytes(self) -> int:
        """Return the size in bytes of the weights of this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())


class GroupEngine:
    """An engine that receives versions, without a model."""

    def __init__(self, plan: SyncPlan, index: int) -> None:
        """Create the tensors of ``plan``; ``index`` is the number of this engine."""
        self._plan = plan
        self._weights: Mapping[str, Tensor] = make_tensors(plan)
        """The tensors of the version in use, by name."""
        self._receiver: Receiver | None = None
        """The receiving side of the transport; None until a request opens it."""
        self._raw = _RawGroups(NUM_RANKS + index)
        """The process groups for bare bytes, with which the transport is compared."""
        self._member = 1 + index
        """The number of this engine in the process groups, after rank 0."""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer to it. The kinds are: ``open`` a receiver and return its address,
        ``stage`` an update, ``commit`` a version, return ``sums`` of the weights in use, receive ``raw`` bytes, and
        ``hash`` some bytes."""
        kinds = {
            "open": self._open,
            "stage": self._stage,
            "commit": self._commit,
            "sums": self._sums,
            "raw": self._receive_raw,
            "hash": measure_hash,
        }
        return kinds[request["do"]](request)

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open the receiver that the request's ``route`` describes, and return its address."""
        self._receiver = make_receiver(msgspec.convert(request["route"], Route), self._weights)
        return {"address": self._receiver.address}

    def _stage(self, request: dict[str, Any]) -> dict[str, Any]:
        """Stage the request's ``update``. Return the error as text; empty if the update was staged."""
        assert self._receiver is not None
        try:
            self._receiver.stage(msgspec.convert(request["update"], WeightUpdate))
        except HeadraceError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": ""}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Commit the request's ``version``."""
        assert self._receiver is not None
        self._receiver.commit(request["version"])
        return {}

    def _sums(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the version in use, and the sum of each tensor's absolute values, in float64."""
        assert self._receiver is not None
        sums = {name: float(tensor.double().abs().sum()) for name, tensor in self._weights.items()}
        return {"version": self._receiver.committed, "sums": sums}

    def _receive_raw(self, request: dict[str, Any]) -> dict[str, Any]:
        """Receive the bare bytes that all ranks broadcast, in one thread for each rank, and discard them."""
        with ThreadPoolExecutor(NUM_RANKS) as threads:
            for moved in [threads.submit(self._raw.move, request, rank) for rank in range(NUM_RANKS)]:
                moved.result()
        return {}


def measure_hash(request: dict[str, Any]) -> dict[str, Any]:
    """Hash the request's number of ``bytes`` once, and return the seconds of the hash."""
    probe = np.ones(request["bytes"], np.uint8)
    return {"hash_s": measure_s(lambda: xxhash.xxh3_64_intdigest(probe.data))}


class _RawGroups:
    """The process groups for bare bytes, one group of each rank with all engines, as in the transport ``group``."""

    def __init__(self, member: int) -> None:
        """Start without groups. ``member`` is the number of this process among all: ranks first, then engines."""
        self._member = member
        self._groups: dict[tuple[int, int], tuple[ProcessGroup, memoryview]] = {}
        """The group and the buffer for each pair of a rank and a number of bytes."""

    def move(self, request: dict[str, Any], sender: int) -> None:
        """Send or receive the request's number of bytes in the group of the rank ``sender``. The first request with
        this number joins the group."""
        num_bytes = int(request["bytes"][sender])
        if (sender, num_bytes) not in self._groups:
            rank = 0 if self._member == sender else 1 + self._member - NUM_RANKS
            name, size = f"raw-{sender}-{num_bytes}", 1 + request["engines"]
            group = join_local_group(Path(request["directory"]), name, (rank, size), DEADLINE_S)
            memory = private_memory(num_bytes)
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
            self._groups[sender, num_bytes] = (group, memory)
        group, memory = self._groups[sender, num_bytes]
        group.broadcast(memory)


def _halves(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Box]:
    """Return the rows of each tensor that belong to ``rank``, one of two ranks, as FSDP2 shards them."""
    boxes = {}
    for name, tensor in tensors.items():
        half = -(-tensor.shape[0] // NUM_RANKS)
        start, end = rank * half, min((rank + 1) * half, tensor.shape[0])
        boxes[name] = Box(starts=(start, *[0] * (tensor.ndim - 1)), shape=(end - start, *tensor.shape[1:]))
    return boxes


def open_side(spec: dict[str, Any]) -> HalfLearnerRank | GroupEngine:
    """Create the side that ``spec`` names, a rank of the learner or an engine, with the plan in a file."""
    plan = msgspec.json.decode(Path(spec["model"]).read_bytes(), type=SyncPlan)
    role, _, number = spec["side"].partition("-")
    return (HalfLearnerRank if role == "rank" else GroupEngine)(plan, int(number))


if __name__ == "__main__":
    answer_requests(open_side)
