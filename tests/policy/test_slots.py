"""Whatever happens between copy and commit, the version that is named is the one in use."""

from __future__ import annotations

import pytest
import torch

from headrace.base.errors import RunError, WeightsError
from headrace.policy.slots import Slots


class Pair:
    """A learner's two tensors and an engine's."""

    def __init__(self) -> None:
        self.source = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
        self.target = {name: tensor.clone() for name, tensor in self.source.items()}
        self.slots = Slots(self.source, self.target)

    def copy(self, version: int):
        for tensor in self.source.values():
            tensor.fill_(version)
        return self.slots.copy(version)

    def publish(self, version: int, parts: int = 1) -> None:
        self.slots.stage(self.copy(version))
        list(self.slots.commit_parts(version, parts))

    def used(self) -> list[float]:
        return [float(tensor.mean()) for tensor in self.target.values()]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_each_version_comes_into_use(parts):
    pair = Pair()
    for version in range(4):
        pair.publish(version, parts)
        assert (pair.used(), pair.slots.committed) == ([version, version], version)


def test_copy_changes_nothing_that_is_in_use():
    pair = Pair()
    pair.publish(0)
    pair.slots.stage(pair.copy(1))
    assert (pair.used(), pair.slots.committed) == ([0, 0], 0)


def test_exchange_in_parts_ends_with_the_last_part():
    pair = Pair()
    pair.publish(0)
    pair.copy(1)
    parts = pair.slots.commit_parts(1, 2)
    next(parts)
    assert (pair.used(), pair.slots.committed) == ([1, 0], 0)
    with pytest.raises(WeightsError, match="version 1 is still coming into use"):
        pair.copy(2)
    assert next(parts, "ended") == "ended"
    pair.publish(2)
    assert pair.used() == [2, 2]


def test_copy_that_was_overwritten_cannot_be_committed():
    pair = Pair()
    pair.publish(0)
    update = pair.copy(1)
    pair.copy(2)
    with pytest.raises(WeightsError, match="version 1 is not the latest copy"):
        pair.slots.stage(update)
    with pytest.raises(WeightsError, match="version 1 is not staged"):
        pair.slots.commit_parts(1, 1)
    list(pair.slots.commit_parts(2, 1))
    assert (pair.used(), pair.slots.committed) == ([2, 2], 2)


def test_version_in_use_is_not_copied_again():
    pair = Pair()
    pair.publish(3)
    for version in (3, 2):
        with pytest.raises(RunError, match=f"version {version} is published already"):
            pair.slots.copy(version)
