"""A sequence in blocks gives the numbers that it gives whole, however it is cut into passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.paged import IMPLEMENTATIONS
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, LayerShape, PagedCache
from headrace.models.paged.plan import PagedPlan, cache_shapes
from tests.models.kinds import KINDS

CPU = torch.device("cpu")
MAKERS = {name: maker for name, offer in IMPLEMENTATIONS.items() if (maker := offer(torch.float32, CPU)) is not None}
LONGEST = 70
BLOCKS_EACH = -(-LONGEST // BLOCK)
NOWHERE = 0
"""A block of no sequence: it holds what is not finite, and pads the tables."""


@dataclass
class Sequence:
    ids_T: np.ndarray
    shared: int = 0
    """Blocks that belong to the first sequence."""
    done: int = 0
    table: list[int] = field(default_factory=list)


def rows_of(sequences: list[Sequence], rng: np.random.Generator) -> tuple[list[Sequence], list[int], int]:
    """Some sequences go on by some tokens: one, or a chunk. The first computes for those that share with it."""
    chosen = [s for s in sequences if s.done < len(s.ids_T) and (s is sequences[0] or rng.random() < 0.7)]
    counts = {id(s): int(rng.integers(1, min(len(s.ids_T) - s.done, rng.choice([1, 20, 70])) + 1)) for s in chosen}
    first = sequences[0].done + counts.get(id(sequences[0]), 0)
    chosen = [s for s in chosen if s.done > s.shared * BLOCK or first >= s.shared * BLOCK]
    decode = [s for s in chosen if counts[id(s)] == 1 and rng.random() < 0.8]  # one token may be a prompt's last chunk
    rows = decode + [s for s in chosen if not any(s is other for other in decode)]
    return rows, [counts[id(s)] for s in rows], len(decode)


def geometry_of(rows: list[Sequence], counts: list[int], num_decode: int) -> Geometry:
    tables_RB = np.full((len(rows), BLOCKS_EACH + 1), NOWHERE, np.int32)
    for row, sequence in enumerate(rows):
        tables_RB[row, : len(sequence.table)] = sequence.table
    return Geometry(
        tables_RB=tables_RB,
        starts_R=np.array([s.done for s in rows], np.int64),
        counts_R=np.array(counts, np.int64),
        num_decode=num_decode,
    )


def make_sequences(rng: np.random.Generator, vocab: int) -> list[Sequence]:
    lengths = [LONGEST, *rng.integers(1, LONGEST + 1, 2).tolist(), 50, 40, 37]
    sequences = [Sequence(rng.integers(0, vocab, length)) for length in lengths]
    blocks = rng.permutation(np.arange(1, len(lengths) * BLOCKS_EACH + 1)).tolist()
    for number, sequence in enumerate(sequences):
        sequence.shared = max(0, number - 2)  # the last ones share 1, 2, … blocks
        if sequence.shared * BLOCK >= len(sequence.ids_T):
            sequence.shared = (len(sequence.ids_T) - 1) // BLOCK
        sequence.ids_T[: sequence.shared * BLOCK] = sequences[0].ids_T[: sequence.shared * BLOCK]
        sequence.table = sequences[0].table[: sequence.shared] + blocks[: BLOCKS_EACH - sequence.shared]
        sequence.done = sequence.shared * BLOCK
        del blocks[: BLOCKS_EACH - sequence.shared]
    return sequences


@torch.inference_mode()
def in_blocks(model: PreTrainedModel, sequences: list[Sequence], make: AttentionMaker, seed: int) -> list[Tensor]:
    """The logits of every sequence's own tokens, computed over as many passes as it takes."""
    rng = np.random.default_rng(seed)
    cache = PagedCache(cache_shapes(model), len(sequences) * BLOCKS_EACH + 1, dtype=model.dtype, device=CPU)
    for pools in cache.layers:
        for pool in pools:
            pool.fill_(100.0)  # what others left behind counts for nothing
            pool[NOWHERE] = torch.nan
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(s.done < len(s.ids_T) for s in sequences):
        rows, counts, num_decode = rows_of(sequences, rng)
        if not rows:
            continue
        plan = PagedPlan(cache, geometry_of(rows, counts, num_decode), make, CPU)
        news = [s.ids_T[s.done : s.done + count] for s, count in zip(rows, counts, strict=True)]
        pieces = forward(model, torch.from_numpy(np.concatenate(news)), plan).split(counts)
        for sequence, count, piece in zip(rows, counts, pieces, strict=True):
            logits[next(i for i, s in enumerate(sequences) if s is sequence)].append(piece)
            sequence.done += count
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
def test_chunks_and_shared_blocks_give_the_logits_of_whole_sequences(
    name: str, kind: str, model_dir: Callable[[str], Path]
) -> None:
    model = load_model(ModelConfig(path=str(model_dir(kind))))
    for seed in range(3):
        sequences = make_sequences(np.random.default_rng(seed), model.config.vocab_size)
        begins = [s.done for s in sequences]
        paged = in_blocks(model, sequences, MAKERS[name], seed)
        lengths = [len(s.ids_T) for s in sequences]
        with torch.inference_mode():
            ids_N = torch.from_numpy(np.concatenate([s.ids_T for s in sequences]))
            whole = forward(model, ids_N, PackedPlan(lengths)).split(lengths)
        for begin, got, expected in zip(begins, paged, whole, strict=True):
            torch.testing.assert_close(got, expected[begin:], atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_every_layer_says_what_it_stores(model_dir: Callable[[str], Path]) -> None:
    grouped = load_model(ModelConfig(path=str(model_dir("qwen3"))))
    assert cache_shapes(grouped) == (LayerShape(heads=2, key_size=8, value_size=8),) * 2
    latent = load_model(ModelConfig(path=str(model_dir("deepseek_v3"))))
    assert cache_shapes(latent) == (LayerShape(heads=4, key_size=24, value_size=8),) * 2
