"""Advantages per token or per turn. E episodes (or turns), N tokens of all episodes, concatenated, T tokens of one
answer. R is the reward of an episode; a reward that is NaN does not count."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
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
from headrace.algo.advantages.groups import GrpoAdvantage
from headrace.algo.advantages.outcomes import Bools, Floats, Ints, Outcomes
from headrace.algo.returns import gae


class CriticEstimate(NamedTuple):
    """The result of estimating advantages with a critic; all numbers are 0 for an episode that does not count."""

    advantages_N: Floats
    """The advantage of each token, before it is normalised over the batch."""
    returns_N: Floats
    """Advantage + value: the target of the critic's training."""
    outcomes_N: Floats
    """The discounted reward γ^k·R at the token k before the last: the return from this token on."""


class GaeAdvantage(AdvantageSection):
    """Generalised advantage estimation (GAE): the return of each token compared with a critic's estimate.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t over the tokens of an episode that carry loss. r is R at
    the last of these tokens, else 0; V_t is a critic's value of the text before the token, 0 after the last.

    With ``normalize``, (A − mean)/(std + ε) over the tokens of the batch; std with denominator n. The group is not
    a baseline, so that a group of one has advantages like any other. Needs ``values``; in a run, the learner's critic
    computes them (``[learner.critic]``).
    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """

    kind: Literal["gae"] = "gae"
    """The name that selects this advantage."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """γ, the discount per token of later rewards."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: with 1, only rewards count. With less, the critic's values at later tokens count too, which reduces the
    variance and adds bias."""
    normalize: bool = True
    """Whether to normalise advantages to mean 0 and standard deviation 1 over the tokens of the batch."""
    eps: float = Field(default=1e-8, ge=0)
    """ε, which is added to the standard deviation."""
    scope: ClassVar[Scope] = "batch"
    per_token: ClassVar[bool] = True
    by_critic: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"lengths", "values"})

    @property
    def compares_siblings(self) -> bool:
        """``False``: the baseline is the critic's value, and not the other episodes of the group."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every token by generalised advantage estimation, normalised over the batch if
        ``normalize`` is set."""
        return self.scaled(self.estimate(outcomes).advantages_N, outcomes.counted_E[outcomes.owners_N])

    def estimate(self, outcomes: Outcomes) -> CriticEstimate:
        """Return the advantages of all tokens before normalisation, computed for each episode separately, and the
        returns, which are the targets of the critic. Requires the critic's values in ``outcomes``. In a run, the
        learner calls this method."""
        values_N, lengths_E = require(outcomes.values_N, "values"), require(outcomes.lengths_E, "lengths")
        # one row per episode, padded to the longest: gae computes all episodes at once
        places_T = np.arange(lengths_E.max(initial=0))
        inside_ET = (places_T < lengths_E[:, None]) & outcomes.counted_E[:, None]
        counted_N = outcomes.counted_E[outcomes.owners_N]
        rewards_ET = (places_T == lengths_E[:, None] - 1) * outcomes.values_E[:, None]
        values_ET = np.zeros(inside_ET.shape)
        values_ET[inside_ET] = values_N[counted_N]
        columns = [
            *gae(rewards_ET, values_ET, inside_ET, self.gamma, self.lam),
            gae(rewards_ET, np.zeros(inside_ET.shape), inside_ET, self.gamma, 1.0).returns,
        ]
        flat = np.zeros((3, len(values_N)))
        flat[:, counted_N] = [column.numpy()[inside_ET] for column in columns]
        return CriticEstimate(*flat)

    def scaled(self, advantages_N: Floats, counted_N: Bools) -> Floats:
        """Return the advantages of :meth:`estimate`, normalised over the tokens of a batch for which ``counted_N`` is
        true if ``normalize`` is set; 0 for the other tokens."""
        if not self.normalize:
            return advantages_N * counted_N
        mean, std = moments(advantages_N, counted_N.astype(np.float64))
        scale_N = np.full(len(advantages_N), std + self.eps if std > 0 else 0.0)
        return divide_or_zero((advantages_N - mean) * counted_N, scale_N) + 0.0


class ReverseKl(AdvantageSection):
    """The advantage of on-policy distillation: the teacher's log-probability of a token minus the sampler's.

    β·(log ν − log μ) per token, + ω·(R − mean) of the group; ν is the teacher that is chosen for the episode.

    The teacher's term does not depend on rewards: it is also present in a group of one and for a reward that does not
    count, where the reward's term is 0. Its expectation over samples of μ is −KL(μ‖ν). Needs ``log_nu`` and ``log_mu``.
    Source: Agarwal et al. (GKD), arXiv 2306.13649; Lu (2025), "On-policy distillation".
    """

    kind: Literal["reverse_kl"] = "reverse_kl"
    """The name that selects this advantage."""
    beta: float = Field(default=1.0, ge=0)
    """β, the weight of the teacher's term."""
    weight: float = Field(default=0.0, ge=0)
    """ω, the weight of the reward's term; with 0, rewards are not used."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"log_mu", "log_nu"})
    by_teacher: ClassVar[bool] = True

    @property
    def compares_siblings(self) -> bool:
        """Whether rewards, which are compared within groups, have a weight beside the teacher's term."""
        return self.weight > 0

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every token: the teacher's term, plus the reward's term of the token's episode if it
        has a weight."""
        credit_N = self.credit_tokens(require(outcomes.log_nu_N, "log_nu") - require(outcomes.log_mu_N, "log_mu"))
        return credit_N + self.credit_rewards(outcomes)[outcomes.owners_N] if self.weight else credit_N

    def credit_tokens(self, gap_N: Floats) -> Floats:
        """Return the teacher's term of the advantage of every token, from ``gap_N``, which is log ν − log μ, clamped to
        ±20; 0 where it is NaN. In a run, the learner adds this term, since it has the teacher's scores."""
        return self.beta * np.nan_to_num(np.clip(gap_N, -20.0, 20.0))

    def credit_rewards(self, outcomes: Outcomes) -> Floats:
        """Return the reward's term of the advantage of every episode of ``outcomes``: ω times the reward minus the
        group's mean."""
        return self.weight * centered(outcomes)


class Prpo(AdvantageSection):
    """PRPO's advantage: process rewards per segment, centred so that their mean is the advantage of the outcome.

    A_outcome + ω·(p − mean of p over the episode)/(std of p over the group + ε); std of p with denominator n.

    p is the mean process reward of a token's segment. Segments begin at the K tokens of highest entropy that are at
    least m apart. The mean over an episode's tokens is then its outcome advantage (R − mean)/(std + ε), with n − 1 in
    the denominator of that std. Needs ``process``, and ``entropies`` or ``segments``. In a run, the components of
    ``env.rewards`` with ``by_turn`` grade every segment of a turn, and do not count in R; the engine records entropies.
    Source: Ding et al., arXiv 2601.07182.
    """

    kind: Literal["prpo"] = "prpo"
    """The name that selects this advantage."""
    spikes: int = Field(default=8, ge=0)
    """K, the largest number of entropy spikes that divide an answer into segments; in a run, each turn of an answer."""
    gap: int = Field(default=16, ge=1)
    """m, the smallest distance between two spikes, in tokens."""
    weight: float = Field(default=1.0, ge=0)
    """ω, the weight of the process rewards."""
    eps: float = Field(default=1e-6, ge=0)
    """ε, which is added to every standard deviation."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"process", "entropies", "segments"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every token: GRPO's advantage of its episode's outcome, plus the weighted, centred
        process reward of its segment."""
        process_N, owners_N = require(outcomes.process_N, "process"), outcomes.owners_N
        segments_N = self._segments(outcomes) if outcomes.segments_N is None else outcomes.segments_N
        keys_N = joint(owners_N, segments_N)
        ones_N = np.ones(len(owners_N))
        p_N = total(process_N, keys_N) / total(ones_N, keys_N)
        shift_N = remove_rounding(p_N - total(p_N, owners_N) / total(ones_N, owners_N), p_N)
        groups_N = outcomes.groups_E[owners_N]
        spread_N = remove_rounding(p_N - total(p_N, groups_N) / total(ones_N, groups_N), p_N)
        std_N = np.sqrt(total(spread_N**2, groups_N) / total(ones_N, groups_N))
        outcome_E = GrpoAdvantage(std="ddof1", eps=self.eps)(outcomes)
        relative_N = divide_or_zero(shift_N, np.where(std_N > 0, std_N + self.eps, 0.0))
        credit_N = outcome_E[owners_N] + self.weight * relative_N
        return credit_N * outcomes.counted_E[owners_N]

    def starts(self, entropies_T: npt.NDArray[np.floating[Any]]) -> list[int]:
        """Return the indices of the tokens at which the segments of one answer begin, without the first segment, which
        begins at 0. They are the spikes of ``entropies_T``, the entropy at each token."""
        return [place for place in spikes(entropies_T, max_count=self.spikes, gap=self.gap) if place > 0]

    def _segments(self, outcomes: Outcomes) -> Ints:
        """Return the number of each token's segment, computed from the entropies. Numbers increase over all episodes;
        the beginning of an episode does not begin a new number."""
        entropies_N, lengths_E = require(outcomes.entropies_N, "entropies"), require(outcomes.lengths_E, "lengths")
        begins_N = np.zeros(len(entropies_N), np.int64)
        for end, length in zip(np.cumsum(lengths_E), lengths_E, strict=True):
            begins_N[end - length :][self.starts(entropies_N[end - length : end])] = 1
        return np.cumsum(begins_N)


def spikes(entropies_T: npt.NDArray[np.floating[Any]], *, max_count: int, gap: int) -> list[int]:
    """Return the indices of the ``max_count`` highest entropies (or fewer, if there are not as many) that are at least
    ``gap`` tokens apart, in ascending order. Among equal entropies, the first is preferred.

    >>> spikes(np.array([0.1, 2.0, 1.9, 0.3, 1.5]), max_count=2, gap=2)
    [1, 4]
    """
    found: list[int] = []
    for place in np.argsort(-entropies_T, kind="stable").tolist():
        if len(found) == max_count:
            break
        if all(abs(place - other) >= gap for other in found):
            found.append(place)
    return sorted(found)


class StepAdvantage(AdvantageSection):
    """Advantages by turn: each turn is compared with other turns in the same state.

    R_episode − mean of the others + ω·(G − mean of the other G in the same state), G = Σ γ^k r from the turn on.

    A row is a turn, in order of time. ``episodes`` is the episode of each turn (by default its own), and ``states`` its
    state (by default its index in the episode). A state that occurs once contributes no turn advantage.
    Source: Feng et al. (GiGPO), arXiv 2505.10978, eq. 5–9, with leave-one-out means.
    """

    kind: Literal["step"] = "step"
    """The name that selects this advantage."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """γ, the discount per turn of the returns that are compared."""
    weight: float = Field(default=1.0, ge=0)
    """ω, the weight of the turn's advantage relative to the episode's."""
    reads: ClassVar[frozenset[str]] = frozenset({"episodes", "states"})
    by_turn: ClassVar[bool] = True

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every turn (a row of ``outcomes`` is a turn): the advantage of its episode, plus the
        weighted advantage of the turn among turns in the same state."""
        rows = np.arange(len(outcomes.rewards_E))
        episodes_E = rows if outcomes.episodes_E is None else outcomes.episodes_E
        returns_E, places_E = self._returns(outcomes.values_E, episodes_E)
        states_E = places_E if outcomes.states_E is None else outcomes.states_E
        keys_E = joint(outcomes.groups_E, states_E)
        step_E = leave_one_out(returns_E, outcomes.counted_E, keys_E)
        # one entry per episode for the episode's own advantage; ``owners_E`` maps it back to the turns
        _, first, owners_E = np.unique(episodes_E, return_index=True, return_inverse=True)
        whole_E = total(outcomes.values_E, episodes_E)[first]
        counted_E = total(outcomes.counted_E.astype(np.float64), episodes_E)[first] > 0
        episode_E = leave_one_out(whole_E, counted_E, outcomes.groups_E[first])[owners_E]
        return (episode_E + self.weight * step_E) * outcomes.counted_E

    def _returns(self, values_E: Floats, episodes_E: Ints) -> tuple[Floats, Ints]:
        """Return two numbers for each turn: the discounted sum of the rewards from this turn to the end of its episode,
        and the index of the turn in its episode, from 0. ``values_E`` are the rewards of the turns, ``episodes_E``
        their episodes."""
        returns_E, places_E = np.zeros(len(values_E)), np.zeros(len(values_E), np.int64)
        later: dict[int, float] = {}
        earlier: dict[int, int] = {}
        for row, episode in enumerate(episodes_E.tolist()):
            places_E[row] = earlier[episode] = earlier.get(episode, -1) + 1
        for row in range(len(values_E) - 1, -1, -1):
            episode = int(episodes_E[row])
            returns_E[row] = later[episode] = values_E[row] + self.gamma * later.get(episode, 0.0)
        return returns_E, places_E
