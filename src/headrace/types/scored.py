"""Groups whose every episode has ended, and the train samples they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.types.batch import TrainSample
from headrace.types.episode import Episode, EpisodeStatus
from headrace.types.tokens import FloatColumn, versions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The episodes that share a baseline."""

    number: int
    episodes: tuple[Episode, ...]
    """All of them, failed ones included."""

    @property
    def scored(self) -> list[Episode]:
        """The episodes that are trained: they have a reward, and nothing keeps them out."""
        return [episode for episode in self.episodes if episode.status is EpisodeStatus.SCORED]

    @property
    def counted(self) -> list[Episode]:
        """The episodes whose rewards make the baseline: those that are trained, and the masked ones."""
        counted = (EpisodeStatus.SCORED, EpisodeStatus.MASKED)
        return [episode for episode in self.episodes if episode.status in counted]

    def oldest_version(self) -> int | None:
        """The oldest version that sampled a token of a scored episode; ``None`` if nothing was sampled."""
        versions = self.versions()
        return None if versions is None else versions[0]

    def versions(self) -> tuple[int, int] | None:
        """The oldest and newest version that sampled a token of a scored episode; ``None`` if nothing was sampled."""
        return versions_of([turn.tokens for episode in self.scored for turn in episode.turns])


Credit = float | Sequence[float]
"""What the tokens of an episode are credited with: all the same, or each turn with its own."""


def paths(episode: Episode, advantage: Credit) -> list[TrainSample]:
    """One train sample per root-to-leaf path; a turn that two paths share carries loss in the first only. A path on
    which nothing is left that carries loss makes no sample, as long as another one does."""
    trained = {index for index, turn in enumerate(episode.turns) if turn.untrained}
    samples: list[TrainSample] = []
    for leaf in episode.leaves():
        path = episode.path(leaf)
        turns = [episode.turns[index].tokens for index in path]
        masks = [
            turn.sampled_T if index not in trained else np.zeros(len(turn), bool)
            for index, turn in zip(path, turns, strict=True)
        ]
        trained.update(path)
        samples.append(
            TrainSample(
                key=episode.key,
                tokens=episode.path_tokens(path),
                mask_T=np.concatenate(masks),
                advantage=advantage if isinstance(advantage, float) else _by_token(episode, path, advantage),
            )
        )
    return [sample for sample in samples if sample.mask_T.any()] or samples[:1]


def _by_token(episode: Episode, path: Sequence[int], advantages: Sequence[float]) -> FloatColumn:
    lengths = [len(episode.turns[index].tokens) for index in path]
    return np.repeat(np.array([advantages[index] for index in path], np.float32), lengths)


def num_untrained(groups: Iterable[ScoredGroup]) -> dict[str, int]:
    """Sampled tokens of the scored episodes that carry no loss because their turns do not, by reason."""
    counts: Counter[str] = Counter()
    for turn in (turn for group in groups for episode in group.scored for turn in episode.turns):
        if turn.untrained:
            counts[turn.untrained] += int(turn.tokens.sampled_T.sum())
    return {reason: count for reason, count in counts.items() if count}
