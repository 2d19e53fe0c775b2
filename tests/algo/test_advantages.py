"""Every advantage against its formula in plain Python, and what odd groups come to."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import algo
from headrace.algo.advantages import AnyAdvantage, GaeAdvantage, make_outcomes
from headrace.algo.advantages.groups import Rae
from headrace.algo.config import AlgoConfig
from headrace.algo.registry import classes_by_kind
from headrace.algo.shaping import LengthShaping, Overlong
from headrace.base.errors import ConfigError, DataError

REWARDS = [1.0, 0.0, 0.25, 2.0, 0.5, 0.5, 3.0]
GROUPS = [0, 0, 0, 1, 1, 1, 1]
LENGTHS = [3, 1, 2, 2, 4, 1, 2]
TOKENS = [[0.1 * (i + 1) + 0.3 * math.sin(7 * i + t) for t in range(n)] for i, n in enumerate(LENGTHS)]
NAMES = list(classes_by_kind(AnyAdvantage))
EXTRAS: dict[str, Any] = {
    "opo": {"lengths": LENGTHS},
    "remax": {"greedy": [0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]},
    "optimal_baseline": {"energies": [[abs(x) + 0.1 for x in row] for row in TOKENS]},
    "prpo": {"process": TOKENS, "entropies": TOKENS, "spikes": 2, "gap": 1},
    "reverse_kl": {"log_mu": TOKENS, "log_nu": [[2 * x for x in row] for row in TOKENS], "weight": 1.0},
    "gae": {"values": TOKENS, "lam": 0.9},
}
OWN_BASELINE = {"rae", "remax", "gae"}
"""Those that compare a reward with something else than its group."""


def by_group(rewards: list[float] = REWARDS) -> list[list[float]]:
    return [[r for r, g in zip(rewards, GROUPS, strict=True) if g == group] for group in (0, 1)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float], ddof: int) -> float:
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / (len(values) - ddof))


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_grpo_states_its_three_choices(ddof: int, leave_one_out: bool) -> None:
    expected = []
    for group in by_group():
        for i, r in enumerate(group):
            others = group[:i] + group[i + 1 :] if leave_one_out else group
            expected.append((r - mean(others)) / (std(group, ddof) + 1e-3))
    got = algo.advantage("grpo", REWARDS, groups=GROUPS, std=f"ddof{ddof}", eps=1e-3, leave_one_out=leave_one_out)
    assert got == pytest.approx(expected)


def test_reinforce_pp_whitens_over_tokens_and_skips_observations() -> None:
    tokens = [r for r, n in zip(REWARDS, LENGTHS, strict=True) for _ in range(n)]
    expected = [(r - mean(tokens)) / (std(tokens, 0) + 1e-8) for r in REWARDS]
    assert algo.advantage("reinforce_pp", REWARDS, lengths=LENGTHS) == pytest.approx(expected)
    plain = [(r - mean(REWARDS)) / (std(REWARDS, 0) + 1e-8) for r in REWARDS]
    assert algo.advantage("reinforce_pp", REWARDS) == pytest.approx(plain)


def test_reinforce_pp_says_what_a_group_of_one_gets() -> None:
    rewards, groups = [1.0, 0.0, 5.0], [0, 0, 1]
    alone = algo.advantage("reinforce_pp", rewards, groups=groups, lengths=[10, 1, 3], group_baseline=True)
    assert alone[2] == 0
    assert alone[:2] == algo.advantage("reinforce_pp", rewards[:2], lengths=[10, 1], group_baseline=True)
    assert algo.advantage("reinforce_pp", rewards, groups=groups)[2] > 1


def test_opo_weighs_its_baseline_by_length() -> None:
    first = sum(r * n for r, n in zip(REWARDS[:3], LENGTHS[:3], strict=True)) / sum(LENGTHS[:3])
    got = algo.advantage("opo", REWARDS, groups=GROUPS, lengths=LENGTHS)
    assert got[:3] == pytest.approx([r - first for r in REWARDS[:3]])


def test_gdpo_keeps_apart_what_a_sum_would_merge() -> None:
    parts = [[0.0, 1.0], [0.0, 2.0], [0.0, 0.0], [1.0, 0.0]]
    normal = [[(x - mean(col)) / (std(col, 1) + 1e-6) for x in col] for col in ([p[k] for p in parts] for k in (0, 1))]
    summed = [2 * a + b for a, b in zip(*normal, strict=True)]
    expected = [(x - mean(summed)) / (std(summed, 0) + 1e-6) for x in summed]
    got = algo.advantage("gdpo", parts, weights=(2.0, 1.0))
    assert got == pytest.approx(expected)
    assert got[0] != pytest.approx(got[3])  # their sums are equal


def test_rae_follows_each_agent_and_hands_its_baselines_on() -> None:
    rewards, agents = [1.0, -1.0, 1.0, 0.0], ["a", "b", "a", "b"]
    b = {"a": 0.05, "b": -0.05}
    later = {"a": 0.95 * 0.05 + 0.05, "b": 0.95 * -0.05}
    expected = [1 - b["a"], -1 - b["b"], 1 - later["a"], -later["b"]]
    assert algo.advantage("rae", rewards, agents=agents) == pytest.approx(expected)
    credit, baselines = Rae().follow(make_outcomes(rewards[:2], agents=agents[:2]))
    handed = dict(zip("ab", baselines.tolist(), strict=True))
    rest = algo.advantage("rae", rewards[2:], agents=agents[2:], baselines=handed)
    assert [*credit.tolist(), *rest] == pytest.approx(expected)


def test_step_credits_turns_in_the_same_state() -> None:
    rewards, episodes, states = [0.0, 1.0, 0.0, 0.0, 0.5, 0.0], [0, 0, 1, 1, 2, 2], ["s", "x", "s", "y", "s", "x"]
    got = algo.advantage("step", rewards, episodes=episodes, states=states, gamma=0.5, weight=2.0)
    whole = [1.0, 0.0, 0.5]
    loo = [w - (sum(whole) - w) / 2 for w in whole]
    returns = [0.5, 1.0, 0.0, 0.0, 0.5, 0.0]
    in_s = [returns[i] - (sum(returns[j] for j in (0, 2, 4)) - returns[i]) / 2 for i in (0, 2, 4)]
    expected = [
        loo[0] + 2 * in_s[0],
        loo[0] + 2 * 1.0,
        loo[1] + 2 * in_s[1],
        loo[1],
        loo[2] + 2 * in_s[2],
        loo[2] - 2.0,
    ]
    assert got == pytest.approx(expected)


def test_optimal_baseline_weighs_by_the_gradient_so_far() -> None:
    energies = EXTRAS["optimal_baseline"]["energies"]
    got = iter(algo.advantage("optimal_baseline", REWARDS, groups=GROUPS, energies=energies))
    for i, n in enumerate(LENGTHS):
        for t in range(n):
            peers = [j for j, g in enumerate(GROUPS) if g == GROUPS[i] and LENGTHS[j] > t]
            w = {j: sum(energies[j][: t + 1]) for j in peers}
            baseline = sum(w[j] * REWARDS[j] for j in peers) / sum(w.values())
            assert next(got) == pytest.approx(REWARDS[i] - baseline, abs=1e-12)


def test_prpo_moves_segments_to_their_outcome() -> None:
    process = [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    entropies = [[0.1, 0.2, 0.9, 0.3], [0.1, 0.2, 0.3, 0.9]]
    got = algo.advantage("prpo", [1.0, 0.0], process=process, entropies=entropies, spikes=1, gap=1)
    outcome = 0.5 / (std([1.0, 0.0], 1) + 1e-6)
    spread = std([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], 0) + 1e-6
    expected = [outcome + x / spread for x in (0.5, 0.5, -0.5, -0.5)]
    expected += [-outcome + x / spread for x in (-0.25, -0.25, -0.25, 0.75)]
    assert got == pytest.approx(expected)
    assert mean(got[:4]) == pytest.approx(outcome)


def test_prpo_keeps_spikes_apart() -> None:
    entropies = [[0.0, 0.9, 1.0, 0.8, 0.0, 0.7]]
    process = [[float(t) for t in range(6)]]
    got = algo.advantage("prpo", [1.0], process=process, entropies=entropies, spikes=2, gap=3)
    segments = [[0, 1], [2, 3, 4], [5]]  # at 2, then at 5: 1 and 3 are too near
    assert [len({round(got[t], 9) for t in segment}) for segment in segments] == [1, 1, 1]
    assert len({round(x, 9) for x in got}) == 3


def test_reverse_kl_credits_what_the_teacher_prefers() -> None:
    got = algo.advantage("reverse_kl", [1.0, 0.0], log_mu=[[-1.0, -2.0], [-1.0]], log_nu=[[-0.5, -3.0], [-30.0]])
    assert got == pytest.approx([0.5, -1.0, -20.0])
    mixed = algo.advantage("reverse_kl", [1.0, 0.0], log_mu=[[0.0], [0.0]], log_nu=[[0.0], [0.0]], weight=2.0)
    assert mixed == pytest.approx([1.0, -1.0])


def by_recursion(rewards: list[float], values: list[list[float]], gamma: float, lam: float) -> list[list[float]]:
    """Schulman et al., eq. 11 and 16, from the last token on."""
    credit = []
    for reward, of_episode in zip(rewards, values, strict=True):
        later, after, row = 0.0, 0.0, []
        for t in reversed(range(len(of_episode))):
            delta = (reward if t == len(of_episode) - 1 else 0.0) + gamma * after - of_episode[t]
            later, after = delta + gamma * lam * later, of_episode[t]
            row.insert(0, later)
        credit.append(row)
    return credit


@given(gamma=st.floats(0.01, 1.0), lam=st.floats(0.0, 1.0), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_gae_is_the_direct_recursion_over_each_episode(gamma: float, lam: float, lengths: list[int]) -> None:
    rewards = [math.cos(3 * i) for i in range(len(lengths))]
    values = [[math.sin(5 * i + 2 * t) for t in range(n)] for i, n in enumerate(lengths)]
    expected = by_recursion(rewards, values, gamma, lam)
    got = algo.advantage("gae", rewards, values=values, lengths=lengths, gamma=gamma, lam=lam, normalize=False)
    assert got == pytest.approx([x for row in expected for x in row], rel=1e-12, abs=1e-12)
    estimate = GaeAdvantage(gamma=gamma, lam=lam).estimate(make_outcomes(rewards, values=values, lengths=lengths))
    flat = [x for row in values for x in row]
    assert estimate.returns_N == pytest.approx([a + v for a, v in zip(got, flat, strict=True)], rel=1e-12, abs=1e-12)
    earned = [r * gamma ** (n - 1 - t) for r, n in zip(rewards, lengths, strict=True) for t in range(n)]
    assert estimate.outcomes_N == pytest.approx(earned, rel=1e-12, abs=1e-12)


def test_gae_is_normalised_over_the_tokens_of_the_batch() -> None:
    raw = algo.advantage("gae", REWARDS, values=TOKENS, normalize=False)
    got = algo.advantage("gae", REWARDS, values=TOKENS, eps=0.5)
    assert got == pytest.approx([(a - mean(raw)) / (std(raw, 0) + 0.5) for a in raw])
    left_out = algo.advantage("gae", [*REWARDS, None], values=[*TOKENS, [9.0, 9.0]], eps=0.5)
    assert left_out == pytest.approx([*got, 0.0, 0.0])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_BASELINE])
def test_group_of_one_has_no_advantage(name: str) -> None:
    only = {k: v[:1] if isinstance(v, list) else v for k, v in EXTRAS.get(name, {}).items()}
    only["weight"] = 0.0 if name == "prpo" else only.get("weight", 1.0)
    options = only if name in ("prpo", "reverse_kl") else {k: v for k, v in only.items() if k != "weight"}
    if name == "reverse_kl":
        options |= {"beta": 0.0}
    assert set(algo.advantage(name, [7.0], **options)) == {0.0}


@pytest.mark.parametrize("name", NAMES)
def test_unequal_groups_are_each_normalised_by_themselves(name: str) -> None:
    if name in {"gdpo", "reinforce_pp", "rae", "gae"}:
        assert classes_by_kind(AnyAdvantage)[name].scope == "batch"
        return
    together = algo.advantage(name, REWARDS, groups=GROUPS, **EXTRAS.get(name, {}))
    alone = []
    for rows_of in (slice(0, 3), slice(3, 7)):
        extras = {k: v[rows_of] if isinstance(v, list) else v for k, v in EXTRAS.get(name, {}).items()}
        alone += algo.advantage(name, REWARDS[rows_of], **extras)
    assert together == pytest.approx(alone)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reverse_kl"])  # a teacher speaks without rewards
def test_rewards_that_do_not_count_change_nothing_and_get_nothing(name: str) -> None:
    nothing = algo.advantage(name, [None] * 7, groups=GROUPS, **EXTRAS.get(name, {}))
    assert set(nothing) == {0.0}
    if name in EXTRAS or name == "step":
        return
    padded: list[float | None] = [*REWARDS, None]
    got = algo.advantage(name, padded, groups=[*GROUPS, 0])
    assert got == pytest.approx([*algo.advantage(name, REWARDS, groups=GROUPS), 0.0])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in EXTRAS and n not in OWN_BASELINE])
@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_group_without_differences_has_no_advantage(name: str, value: float, size: int) -> None:
    assert set(algo.advantage(name, [value] * size)) == {0.0}


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "gdpo", "reinforce_pp"])
@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=8), st.randoms())
def test_order_of_episodes_does_not_matter(name: str, rewards: list[float | None], random: Any) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = algo.advantage(name, rewards)
    moved = algo.advantage(name, [rewards[i] for i in order])
    assert moved == pytest.approx([straight[i] for i in order], rel=1e-6, abs=1e-9)
    assert all(map(math.isfinite, straight))


@pytest.mark.parametrize("name", ["opo", "remax", "optimal_baseline", "prpo", "reverse_kl"])
def test_missing_column_is_named(name: str) -> None:
    with pytest.raises(DataError, match=r"needs '.*', which is missing"):
        algo.advantage(name, REWARDS)


def test_bad_rewards_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="'groo' does not exist"):
        algo.advantage("groo", REWARDS)
    with pytest.raises(ConfigError, match="no option 'epss'"):
        algo.advantage("grpo", REWARDS, epss=1)
    with pytest.raises(ConfigError, match="no option 'lengths'"):
        algo.advantage("grpo", REWARDS, lengths=LENGTHS)
    with pytest.raises(ConfigError, match="ddof2"):
        algo.advantage("grpo", REWARDS, std="ddof2")
    with pytest.raises(DataError, match="not numbers"):
        algo.advantage("grpo", ["good", 1.0])
    with pytest.raises(DataError, match="infinite"):
        algo.advantage("grpo", [1.0, math.inf])
    with pytest.raises(DataError, match="groups has 1 entries, but there are 7 rewards"):
        algo.advantage("grpo", REWARDS, groups=[0])
    with pytest.raises(DataError, match="different numbers of rewards"):
        algo.advantage("gdpo", [[1.0], [1.0, 2.0]])
    with pytest.raises(DataError, match="1 weights for 2 rewards"):
        algo.advantage("gdpo", [[1.0, 2.0]], weights=(1.0,))
    with pytest.raises(DataError, match="fewer than 0 tokens"):
        algo.advantage("opo", [1.0, 0.0], lengths=[-1, 2])
    with pytest.raises(DataError, match="not whole numbers"):
        algo.advantage("opo", [1.0, 0.0], lengths=[math.nan, 2])
    with pytest.raises(DataError, match="groups is 3, which is not a list"):
        algo.advantage("grpo", [1.0, 0.0], groups=3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="not numbers"):
        algo.advantage("grpo", ["1", "0"])


def test_arrays_and_labels_of_any_kind_are_taken() -> None:
    expected = algo.advantage("grpo", [1, 0, 2], groups=[0, 0, 1])
    assert algo.advantage("grpo", np.array([1, 0, 2]), groups=["a", "a", None]) == expected  # type: ignore[arg-type]
    assert algo.advantage("grpo", iter([1, 0, 2]), groups=np.array([7, 7, 3])) == expected  # type: ignore[arg-type]
    parts = [[1.0, 0.0], [0.0, 0.5]]
    assert algo.advantage("gdpo", np.array(parts)) == algo.advantage("gdpo", parts)  # type: ignore[arg-type]


def test_overlong_answers_lose_gradually() -> None:
    outcomes = make_outcomes([1.0] * 4 + [None], lengths=[50, 80, 90, 200, 90])
    shaped = Overlong(max_tokens=100, buffer=20, penalty=0.5)(outcomes)
    np.testing.assert_allclose(shaped, [1.0, 1.0, 0.75, 0.5, np.nan])


def test_short_right_answers_gain_and_long_wrong_ones_lose() -> None:
    outcomes = make_outcomes([1.0, 1.0, 0.0, 0.0, 1.0], groups=[0, 0, 0, 0, 1], lengths=[10, 30, 10, 30, 5])
    np.testing.assert_allclose(LengthShaping()(outcomes), [1.5, 0.5, 0.0, -0.5, 1.0])


def test_credit_shapes_rewards_before_it_compares_them() -> None:
    table = {"advantage": "rloo", "shaping": [{"kind": "overlong", "max_tokens": 100, "buffer": 50}]}
    config = AlgoConfig.model_validate(table)
    credit = config.credit(make_outcomes([1.0, 1.0], lengths=[10, 100]))
    assert credit.tolist() == [1.0, -1.0]
