"""What a run under fire has to show for itself: in its ledger, and when a fresh learner is trained on what it recorded.

killed ──▶ held: a copy of the ledger ──▶ resumed … ended ──▶ judge: nothing of it is missing, every group has one
                                                              fate, its weights are those of its batches
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
from headrace.control.recovery import starting_point
from headrace.flow.ledger import Ledger
from headrace.flow.ledger.opening import SQLITE_FILE, open_ledger
from headrace.run.session.config import RunConfig
from headrace.run.session.replaying import replay

Answers = dict[tuple[EpisodeKey, int], Tokens]
"""What was sampled, by episode and number of the turn among those that a policy sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the ledger held when everything had died."""

    balanced: bool = True
    tokens: int = 0
    """Submitted so far."""
    running: int = 0
    """Episodes that had not ended, of groups that had begun."""
    begun: Answers = field(default_factory=dict)
    """What was recorded of answers that had not ended."""
    ended: Answers = field(default_factory=dict)
    """Those that had ended, of groups that are still to be trained."""


def held(run_dir: Path, scratch: Path) -> Held:
    """Looked up in a copy: the run's own file is left as the kill left it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in (SQLITE_FILE, f"{SQLITE_FILE}-wal"):
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, scratch / name)
    with closing(open_ledger(scratch)) as ledger:
        books = ledger.conservation()
        groups = ledger.recall(starting_point(run_dir).step).groups
    size = books.episodes.submitted // max(1, books.groups.submitted)
    unended = [group for group in groups if group.state is GroupState.SUBMITTED]
    return Held(
        balanced=books.holds,
        tokens=books.tokens.submitted,
        running=sum(size - len(group.episodes) for group in unended),
        begun={(part.key, part.turn): part.tokens for group in unended for part in group.begun},
        ended=answers_of(episode for group in groups for episode in group.episodes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of everything. All but ``continued`` and ``dropped`` are 0 where nothing went wrong."""

    lost: int
    """Groups that should have been trained and were not, or that have no fate."""
    twice: int
    """Groups in more than one batch."""
    unbalanced: int
    """Units (groups, episodes, tokens) whose books do not balance."""
    broken: int
    """Answers that differ in a token, logprob or version from what had been recorded of them before a kill."""
    differ: int
    """Versions whose weights are not those of a fresh learner trained on the recorded batches, once each."""
    too_old: int
    """Tokens trained at an age above the bound."""
    continued: int
    """Answers that went on behind what was recorded of them."""
    dropped: dict[str, int]
    """Groups dropped, by reason."""

    @classmethod
    def hopeless(cls, config: RunConfig) -> Verdict:
        """Of a run that does not come to its end."""
        lost, versions = config.run.steps * config.flow.groups_per_step, config.run.steps + 1
        return cls(
            lost=lost, twice=0, unbalanced=0, broken=0, differ=versions, too_old=0, continued=0, dropped={}
        )  # fmt: skip


def judge(run_dir: Path, config: RunConfig, before: Sequence[Held]) -> Verdict:
    """The run in ``run_dir``, which is over; ``before``: what each of its kills left."""
    needed = config.run.steps * config.flow.groups_per_step
    with closing(open_ledger(run_dir)) as ledger:
        books, steps = ledger.conservation(), ledger.steps()
        numbers = [number for step in steps.values() for number in step]
        attempts = ledger.attempts(0)
        unclosed = sum(not attempt.closed for attempt in attempts)
        everything = answers_of(episode for attempt in attempts for episode in ledger.episodes(attempt.number))
        agree = _versions_that_agree(run_dir, ledger)
        too_old = sum(tokens for age, tokens in ledger.ages().items() if age > config.flow.greatest_age)
    units = (books.groups, books.episodes, books.tokens)
    return Verdict(
        lost=needed - len(set(numbers)) + unclosed + books.groups.in_flight,
        twice=len(numbers) - len(set(numbers)),
        unbalanced=sum(fates.balance != 0 or fates.in_flight != 0 for fates in units),
        broken=sum(_broken(everything, each) for each in before),
        differ=config.run.steps + 1 - agree,
        too_old=too_old,
        continued=sum(len(each.begun) for each in before),
        dropped=dict(books.groups.dropped),
    )


def _versions_that_agree(run_dir: Path, ledger: Ledger) -> int:
    try:
        return len(replay(run_dir, ledger).agree)
    except LedgerError:  # steps are missing
        return 0


def same_weights(one: Path, other: Path) -> bool:
    """Whether two snapshots hold the same weights and moments, bit for bit."""
    moments = [load_file(directory / "optimizer.safetensors") for directory in (one, other)]
    for tensors in moments:
        tensors.pop("random_state.cpu")  # of the process: nothing of a step draws from it
    return (
        (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
        and moments[0].keys() == moments[1].keys()
        and all(np.array_equal(tensor, moments[1][name]) for name, tensor in moments[0].items())
    )


def answers_of(episodes: Iterable[EpisodeGraph]) -> Answers:
    """What was sampled in ``episodes``."""
    found: Answers = {}
    for episode in episodes:
        sampled = [turn for turn in episode.turns if turn.author == "policy"]
        found |= {(episode.key, number): turn.tokens for number, turn in enumerate(sampled)}
    return found


def _broken(everything: Answers, before: Held) -> int:
    """Answers of which something is gone that was recorded before a kill."""
    none = Tokens.observed([])
    changed = sum(not _begins(everything.get(at, none), tokens) for at, tokens in before.begun.items())
    return changed + sum(
        len(everything.get(at, none)) != len(tokens) or not _begins(everything[at], tokens)
        for at, tokens in before.ended.items()
    )


def _begins(whole: Tokens, part: Tokens) -> bool:
    count = len(part)
    return (
        np.array_equal(whole.ids_T[:count], part.ids_T)
        and np.array_equal(whole.logprobs_T[:count], part.logprobs_T)
        and np.array_equal(whole.versions_T[:count], part.versions_T)
    )
