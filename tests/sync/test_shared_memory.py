"""Weights through shared memory: laid out, copied, announced, verified, committed; refused where anything is off."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.base.errors import WeightsError
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.sync.config import Route
from headrace.sync.manifest import ALIGNMENT_BYTES, plan
from headrace.sync.publisher import Publisher
from headrace.sync.receiver import Receiver
from headrace.sync.transports import make_publisher, make_receiver

torch.set_num_threads(1)


def weights(seed: int, *, width: int = 5) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, width, generator=rng),
        "norm.weight": torch.randn(3, generator=rng).to(torch.bfloat16),
        "scale": torch.randn((), generator=rng),
        "count": torch.tensor([seed], dtype=torch.int64),
    }


@dataclass(slots=True, kw_only=True)
class Pair:
    path: Path
    learner: dict[str, Tensor]
    engine: dict[str, Tensor]
    publisher: Publisher
    receiver: Receiver

    def learn(self, seed: int) -> dict[str, Tensor]:
        """New weights, in place."""
        new = weights(seed)
        for name, tensor in self.learner.items():
            tensor.copy_(new[name])
        return new

    def publish(self, version: int, slot: int) -> WeightUpdate:
        self.publisher.copy(slot)
        return self.publisher.announce(version, slot)

    def transfer(self, version: int, slot: int) -> None:
        self.receiver.stage(self.publish(version, slot))
        self.receiver.commit(version)


def paired(path: Path, learner: dict[str, Tensor], engine: dict[str, Tensor]) -> Pair:
    return Pair(
        path=path,
        learner=learner,
        engine=engine,
        publisher=make_publisher(Route(address=str(path)), learner),
        receiver=make_receiver(Route(), engine),
    )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = paired(tmp_path / "weights", weights(1), weights(100))
    yield made
    made.publisher.close()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(1, 40))))
def test_tensors_lie_apart_and_aligned(shapes: list[tuple[torch.dtype, int]]) -> None:
    manifest = plan({str(index): torch.zeros(size, dtype=dtype) for index, (dtype, size) in enumerate(shapes)})
    end = 0
    for entry, (dtype, size) in zip(manifest.entries, shapes, strict=True):
        assert entry.offset_bytes % ALIGNMENT_BYTES == 0
        assert entry.offset_bytes >= end
        assert entry.num_bytes == size * dtype.itemsize
        end = entry.offset_bytes + entry.num_bytes
    assert end <= manifest.total_bytes
    assert manifest.total_bytes % ALIGNMENT_BYTES == 0


def test_manifest_says_dtype_and_shape_in_words_that_travel() -> None:
    manifest = plan(weights(0))
    assert [(entry.name, entry.dtype, entry.shape) for entry in manifest.entries] == [
        ("embed.weight", "float32", (7, 5)),
        ("norm.weight", "bfloat16", (3,)),
        ("scale", "float32", ()),
        ("count", "int64", (1,)),
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def test_committed_weights_are_the_learners_bit_for_bit(pair: Pair) -> None:
    for version, slot in enumerate((0, 1, 0, 1)):
        new = pair.learn(version + 10)
        pair.transfer(version, slot)
        assert equal(pair.engine, new)


def test_staging_changes_nothing_until_the_commit(pair: Pair) -> None:
    pair.transfer(0, 0)
    before = {name: tensor.clone() for name, tensor in pair.engine.items()}
    new = pair.learn(2)
    pair.receiver.stage(pair.publish(1, 1))
    assert equal(pair.engine, before)
    pair.receiver.commit(1)
    assert equal(pair.engine, new)


def test_commit_is_a_change_of_pointers_into_the_committed_slot(pair: Pair) -> None:
    pair.transfer(0, 0)
    first = {name: tensor.data_ptr() for name, tensor in pair.engine.items()}
    pair.transfer(1, 1)
    second = {name: tensor.data_ptr() for name, tensor in pair.engine.items()}
    pair.transfer(2, 0)
    assert {name: tensor.data_ptr() for name, tensor in pair.engine.items()} == first
    apart = {second[name] - first[name] for name in first}
    assert apart == {pair.publisher.manifest.total_bytes}
    offsets = {entry.name: entry.offset_bytes for entry in pair.publisher.manifest.entries}
    assert {name: first[name] - first["embed.weight"] for name in first} == offsets


def test_committed_slot_is_shared_and_the_other_can_be_filled_meanwhile(pair: Pair) -> None:
    pair.transfer(0, 0)
    old = {name: tensor.clone() for name, tensor in pair.engine.items()}
    pair.learn(5)
    pair.publisher.copy(1)
    assert equal(pair.engine, old), "the learner wrote into weights that are in use"


def test_parameters_of_a_model_are_views_after_a_commit(tmp_path: Path) -> None:
    learner, engine = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    pair = paired(tmp_path / "weights", dict(learner.named_parameters()), dict(engine.named_parameters()))
    pair.transfer(0, 0)
    x = torch.ones(2, 4)
    assert torch.equal(engine(x), learner(x))
    assert isinstance(engine.weight, torch.nn.Parameter)
    pair.publisher.close()


def test_learner_that_lists_its_tensors_in_another_order_still_fits(tmp_path: Path) -> None:
    same_shape = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}
    engine = {"b": torch.zeros(4), "a": torch.zeros(4)}
    pair = paired(tmp_path / "weights", same_shape, engine)
    pair.transfer(0, 0)
    assert equal(engine, same_shape)
    pair.publisher.close()


@pytest.mark.parametrize("version", [0, 2, 3])
def test_version_that_is_not_newer_is_refused(pair: Pair, version: int) -> None:
    pair.transfer(3, 0)
    with pytest.raises(WeightsError, match=f"version {version} is not newer than the committed version 3"):
        pair.receiver.stage(pair.publish(version, 1))


def test_only_the_version_that_is_staged_can_be_committed(pair: Pair) -> None:
    with pytest.raises(WeightsError, match="nothing is staged"):
        pair.receiver.commit(0)
    pair.receiver.stage(pair.publish(1, 0))
    with pytest.raises(WeightsError, match="commit of version 2, but version 1 is staged"):
        pair.receiver.commit(2)
    pair.receiver.commit(1)
    with pytest.raises(WeightsError, match="nothing is staged"):
        pair.receiver.commit(1)


def test_every_difference_of_layout_is_listed(pair: Pair, tmp_path: Path) -> None:
    other = weights(1, width=6)
    other["norm.weight"] = other["norm.weight"].float()
    other["extra"] = torch.zeros(1)
    del other["count"]
    publisher = make_publisher(Route(address=str(tmp_path / "other")), other)
    publisher.copy(0)
    with pytest.raises(WeightsError) as refused:
        pair.receiver.stage(publisher.announce(0, 0))
    for difference in (
        "count: missing",
        "embed.weight: float32[7, 6], expected float32[7, 5]",
        "extra: not a tensor of this model",
        "norm.weight: float32[3], expected bfloat16[3]",
    ):
        assert difference in str(refused.value)
    assert "scale" not in str(refused.value)
    publisher.close()


def file_of(pair: Pair) -> mmap.mmap:
    with pair.path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "scale", "count"])
def test_flipped_bit_is_refused_with_the_name_of_its_tensor(pair: Pair, name: str) -> None:
    pair.transfer(0, 0)
    before = {each: tensor.clone() for each, tensor in pair.engine.items()}
    pair.learn(9)
    update = pair.publish(1, 1)
    entry = next(entry for entry in update.manifest.entries if entry.name == name)
    with file_of(pair) as buffer:
        buffer[update.manifest.total_bytes + entry.offset_bytes + entry.num_bytes - 1] ^= 1
    with pytest.raises(WeightsError, match=f"version 1: tensor {name} hashes to"):
        pair.receiver.stage(update)
    assert equal(pair.engine, before)
    with pytest.raises(WeightsError):
        pair.receiver.commit(1)
    pair.transfer(2, 1)  # published again, it is taken


def test_announcement_of_the_wrong_slot_is_refused(pair: Pair) -> None:
    pair.publish(0, 1)
    pair.learn(3)
    update = pair.publish(0, 0)
    with pytest.raises(WeightsError, match="hashes to"):
        pair.receiver.stage(msgspec.structs.replace(update, slot=1))


@pytest.mark.parametrize("changes", [{"slot": 2}, {"slot": -1}, {"checksums": (1, 2)}, {"checksums": ()}])
def test_announcement_that_cannot_be_right_is_refused(pair: Pair, changes: dict[str, object]) -> None:
    update = msgspec.structs.replace(pair.publish(0, 0), **changes)
    with pytest.raises(WeightsError, match="is announced in slot"):
        pair.receiver.stage(update)


def test_buffer_that_is_filled_again_between_two_versions_is_never_committed(pair: Pair) -> None:
    """A copy that is still being made while the engine verifies: neither version, so refused."""
    update = pair.publish(0, 0)
    pair.learn(4)
    pair.publisher.copy(0)
    with pytest.raises(WeightsError, match="hashes to"):
        pair.receiver.stage(update)


def test_truncated_buffer_is_refused_before_it_is_mapped(pair: Pair) -> None:
    update = pair.publish(0, 0)
    with pair.path.open("r+b") as file:
        file.truncate(100)
        with pytest.raises(WeightsError, match="has 100 bytes, the manifest needs"):
            pair.receiver.stage(update)
        file.truncate(pair.publisher.manifest.total_bytes * 2)


def test_missing_buffer_is_refused_in_words(pair: Pair) -> None:
    update = pair.publish(0, 0)
    pair.path.unlink()
    with pytest.raises(WeightsError, match="cannot be opened") as refused:
        pair.receiver.stage(update)
    assert "one machine" in refused.value.remedy


def test_buffer_that_does_not_fit_the_memory_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    vast = torch.zeros(1).expand(1 << 50)
    with pytest.raises(WeightsError) as refused:
        make_publisher(Route(address=str(tmp_path / "weights")), {"vast": vast})
    assert f"{2 * 4 * (1 << 50)} bytes of shared memory" in str(refused.value)
    assert "df -h" in refused.value.remedy
    assert not (tmp_path / "weights").exists()


def test_closed_publisher_leaves_no_file_and_the_engine_its_weights(pair: Pair) -> None:
    new = pair.learn(6)
    pair.transfer(0, 0)
    pair.publisher.close()
    assert not pair.path.exists()
    assert equal(pair.engine, new)


def test_buffer_is_private_to_the_user(pair: Pair) -> None:
    assert pair.path.stat().st_mode & 0o077 == 0
