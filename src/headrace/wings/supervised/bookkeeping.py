"""The ledger of a run on given rows: which row was trained in which step, exactly once.

A row is a group, and each of its samples (one, or two for a pair) is an episode. The ledger records tokens that carry
loss as sampled by a frozen version. The number of a row in the run is its place in the order of training, so a row that
is trained in two epochs has two numbers.

    row ──▶ SUBMITTED ──▶ TAKEN(step) ──▶ TRAINED ──▶ RELEASED, with the version that its step made
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from headrace.base.clock import Clock
from headrace.base.errors import CheckpointError
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import Credit, TokenResults, paths
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN, NOT_SAMPLED
from headrace.flow.ledger import Ledger
from headrace.flow.ledger.base import CommitVersion, EndEpisode, EndStep, Move, Note, Submit
from headrace.wings.supervised.rendering import RenderedSample

GIVEN, TRAINED = "task", "rows"
"""The authors of a sample's tokens: of tokens without loss, and of tokens that carry loss."""


def make_episode(key: EpisodeKey, sample: RenderedSample) -> EpisodeGraph:
    """Create the episode with the key ``key`` of ``sample`` for the ledger and the batch: a chain of turns, one for
    each run of neighbouring tokens that all carry loss or all do not. The reward is 1 for a chosen (or good) answer,
    −1 for a rejected (or bad) answer, and ``None`` for a sample to imitate."""
    cuts = np.flatnonzero(np.diff(sample.mask_T)) + 1
    borders = sorted({0, *cuts.tolist(), sample.num_prompt, len(sample.ids_T)})
    turns = [
        _make_turn(sample, start, end, None if number == 0 else number - 1)
        for number, (start, end) in enumerate(pairwise(borders))
    ]
    reward = float(sample.side) if sample.side else None
    return EpisodeGraph(key=key, turns=turns, status=EpisodeStatus.SCORED, reward=reward)


def _make_turn(sample: RenderedSample, start: int, end: int, parent: int | None) -> Turn:
    """Return the tokens from ``start`` up to ``end`` of a sample as a turn; ``parent`` is the index of the turn before
    it, ``None`` for the first. Tokens that carry loss count as sampled by a frozen version."""
    trained = bool(sample.mask_T[start])
    version = FROZEN if trained else NOT_SAMPLED
    tokens = Tokens(
        ids_T=sample.ids_T[start:end],
        logprobs_T=np.zeros(end - start, np.float32),
        versions_T=np.full(end - start, version, np.int32),
        teacher_scores=None if sample.teacher_scores is None else sample.teacher_scores[start:end],
    )
    return Turn(author=TRAINED if trained else GIVEN, tokens=tokens, parent=parent)


def make_credit(episode: EpisodeGraph, sample: RenderedSample) -> Credit:
    """Return the advantages of a sample: 1 for all tokens of a sample to imitate. For a sample with a side, one
    advantage for each turn of its ``episode``: the side (1 chosen, −1 rejected), and 0 for the prompt."""
    if not sample.side:
        return 1.0
    ends = np.cumsum([len(turn.tokens) for turn in episode.turns])
    return [float(sample.side) if end > sample.num_prompt else 0.0 for end in ends.tolist()]


def make_batch(step: int, groups: Sequence[tuple[int, tuple[RenderedSample, ...]]]) -> tuple[Batch, list[EpisodeGraph]]:
    """Create the batch of the training step ``step``, and return it with the episodes of its samples. ``groups`` are
    the rows of the batch, as pairs of the row's number in the run and the row's samples; each sample becomes one
    episode, whose key is the row's number and the index of the sample."""
    pairs = [
        (make_episode(EpisodeKey(number, index), sample), sample)
        for number, samples in groups
        for index, sample in enumerate(samples)
    ]
    laid_out = [path for episode, sample in pairs for path in paths(episode, make_credit(episode, sample))]
    return Batch.collate(step, laid_out), [episode for episode, _ in pairs]


class RowLedger:
    """Records the states of every row in the ledger of the run. In a resumed run, rows that an earlier life has
    recorded are not submitted again."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        """Create the object, which writes into ``ledger`` with the times of ``clock``."""
        self._ledger = ledger
        self._clock = clock
        self._num_recorded = 0
        """Number of rows that the ledger contains, in this life or an earlier one."""

    def roll_back(self, step: int, num_trained: int) -> None:
        """Return the ledger to the checkpoint of ``step``, at which the first ``num_trained`` rows were trained.

        Raises :class:`~headrace.base.errors.CheckpointError` if the ledger has another number of rows trained before
        it.
        """
        resumed = self._ledger.roll_back(step)
        if resumed.num_released != num_trained:
            raise CheckpointError(
                f"the snapshot is of step {step}, which has trained {num_trained} rows, but the ledger knows "
                f"{resumed.num_released} trained rows before it",
                remedy="restore ledger and checkpoints from the same moment, or start a new run directory",
            )
        self._num_recorded = resumed.num_submitted

    def take(self, step: int, numbers: Sequence[int], rows: Sequence[int], episodes: Sequence[EpisodeGraph]) -> None:
        """Record that ``step`` takes a batch of rows. ``numbers`` are the rows' numbers in the run, ``rows`` their
        indices into the dataset, and ``episodes`` their episodes. Rows and episodes that an earlier life has recorded
        are not recorded again."""
        at_s = self._clock.wall()
        fresh = [(number, row) for number, row in zip(numbers, rows, strict=True) if number >= self._num_recorded]
        submit = Submit(numbers=tuple(n for n, _ in fresh), rows=tuple(row for _, row in fresh), at_s=at_s)
        ended = [EndEpisode(episode=one, at_s=at_s) for one in episodes if one.key.group >= self._num_recorded]
        move = Move(numbers=tuple(numbers), state=GroupState.TAKEN, at_s=at_s, oldest_version=step, step=step)
        self._ledger.apply(*([submit] if fresh else []), *ended, move)
        self._num_recorded = max(self._num_recorded, numbers[-1] + 1)

    def record_step(
        self, report: StepReport, numbers: Sequence[int], batch: Batch, episodes: Sequence[EpisodeGraph]
    ) -> None:
        """Record that the optimizer has made the step of ``report`` with ``batch``, which are the rows ``numbers``, the
        learner's results for the tokens of their ``episodes``, and the commit of the new weights."""
        at_s = self._clock.wall()
        learned = TokenResults.from_batch([episode.key for episode in episodes], batch, report.log_pi_N)
        ended = EndStep(
            step=report.step,
            numbers=tuple(numbers),
            trained_tokens=report.trained_tokens,
            dropped_tokens=report.dropped_tokens,
            ages={0: report.trained_tokens},
            at_s=at_s,
            learned=learned,
        )
        released = CommitVersion(version=report.step + 1, numbers=tuple(numbers), checksum="", at_s=at_s)
        self._ledger.apply(ended, released)

    def note(self, kind: str, detail: str) -> None:
        """Record an event of the run: its kind in one word, and the details in words."""
        self._ledger.apply(Note(kind=kind, detail=detail, at_s=self._clock.wall()))

    def persist(self) -> None:
        """Write everything that was recorded to the disk, so that it survives a power failure."""
        self._ledger.persist()
