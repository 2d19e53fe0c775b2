"""What each rank of a learner sends covers the weights exactly once, and what does not is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.base.errors import WeightsError
from headrace.base.types.weights import Manifest, RankLayout
from headrace.learner.parallel.shares import assign_gathered_boxes, local_box
from headrace.models.weights import weight_tensors
from headrace.sync.codecs.forms import Float8, IdentityForm
from headrace.sync.manifest import plan, view
from headrace.sync.pieces import Box, buckets, checksums, make_layout, refuse_incomplete, view_box, whole_boxes

TENSORS = {"a": torch.zeros(7, 3), "b": torch.zeros(()), "c": torch.zeros(4, dtype=torch.bfloat16)}


def layouts(*shares: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[RankLayout, ...]:
    held = [{name: Box(starts=starts, shape=shape) for name, (starts, shape) in share.items()} for share in shares]
    return tuple(make_layout(each, TENSORS, IdentityForm()) for each in held)


REST = {"b": ((), ()), "c": ((0,), (4,))}
WHOLE = [
    ({"a": ((0, 0), (7, 3)), **REST},),
    ({"a": ((0, 0), (4, 3))}, {"a": ((4, 0), (3, 3)), **REST}),
    ({"a": ((0, 0), (7, 2)), **REST}, {"a": ((0, 2), (7, 1))}),
    ({"a": ((0, 0), (4, 2)), **REST}, {"a": ((0, 2), (4, 1))}, {"a": ((4, 0), (3, 3))}, {}),
]
BROKEN = {
    "a gap": ({"a": ((0, 0), (4, 3))}, {"a": ((5, 0), (2, 3)), **REST}),
    "an overlap of the same size": ({"a": ((0, 0), (4, 3))}, {"a": ((3, 0), (3, 3)), **REST}),
    "an overlap of columns": ({"a": ((0, 0), (7, 2)), **REST}, {"a": ((0, 1), (7, 1))}),
    "twice": ({"a": ((0, 0), (7, 3)), **REST}, REST),
    "missing": ({"a": ((0, 0), (7, 3)), "b": ((), ())},),
    "outside": ({"a": ((1, 0), (7, 3)), **REST},),
    "before the beginning": ({"a": ((-1, 0), (7, 3)), **REST},),
    "another number of axes": ({"a": ((0,), (21,)), **REST},),
}


@pytest.mark.parametrize("shares", WHOLE)
def test_parts_that_cover_everything_once_are_taken(shares: Any) -> None:
    refuse_incomplete(layouts(*shares), plan(TENSORS))


@pytest.mark.parametrize("shares", BROKEN.values(), ids=list(BROKEN))
def test_parts_that_do_not_are_refused(shares: Any) -> None:
    with pytest.raises(WeightsError, match="is not a version of the weights"):
        refuse_incomplete(layouts(*shares), plan(TENSORS))


def test_pieces_with_other_numbers_or_places_are_refused() -> None:
    (layout,) = layouts(WHOLE[0][0])
    first, *rest = layout.pieces.entries
    wrong = [
        msgspec.structs.replace(first, offset_bytes=64),
        msgspec.structs.replace(first, num_bytes=1 << 40),
        msgspec.structs.replace(first, dtype="float64"),
        msgspec.structs.replace(first, dtype="Tensor"),
        msgspec.structs.replace(first, name="z"),
    ]
    for entry in wrong:
        pieces = Manifest(entries=(entry, *rest), total_bytes=layout.pieces.total_bytes)
        with pytest.raises(WeightsError, match="is not a version of the weights"):
            refuse_incomplete((msgspec.structs.replace(layout, pieces=pieces),), plan(TENSORS))
    with pytest.raises(WeightsError, match="one after the other"):
        refuse_incomplete((msgspec.structs.replace(layout, starts=layout.starts[:-1]),), plan(TENSORS))


@pytest.mark.parametrize("seed", range(20))
def test_buckets_carry_every_byte_of_a_rank_to_its_place(seed: int) -> None:
    """Random tensors, random cuts over random ranks, small buckets: the image is that of the whole tensors."""
    rng = np.random.default_rng(seed)
    tensors = {f"t{n}": _random_tensor(rng) for n in range(8)}
    manifest = plan(tensors)
    shares = _cut(rng, tensors, int(rng.integers(1, 5)))
    made = tuple(make_layout(share, tensors, IdentityForm()) for share in shares)
    refuse_incomplete(made, manifest)
    image = memoryview(bytearray(manifest.total_bytes))
    entries = {entry.name: entry for entry in manifest.entries}
    largest = int(rng.choice([1, 64, 200, 1 << 20]))
    for layout in made:
        sent = _packed(layout, tensors)
        found = buckets(layout, largest)
        ends = [bucket.start + bucket.num_bytes for bucket in found]
        assert all(start >= end for start, end in zip([b.start for b in found[1:]], ends, strict=False))
        for bucket in found:
            rows = max(block.entry.num_bytes for block in bucket.blocks)
            assert bucket.num_bytes <= largest or (len(bucket.blocks) == 1 and rows == bucket.num_bytes)
            payload = sent[bucket.start : bucket.start + bucket.num_bytes]
            for block, arrived in zip(bucket.blocks, bucket.views(payload), strict=True):
                view_box(image, entries[block.name], block.starts, block.entry.shape).copy_(arrived)
    for name, tensor in tensors.items():
        assert torch.equal(view(image, entries[name]), tensor)
    hashes = [number for _, number in checksums(image, manifest, made)]
    again = [number for layout in made for number in _hashes(layout, tensors)]
    assert hashes == again


def test_scales_of_rows_belong_to_the_rows_of_the_box() -> None:
    tensors = {"w": torch.zeros(6, 2, 5)}
    held = {"w": Box(starts=(2, 0, 0), shape=(3, 2, 5))}
    assert make_layout(held, tensors, Float8()).starts == ((2, 0, 0), (4, 0))
    parts = Float8().parts("w", tensors["w"])
    first = {"w": Box(starts=(0, 0, 0), shape=(2, 2, 5))}, {"w": Box(starts=(5, 0, 0), shape=(1, 2, 5))}
    refuse_incomplete([make_layout(each, tensors, Float8()) for each in (*first, held)], plan(parts))


def _random_tensor(rng: np.random.Generator) -> Tensor:
    shape = [int(size) for size in rng.integers(1, 9, size=int(rng.integers(0, 4)))]
    dtype = [torch.float32, torch.bfloat16, torch.int64][int(rng.integers(3))]
    return torch.from_numpy(np.asarray(rng.normal(size=shape) * 100)).to(dtype)


def _cut(rng: np.random.Generator, tensors: dict[str, Tensor], world: int) -> list[dict[str, Box]]:
    shares: list[dict[str, Box]] = [{} for _ in range(world)]
    for name, box in whole_boxes(tensors).items():
        axes = [axis for axis, size in enumerate(box.shape) if size > 1]
        if not axes or rng.random() < 0.3:
            shares[int(rng.integers(world))][name] = box
            continue
        axis = int(rng.choice(axes))
        places = np.sort(rng.integers(0, box.shape[axis] + 1, size=world - 1))
        for share, first, last in zip(shares, [0, *places], [*places, box.shape[axis]], strict=True):
            starts, shape = list(box.starts), list(box.shape)
            starts[axis], shape[axis] = int(first), int(last - first)
            if shape[axis]:
                share[name] = Box(starts=tuple(starts), shape=tuple(shape))
    return shares


def _packed(layout: RankLayout, tensors: dict[str, Tensor]) -> memoryview:
    memory = memoryview(bytearray(layout.pieces.total_bytes))
    for piece, starts in zip(layout.pieces.entries, layout.starts, strict=True):
        view(memory, piece).copy_(_box(tensors[piece.name], starts, piece.shape))
    return memory


def _box(tensor: Tensor, starts: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))]


def _hashes(layout: RankLayout, tensors: dict[str, Tensor]) -> list[int]:
    from headrace.sync import manifest

    return list(manifest.checksums(_packed(layout, tensors), layout.pieces))


MODELS = ["llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "mistral", "glm4_moe", "mamba2", "falcon_h1", "phi3"]
MESHES = {"2": (2, 1), "3": (3, 1), "tensor 2": (1, 2), "4 x 2": (4, 2), "3 x 2": (3, 2), "8 x 4": (8, 4)}
"""Ranks that shard the layers (FSDP2), and ranks that cut their matrices."""
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), ("o_proj", "down_proj")
CASES = [(model, mesh) for model in MODELS for mesh in MESHES]
GATE = [("qwen3", "3 x 2"), ("qwen3_moe", "4 x 2")]


@pytest.mark.parametrize(
    ("model", "mesh"), [case if case in GATE else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_element_of_a_sharded_model_is_sent_once(model: str, mesh: str) -> None:
    """Each rank of a mesh shards the model as it would among the others; together they send it all, evenly."""
    samples, tensor = MESHES[mesh]
    held = []
    for rank in range(samples * tensor):
        with _one_of(rank, samples * tensor):
            named = weight_tensors(_sharded(model, samples, tensor))
            held.append([local_box(name, each) for name, each in named.items()])
            shapes = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in named.items()}
    shares = assign_gathered_boxes(shapes, held)
    manifest = plan(shapes)
    refuse_incomplete([make_layout(share, shapes, IdentityForm()) for share in shares], manifest)
    sizes = [sum(int(np.prod(box.shape)) * shapes[name].itemsize for name, box in share.items()) for share in shares]
    largest = max(shape.numel() * shape.itemsize for shape in shapes.values())
    assert max(sizes) <= manifest.total_bytes / len(sizes) + largest


@contextmanager
def _one_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sharded(kind: str, samples: int, tensor: int) -> nn.Module:
    config = AutoConfig.for_model(kind, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # torch keeps meshes by their equality, which the ranks of this one process must not have
    along = (f"samples {dist.get_rank()}", f"tensor {dist.get_rank()}")
    mesh = init_device_mesh("cpu", (samples, tensor), mesh_dim_names=along)
    for name, module in model.named_modules():
        end = name.rpartition(".")[2]
        if tensor > 1 and isinstance(module, nn.Linear) and end in (*COLUMNS, *ROWS):
            axis = 0 if end in COLUMNS else 1
            distribute_module(module, mesh[along[1]], lambda _, part, mesh, axis=axis: _cut_module(part, mesh, axis))
    trunk: Any = model.base_model
    for layer in trunk.layers:
        fully_shard(layer, mesh=mesh[along[0]])
    return fully_shard(model, mesh=mesh[along[0]])


def _cut_module(module: nn.Module, mesh: Any, axis: int) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        along = Shard(min(axis, parameter.ndim - 1))
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [along])))
