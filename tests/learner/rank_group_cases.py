"""What the ranks of the tests send to engines over process groups: each its own part; the engines hold the whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.base.errors import NeedsFull
from headrace.base.types.weights import WeightUpdate
from headrace.launch.hosts.learner import PublishedBuffers
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.load import load_on_ranks
from headrace.learner.parallel.mesh import Ranks
from headrace.learner.parallel.shards import gather_each, local_shard
from headrace.models import ModelConfig
from headrace.models.config import LoraConfig
from headrace.models.weights import weight_tensors
from headrace.sync.codecs import get_codec
from headrace.sync.config import Route
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_receiver
from headrace.testing.sync import encode_and_decode

Found = dict[str, Any]

SENT: dict[str, tuple[str, dict[str, int], str]] = {
    "sent_fsdp2": ("dense", {"data": 2}, "full"),
    "sent_tp2": ("dense", {"tensor": 2}, "full"),
    "sent_hsdp2": ("dense", {"replicate": 2}, "full"),
    "sent_tied_delta": ("tied", {"data": 2}, "delta"),
    "sent_tp2_delta": ("dense", {"tensor": 2}, "delta"),
    "sent_experts_bf16": ("experts", {"data": 2, "expert": 2}, "cast_bf16"),
    "sent_fsdp2_fp8": ("dense", {"data": 2}, "cast_fp8"),
    "sent_adapter": ("dense", {"data": 2}, "adapter"),
    "sent_fsdp2_tp2": ("dense", {"data": 2, "tensor": 2}, "full"),
    "sent_hsdp2x2_delta": ("dense", {"data": 2, "replicate": 2}, "delta"),
    "sent_ep2_tp2": ("experts", {"data": 2, "tensor": 2, "expert": 2}, "delta"),
}
"""For each case the kind of model, the layout of the ranks, and the codec."""


def sent(directory: Path, case: str) -> Found:
    """Three versions and one that is sent again reach an engine in the process of every rank."""
    kind, parallel, codec = SENT[case]
    config = ParallelConfig.model_validate(parallel)
    ranks = Ranks(config, torch.device("cpu"))
    lora = LoraConfig(rank=2) if codec == "adapter" else None
    model = load_on_ranks(ModelConfig(path=str(directory / kind), lora=lora), ranks)
    tensors = weight_tensors(model)
    route = Route(transport="group", codec=codec, deadline_s=20.0)
    engine = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    receiver = make_receiver(route, engine)
    with closing(PublishedBuffers(model, route, ranks)) as buffers, closing(receiver):
        line = _Line(ranks=ranks, buffers=buffers, receiver=receiver, to=_gathered(ranks, receiver.address))
        wrong = []
        for version in range(3):
            _move(tensors, version)
            line.publish(version, again=False)
            receiver.commit(version)
            wrong += _differing(codec, engine, tensors)
        _move(tensors, 3)
        line.publish(3, again=True)
        receiver.commit(3)
        wrong += _differing(codec, engine, tensors)
        assert buffers.publisher is not None
        own = buffers.publisher._layout.pieces.total_bytes
        elements = sum(local_shard(tensor).numel() for tensor in tensors.values())
        answer = {"wrong": wrong, "own": own, "held": 4 * elements, "total": receiver.manifest.total_bytes}
    return {"ranks": [msgspec.json.decode(each) for each in ranks.gather(msgspec.json.encode(answer))]}


class _Line:
    """The ranks of a learner, each with an engine beside it."""

    def __init__(self, *, ranks: Ranks, buffers: PublishedBuffers, receiver: Receiver, to: list[str]) -> None:
        self.ranks, self.buffers, self.receiver, self.to = ranks, buffers, receiver, to

    def publish(self, version: int, *, again: bool) -> None:
        """Send one version, and stage it; with ``again``, the first time the engine of rank 1 loses it."""
        self.buffers.copy(version % 2)
        publisher = self.buffers.publisher
        assert publisher is not None
        update = self._announced(publisher.announce(version, version % 2, self.to))
        if again:
            try:
                self.receiver.stage(self._lost(update))
            except NeedsFull:
                assert self.ranks.rank == 1
            update = self._announced(publisher.resend(version, version % 2, self.to))
        self.receiver.stage(update)

    def _announced(self, update: WeightUpdate) -> WeightUpdate:
        leading = msgspec.json.encode(update) if self.ranks.is_leader else None
        return msgspec.json.decode(self.ranks.broadcast(leading), type=WeightUpdate)

    def _lost(self, update: WeightUpdate) -> WeightUpdate:
        """On rank 1, the update with one hash that does not hold: as if a bit had changed on the way."""
        if self.ranks.rank != 1:
            return update
        return msgspec.structs.replace(update, checksums=(*update.checksums[:-1], update.checksums[-1] ^ 1))


def _gathered(ranks: Ranks, address: str) -> list[str]:
    return [each.decode() for each in ranks.gather(address.encode())]


@torch.no_grad()
def _move(tensors: Mapping[str, Tensor], version: int) -> None:
    """Change a few of the weights, the same on ranks that hold the same part."""
    for tensor in tensors.values():
        part = local_shard(tensor).view(-1) if local_shard(tensor).is_contiguous() else local_shard(tensor)
        part[version :: 5 + version] += 0.125 * (1 + version)


def _differing(codec: str, engine: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    expected = {
        name: encode_and_decode(get_codec(codec), name, tensor) for name, tensor in gather_each(tensors.items())
    }
    return [name for name, tensor in engine.items() if not torch.equal(tensor, expected[name])]


def refused_fp8(directory: Path) -> Found:
    """Eight bits have one scale for a row, and tensor-parallel ranks hold parts of rows."""
    ranks = Ranks(ParallelConfig(tensor=2), torch.device("cpu"))
    model = load_on_ranks(ModelConfig(path=str(directory / "dense")), ranks)
    try:
        # rank 1 waits twice this time for the store of rank 0, which has refused by then
        PublishedBuffers(model, Route(transport="group", codec="cast_fp8", deadline_s=1.0), ranks)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return {"problem": str(error)}
    return {"problem": ""}


for _case in SENT:
    globals()[_case] = lambda directory, case=_case: sent(directory, case)
