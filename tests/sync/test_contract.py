"""Every transport with every codec keeps the contract: each of them at least once in the fast tests, the other pairs
in the slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.sync.codecs import CODECS
from headrace.sync.config import TRANSPORTS, Route
from headrace.testing.sync import CHECKS, Pair, open_pair

torch.set_num_threads(1)

FAST = {
    *(("shm", "full"), ("shm", "delta"), ("shm", "cast_fp8")),
    *(("files", "delta"), ("http", "cast_bf16"), ("group", "adapter")),
}
PAIRS = [
    pytest.param(*pair, marks=[] if pair in FAST else [pytest.mark.slow])
    for pair in itertools.product(TRANSPORTS.rows, CODECS)
]


def test_every_transport_and_every_codec_is_among_the_fast_ones() -> None:
    assert ({transport for transport, _ in FAST}, {codec for _, codec in FAST}) == (set(TRANSPORTS.rows), set(CODECS))


@pytest.mark.parametrize(("transport", "codec"), PAIRS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport_and_codec_keep_the_contract(
    check: Callable[[Pair], None], transport: str, codec: str, tmp_path: Path
) -> None:
    route = Route(transport=transport, codec=codec, address=str(tmp_path / "place"), deadline_s=10.0)
    with open_pair(route, seed=7) as pair:
        check(pair)
