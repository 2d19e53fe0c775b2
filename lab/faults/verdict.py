"""Checks that a run with kills lost nothing: from its ledger, and from a fresh learner trained on its recorded
batches.

    killed ──▶ snapshot: a copy of the ledger ──▶ resumed … ended ──▶ judge: nothing in the snapshot is missing, every
                                                              group has one fate, the weights follow from the batches
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from headrace.base.errors import LedgerError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.base.types.group import GroupState
from headrace.base.types.tokens import Tokens
from headrace.control.recovery import find_starting_point
from headrace.flow.ledger import Ledger
from headrace.flow.ledger.opening import SQLITE_FILE, open_ledger
from headrace.run.session.config import RunConfig
from headrace.run.session.replaying import replay

Answers = dict[tuple[EpisodeKey, int], Tokens]
"""Sampled tokens by episode and by the index of the turn among the sampled turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The content of the ledger after a kill."""

    is_balanced: bool = True
    tokens: int = 0
    """Number of submitted tokens."""
    num_running: int = 0
    """Number of unfinished episodes of groups that had started."""
    partial_turns: Answers = field(default_factory=dict)
    """Recorded parts of unfinished answers."""
    finished_answers: Answers = field(default_factory=dict)
    """Finished answers of groups that are still to be trained."""


def take_snapshot(run_dir: Path, scratch: Path) -> LedgerSnapshot:
    """Read the ledger in ``run_dir`` from a copy in ``scratch``, so that the file itself stays as the kill left it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in (SQLITE_FILE, f"{SQLITE_FILE}-wal"):
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, scratch / name)
    with closing(open_ledger(scratch)) as ledger:
        conservation = ledger.conservation()
        groups = ledger.roll_back(find_starting_point(run_dir).step).groups
    size = conservation.episodes.submitted // max(1, conservation.groups.submitted)
    unended = [group for group in groups if group.state is GroupState.SUBMITTED]
    return LedgerSnapshot(
        is_balanced=conservation.holds,
        tokens=conservation.tokens.submitted,
        num_running=sum(size - len(group.episodes) for group in unended),
        partial_turns={(part.key, part.turn): part.tokens for group in unended for part in group.partial_turns},
        finished_answers=collect_answers(episode for group in groups for episode in group.episodes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a run with kills. All fields but ``continued`` and ``dropped`` are 0 if nothing went wrong."""

    lost: int
    """Number of groups that should have been trained and were not, or that have no fate."""
    twice: int
    """Number of groups in more than one batch."""
    unbalanced: int
    """Number of units (groups, episodes, tokens) that violate conservation."""
    broken: int
    """Number of answers that differ in a token, log-probability or version from their record before a kill."""
    differ: int
    """Number of versions whose weights differ from those of a fresh learner trained once on each recorded batch."""
    too_old: int
    """Number of tokens trained at an age above the bound."""
    continued: int
    """Number of answers that continued their recorded part."""
    dropped: dict[str, int]
    """Number of dropped groups by reason."""

    @classmethod
    def unfinished(cls, config: RunConfig) -> Verdict:
        """Return the verdict of a run with ``config`` that never finished."""
        lost, versions = config.run.steps * config.flow.groups_per_step, config.run.steps + 1
        return cls(
            lost=lost, twice=0, unbalanced=0, broken=0, differ=versions, too_old=0, continued=0, dropped={}
        )  # fmt: skip


def judge(run_dir: Path, config: RunConfig, before: Sequence[LedgerSnapshot]) -> Verdict:
    """Return the verdict of the finished run in ``run_dir`` with ``config``; ``before`` holds the ledger's content
    after each kill."""
    needed = config.run.steps * config.flow.groups_per_step
    with closing(open_ledger(run_dir)) as ledger:
        conservation, steps = ledger.conservation(), ledger.steps()
        numbers = [number for step in steps.values() for number in step]
        attempts = ledger.attempts(0)
        unclosed = sum(not attempt.closed for attempt in attempts)
        everything = collect_answers(episode for attempt in attempts for episode in ledger.episodes(attempt.number))
        agree = _versions_that_agree(run_dir, ledger)
        too_old = sum(tokens for age, tokens in ledger.ages().items() if age > config.flow.largest_age)
    units = (conservation.groups, conservation.episodes, conservation.tokens)
    return Verdict(
        lost=needed - len(set(numbers)) + unclosed + conservation.groups.in_flight,
        twice=len(numbers) - len(set(numbers)),
        unbalanced=sum(fates.balance != 0 or fates.in_flight != 0 for fates in units),
        broken=sum(_count_broken(everything, snapshot) for snapshot in before),
        differ=config.run.steps + 1 - agree,
        too_old=too_old,
        continued=sum(len(snapshot.partial_turns) for snapshot in before),
        dropped=dict(conservation.groups.dropped),
    )


def _versions_that_agree(run_dir: Path, ledger: Ledger) -> int:
    try:
        return len(replay(run_dir, ledger).agree)
    except LedgerError:  # steps are missing
        return 0


def same_weights(first: Path, second: Path) -> bool:
    """Return whether the snapshots in ``first`` and ``second`` hold the same weights and moments, bit for bit."""
    moments = [load_file(directory / "optimizer.safetensors") for directory in (first, second)]
    for tensors in moments:
        tensors.pop("random_state.cpu")  # differs by process, and no step draws from it
    return (
        (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
        and moments[0].keys() == moments[1].keys()
        and all(np.array_equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
    )


def collect_answers(episodes: Iterable[EpisodeGraph]) -> Answers:
    """Return the sampled tokens of ``episodes``."""
    answers: Answers = {}
    for episode in episodes:
        sampled = [turn for turn in episode.turns if turn.author == "policy"]
        answers |= {(episode.key, number): turn.tokens for number, turn in enumerate(sampled)}
    return answers


def _count_broken(everything: Answers, before: LedgerSnapshot) -> int:
    """Return the number of answers in ``everything`` of which something recorded before a kill is missing or
    different."""
    missing = Tokens.observed([])
    changed = sum(
        not _starts_with(everything.get(key, missing), tokens) for key, tokens in before.partial_turns.items()
    )
    return changed + sum(
        len(everything.get(key, missing)) != len(tokens) or not _starts_with(everything[key], tokens)
        for key, tokens in before.finished_answers.items()
    )


def _starts_with(whole: Tokens, part: Tokens) -> bool:
    count = len(part)
    return (
        np.array_equal(whole.ids_T[:count], part.ids_T)
        and np.array_equal(whole.logprobs_T[:count], part.logprobs_T)
        and np.array_equal(whole.versions_T[:count], part.versions_T)
    )
