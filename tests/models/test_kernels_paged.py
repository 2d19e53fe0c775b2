from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.models.attention import Rule
from headrace.models.paged.base import Geometry, LayerShape, PagedCache
from headrace.models.paged.compiled import maker

CPU = torch.device("cpu")
SINKS = torch.linspace(-2, 3, 16)
CASES = {  # heads, key-value heads, key size, value size, rule, lengths
    "grouped": (8, 4, 64, 64, Rule(layer=0, scale=0.125), (300, 1, 17, 16, 129)),
    "window": (6, 2, 32, 48, Rule(layer=0, scale=0.2, window=20), (200, 5)),
    "softcap": (5, 5, 24, 20, Rule(layer=0, scale=0.2, window=150, softcap=5.0), (200, 5, 333)),
    "sinks": (16, 1, 80, 128, Rule(layer=0, scale=0.2, sinks_H=SINKS), (200, 5)),
}
Case = tuple[int, int, int, int, Rule, tuple[int, ...]]


def double(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """One sequence in double precision."""
    q, (k, v) = q.double(), (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    apart = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = torch.einsum("lhe,mhe->hlm", q, k) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill((apart < 0) | (apart >= (rule.window or len(q))), -torch.inf)
    if rule.sinks_H is not None:
        scores = torch.cat([scores, rule.sinks_H.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hlm,mhe->lhe", scores.softmax(-1)[..., : len(q)], v)


class Setup:
    def __init__(self, case: Case) -> None:
        heads, kv_heads, key, value, self.rule, self.lengths = case
        rng = torch.Generator().manual_seed(0)
        self.num, self.width = len(self.lengths), -(-max(self.lengths) // 16)
        self.cache = PagedCache(
            [LayerShape(heads=kv_heads, key_size=key, value_size=value)],
            self.num * self.width,
            dtype=torch.float32,
            device="cpu",
        )
        self.tables = torch.randperm(self.num * self.width, generator=rng).view(self.num, -1).numpy().astype(np.int32)
        sizes = ((heads, key), (kv_heads, key), (kv_heads, value))
        self.qkv = [[torch.randn(n, *size, generator=rng) * 1.5 for size in sizes] for n in self.lengths]

    def attend(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> list[Tensor]:
        make = maker()
        if make is None:
            pytest.skip("no kernels")
        geometry = Geometry(tables_RB=self.tables[rows], starts_R=starts, counts_R=counts, num_decode=0)
        ranges = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        joined = [torch.cat([self.qkv[r][j][at] for r, at in zip(rows, ranges, strict=True)]) for j in range(3)]
        out = make(geometry, CPU).attend((joined[0], joined[1], joined[2]), self.cache.layers[0], self.rule)
        return list(out.split(counts.tolist()))

    def whole(self) -> list[Tensor]:
        return self.attend(np.arange(self.num), np.zeros(self.num, np.int64), np.array(self.lengths))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_that_of_double_precision_whatever_lay_in_the_blocks(case: Case) -> None:
    setup = Setup(case)
    for pool in setup.cache.layers[0]:
        pool.fill_(torch.nan)
    for out, qkv in zip(setup.whole(), setup.qkv, strict=True):
        wanted = double(*qkv, setup.rule)
        assert float((out - wanted).abs().max() / wanted.abs().max()) < 5e-6


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decoding_and_any_chunking_give_the_bits_of_one_prefill(case: Case) -> None:
    setup, rng = Setup(case), np.random.default_rng(0)
    whole = setup.whole()
    done, lengths = np.zeros(setup.num, np.int64), np.array(setup.lengths)
    before = torch.get_num_threads()
    while (done < lengths).any():
        rows = rng.permutation(np.flatnonzero(done < lengths))[: rng.integers(1, setup.num + 1)]
        wanted = np.where(rng.random(len(rows)) < 0.5, 1, rng.integers(1, 40, len(rows)))
        counts = np.minimum(wanted, lengths[rows] - done[rows])
        torch.set_num_threads(int(rng.integers(1, 3)))
        for row, count, out in zip(rows, counts, setup.attend(rows, done[rows], counts), strict=True):
            assert torch.equal(out, whole[row][done[row] : done[row] + count])
        done[rows] += counts
    torch.set_num_threads(before)
