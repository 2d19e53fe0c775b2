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
from headrace.base.types.stored import Stored
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import oldest

BYTES_PER_TOKEN = 17.0
"""Bytes per token of the columns that every batch has."""
BYTES_PER_SAMPLE = 12.0
"""Bytes per sample of the columns with one entry per sample."""
REFERENCE_BYTES = 64.0
"""The largest size of a reference to stored rows, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One root-to-leaf path of turns of an episode, laid out as token-aligned arrays."""

    key: EpisodeKey
    """The identifier of the episode."""
    tokens: Tokens
    """All T tokens of the path, prompts included."""
    mask_T: npt.NDArray[np.bool_]
    """Whether each token carries loss: the policy sampled it, and no other path of the episode trains it."""
    advantage: float | FloatColumn
    """The advantage of the tokens that carry loss: one number for all of them, or one number for each of the T
    tokens."""
    roles: tuple[tuple[str, int], ...] = ()
    """The authors of the turns, in order: the role of each author and the number of tokens of its turn. It may be empty
    unless agents with their own adapters are trained."""


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
            teacher_scores=tokens.teacher_scores,
            agents=("", *agents),
            agents_N=_adapter_indices(samples, agents) if agents else None,
        )

    def divide(self, max_bytes: int) -> list[Batch]:
        """Divide the batch into parts of at most about ``max_bytes`` bytes, and return them in order. A part consists
        of whole samples; a sample that is larger is a part of its own. A batch without samples is one part. The columns
        of the parts are views of this batch's columns, and the parts keep its indices of groups and episodes."""
        parts: list[Batch] = []
        # both are running sums: the end of each sample in tokens, and in bytes
        ends_S, sizes_S = np.cumsum(self.lengths_S, dtype=np.int64), np.cumsum(self._bytes_S())
        first, before, sent = 0, 0, 0.0
        while first < len(ends_S):
            last = max(first + 1, int(np.searchsorted(sizes_S, sent + max_bytes, side="right")))
            parts.append(self._part(slice(first, last), slice(before, int(ends_S[last - 1]))))
            first, before, sent = last, int(ends_S[last - 1]), float(sizes_S[last - 1])
        return parts or [self]

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """Return the batch whose :meth:`divide` returned ``parts``."""
        if len(parts) == 1:
            return parts[0]
        kept = [part.kept for part in parts if part.kept is not None]
        routing = [part.routing for part in parts if part.routing is not None]
        scores = [part.teacher_scores for part in parts if part.teacher_scores is not None]
        agents = [part.agents_N for part in parts if part.agents_N is not None]
        return cls(
            step=parts[0].step,
            lengths_S=np.concatenate([part.lengths_S for part in parts]),
            groups_S=np.concatenate([part.groups_S for part in parts]),
            episodes_S=np.concatenate([part.episodes_S for part in parts]),
            ids_N=np.concatenate([part.ids_N for part in parts]),
            mask_N=np.concatenate([part.mask_N for part in parts]),
            logprobs_N=np.concatenate([part.logprobs_N for part in parts]),
            versions_N=np.concatenate([part.versions_N for part in parts]),
            advantages_N=np.concatenate([part.advantages_N for part in parts]),
            kept=KeptSets.concat(kept) if kept else None,
            routing=Routing.concat(routing) if routing else None,
            teacher_scores=TeacherScores.concat(scores) if scores else None,
            agents=parts[0].agents,
            agents_N=np.concatenate(agents) if agents else None,
        )

    def _bytes_S(self) -> npt.NDArray[np.float64]:
        """Return the size of each sample with all its columns, in bytes. It is an estimate for stored columns."""
        bytes_N = np.full(self.num_tokens, BYTES_PER_TOKEN)
        if self.kept is not None:
            bytes_N += self.kept.sizes_T.itemsize
            bytes_N += (
                _reference_bytes_per_token(self.kept.stored, self.num_tokens)
                or self.kept.ids_E.itemsize * self.kept.sizes_T
            )
        if self.routing is not None:
            bytes_N += self.routing.known_T.itemsize + _reference_bytes_per_token(self.routing.stored, self.num_tokens)
            bytes_N[self.routing.known_T] += self.routing.experts_RLK[:1].nbytes
        if self.teacher_scores is not None:
            scores = self.teacher_scores[:1]
            bytes_N += sum(
                each.nbytes for each in (scores.logprobs_T, scores.versions_T, scores.ids_TK, scores.logs_TK)
            )
        if self.agents_N is not None:
            bytes_N += self.agents_N.itemsize
        sums_N = np.concatenate([[0.0], np.cumsum(bytes_N)])
        ends_S = np.cumsum(self.lengths_S, dtype=np.int64)
        bytes_S: npt.NDArray[np.float64] = sums_N[ends_S] - sums_N[ends_S - self.lengths_S]
        return bytes_S + BYTES_PER_SAMPLE

    def _part(self, samples: slice, tokens: slice) -> Batch:
        """Return the batch of the samples in the slice ``samples``, whose tokens are in the slice ``tokens``."""
        return msgspec.structs.replace(
            self,
            lengths_S=self.lengths_S[samples],
            groups_S=self.groups_S[samples],
            episodes_S=self.episodes_S[samples],
            ids_N=self.ids_N[tokens],
            mask_N=self.mask_N[tokens],
            logprobs_N=self.logprobs_N[tokens],
            versions_N=self.versions_N[tokens],
            advantages_N=self.advantages_N[tokens],
            kept=None if self.kept is None else self.kept[tokens],
            routing=None if self.routing is None else self.routing[tokens],
            teacher_scores=None if self.teacher_scores is None else self.teacher_scores[tokens],
            agents_N=None if self.agents_N is None else self.agents_N[tokens],
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the batch, prompts included."""
        return len(self.ids_N)

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that carry loss."""
        return int(self.mask_N.sum())

    def by_agent(self, mask_N: npt.NDArray[np.bool_]) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """Divide the tokens of ``mask_N`` by the adapter that they train. Return, for every agent whose adapter is
        trained, its name and the mask of its tokens."""
        if self.agents_N is None:
            return [("", mask_N)]
        parts = [(agent, mask_N & (self.agents_N == index)) for index, agent in enumerate(self.agents)]
        return [(agent, own_N) for agent, own_N in parts if own_N.any()]

    def ages(self) -> npt.NDArray[np.int32]:
        """Return the age of every token that carries loss, in the order of the batch: the learner's version (``step``)
        minus the version that sampled the token. For a token of mixed versions the older version counts."""
        return (self.step - oldest(self.versions_N[self.mask_N])).astype(np.int32)


def _reference_bytes_per_token(stored: Stored, num_tokens: int) -> float:
    """Return the number of bytes per token of the references ``stored``, for a column of ``num_tokens`` tokens."""
    return REFERENCE_BYTES * len(stored) / max(1, num_tokens)


def _adapter_indices(samples: Sequence[TrainSample], agents: Sequence[str]) -> IntColumn:
    """Return, for each token of ``samples``, the index of the adapter that it trains: 0 for the policy's adapter,
    otherwise 1 plus the index in ``agents`` of its author's role."""
    indices = {agent: index for index, agent in enumerate(agents, 1)}
    turns = [turn for sample in samples for turn in sample.roles]
    authors = np.array([indices.get(role, 0) for role, _ in turns], np.int32)
    return np.repeat(authors, [num_tokens for _, num_tokens in turns])
