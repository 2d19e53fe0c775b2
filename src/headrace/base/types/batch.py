"""Train samples and the batch of one optimizer step. A version is the integer that names one set of weights.

Shape legend: S samples of the batch, N tokens of all samples one after the other, T tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.episode import EpisodeKey
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import NO_TOKENS, FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One root-to-leaf path of turns of an episode, laid out as token-aligned arrays."""

    key: EpisodeKey
    """The identifier of the episode."""
    spans: Sequence[Tokens]
    """All T tokens of the path, prompts included: consecutive spans, whose columns only the batch copies."""
    mask_T: npt.NDArray[np.bool_]
    """Whether each token carries loss: the policy sampled it, and no other path of the episode trains it."""
    advantage: float | FloatColumn
    """The advantage of the tokens that carry loss: one number for all of them, or one number for each of the T
    tokens."""
    roles: tuple[tuple[str, int], ...] = ()
    """The authors of the turns, in order: the role of each author and the number of tokens of its turn. It may be empty
    unless agents with their own adapters are trained."""

    @property
    def tokens(self) -> Tokens:
        """Return the T tokens as one span."""
        return Tokens.concat(self.spans)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens T."""
        return sum([len(span.ids_T) for span in self.spans])


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The data that one optimizer step trains on, as columns concatenated over samples."""

    step: int
    """The number of the optimizer step, from 0; also the version of the learner's weights before it."""
    lengths_S: IntColumn
    """The number of tokens of each sample; the sum is N."""
    groups_S: IntColumn
    """The index of each sample's group in this batch, from 0: samples of one group share a baseline."""
    episodes_S: IntColumn
    """The index of each sample's episode in this batch, from 0: paths of one episode count as one rollout."""
    ids_N: IntColumn
    """The vocabulary id of each token, prompts included."""
    mask_N: npt.NDArray[np.bool_]
    """Whether each token carries loss."""
    logprobs_N: FloatColumn
    """log μ: the log-probability of each token under the distribution that it was really sampled from, as the engine
    recorded it; 0 for a token that was not sampled."""
    versions_N: IntColumn
    """The version of the weights that sampled each token; −1 for a token that no policy sampled."""
    advantages_N: FloatColumn
    """The advantage of each token. Only advantages of tokens that carry loss are used."""
    kept: KeptSets | None = None
    """The kept-set of each of the N tokens: the vocabulary entries that top-k, top-p and min-p left to draw from.
    ``None`` if no token has one."""
    routing: Routing | None = None
    """The experts that computed each of the N tokens in a mixture-of-experts model; ``None`` if none are recorded."""
    teacher_scores: TeacherScores | None = None
    """A teacher's scores of the N tokens; ``None`` if no teacher scored any."""
    agents: tuple[str, ...] = ("",)
    """The agents whose adapters are trained. The first is the policy, which has the empty name; the others are agents
    with their own adapters."""
    agents_N: IntColumn | None = None
    """The index in ``agents`` of the adapter that each of the N tokens trains; ``None`` if all train the policy's
    adapter."""

    @classmethod
    def collate(cls, step: int, samples: list[TrainSample], agents: Sequence[str] = ()) -> Batch:
        """Return the batch of optimizer step ``step``: the columns of ``samples``, concatenated in the given order.
        ``agents`` are the roles that train their own adapters instead of the policy's adapter."""
        # begins with an empty span, so that the columns of a single span are copied, too
        tokens = Tokens.concat([NO_TOKENS, *(span for sample in samples for span in sample.spans)])
        groups: dict[int, int] = {}
        episodes: dict[EpisodeKey, int] = {}
        lengths = np.array([sample.num_tokens for sample in samples], np.int32)
        return cls(
            step=step,
            lengths_S=lengths,
            groups_S=np.array([groups.setdefault(s.key.group, len(groups)) for s in samples], np.int32),
            episodes_S=np.array([episodes.setdefault(s.key, len(episodes)) for s in samples], np.int32),
            ids_N=tokens.ids_T,
            mask_N=np.concatenate([sample.mask_T for sample in samples]) if samples else np.zeros(0, bool),
            logprobs_N=tokens.logprobs_T,
            versions_N=tokens.versions_T,
            advantages_N=_advantages(samples, lengths),
            kept=tokens.kept,
            routing=tokens.routing,
            teacher_scores=tokens.teacher_scores,
            agents=("", *agents),
            agents_N=_adapter_indices(samples, agents) if agents else None,
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the batch, prompts included."""
        return len(self.ids_N)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that carry loss."""
        return int(self.mask_N.sum())

    def split_by_agent(self, mask_N: npt.NDArray[np.bool_]) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """Divide the tokens of ``mask_N`` by the adapter that they train. Return, for every agent whose adapter is
        trained, its name and the mask of its tokens."""
        if self.agents_N is None:
            return [("", mask_N)]
        parts = [(agent, mask_N & (self.agents_N == index)) for index, agent in enumerate(self.agents)]
        return [(agent, own_N) for agent, own_N in parts if own_N.any()]

    def ages(self, tokens: slice = slice(None)) -> npt.NDArray[np.int32]:
        """Return the age of every token that carries loss, in the order of the batch: the learner's version (``step``)
        minus the version that sampled the token. For a token of mixed versions the older version counts. ``tokens``
        selects the tokens."""
        return (self.step - oldest(self.versions_N[tokens][self.mask_N[tokens]])).astype(np.int32)


def _advantages(samples: Sequence[TrainSample], lengths_S: IntColumn) -> FloatColumn:
    """Return the advantage of each token of ``samples``, whose numbers of tokens are ``lengths_S``."""
    ends = np.cumsum(lengths_S, dtype=np.int64)
    advantages_N = np.empty(int(ends[-1]) if len(ends) else 0, np.float32)
    for sample, end in zip(samples, ends.tolist(), strict=True):
        advantages_N[end - sample.num_tokens : end] = sample.advantage
    return advantages_N


def _adapter_indices(samples: Sequence[TrainSample], agents: Sequence[str]) -> IntColumn:
    """Return, for each token of ``samples``, the index of the adapter that it trains: 0 for the policy's adapter,
    otherwise 1 plus the index in ``agents`` of its author's role."""
    indices = {agent: index for index, agent in enumerate(agents, 1)}
    turns = [turn for sample in samples for turn in sample.roles]
    authors = np.array([indices.get(role, 0) for role, _ in turns], np.int32)
    return np.repeat(authors, [num_tokens for _, num_tokens in turns])
