"""The worker process of the sync benchmark, which has the role of the learner and publishes weights.

    python -m headrace.wings.bench.sync_worker '{"side": "learner", "model": PLAN, "threads": 1}'

PLAN is a JSON file with a :class:`SyncPlan`. Requests and answers have the format of
:mod:`headrace.wings.bench.engine_worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.base.clock import RealClock
from headrace.sync.config import Route
from headrace.sync.groups import ProcessGroup, join_local_group
from headrace.sync.manifest import private_memory
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher
from headrace.wings.bench.base import shortest_s
from headrace.wings.bench.engine_peers import answer_requests

TOKEN = "benchmark"
DEADLINE_S = 120.0
_TIMES = 5
"""The number of copies in memory, of which the fastest is reported."""


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes and the type of the weights on both sides of the sync benchmark, without values."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of each weight, by name."""
    dtype: str
    """The name of the weights' type in torch, such as ``bfloat16``."""


def make_tensors(plan: SyncPlan, *, seed: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of ``plan`` by name. They contain zeros, or with ``seed`` normal random numbers with a
    standard deviation of 0.02."""
    rng = torch.Generator().manual_seed(seed or 0)
    dtype: torch.dtype = getattr(torch, plan.dtype)
    made = {name: torch.zeros(shape, dtype=dtype) for name, shape in plan.shapes.items()}
    for tensor in made.values() if seed is not None else ():
        tensor.normal_(0.0, 0.02, generator=rng)
    return made


class ChangingLearner:
    """A learner whose weights change a little before every publication."""

    def __init__(self, path: str) -> None:
        """Create the weights of the plan in the JSON file ``path``, with random values."""
        self._clock = RealClock()
        plan = msgspec.json.decode(Path(path).read_bytes(), type=SyncPlan)
        self._weights = make_tensors(plan, seed=1)
        """The weights, by name."""
        self._rng = torch.Generator().manual_seed(2)
        """Draws which weights change."""
        self._publisher: Publisher | None = None
        self._group: ProcessGroup | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request, whose field ``do`` names its kind, and return the answer to it. The kinds are: ``open`` a
        publisher, ``publish`` a version, ``copy`` the weights in memory, and ``broadcast`` them."""
        kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open, "publish": self._publish, "copy": self._copy, "broadcast": self._broadcast,
        }  # fmt: skip
        return kinds[request["do"]](request)

    def close(self) -> None:
        """Close the publisher, if there is one."""
        if self._publisher is not None:
            self._publisher.close()

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Close the present publisher, open the publisher that the ``route`` of the request describes, and return the
        size in bytes of the weights in its buffer."""
        self.close()
        self._publisher = make_publisher(msgspec.convert(request["route"], Route), self._weights, TOKEN)
        for slot in (0, 1):  # the first copy allocates the pages of a slot
            self._publisher.copy(slot)
        return {"image_bytes": self._publisher.manifest.total_bytes}

    @torch.no_grad()
    def _change_weights(self) -> None:
        """Multiply one weight in thirty by 1 + 2^-7, which changes a bfloat16 number to its next or second next
        neighbour."""
        for tensor in self._weights.values():
            flat = tensor.view(-1)
            start = int(torch.randint(0, 30, (1,), generator=self._rng))
            flat[start::30] *= 1 + 2**-7

    def _publish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change the weights a little and publish them, as the version and into the slot that the request names. Return
        the seconds of the copy into the slot, for which a learner would be blocked (``exposed_s``), the seconds of the
        announcement (``announce_s``), and the announcement itself (``update``)."""
        assert self._publisher is not None
        self._change_weights()
        start_s = self._clock.now()
        self._publisher.copy(request["slot"])
        copied_s = self._clock.now()
        update = self._publisher.announce(request["version"], request["slot"], request["to"])
        return {
            "exposed_s": copied_s - start_s,
            "announce_s": self._clock.now() - copied_s,
            "update": msgspec.to_builtins(update),
        }

    def _copy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the shortest time, in seconds, of several copies of one block of memory with the size of all weights,
        and this size in bytes. A publication is compared with this copy."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())
        source = torch.ones(num_bytes, dtype=torch.uint8)  # writing ones allocates the pages of the source
        target = torch.ones_like(source)
        return {"copy_s": shortest_s(lambda: target.copy_(source), _TIMES), "bytes": num_bytes}

    def _broadcast(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send the weights to the receiving process in the manner that the request's ``how`` names, through a process
        group. The first request joins this group."""
        if self._group is None:
            self._group = join_local_group(Path(request["directory"]), "bench", (0, 2), DEADLINE_S)
        broadcast(self._group, list(self._weights.values()), request["how"], packs=True)
        return {}


def broadcast(group: ProcessGroup, tensors: list[Tensor], manner: str, *, packs: bool) -> None:
    """Execute one side of a broadcast of all ``tensors`` in ``group``. ``manner`` is ``each`` (tensor by tensor),
    ``buckets`` (packed into a buffer that is sent in buckets), or ``one`` (a buffer of the same size as a single
    tensor). The sending side sets ``packs``, so that it packs its tensors; the receiving side does not unpack the
    received bytes."""
    flat = _block(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    if manner == "each":
        for tensor in tensors:
            group.broadcast_one(tensor)
    elif manner == "one":
        group.broadcast_one(torch.frombuffer(flat, dtype=torch.uint8))
    else:
        if packs:
            _pack(tensors, flat)
        group.broadcast(flat)


_blocks: dict[int, memoryview] = {}
"""The blocks of memory that :func:`_block` has returned, by their size in bytes."""


def _block(num_bytes: int) -> memoryview:
    """Return a block of ``num_bytes`` bytes of memory whose pages are allocated. Calls with the same size return the
    same block."""
    if num_bytes not in _blocks:
        _blocks[num_bytes] = private_memory(num_bytes)
        torch.frombuffer(_blocks[num_bytes], dtype=torch.uint8).fill_(1)
    return _blocks[num_bytes]


def _pack(tensors: list[Tensor], flat: memoryview) -> None:
    """Copy the values of ``tensors``, one after the other, into the buffer ``flat``, which has the size of all tensors
    together."""
    start = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        part = torch.frombuffer(flat, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        part.copy_(tensor.view(-1))
        start += num_bytes


if __name__ == "__main__":
    answer_requests(lambda spec: ChangingLearner(spec["model"]))
