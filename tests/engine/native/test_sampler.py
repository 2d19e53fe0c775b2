"""The sampler draws from exactly the distribution whose logprobs it reports."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.native.sampler import sample, splitmix, uniforms

LOGITS = st.lists(st.floats(-30, 30) | st.just(-float("inf")), min_size=1, max_size=30).filter(
    lambda row: max(row) > -float("inf")
)
LARGEST = 1 - 2.0**-52


def draw(row: list[float], uniform: float, temperature: float = 1.0) -> tuple[int, float, bool]:
    drawn = sample(
        torch.tensor([row]), torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64)
    )  # fmt: skip
    return drawn.ids_R.item(), drawn.logprobs_R.item(), drawn.sound_R.item()


@given(LOGITS, st.sampled_from([0.0, LARGEST]) | st.floats(0, LARGEST), st.floats(0.1, 10))
def test_token_is_where_the_uniform_falls_and_never_impossible(row: list[float], uniform: float, hot: float) -> None:
    token, logprob, sound = draw(row, uniform, hot)
    expected = (torch.tensor(row) / hot).log_softmax(-1)
    assert sound
    assert expected[token] > -torch.inf
    np.testing.assert_allclose(logprob, expected[token].item(), rtol=1e-5, atol=1e-5)
    edges = np.concatenate([[0.0], expected.double().exp().cumsum(-1).numpy()])
    assert edges[token] - 1e-5 <= uniform <= edges[token + 1] + 1e-5


def test_an_even_grid_of_uniforms_gives_the_probabilities() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    count = 20_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sample(logits.expand(count, -1), torch.full((count,), 0.7), grid)
    share = torch.bincount(drawn.ids_R, minlength=4) / count
    torch.testing.assert_close(share, (logits / 0.7).softmax(-1), atol=1e-4, rtol=0)


@given(LOGITS, st.floats(0, LARGEST))
def test_temperature_zero_takes_the_first_best_with_certainty(row: list[float], uniform: float) -> None:
    assert draw(row, uniform, 0.0)[:2] == (int(torch.tensor(row).argmax()), 0.0)


def test_rows_that_are_no_distribution_are_marked_and_their_neighbours_are_not() -> None:
    bad = float("nan"), float("inf")
    rows = [[0.0, 1.0], [bad[0], 0.0], [bad[1], 0.0], [-bad[1], -bad[1]], [-bad[1], 0.0]]
    drawn = sample(torch.tensor(rows), torch.ones(5), torch.full((5,), 0.5, dtype=torch.float64))
    assert drawn.sound_R.tolist() == [True, False, False, False, True]
    assert drawn.ids_R[4] == 1
    assert 0 <= drawn.ids_R.min() <= drawn.ids_R.max() <= 1


def test_uniforms_are_the_published_splitmix64() -> None:
    found = uniforms(np.zeros(3, np.uint64), np.arange(3))
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert found.tolist() == [(bits >> 12) * 2.0**-52 for bits in published]


def test_any_integer_is_a_seed() -> None:
    keys = splitmix(np.array([seed % 2**64 for seed in (0, 1, -1, 2**63, 2**64 - 2, 10**30)], np.uint64))
    assert len(np.unique(keys)) == len(keys)


def test_uniforms_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    keys = splitmix(np.arange(300, dtype=np.uint64))
    grid = uniforms(np.repeat(keys, 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    assert len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    assert np.abs(counts - grid.size / 20).max() < 5 * np.sqrt(grid.size / 20)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
