"""Train samples and the batch of one optimizer step.

Shape legend: S samples of the batch, N tokens of all samples one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.types.episode import EpisodeKey
from headrace.types.recorded import KeptSets, Routing
from headrace.types.taught import Taught
from headrace.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.types.versions import oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One root-to-leaf path of an episode, laid out as token-aligned arrays."""

    key: EpisodeKey
    tokens: Tokens
    mask_T: npt.NDArray[np.bool_]
    """The tokens that carry loss: sampled by the policy, and not already trained through another path."""
    advantage: float | FloatColumn
    """What every token of the mask is credited with: one number for all, or one for each."""


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

    @classmethod
    def collate(cls, step: int, samples: list[TrainSample]) -> Batch:
        """Lay the samples out one after the other, in the order given."""
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
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, prompts included."""
        return len(self.ids_N)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.mask_N.sum())

    def ages(self) -> npt.NDArray[np.int32]:
        """The age of every token that carries loss: version of the learner when it trains − version of the token."""
        return (self.step - oldest(self.versions_N[self.mask_N])).astype(np.int32)
