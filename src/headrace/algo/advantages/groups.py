"""Advantages per episode: formulas that compare the reward R with a baseline of the group, the batch or the agent. The
last formula returns advantages per token. E episodes, N tokens. A reward that is NaN does not count, and its advantage
is 0."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import (
    AdvantageSection,
    Scope,
    centered,
    divide_or_zero,
    joint,
    leave_one_out,
    moments,
    remove_rounding,
    require,
    total,
)
from headrace.algo.advantages.outcomes import Floats, Outcomes
from headrace.base.errors import DataError

DDOF = {"ddof0": 0, "ddof1": 1}
"""The number that is subtracted from n in the denominator of a standard deviation, by the value of ``std``."""


class GrpoAdvantage(AdvantageSection):
    """GRPO's advantage: the reward relative to the group, with three variants of the normalisation.

    (R − mean) / (std + ε) over the group; with ``std = "none"`` only R − mean.

    Source: Shao et al., arXiv 2402.03300, eq. 1; without std: Liu et al. (Dr. GRPO), arXiv 2503.20783, eq. 2.
    """

    kind: Literal["grpo"] = "grpo"
    """The name that selects this advantage."""
    std: Literal["none", "ddof0", "ddof1"] = "ddof1"
    """The divisor: none, or the group's standard deviation with the denominator n − 0 or n − 1."""
    eps: float = Field(default=1e-6, ge=0)
    """ε, which is added to the standard deviation."""
    leave_one_out: bool = False
    """Whether to subtract the mean of the other episodes instead of the group's mean. The standard deviation remains
    that of the whole group."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the group's mean, divided by the group's standard
        deviation as ``std`` says. It is 0 for a reward that does not count, and in a group with equal rewards."""
        difference_E = centered(outcomes)
        num_E = total(outcomes.counted_E.astype(np.float64), outcomes.groups_E)
        credit_E = difference_E
        if self.leave_one_out:
            # R − mean of the others = (R − mean of all) · n / (n − 1)
            credit_E = divide_or_zero(difference_E * num_E, np.maximum(num_E - 1, 0))
        if self.std == "none":
            return credit_E
        squares_E = total(difference_E**2, outcomes.groups_E)
        std_E = np.sqrt(divide_or_zero(squares_E, np.maximum(num_E - DDOF[self.std], 0)))
        return divide_or_zero(credit_E, np.where(std_E > 0, std_E + self.eps, 0.0))


class Rloo(AdvantageSection):
    """The leave-one-out advantage (RLOO): the baseline is the mean of the group's other rewards.

    R − mean of the other rewards of the group.

    Source: Kool et al. (2019); Ahmadian et al., arXiv 2402.14740, eq. 8.
    """

    kind: Literal["rloo"] = "rloo"
    """The name that selects this advantage."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the mean of the other counted rewards of its
        group."""
        return leave_one_out(outcomes.values_E, outcomes.counted_E, outcomes.groups_E)


class Maxrl(AdvantageSection):
    """MaxRL's advantage: a success has a higher advantage if successes are rarer in its group.

    (R − mean) / mean over the group; 0 for a group whose mean is not above 0. Rewards should be 0 or positive.

    Source: Tajwar et al. (2026), arXiv 2602.02710, which maximises the log of the success probability p through its
    series, log p = −Σ_k (1 − p)^k / k. For rewards of 0 or 1 and a group of N episodes, the expectation of the mean of
    advantage · ∇ log π over the group is the gradient of the series truncated after N − 1 terms (N without the
    baseline). The plain policy gradient is the gradient of the first term.
    """

    kind: Literal["maxrl"] = "maxrl"
    """The name that selects this advantage."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the group's mean, divided by that mean; 0 if the mean
        is not above 0."""
        difference_E = centered(outcomes)
        mean_E = outcomes.values_E - difference_E
        return divide_or_zero(difference_E, np.where(outcomes.counted_E & (mean_E > 0), mean_E, 0.0))


class Opo(AdvantageSection):
    """OPO's advantage: its baseline has the least variance if the norm of an answer's gradient grows with the answer's
    length.

    R − Σ(length·R)/Σ(length) over the group. Needs ``lengths``.

    Source: Hao et al., arXiv 2505.23585, eq. 7.
    """

    kind: Literal["opo"] = "opo"
    """The name that selects this advantage."""
    reads: ClassVar[frozenset[str]] = frozenset({"lengths"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the length-weighted mean of the rewards of its
        group."""
        return centered(outcomes, require(outcomes.lengths_E, "lengths").astype(np.float64))


class Remax(AdvantageSection):
    """ReMax's advantage: the baseline is the reward of the greedy answer.

    R − R_greedy of the same task; needs ``greedy``. It is defined for a group of one.

    Source: Li et al., arXiv 2310.10505, eq. 6.
    """

    kind: Literal["remax"] = "remax"
    """The name that selects this advantage."""
    reads: ClassVar[frozenset[str]] = frozenset({"greedy"})

    @property
    def compares_siblings(self) -> bool:
        """``False``: the baseline is the reward of the greedy answer, and not the other episodes of the group."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the reward of the greedy answer to the same task; 0
        if either is missing."""
        greedy_E = require(outcomes.greedy_E, "greedy")
        return np.where(outcomes.counted_E & ~np.isnan(greedy_E), outcomes.values_E - np.nan_to_num(greedy_E), 0.0)


class Gdpo(AdvantageSection):
    """GDPO's advantage: each component of the reward is normalised separately, so that none dominates the others.

    Σ_k w_k·(R_k − mean_k)/(std_k + ε) over the group, with n − 1 in the denominator of std_k; then whitened over the
    batch: mean 0, standard deviation 1 with n in the denominator.

    Source: Liu et al., arXiv 2601.05242, eq. 4–7. A single reward counts as one component.
    """

    kind: Literal["gdpo"] = "gdpo"
    """The name that selects this advantage."""
    weights: tuple[float, ...] | None = None
    """w, the weight of each component of the reward, in their order; unset: 1 for all."""
    eps: float = Field(default=1e-6, ge=0)
    """ε, which is added to every standard deviation."""
    scope: ClassVar[Scope] = "batch"

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: GRPO's advantage of each component of the reward, weighted, summed and
        normalised over the batch. Raises :class:`~headrace.base.errors.DataError` if the number of weights differs from
        the number of components."""
        parts_EK = outcomes.rewards_E[:, None] if outcomes.parts_EK is None else outcomes.parts_EK
        weights = self.weights or (1.0,) * parts_EK.shape[1]
        if len(weights) != parts_EK.shape[1]:
            raise DataError(
                f"gdpo has {len(weights)} weights for {parts_EK.shape[1]} rewards", remedy="give one weight per reward"
            )
        single = GrpoAdvantage(std="ddof1", eps=self.eps)
        counted_KE = np.where(outcomes.counted_E, parts_EK.T, np.nan)
        columns = [single(replace(outcomes, rewards_E=column_E, parts_EK=None)) for column_E in counted_KE]
        summed_E = sum((w * column_E for w, column_E in zip(weights, columns, strict=True)), np.zeros(len(parts_EK)))
        mean, std = moments(summed_E, outcomes.counted_E.astype(np.float64))
        return divide_or_zero(
            (summed_E - mean) * outcomes.counted_E, np.full(len(summed_E), std + self.eps if std > 0 else 0.0)
        )


class ReinforcePp(AdvantageSection):
    """The advantage of REINFORCE++: one baseline for the whole batch instead of one per prompt.

    (R − mean)/(std + ε) over the tokens of the batch that carry loss, so that each episode is weighted by its length;
    std with denominator n. A group of one is treated like any other, since the batch is the baseline.

    With ``group_baseline``, R minus its group's mean replaces R. A group of one is then left out of mean and std, and
    has advantage 0. Observation tokens carry no loss and do not count; without lengths, all episodes have the same
    weight.
    Source: Hu et al., arXiv 2501.03262, eq. 8 and 9.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """The name that selects this advantage."""
    group_baseline: bool = False
    """Whether to subtract the mean of the group first (REINFORCE++-baseline)."""
    eps: float = Field(default=1e-8, ge=0)
    """ε, which is added to the standard deviation."""
    scope: ClassVar[Scope] = "batch"
    reads: ClassVar[frozenset[str]] = frozenset({"lengths"})

    @property
    def compares_siblings(self) -> bool:
        """Whether the group's mean is subtracted, so that an episode is compared with its siblings."""
        return self.group_baseline

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward (minus the group's mean with ``group_baseline``),
        normalised over the whole batch with each episode weighted by its length."""
        credit_E, counted_E = outcomes.values_E, outcomes.counted_E
        if self.group_baseline:
            counted_E = counted_E & (total(counted_E.astype(np.float64), outcomes.groups_E) > 1)
            credit_E = centered(outcomes)
        lengths_E = np.ones(len(credit_E)) if outcomes.lengths_E is None else outcomes.lengths_E.astype(np.float64)
        mean, std = moments(credit_E, counted_E * lengths_E)
        difference_E = (credit_E - mean) * counted_E
        return divide_or_zero(difference_E, np.full(len(credit_E), std + self.eps if std > 0 else 0.0)) + 0.0


class Rae(AdvantageSection):
    """Role-conditioned advantage estimation (RAE): each agent is compared with its own running mean.

    b ← α·b + (1 − α)·R, then R − b, per agent, in the order of the episodes. It is defined for a group of one.

    Without ``agents`` there is one agent. Without ``baselines`` each agent starts at 0; for the next batch, pass the
    baselines that :meth:`follow` returned for the previous batch.
    Source: Liu et al. (SPIRAL), arXiv 2506.24119, eq. 4 and 5.
    """

    kind: Literal["rae"] = "rae"
    """The name that selects this advantage."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """α, the fraction of the running mean that remains after each episode."""
    scope: ClassVar[Scope] = "batch"
    stateful: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"agents", "baselines"})

    @property
    def compares_siblings(self) -> bool:
        """``False``: the baseline is the running mean of the agent, and not the other episodes of the group."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode: its reward minus the running mean of its agent. The running means
        after the batch are discarded; :meth:`follow` returns them."""
        credit_E, _ = self.follow(outcomes)
        return credit_E

    def follow(self, outcomes: Outcomes) -> tuple[Floats, Floats]:
        """Return the advantage of every episode of ``outcomes``, and the running mean of every agent after these
        episodes, which is the baseline at the start of the next batch."""
        agents_E = np.zeros(len(outcomes.rewards_E), np.int64) if outcomes.agents_E is None else outcomes.agents_E
        num_agents = int(agents_E.max()) + 1 if len(agents_E) else 0
        baselines = np.zeros(num_agents) if outcomes.baselines is None else outcomes.baselines.copy()
        credit_E = np.zeros(len(agents_E))
        for episode in np.flatnonzero(outcomes.counted_E):
            agent, reward = agents_E[episode], outcomes.rewards_E[episode]
            baselines[agent] = self.decay * baselines[agent] + (1 - self.decay) * reward
            credit_E[episode] = reward - baselines[agent]
        return credit_E, baselines


class OptimalBaseline(AdvantageSection):
    """The optimal token baseline: at each position, the mean reward weighted by the gradient energy accumulated up to
    that position.

    R_i − B_t, B_t = Σ_j W_{j,t}·R_j / Σ_j W_{j,t} over the group's answers with at least t tokens.

    W_{j,t} = Σ_{s≤t} ‖∇ log π_s‖²: needs ``energies``, the squared norm of each token or its proxy 1 − 2π + Σπ². An
    answer that alone has a token at t has advantage 0 there.
    Source: "Optimal token baseline", arXiv 2602.07078; Greensmith et al. (2004) for the optimal baseline.
    """

    kind: Literal["optimal_baseline"] = "optimal_baseline"
    """The name that selects this advantage."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"energies"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every token: the episode's reward minus the baseline at the token's position, which
        is the mean reward of the group weighted by the gradient energy up to this position."""
        energies_N = require(outcomes.energies_N, "energies")
        lengths_E = require(outcomes.lengths_E, "lengths")
        starts_N = np.repeat(np.cumsum(lengths_E) - lengths_E, lengths_E)
        owners_N = outcomes.owners_N
        # the energy of each token's own episode up to this token: a running sum minus its value at the episode's start
        sums_N = np.cumsum(energies_N)
        weights_N = sums_N - (sums_N - energies_N)[starts_N] if len(sums_N) else sums_N
        weights_N = weights_N * outcomes.counted_E[owners_N]
        places_N = np.arange(len(owners_N)) - starts_N
        keys_N = joint(outcomes.groups_E[owners_N], places_N)  # tokens of a group at the same position are compared
        values_N = outcomes.values_E[owners_N]
        mass_N = total(weights_N, keys_N)
        baseline_N = np.where(mass_N > 0, divide_or_zero(total(weights_N * values_N, keys_N), mass_N), values_N)
        return remove_rounding((values_N - baseline_N) * outcomes.counted_E[owners_N], values_N)
