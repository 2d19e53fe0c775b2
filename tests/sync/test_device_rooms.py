"""Weights that are used on another device than the one they arrive on. Torch's ``meta`` device, which holds no numbers,
shows where they are put; what they are there is what every other test of the receiver shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver


def test_an_engine_on_another_device_keeps_two_copies_and_uses_them_in_turn(tmp_path: Path) -> None:
    learner = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    engine = {name: torch.empty_like(tensor, device="meta") for name, tensor in learner.items()}
    route = Route(address=str(tmp_path / "weights"))
    publisher, receiver = make_publisher(route, learner), make_receiver(route, engine)
    used: list[list[Tensor]] = [[tensor.data for tensor in engine.values()]]
    for version in range(4):
        publisher.copy(version % 2)
        receiver.stage(publisher.announce(version, version % 2))
        before = [_place(tensor) for tensor in engine.values()]
        assert before == [_place(tensor) for tensor in used[-1]]  # staging has not changed what is used
        receiver.commit(version)
        used.append([tensor.data for tensor in engine.values()])
    publisher.close()
    loaded, spare = ([_place(tensor) for tensor in tensors] for tensors in used[:2])
    assert [[_place(tensor) for tensor in tensors] for tensors in used] == [loaded, spare, loaded, spare, loaded]
    assert not set(loaded) & set(spare)
    assert all(tensor.device.type == "meta" for tensor in engine.values())


def _place(tensor: Tensor) -> int:
    """Names the memory of a tensor that has none."""
    return tensor.untyped_storage()._cdata
