"""The kernels for CUDA compile for every generation of cards, and need no more shared memory than it has. No GPU is
needed for that."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.models.paged import triton as paged_triton

triton = pytest.importorskip("triton", reason="Triton is not installed (extra: cuda)")

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""The most shared memory of one program, by compute capability (CUDA C++ Programming Guide, technical
specifications)."""
TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""The number formats and their sizes in bytes."""
SIZES = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)]
"""The sizes of keys and values of the supported architectures; the last are those of latent attention."""


def compiled(name: str, generation: int, dtype: str, constants: dict[str, Any]) -> Any:
    """A kernel as it is for a card of this generation."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = paged_triton.kernel(name)
    types = {"query": f"*{dtype}", "keys": f"*{dtype}", "values": f"*{dtype}", "new": f"*{dtype}", "pool": f"*{dtype}"}
    types |= {"tables": "*i32", "parts": "*fp32", "sums": "*fp32", "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(["positions", "blocks", "places"], "*i64") | dict.fromkeys(constants, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in function.arg_names}
    values = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", generation, 32))


def assert_compiles(generation: int, dtype: str, sizes: tuple[int, int], group: int, *, capped: bool) -> None:
    constants = {**paged_triton.decode_constants(group, sizes, TYPES[dtype]), "CAPPED": capped}
    decode = compiled("decode", generation, dtype, constants)
    assert len(decode.asm["cubin"]) > 1000
    assert decode.metadata.shared <= SHARED_BYTES[generation]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, it is warned of


@pytest.mark.parametrize("generation", SHARED_BYTES)
def test_decoding_compiles_for_every_generation(generation: int) -> None:
    assert_compiles(generation, "bf16", (128, 128), 4, capped=True)
    write = compiled("write", generation, "bf16", {"S": 16, "E": 96, "EP": 128})
    assert write.asm["cubin"]


def test_heads_that_no_card_has_room_for_are_known() -> None:
    assert paged_triton.columns(128, 128, 2) == 64
    assert paged_triton.columns(576, 512, 2) == 16
    assert paged_triton.columns(576, 512, 4) == 0


@pytest.mark.slow
@pytest.mark.parametrize("generation", SHARED_BYTES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size_of_heads_compiles_within_the_memory_of_the_card(
    generation: int, dtype: str, sizes: tuple[int, int]
) -> None:
    if not paged_triton.columns(*sizes, TYPES[dtype]):
        pytest.skip("no card has room for these")
    assert_compiles(generation, dtype, sizes, 8 if sizes[0] <= 128 else 16, capped=False)
