"""The layout of a batch: the steps in which the groups that were taken for a step become the columns with which the
learner computes.

    controller                                    every rank of the learner
    groups, credit ── make_outline ──▶ BatchOutline ── lay_out ──▶ LaidOutBatch ── masks ──▶ Batch

The controller only decides: its outline of a batch contains the groups, their credit, and the references to their
tokens. Each rank reads the tokens and concatenates them. The numbers that only a rank can compute from the tokens
(ages, masked tokens) return to the controller in the report of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, get_role
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline, GroupOutline
from headrace.base.types.scored import Credit, ScoredGroup, TokenResults, paths
from headrace.base.types.versions import oldest
from headrace.flow.ledger.bundles import GroupBundle, encode_group
from headrace.flow.policies import STALE

UNTAUGHT = "untaught"
"""The reason under which a token is counted that carries no loss because no teacher has scored it, although teachers
have scored other tokens of the batch."""
PART_TOKENS = 1 << 18
"""The number of tokens of a batch whose versions are looked at in one go."""
_NO_FLOATS = np.zeros(0, np.float32)


def make_outline(
    step: int,
    groups: Sequence[ScoredGroup],
    advantages: Sequence[Credit],
    *,
    agents: Sequence[str] = (),
    oldest_version: int | None = None,
) -> BatchOutline:
    """Return the outline of the batch of ``step``, which trains ``groups``. ``advantages`` contains the credit of each
    episode that counts in a baseline, in order; :class:`~headrace.base.types.outline.BatchOutline` describes the other
    arguments."""
    episodes = [episode for group in groups for episode in group.counted]
    credited = {episode.key: credit for episode, credit in zip(episodes, advantages, strict=True)}
    outlines = [_group_outline(group, credited) for group in groups if group.scored]
    return BatchOutline(step=step, groups=tuple(outlines), agents=tuple(agents), oldest_version=oldest_version)


def _group_outline(group: ScoredGroup, credited: Mapping[EpisodeKey, Credit]) -> GroupOutline:
    """Return the outline of ``group``. ``credited`` contains the credit of each episode by its key."""
    trained = group.scored
    if group.columns is None:
        entries = list(range(len(trained)))
    else:
        entries = [
            entry for entry, episode in enumerate(group.episodes) if episode.status is EpisodeStatus.SCORED
        ]  # fmt: skip
    turns = [turn for episode in trained for turn in episode.turns]
    return GroupOutline(
        number=group.number,
        places=tuple([episode.key.place for episode in trained]),
        entries=tuple(entries),
        credits=tuple([_plain(credited[episode.key]) for episode in trained]),
        columns=memoryview(encode_group(trained)) if group.columns is None else group.columns,
        num_tokens=sum([len(turn.tokens.ids_T) for turn in turns]),
        num_loss_tokens=sum([turn.tokens.num_sampled for turn in turns if not turn.untrained]),
    )


def _plain(credit: Credit) -> float | tuple[float, ...]:
    """Return ``credit``, whose numbers may be of NumPy's types, with numbers of Python's types."""
    return float(credit) if isinstance(credit, float) else tuple(map(float, credit))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutBatch:
    """A batch that was laid out from its outline."""

    batch: Batch
    """The batch, in which stale tokens and tokens without a teacher's score are masked."""
    unmasked: Batch
    """The batch before these tokens were masked."""
    keys: list[EpisodeKey]
    """The keys of the episodes, in the order in which the batch numbers them."""
    ages: dict[int, int]
    """The number of tokens that carry loss, by age in versions."""
    masked: dict[str, int]
    """The number of tokens that were masked, by reason."""

    @property
    def groups(self) -> list[int]:
        """Return the number of each group in the run, in the order in which the batch numbers the groups."""
        return list(dict.fromkeys(key.group for key in self.keys))

    def complete_report(self, report: StepReport) -> StepReport:
        """Return a copy of ``report``, the report of the step on this batch, for the controller, which does not have
        the batch. The copy also contains the ages, the masked tokens, and the results for the tokens of each
        episode."""
        return msgspec.structs.replace(
            report,
            dropped_tokens={**report.dropped_tokens, **self.masked},
            ages=self.ages,
            learned=TokenResults.from_batch(self.keys, self.unmasked, report.log_pi_N, report.teacher_scores_N),
            log_pi_N=_NO_FLOATS,
            teacher_scores_N=None,
        )


def lay_out(outline: BatchOutline, read: Callable[[GroupOutline], bytes | memoryview | None]) -> LaidOutBatch:
    """Return the batch of ``outline``. ``read`` returns the bundle of a group, or ``None`` if the group cannot be read;
    the batch then does not contain this group."""
    samples: list[TrainSample] = []
    keys: list[EpisodeKey] = []
    for group in outline.groups:
        data = read(group)
        if data is None:
            continue
        bundle = GroupBundle(memoryview(data))
        for place, entry, credit in zip(group.places, group.entries, group.credits, strict=True):
            keys.append(EpisodeKey(group.number, place))
            samples += _samples(bundle, entry, keys[-1], credit)
    unmasked = Batch.collate(outline.step, samples, outline.agents)
    batch, untaught = drop_untaught(unmasked)
    batch, stale = drop_stale(batch, outline.oldest_version)
    return LaidOutBatch(batch=batch, unmasked=unmasked, keys=keys, ages=_ages(batch), masked={**untaught, **stale})


def _samples(bundle: GroupBundle, entry: int, key: EpisodeKey, credit: Credit) -> list[TrainSample]:
    """Return the train samples of the episode ``key``, which has the index ``entry`` in ``bundle``, with its
    ``credit``. They are equal to the samples that :func:`~headrace.base.types.scored.paths` returns for the episode."""
    tokens = bundle.plain_tokens(entry)
    if tokens is None:
        return paths(EpisodeGraph(key=key, turns=bundle.turns(entry)), credit)
    lengths = bundle.lengths(entry)
    return [
        TrainSample(
            key=key,
            spans=(tokens,),
            mask_T=tokens.sampled_T,
            advantage=credit if isinstance(credit, float) else np.repeat(np.array(credit, np.float32), lengths),
            roles=tuple(zip(map(get_role, bundle.authors(entry)), lengths, strict=True)),
        )
    ]


def inline(group: GroupOutline) -> memoryview:
    """Return the bundle of ``group``, which the outline itself contains. Use this function for learners that have no
    store."""
    assert isinstance(group.columns, memoryview), f"group {group.number} lies in a store"
    return group.columns


def collate(
    step: int, groups: Sequence[ScoredGroup], advantages: Sequence[Credit], agents: Sequence[str] = ()
) -> Batch:
    """Return the batch of ``step`` with the trained episodes of ``groups``, which are in memory. ``advantages``
    contains the credit of each episode that counts in a baseline, in order; ``agents`` are the names of the roles that
    train their own adapters in addition to the policy's."""
    return lay_out(make_outline(step, groups, advantages, agents=agents), inline).unmasked


def drop_stale(batch: Batch, oldest_version: int | None) -> tuple[Batch, dict[str, int]]:
    """Return a copy of the batch in which tokens of versions before ``oldest_version`` are masked (``None``: no
    tokens), and the number of masked tokens by reason, empty if there are none."""
    if oldest_version is None:
        return batch, {}
    mask_N = batch.mask_N.copy()
    for at in _parts(batch):
        mask_N[at] &= oldest(batch.versions_N[at]) >= oldest_version
    count = batch.num_loss_tokens - int(mask_N.sum())
    return (msgspec.structs.replace(batch, mask_N=mask_N), {STALE: count}) if count else (batch, {})


def _ages(batch: Batch) -> dict[int, int]:
    """Return the number of tokens that carry loss, by age in versions."""
    total: Counter[int] = Counter()
    for at in _parts(batch):
        ages, counts = np.unique(batch.ages(at), return_counts=True)
        total.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
    return dict(sorted(total.items()))


def _parts(batch: Batch) -> Iterator[slice]:
    """Yield the tokens of the batch in parts, for computations that need several times the memory of their columns."""
    for begin in range(0, batch.num_tokens, PART_TOKENS):
        yield slice(begin, begin + PART_TOKENS)


def drop_untaught(batch: Batch) -> tuple[Batch, dict[str, int]]:
    """Return a copy of the batch in which tokens without a teacher's score are masked, and the number of masked tokens
    by reason, empty if there are none. A batch without any teacher's score is returned unchanged. Such tokens were
    recorded before a resumed run had teachers, for example."""
    if batch.teacher_scores is None:
        return batch, {}
    mask_N = batch.mask_N & batch.teacher_scores.known_T
    count = int(batch.mask_N.sum()) - int(mask_N.sum())
    return (msgspec.structs.replace(batch, mask_N=mask_N), {UNTAUGHT: count}) if count else (batch, {})
