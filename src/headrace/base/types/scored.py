"""Scored groups, whose episodes have all ended, the train samples made from them, and the step's results per token.

Shape legend: T tokens of one path, E trained episodes of a step, L their tokens that carry loss, N tokens of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, get_role
from headrace.base.types.stored import StoredRows
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn, find_version_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The episodes of one group after all of them have ended. The episodes of a group share a baseline."""

    number: int
    """The number of the group in the run."""
    episodes: tuple[EpisodeGraph, ...]
    """All episodes of the group, failed ones included."""
    columns: StoredRows | None = None
    """Where the turns of all episodes lie in the run's store, with all of their columns; the tokens in ``episodes`` are
    views of some of these. ``None``: everything is in memory."""

    @property
    def scored(self) -> list[EpisodeGraph]:
        """Return the episodes of the group that are trained: they have a reward and are not excluded."""
        return [episode for episode in self.episodes if episode.status is EpisodeStatus.SCORED]

    @property
    def counted(self) -> list[EpisodeGraph]:
        """Return the episodes whose rewards count in the baseline of the group: the trained episodes, and the masked
        episodes, whose tokens carry no loss."""
        counted = (EpisodeStatus.SCORED, EpisodeStatus.MASKED)
        return [episode for episode in self.episodes if episode.status in counted]

    def oldest_version(self) -> int | None:
        """Return the oldest version that sampled a token of a trained episode; ``None`` if nothing was sampled."""
        versions = self.versions()
        return None if versions is None else versions[0]

    def versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version that sampled a token of a trained episode; ``None`` if nothing was
        sampled."""
        return find_version_range([turn.tokens for episode in self.scored for turn in episode.turns])


Credit = float | Sequence[float]
"""The advantage of an episode's tokens: one number for all, or one per turn."""


def paths(episode: EpisodeGraph, advantage: Credit) -> list[TrainSample]:
    """Return one train sample for each root-to-leaf path of turns of ``episode``. ``advantage`` is one number for all
    tokens, or one number per turn.

    A turn that belongs to several paths carries loss only in the first of them. A path without a token that carries
    loss makes no sample; but if no path has such a token, the first path makes a sample.
    """
    if episode.is_chain:
        return [_single_path_sample(episode, advantage)]
    return [
        TrainSample(
            key=episode.key,
            spans=tuple(episode.path_spans(path)),
            mask_T=np.concatenate(masks),
            advantage=advantage if isinstance(advantage, float) else _advantages_by_token(episode, path, advantage),
            roles=tuple((get_role(episode.turns[index].author), len(episode.turns[index].tokens)) for index in path),
        )
        for path, masks in _masked_paths(episode)
    ]


def _single_path_sample(episode: EpisodeGraph, advantage: Credit) -> TrainSample:
    """Return the only train sample of :func:`paths` for an episode whose turns form one path, as in most episodes."""
    path = range(len(episode.turns))
    masks = [
        np.zeros(len(turn.tokens), bool) if turn.untrained else turn.tokens.sampled_T for turn in episode.turns
    ]  # fmt: skip
    return TrainSample(
        key=episode.key,
        spans=tuple(episode.path_spans(path)),
        mask_T=np.concatenate(masks),
        advantage=advantage if isinstance(advantage, float) else _advantages_by_token(episode, path, advantage),
        roles=tuple([(get_role(turn.author), len(turn.tokens.ids_T)) for turn in episode.turns]),
    )


def loss_places(episode: EpisodeGraph) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return, for each turn of ``episode`` with tokens that carry loss, its index and the indices of those tokens,
    in the order in which :func:`paths` lays them out."""
    return [
        (turn, np.flatnonzero(mask_T))
        for path, masks in _masked_paths(episode)
        for turn, mask_T in zip(path, masks, strict=True)
        if mask_T.any()
    ]


def _masked_paths(episode: EpisodeGraph) -> list[tuple[list[int], list[npt.NDArray[np.bool_]]]]:
    """Return the paths of ``episode`` that make a train sample: for each path, the indices of its turns, and the loss
    mask of each turn."""
    no_loss = {index for index, turn in enumerate(episode.turns) if turn.untrained}
    found = []
    # ``no_loss`` contains the turns that carry no loss in the next path: excluded turns, and turns of earlier paths
    for leaf in episode.leaves():
        path = episode.path(leaf)
        turns = [episode.turns[index].tokens for index in path]
        masks = [
            turn.sampled_T if index not in no_loss else np.zeros(len(turn), bool)
            for index, turn in zip(path, turns, strict=True)
        ]
        no_loss.update(path)
        found.append((path, masks))
    return [(path, masks) for path, masks in found if any(mask_T.any() for mask_T in masks)] or found[:1]


class TokenResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an optimizer step for each token that carried loss, ordered by episode, and within an episode as
    :func:`loss_places` orders them. The ledger stores these records."""

    groups_E: IntColumn
    """The number of each episode's group in the run."""
    places_E: IntColumn
    """The index of each episode in its group."""
    sizes_E: IntColumn
    """The number of the L tokens that belong to each episode."""
    log_pi_L: FloatColumn
    """log π under the weights before the step; NaN for a token whose loss was dropped during the step."""
    teacher_scores_L: TeacherScores | None = msgspec.field(default=None, name="taught_L")  # its name in stored runs
    """The scores of a teacher in the learner's process; ``None`` if no sampled token was scored."""

    @classmethod
    def from_batch(
        cls,
        keys: Sequence[EpisodeKey],
        batch: Batch,
        log_pi_N: FloatColumn,
        teacher_scores_N: TeacherScores | None = None,
    ) -> TokenResults:
        """Return the results for the tokens of ``batch`` that carry loss. ``keys`` are the keys of the batch's
        episodes, in the order in which the batch numbers them. ``log_pi_N`` (log π before the step) and
        ``teacher_scores_N`` have one entry for each token of the batch."""
        episodes_N = np.repeat(batch.episodes_S, batch.lengths_S)
        return cls(
            groups_E=np.array([key.group for key in keys], np.int32),
            places_E=np.array([key.place for key in keys], np.int32),
            sizes_E=np.bincount(episodes_N[batch.mask_N], minlength=len(keys)).astype(np.int32),
            log_pi_L=log_pi_N[batch.mask_N],
            teacher_scores_L=None if teacher_scores_N is None else teacher_scores_N[batch.mask_N],
        )

    def gaps(self, episode: EpisodeGraph) -> dict[int, FloatColumn]:
        """Return log π − log μ, the learner's log-probability minus the engine's, for each turn of ``episode`` that
        carried loss: by the index of the turn, one number per token, NaN for a token without loss."""
        found: dict[int, FloatColumn] = {}
        for turn, places, span in self._spans(episode):
            log_mu_T = episode.turns[turn].tokens.logprobs_T
            gaps_T = np.full(len(log_mu_T), np.nan, np.float32)
            gaps_T[places] = self.log_pi_L[span] - log_mu_T[places]
            found[turn] = gaps_T
        return found

    def teacher_scores(self, episode: EpisodeGraph) -> dict[int, TeacherScores]:
        """Return the teacher's scores of the turns of ``episode`` that carried loss, by the index of the turn; empty if
        there are no scores."""
        if (scores := self.teacher_scores_L) is None:
            return {}
        return {
            turn: scores[span].scatter(places, len(episode.turns[turn].tokens))
            for turn, places, span in self._spans(episode)
        }

    def _spans(self, episode: EpisodeGraph) -> Iterator[tuple[int, npt.NDArray[np.int64], slice]]:
        """Yield, for each turn of ``episode`` that carried loss: its index, the indices of its tokens with loss, and
        their slice of the L tokens. For an episode that was not in the batch, yield nothing."""
        here = (self.groups_E == episode.key.group) & (self.places_E == episode.key.place)
        if not here.any():
            return
        begin = int(self.sizes_E[: int(np.argmax(here))].sum())
        for turn, places in loss_places(episode):
            yield turn, places, slice(begin, begin + len(places))
            begin += len(places)


def _advantages_by_token(episode: EpisodeGraph, path: Sequence[int], advantages: Sequence[float]) -> FloatColumn:
    """Return the advantage of each token of a path, which is the advantage of its turn. ``path`` contains the indices
    of the path's turns, and ``advantages`` has one number for each turn of the episode."""
    lengths = [len(episode.turns[index].tokens) for index in path]
    return np.repeat(np.array([advantages[index] for index in path], np.float32), lengths)


def num_untrained(groups: Iterable[ScoredGroup]) -> dict[str, int]:
    """Return the number of sampled tokens that carry no loss, in the scored episodes of ``groups``, by the reason why
    their turn carries no loss."""
    counts: Counter[str] = Counter()
    for turn in (turn for group in groups for episode in group.scored for turn in episode.turns):
        if turn.untrained:
            counts[turn.untrained] += turn.tokens.num_sampled
    return {reason: count for reason, count in counts.items() if count}
