"""The benchmark of the learner, cut down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from headrace.models.tiny import TinySpec
from headrace.wings.bench import learner, learner_worker, run_benchmark
from headrace.wings.bench.learner_trees import draw_paths, tree_cases

ORDER = {"prompt": 3, "lengths": [1, 4, 2, 2, 2, 2, 2, 2, 7, 1], "vocab": 20, "seed": 5}


@pytest.mark.slow
def test_a_quick_run_measures_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "HEADS", ("tiled",))  # each is a process
    report = run_benchmark("learner", quick=True, threads=1)
    by_side = {row["side"]: row for row in report.rows if "side" in row}
    assert by_side["learner"]["tok_s"] > 0
    assert by_side["padded"]["peak_mb"] > by_side["padded"]["loaded_mb"] > 0
    assert [row["what"].split(",")[0] for row in report.rows if "on_s" in row] == [
        "shared prefixes", "LoRA of rank 16 instead of all weights", "routing replay", *["prefix trees"] * 4,
    ]  # fmt: skip
    assert 0 < next(row["used"] for row in report.rows if "used" in row) < 1
    assert [target.target for target in report.targets[:2]] == [">= 2", ">= 0.55"]
    assert len(report.targets) == 12


def test_operations_are_those_of_matrices_head_and_attention() -> None:
    spec = TinySpec(vocab="abcde", hidden_size=4, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=6)
    matrices = 3 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
    attention = 3 * 4 * (5**2 + 7**2)
    assert learner.step_flop(spec, 2, (3, 5)) == 6 * (12 * matrices + 8 * (4 * 8) + attention)


def test_samples_of_a_group_answer_one_prompt() -> None:
    batch = learner_worker.make_batch(9, ORDER)
    samples = np.split(batch.ids_N, np.cumsum(batch.lengths_S)[:-1])
    prompts = [sample[:3].tolist() for sample in samples]
    assert prompts[:8] == [prompts[0]] * 8
    assert prompts[8:] == [prompts[8]] * 2 != [prompts[0]] * 2
    assert batch.num_loss_tokens == sum(ORDER["lengths"])
    assert batch.ids_N.min() > 0  # which is what padding is told by
    assert (learner_worker.make_batch(10, ORDER).ids_N == batch.ids_N).all()


def test_padded_batches_hold_every_token_once() -> None:
    batch = learner_worker.make_batch(0, ORDER)
    first, second = learner_worker.padded_batches(batch)
    assert first[0].shape == (8, 7)
    assert second[0].shape == (2, 10)
    ids_N = torch.cat([ids_BL[ids_BL > 0] for ids_BL, _, _ in (first, second)])
    assert ids_N.tolist() == batch.ids_N.tolist()
    assert int(first[1].sum() + second[1].sum()) == batch.num_loss_tokens


@pytest.mark.parametrize("side", ["dense", "chunked", "tiled"])
def test_memory_under_a_head_is_at_least_its_gradient(side: str) -> None:
    answer = learner_worker.SIDES[side]("").handle({"tokens": 64, "vocab": 200_000, "hidden": 32})
    assert answer["extra_bytes"] > 200_000 * 32 * 4
    assert answer["seconds"] > 0


def test_the_ways_to_logprobs_agree() -> None:
    draws = torch.Generator().manual_seed(1)
    hidden_PD, weight_VD = torch.randn(70, 4, generator=draws), torch.randn(2**18, 4, generator=draws)  # two chunks
    ids_P = torch.randint(2**18, (70,), generator=draws)
    ways = (learner_worker._dense, learner_worker._chunked, learner_worker._tiled)
    dense_P, chunked_P, tiled_P = (way(hidden_PD, weight_VD, ids_P) for way in ways)
    torch.testing.assert_close(chunked_P, dense_P, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tiled_P, dense_P, rtol=1e-5, atol=1e-5)


def test_the_trees_of_the_benchmark_have_the_rows_that_it_names() -> None:
    """No id is drawn twice, so that no two samples begin alike by chance."""
    rows = []
    for case in tree_cases(quick=False):
        numbers = itertools.count()
        paths = draw_paths(case.shape, lambda count, n=numbers: np.array([next(n) for _ in range(count)]))
        begun = {tuple(ids[:place].tolist()) for ids in paths.ids_S for place in range(1, len(ids) + 1)}
        rows.append((sum(map(len, paths.ids_S)), len(begun)))
        assert all(prompt < len(ids) for prompt, ids in zip(paths.prompts_S, paths.ids_S, strict=True))
    assert rows == [(5376, 2816), (8064, 3712), (40400, 6336), (5376, 5376)]
