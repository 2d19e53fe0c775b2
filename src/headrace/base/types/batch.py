"""Train samples and the batch of one optimizer step.

Shape legend: S samples of the batch, N tokens of all samples one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.episode import EpisodeKey
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.taught import Taught
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One root-to-leaf path of an episode, laid out as token-aligned arrays."""

    key: EpisodeKey
    tokens: Tokens
    mask_T: npt.NDArray[np.bool_]
    """The tokens that carry loss: sampled by the policy, and not already trained through another path."""
    advantage: float | FloatColumn
    """What every token of the mask is credited with: one number for all, or one for each."""
    roles: tuple[tuple[str, int], ...] = ()
    """Who wrote it: a role and a number of tokens for each turn; empty where nobody asks."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one optimizer step trains on: columns, concatenated over samples."""

    step: int
    """The optimizer step that trains it; also the version of the learner's weights when it does."""
    lengths_S: IntColumn
    """Tokens of each sample; sums to N."""
    groups_S: IntColumn
    """Place, from 0, of each sample's group in this batch: samples of one group share a baseline."""
    episodes_S: IntColumn
    """Place, from 0, of each sample's episode in this batch: paths of one episode count as one rollout."""
    ids_N: IntColumn
    mask_N: npt.NDArray[np.bool_]
    """Whether the token carries loss."""
    logprobs_N: FloatColumn
    """log μ as the engine recorded it; 0 outside the mask."""
    versions_N: IntColumn
    advantages_N: FloatColumn
    kept: KeptSets | None = None
    """What each of the N tokens was drawn from; ``None`` if no token has a kept-set."""
    routing: Routing | None = None
    """The experts of each of the N tokens; ``None`` if none are known."""
    taught: Taught | None = None
    """What a teacher says of each of the N tokens; ``None`` if none was asked."""
    agents: tuple[str, ...] = ("",)
    """Whose adapters are trained: the policy's, which has no name, and those of agents that train their own."""
    agents_N: IntColumn | None = None
    """Whose adapter each of the N tokens trains, as a place in ``agents``; ``None``: the policy's, all of them."""

    @classmethod
    def collate(cls, step: int, samples: list[TrainSample], agents: Sequence[str] = ()) -> Batch:
        """Lay the samples out one after the other, in the order given. ``agents``: roles that train adapters of their
        own."""
        tokens = Tokens.concat([sample.tokens for sample in samples])
        groups: dict[int, int] = {}
        episodes: dict[EpisodeKey, int] = {}
        lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
        return cls(
            step=step,
            lengths_S=lengths,
            groups_S=np.array([groups.setdefault(s.key.group, len(groups)) for s in samples], np.int32),
            episodes_S=np.array([episodes.setdefault(s.key, len(episodes)) for s in samples], np.int32),
            ids_N=tokens.ids_T,
            mask_N=np.concatenate([sample.mask_T for sample in samples]) if samples else np.zeros(0, bool),
            logprobs_N=tokens.logprobs_T,
            versions_N=tokens.versions_T,
            advantages_N=np.concatenate(
                [np.zeros(0, np.float32), *(np.full(len(s.tokens), s.advantage, np.float32) for s in samples)]
            ),
            kept=tokens.kept,
            routing=tokens.routing,
            taught=tokens.taught,
            agents=("", *agents),
            agents_N=_whose(samples, agents) if agents else None,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, prompts included."""
        return len(self.ids_N)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.mask_N.sum())

    def by_agent(self, mask_N: npt.NDArray[np.bool_]) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """Every agent whose adapter tokens of the mask train, with those tokens."""
        if self.agents_N is None:
            return [("", mask_N)]
        parts = [(agent, mask_N & (self.agents_N == place)) for place, agent in enumerate(self.agents)]
        return [(agent, own_N) for agent, own_N in parts if own_N.any()]

    def ages(self) -> npt.NDArray[np.int32]:
        """The age of every token that carries loss: version of the learner when it trains − version of the token."""
        return (self.step - oldest(self.versions_N[self.mask_N])).astype(np.int32)


def _whose(samples: Sequence[TrainSample], agents: Sequence[str]) -> IntColumn:
    """The place among the policy and ``agents`` of who wrote each token."""
    places = {agent: place for place, agent in enumerate(agents, 1)}
    turns = [turn for sample in samples for turn in sample.roles]
    whose = np.array([places.get(role, 0) for role, _ in turns], np.int32)
    return np.repeat(whose, [length for _, length in turns])
