"""Groups whose every episode has ended, and the train samples they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.types.batch import TrainSample
from headrace.types.episode import Episode, EpisodeStatus


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
        sampled = [versions for episode in self.scored if (versions := episode.versions()) is not None]
        return (min(old for old, _ in sampled), max(new for _, new in sampled)) if sampled else None


def paths(episode: Episode, advantage: float) -> list[TrainSample]:
    """One train sample per root-to-leaf path; a turn that two paths share carries loss in the first only."""
    trained: set[int] = set()
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
                advantage=advantage,
            )
        )
    return samples
