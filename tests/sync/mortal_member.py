"""A member of the benchmark of process groups that can be told to die at a broadcast. Its buckets are small."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from headrace.sync import pieces
from headrace.sync.groups import ProcessGroup
from headrace.wings.bench import sync_group_worker
from headrace.wings.bench.engine_peers import answer_requests
from headrace.wings.bench.sync_group_worker import GroupEngine, HalfLearnerRank

BUCKET = 3000
left: list[int] = []
"""How many broadcasts the process survives; empty: all."""
broadcast_one = ProcessGroup.broadcast_one


def mortal(self: ProcessGroup, tensor: torch.Tensor) -> None:
    if left:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    broadcast_one(self, tensor)


def told(member: Any) -> Any:
    handle = member.handle

    def answer(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "die":
            left[:] = [request["after"]]
            return {}
        if request["do"] == "weights":
            return {"sums": {name: float(each.double().abs().sum()) for name, each in self._weights.items()}}
        found: dict[str, Any] = handle(self, request)
        return found

    member.handle = answer
    return member


if __name__ == "__main__":
    pieces.buckets.__defaults__ = (BUCKET,)
    ProcessGroup.broadcast_one = mortal  # type: ignore[method-assign]
    told(HalfLearnerRank)
    told(GroupEngine)
    answer_requests(sync_group_worker.open_side)
