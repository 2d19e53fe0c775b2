"""Every row is drawn as its own request says: bias, penalties, temperature, truncation, in this order."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper

from headrace.base.types.recorded import KeptSets
from headrace.base.types.sampling import Sampling
from headrace.engine.native.checks import sampling_problem as problem
from headrace.engine.native.controls import Controls
from headrace.engine.native.sampler import Draw, TruncationLimits, find_support, splitmix, uniforms
from tests.engine.native.alone import Floats, probabilities

CPU = torch.device("cpu")


def controls_of(samplings: Sequence[Sampling], prompts: Sequence[Sequence[int]] | None = None) -> Controls:
    controls = Controls(len(samplings), CPU)
    for row, sampling in enumerate(samplings):
        prompt = prompts[row] if prompts else [0]
        controls.add(row, sampling, np.array(prompt, np.int32), np.zeros(0, np.int32))
    return controls


def span(draw: Draw, row: int) -> list[int]:
    return draw.kept.spans()[row].tolist() if draw.kept is not None else []


# eighths are exact in float32, so that ties are ties and sums of few terms rarely fall on a boundary
EIGHTHS = st.integers(-40, 40).map(lambda eighth: eighth / 8)
SAMPLINGS = st.builds(
    Sampling,
    max_new_tokens=st.just(4),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 7, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.0313]),
    min_p=st.sampled_from([0.0, 0.0, 0.051, 0.513, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -0.25]),
    logit_bias=st.dictionaries(st.integers(0, 9), EIGHTHS, max_size=3),
    seed=st.integers(0, 99),
    record_kept=st.booleans(),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Sampling], list[list[int]], list[Floats]]:
    count = draw(st.integers(1, 5))
    samplings = [draw(SAMPLINGS) for _ in range(count)]
    prompts = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)) for _ in range(count)]
    steps = [
        np.array(draw(st.lists(st.lists(EIGHTHS, min_size=10, max_size=10), min_size=count, max_size=count)))
        for _ in range(4)
    ]
    return samplings, prompts, steps


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_row_is_drawn_from_its_own_distribution(
    batch: tuple[list[Sampling], list[list[int]], list[Floats]],
) -> None:
    samplings, prompts, steps = batch
    controls = controls_of(samplings, prompts)
    answers: list[list[int]] = [[] for _ in samplings]
    for position, logits_RV in enumerate(steps):
        drawn = controls.draw(torch.tensor(logits_RV, dtype=torch.float32), np.full(len(samplings), position))
        controls.append(drawn.ids_R)
        assert drawn.sound_R.all()
        for row, sampling in enumerate(samplings):
            expected_V = probabilities(logits_RV[row], sampling, prompts[row], answers[row])
            token = int(drawn.ids_R[row])
            answers[row].append(token)
            assert expected_V[token] > 0
            np.testing.assert_allclose(drawn.logprobs_R[row], np.log(expected_V[token]), atol=2e-5)
            uniform = uniforms(splitmix(np.array([sampling.seed % 2**64], np.uint64)), np.array([position]))[0]
            assert expected_V[:token].sum() - 1e-6 <= uniform <= expected_V[: token + 1].sum() + 1e-6 or not uniform
            recorded = sampling.record_kept and (sampling.truncated or sampling.temperature == 0)
            assert span(drawn, row) == (np.flatnonzero(expected_V).tolist() if recorded else [])
        if drawn.kept is not None:
            assert not drawn.kept.problem(drawn.ids_R.numpy())


def limits_of(count: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> TruncationLimits:
    return TruncationLimits(
        top_k_R=torch.full((count,), top_k),
        top_p_R=torch.full((count,), top_p, dtype=torch.float64),
        min_p_R=torch.full((count,), min_p, dtype=torch.float64),
    )


@pytest.mark.parametrize("vocab_size", [50, 300, 5000])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1}, {"top_k": 64}, {"top_k": 65}, {"top_k": 1500}, {"top_p": 0.3}, {"top_p": 0.999999},
        {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 200, "top_p": 0.9}, {"top_k": 1024, "min_p": 0.01, "top_p": 0.99},
    ],
)  # fmt: skip
def test_support_of_a_large_vocabulary_with_ties_is_exact(vocab_size: int, limits: dict[str, float]) -> None:
    rng = np.random.default_rng(vocab_size)
    # peaked, flat, all equal, in bfloat16: many ties
    scaled_RV = torch.tensor(rng.normal(size=(4, vocab_size)) * np.array([[8.0], [1.0], [0.2], [0.0]]))
    scaled_RV = scaled_RV.bfloat16().float()
    support = find_support(scaled_RV, limits_of(4, **limits))  # type: ignore[arg-type]
    for row in range(4):
        sampling = Sampling(max_new_tokens=1, **limits)  # type: ignore[arg-type]
        expected = np.flatnonzero(probabilities(scaled_RV[row].double().numpy(), sampling, [], []) > 1e-45)
        found = support.ids_RK[row, : support.sizes_R[row]].tolist()
        assert abs(len(found) - len(expected)) <= 1  # a sum may round over the boundary
        assert found == sorted(set(found))
        assert len(set(found) ^ set(expected.tolist())) <= 1
        assert set(support.ids_RK[row, support.sizes_R[row] :].tolist()) <= {vocab_size}


def test_top_k_keeps_every_token_that_equals_the_kth() -> None:
    support = find_support(torch.zeros(1, 5000), limits_of(1, top_k=7))
    assert support.ids_RK.tolist() == [list(range(5000))]


@pytest.mark.parametrize("vocab_size", [60, 5000, 40_000])
@pytest.mark.parametrize(
    "warped", [{"top_k": 1}, {"top_k": 8}, {"top_k": 50}, {"top_k": 40, "min_p": 0.3}, {"min_p": 0.05}]
)
def test_survivors_of_rounded_logits_are_those_of_transformers(vocab_size: int, warped: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits_RV = (torch.randn(300, vocab_size, generator=generator) * 2).bfloat16().float()
    support = find_support(logits_RV, limits_of(300, **warped))  # type: ignore[arg-type]
    warpers = {"top_k": TopKLogitsWarper, "min_p": MinPLogitsWarper}
    left_RV = logits_RV
    for name, value in warped.items():
        left_RV = warpers[name](value)(torch.zeros(300, 1), left_RV)  # type: ignore[arg-type]
    tied = 0
    for row in range(300):
        expected = left_RV[row].isfinite().nonzero()[:, 0].tolist()
        assert support.ids_RK[row, : support.sizes_R[row]].tolist() == expected
        tied += len(expected) > warped.get("top_k", vocab_size)
    assert tied or "top_k" not in warped or "min_p" in warped


def test_top_p_measures_the_mass_of_all_that_top_k_leaves_and_keeps_the_lower_of_equals() -> None:
    logits_V = torch.full((5000,), -9.0)
    logits_V[[4, 40, 400, 900]] = 1.0  # the second to fifth most likely, all alike
    logits_V[17] = 2.0
    support = find_support(logits_V[None], limits_of(1, top_k=2, top_p=0.7))
    # e / (e + 4) = 0.405, and each of the four 0.149: three are the smallest number that reach 0.7
    assert support.ids_RK.tolist() == [[4, 17, 40]]


def test_greedy_row_that_records_its_kept_set_has_one_token_among_equals() -> None:
    controls = controls_of([Sampling(max_new_tokens=1, temperature=0.0, record_kept=True)])
    logits_RV = torch.zeros(1, 5000)
    logits_RV[0, [7, 70, 700]] = 3.0
    drawn = controls.draw(logits_RV, np.array([1]))
    assert told_by(drawn) == [(7, 0.0, [7])]


def test_impossible_tokens_do_not_survive() -> None:
    scaled_RV = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf, -300.0]])
    assert find_support(scaled_RV, limits_of(1, top_k=4)).ids_RK.tolist() == [[0, 2]]


MIXED = [
    Sampling(max_new_tokens=9, seed=1),
    Sampling(max_new_tokens=9, seed=2, top_p=0.9, record_kept=True),
    Sampling(max_new_tokens=9, seed=3, temperature=0.0),
    Sampling(max_new_tokens=9, seed=4, top_k=70, temperature=0.7),
    Sampling(max_new_tokens=9, seed=5, min_p=0.02, repetition_penalty=1.3, record_kept=True),
    Sampling(max_new_tokens=9, seed=6, frequency_penalty=0.5, logit_bias={3: 2.0}),
    Sampling(max_new_tokens=9, seed=7, top_p=0.99, top_k=900, presence_penalty=0.2, record_kept=True),
    Sampling(max_new_tokens=9, seed=8, temperature=0.0, record_kept=True),
]
Told = list[tuple[int, float, list[int]]]


def told_by(draw: Draw) -> Told:
    return [(int(draw.ids_R[row]), float(draw.logprobs_R[row]), span(draw, row)) for row in range(len(draw.ids_R))]


@pytest.mark.parametrize("vocab_size", [37, 1001, 20_011])
def test_a_row_alone_gets_bit_for_bit_what_it_gets_in_a_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [[row, row + 1] for row in range(len(MIXED))]
    together = controls_of(MIXED, prompts)
    alone = [controls_of([sampling], [prompt]) for sampling, prompt in zip(MIXED, prompts, strict=True)]
    for position in range(4):
        logits_RV = torch.randn(len(MIXED), vocab_size, generator=generator) * 3
        batch = together.draw(logits_RV, np.full(len(MIXED), position))
        together.append(batch.ids_R)
        singles: Told = []
        for row, controls in enumerate(alone):
            single = controls.draw(logits_RV[row : row + 1], np.array([position]))
            controls.append(single.ids_R)
            singles += told_by(single)
        assert told_by(batch) == singles


def test_rows_keep_their_controls_and_counts_when_others_leave_join_or_wait() -> None:
    generator = torch.Generator().manual_seed(1)
    vocab_size, prompts = 37, [[row, row + 1] for row in range(len(MIXED))]
    controls = Controls(8, CPU)
    rows = [0, 1, 4, 5, 6]
    for row, which in enumerate(rows):
        controls.add(row, MIXED[which], np.array(prompts[which], np.int32), np.zeros(0, np.int32))
    answers: dict[int, list[int]] = {which: [] for which in range(len(MIXED))}

    def step(drawing: list[int]) -> None:
        logits_DV = torch.randn(len(drawing), vocab_size, generator=generator) * 3
        places = np.array([len(answers[rows[row]]) for row in drawing])
        drawn = controls.draw(logits_DV, places, np.array(drawing))
        controls.append(drawn.ids_R, np.array(drawing))
        for place, row in enumerate(drawing):
            which = rows[row]
            fresh = Controls(1, CPU)
            fresh.add(0, MIXED[which], np.array(prompts[which], np.int32), np.array(answers[which], np.int32))
            again = fresh.draw(logits_DV[place : place + 1], places[place : place + 1])
            assert told_by(drawn)[place] == told_by(again)[0]
            answers[which].append(int(again.ids_R))

    step([0, 1, 2, 3, 4])
    step([4, 2])
    controls.move(np.array([4, 3]), np.array([0, 1]), 3)  # rows 0 and 1 leave
    rows[:] = [6, 5, 4]
    step([0, 1, 2])
    controls.add(3, MIXED[7], np.array(prompts[7], np.int32), np.zeros(0, np.int32))
    controls.add(4, MIXED[0], np.array(prompts[0], np.int32), np.zeros(0, np.int32))
    rows += [7, 0]
    for _ in range(70):
        step([0, 1, 2, 3, 4])


def test_a_row_that_held_a_controlled_sequence_is_plain_again() -> None:
    controls = controls_of([MIXED[6]], [[1, 2, 3]])
    controls.move(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    plain = Sampling(max_new_tokens=3, seed=9)
    controls.add(0, plain, np.array([1], np.int32), np.zeros(0, np.int32))
    logits_RV = torch.randn(1, 37, generator=torch.Generator().manual_seed(2))
    expected = controls_of([plain]).draw(logits_RV, np.array([5]))
    assert told_by(controls.draw(logits_RV, np.array([5]))) == told_by(expected)


def test_frequencies_are_those_of_the_truncated_distribution() -> None:
    logits_V = np.array([0.3, -1.0, 2.0, 0.0, 1.1, 0.3])
    sampling = Sampling(max_new_tokens=1, temperature=0.8, top_k=5, top_p=0.93, seed=3)
    expected_V = probabilities(logits_V, sampling, [0], [])
    count = 40_000
    controls = controls_of([sampling])
    logits_RV = torch.tensor(logits_V, dtype=torch.float32)[None].expand(count, -1)
    drawn = controls.draw(logits_RV, np.arange(count), np.zeros(count, np.int64))
    shares_V = np.bincount(drawn.ids_R.numpy(), minlength=6) / count
    assert 0 < (expected_V == 0).sum() < 4
    np.testing.assert_array_equal(shares_V[expected_V == 0], 0)
    np.testing.assert_allclose(shares_V, expected_V, atol=5 * np.sqrt(0.25 / count))


@pytest.mark.parametrize("vocab_size", [8, 5000])
def test_rows_that_are_no_distribution_are_marked_and_their_neighbours_are_not(vocab_size: int) -> None:
    logits_RV = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3))
    logits_RV[0, 3] = torch.nan
    logits_RV[1, 3] = torch.inf
    logits_RV[2] = -torch.inf
    logits_RV[3, 5] = -torch.inf
    samplings = [Sampling(max_new_tokens=1, top_p=0.9, top_k=6, record_kept=True, presence_penalty=1.0)] * 5
    drawn = controls_of(samplings).draw(logits_RV, np.zeros(5, np.int64))
    assert drawn.sound_R.tolist() == [False, False, False, True, True]
    assert drawn.kept is not None
    assert drawn.kept.sizes_T.tolist()[:3] == [0, 0, 0]
    assert min(drawn.kept.sizes_T[3:]) > 0
    assert 0 <= int(drawn.ids_R.min()) <= int(drawn.ids_R.max()) < vocab_size
    alone = controls_of(samplings[:2]).draw(logits_RV[3:], np.zeros(2, np.int64))
    assert told_by(alone) == told_by(drawn)[3:]


def test_logits_are_left_as_they_are() -> None:
    logits_RV = torch.randn(len(MIXED), 37, generator=torch.Generator().manual_seed(4))
    before = logits_RV.clone()
    controls_of(MIXED).draw(logits_RV, np.zeros(len(MIXED), np.int64))
    assert torch.equal(logits_RV, before)


def test_draws_of_plain_rows_come_without_kept_sets() -> None:
    drawn = controls_of(MIXED[:1]).draw(torch.zeros(1, 9), np.zeros(1, np.int64))
    assert drawn.kept is None
    asked = Sampling(max_new_tokens=1, record_kept=True)
    assert controls_of([asked]).draw(torch.zeros(1, 9), np.zeros(1, np.int64)).kept is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"min_p": 1.1}, r"min_p=1.1 is not in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is not > 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty=inf"),
        ({"logit_bias": {100: 1.0}}, "logit_bias holds token 100, outside the vocabulary of 100"),
        ({"logit_bias": {5: float("-inf")}}, "logit_bias of token 5 is -inf"),
        ({"stop_ids": (3, -1)}, "stop_ids holds token -1"),
        ({"stop": ("a", "")}, "empty string"),
        ({"stop": ("a",) * 65}, "65 strings"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(setting: dict[str, object], words: str) -> None:
    wrong = Sampling(**{"max_new_tokens": 1, **setting})  # type: ignore[arg-type]
    assert re.search(words, problem(wrong, 100))


def test_everything_else_can_be_done() -> None:
    assert [problem(sampling, 10) for sampling in MIXED] == [""] * len(MIXED)
    assert KeptSets.none(0).problem(np.zeros(0, np.int32)) == ""
