"""What a rank holds of a tensor is one box, or it is refused by name."""

from __future__ import annotations

import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.learner.parallel import shares
from headrace.sync.pieces import Box


def test_what_is_not_sharded_is_held_whole() -> None:
    assert shares.local_box("w", torch.zeros(2, 3)) == Box(starts=(0, 0), shape=(2, 3))
    assert shares.local_box("b", torch.zeros(())) == Box(starts=(), shape=())


def test_several_ranges_of_an_axis_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fused matrix has them that is cut so that each rank has some of each of its parts."""
    monkeypatch.setattr(shares, "local_ranges", lambda tensor: [[range(4, 7), range(2)], [range(3)]])
    with pytest.raises(ConfigError, match=r"2 ranges of gate_up") as refused:
        shares.local_box("gate_up", torch.zeros(8, 3))
    assert "sync.transport = 'http'" in refused.value.remedy


def test_a_part_that_several_ranks_hold_is_sent_by_the_one_with_the_least_to_send() -> None:
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2), "none": torch.zeros(0, 2), "cut": torch.zeros(4)}
    both = [Box(starts=(0, 0), shape=(4, 2))] * 2 + [Box(starts=(0, 0), shape=(0, 2))]
    first, second = Box(starts=(0,), shape=(4,)), Box(starts=(4,), shape=(0,))
    shared = shares.assign_gathered_boxes(tensors, [[*both, first], [*both, second]])
    assert [sorted(share) for share in shared] == [["a", "cut", "none"], ["b"]]
