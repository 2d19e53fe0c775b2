"""Differences between images: exact, short, and never believed when damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import NeedsFull
from headrace.sync.codecs import delta
from headrace.sync.manifest import plan, private_memory

torch.set_num_threads(1)

MANIFEST = plan({"a": torch.zeros(300, dtype=torch.bfloat16), "b": torch.zeros(70)})
SIZE = MANIFEST.total_bytes


def changed(old: memoryview, places: dict[int, int]) -> memoryview:
    new = private_memory(len(old))
    new[:] = old
    for place, bits in places.items():
        new[place % len(old)] ^= bits
    return new


def image(seed: int) -> memoryview:
    made = private_memory(SIZE)
    made[:] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
    return made


@given(st.integers(0, 9), st.dictionaries(st.integers(0, SIZE - 1), st.integers(1, 255), max_size=30))
def test_image_comes_back_bit_for_bit(seed: int, places: dict[int, int]) -> None:
    old = image(seed)
    new, out = changed(old, places), image(99)
    payload = delta.encode(new, old, MANIFEST)
    assert payload is not None
    delta.decode(memoryview(payload), old, out, MANIFEST)
    assert out == new


def test_equal_images_differ_by_headers_alone() -> None:
    payload = delta.encode(image(1), image(1), MANIFEST)
    assert payload == struct.pack("<II", 0, 0)


def test_difference_that_is_no_shorter_is_not_made() -> None:
    assert delta.encode(image(1), image(2), MANIFEST) is None


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_difference_is_refused_or_gives_another_image(place: int, bits: int) -> None:
    """Never the right image, never another error: the checksums of the tensors see the rest."""
    old = image(3)
    new = changed(old, {7: 1, 200: 9, SIZE - 1: 128})
    payload = delta.encode(new, old, MANIFEST)
    assert payload is not None
    damaged = changed(memoryview(payload), {place: bits})
    out = private_memory(SIZE)
    try:
        delta.decode(damaged, old, out, MANIFEST)
    except NeedsFull:
        return
    assert out != new or damaged[:-4] == payload[:-4]  # the last four bytes of a frame are its own checksum


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "ends at byte 0"),
        (struct.pack("<II", 1, 50), "claims 1 changes in 50 bytes"),
        (struct.pack("<II", 2**32 - 1, 0), "claims 4294967295 changes"),
        (struct.pack("<II", 3, 4) + b"\0\0\0\0", "damaged"),
        (struct.pack("<II", 0, 0) + b"more", "4 bytes follow"),
    ],
)
def test_nonsense_is_refused_in_words_before_anything_is_unpacked(payload: bytes, words: str) -> None:
    with pytest.raises(NeedsFull, match=words):
        delta.decode(memoryview(payload), image(1), image(2), MANIFEST)


def test_frame_that_would_unpack_to_more_than_the_image_has_is_refused() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    with pytest.raises(NeedsFull, match="unpacks to 100000000 bytes instead of 18"):
        delta.decode(memoryview(struct.pack("<II", 3, len(bomb)) + bomb), image(1), image(2), MANIFEST)


def test_hundred_updates_of_adamw_arrive_bit_for_bit_in_a_twentieth_of_the_bytes() -> None:
    """bfloat16 weights rounded from float32 ones, lr 1e-6: each update sent as the difference from the one before."""
    rng = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(400, 500, generator=rng) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=1e-6)
    published = master.detach().to(torch.bfloat16)
    manifest = plan({"w": published})
    held, spare = private_memory(manifest.total_bytes), private_memory(manifest.total_bytes)
    held[:] = memoryview(published.view(torch.uint8).numpy().reshape(-1))
    shares = []
    for _ in range(100):
        master.grad = torch.randn(master.shape, generator=rng)
        optimizer.step()
        new = memoryview(master.detach().to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1))
        payload = delta.encode(new, held, manifest)
        assert payload is not None
        delta.decode(memoryview(payload), held, spare, manifest)
        assert spare == new
        held, spare = spare, held
        shares.append(len(payload) / len(new))
    assert np.mean(shares) < 0.05
    assert max(shares) < 0.05
