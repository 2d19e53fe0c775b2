"""The contract of a ledger, as checks: ``for check in LEDGER_CHECKS: check(open_ledger)``.

``open_ledger`` opens and returns the ledger under test. Called again after ``close``, it returns the same ledger with
all its contents. A check raises ``AssertionError`` if the ledger breaks the contract. In the checks, a group has
:data:`GROUP_SIZE` episodes and a step trains one group. A ledger records the state of every group, episode and token as
*operations*; its counts *hold* if submitted = trained + dropped + in flight. A *part* is a chunk of the tokens of a
turn that is still being sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.base.errors import LedgerError
from headrace.base.store import COLUMNS_LOST
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.outline import LostGroup
from headrace.base.types.tokens import Tokens
from headrace.flow.ledger import GroupAttempt, Ledger, Lengths, UnitCounts
from headrace.flow.ledger.base import (
    CommitVersion,
    DropEpisodes,
    EndEpisode,
    EndStep,
    Move,
    Note,
    Operation,
    Stream,
    Submit,
)

GROUP_SIZE = 2
"""Number of episodes in each group."""
NUM_TOKENS = 4
"""Number of sampled tokens of each episode."""
OpenLedger = Callable[[], Ledger]
"""A function that opens the ledger under test, with the contents that it had when it was closed."""


def sampled_tokens(count: int, version: int = 0) -> Tokens:
    """Return ``count`` tokens of the policy version ``version``, with the ids 0, 1, 2 ... and the logprobs 0, −1, −2
    ..."""
    ids = np.arange(count, dtype=np.int32)
    return Tokens(ids_T=ids, logprobs_T=-ids.astype(np.float32), versions_T=np.full(count, version, np.int32))


def ended_episode(group: int, place: int, *, cause: str = "", tokens: int = NUM_TOKENS) -> EpisodeGraph:
    """Return the ended episode ``place`` of ``group``: a prompt of two tokens and an answer of ``tokens`` tokens, with
    ``place`` as the reward. With a ``cause``, the episode has failed and has no reward."""
    return EpisodeGraph(
        key=EpisodeKey(group, place),
        turns=[
            Turn(author="task", tokens=Tokens.observed([group, place])),
            Turn(author="policy", tokens=sampled_tokens(tokens), parent=0, stop_reason=StopReason.STOP),
        ],
        status=EpisodeStatus.FAILED if cause else EpisodeStatus.SCORED,
        reward=None if cause else float(place),
        cause=cause,
    )


def turn_part(group: int, place: int, tokens: Tokens, *, turn: int = 0, lost: str = "") -> TokenChunk:
    """Return a part of a running turn: ``tokens``, which were sampled for turn number ``turn`` of episode ``place`` of
    ``group``. A reason in ``lost`` says that the turn was restarted and its earlier parts are invalid."""
    return TokenChunk(key=EpisodeKey(group, place), turn=turn, prompt="p", tokens=tokens, lost=lost)


def record_parts(*parts: TokenChunk) -> Stream:
    """Return the operation that records ``parts`` of running turns."""
    return Stream(parts=parts, at_s=2.0)


def move_group(number: int, state: GroupState, **details: int | str) -> Move:
    """Return the operation that moves group ``number`` to ``state``; ``details`` are further fields of the operation,
    such as the step or a reason."""
    return Move(numbers=(number,), state=state, at_s=2.0, **details)  # type: ignore[arg-type]


def start_group(number: int, *, version: int = 0) -> list[Operation]:
    """Return the operations that submit, admit and start group ``number`` while ``version`` is committed."""
    return [
        Submit(numbers=(number,), rows=(10 * number,), at_s=1.0),
        move_group(number, GroupState.ADMITTED, oldest_version=version),
        move_group(number, GroupState.RUNNING),
    ]


def complete_group(number: int) -> list[Operation]:
    """Return the operations of group ``number`` from its submission to the state READY: all its episodes have ended and
    are scored."""
    ended = [EndEpisode(episode=ended_episode(number, place), at_s=2.0) for place in range(GROUP_SIZE)]
    closed = [move_group(number, GroupState.SCORED), move_group(number, GroupState.READY, oldest_version=0)]
    return [*start_group(number), *ended, *closed]


def train_group(number: int, *, tokens: int = GROUP_SIZE * NUM_TOKENS) -> list[Operation]:
    """Return the operations of group ``number`` from its submission to the state TRAINED, in the step of the same
    number; ``tokens`` is the number of tokens that carried loss."""
    step = EndStep(
        step=number, numbers=(number,), trained_tokens=tokens, dropped_tokens={}, ages={0: tokens}, at_s=3.0
    )  # fmt: skip
    return [*complete_group(number), move_group(number, GroupState.TAKEN, step=number), step]


def commit_version(version: int, number: int) -> CommitVersion:
    """Return the operation that records the commit of ``version``, which releases group ``number``."""
    return CommitVersion(version=version, numbers=(number,), checksum=f"hash {version}", at_s=4.0)


def _open_and_apply(open_ledger: OpenLedger, *operations: Operation) -> Ledger:
    """Open the ledger, apply ``operations`` one by one, check after each operation that the counts hold, and return the
    ledger, which the caller must close."""
    ledger = open_ledger()
    for operation in operations:
        ledger.apply(operation)
        assert ledger.conservation().holds, operation
    return ledger


def _reopen(ledger: Ledger, open_ledger: OpenLedger) -> Ledger:
    """Close the ledger and open it again, as after a restart, and return it."""
    ledger.close()
    return open_ledger()


def check_reopened_ledger_keeps_all_records(open_ledger: OpenLedger) -> None:
    """Check that a ledger that is closed and opened again still has its counts, notes, hashes of weights, steps, and
    tokens."""
    note = Note(kind="start", detail="step 0", at_s=9.0)
    ledger = _reopen(
        _open_and_apply(open_ledger, *train_group(0), commit_version(1, 0), *complete_group(1), note), open_ledger
    )
    books = ledger.conservation()
    assert books.groups == UnitCounts(submitted=2, trained=1, in_flight=1)
    assert books.episodes == UnitCounts(submitted=4, trained=2, in_flight=2)
    assert books.tokens == UnitCounts(submitted=16, trained=8, in_flight=8)
    assert (ledger.ages(), ledger.notes()) == ({0: 8}, [("start", "step 0", 9.0)])
    assert (ledger.steps(), ledger.checksums()) == ({0: (0,)}, {1: "hash 1"})
    assert ledger.lengths() == Lengths(submitted=(4, 4), trained=(4, 4))
    attempt = GroupAttempt(number=1, row=10, oldest_version=0, closed=True, rewards=(0.0, 1.0))
    assert ledger.attempts(1) == [attempt]
    (first, _) = ledger.episodes(1)
    assert first.turns[1].tokens.logprobs_T.tolist() == [0.0, -1.0, -2.0, -3.0]
    ledger.close()


def check_running_groups_keep_episodes_and_parts(open_ledger: OpenLedger) -> None:
    """Check that a running group keeps its ended episodes and the parts of its running turns over a restart, in order
    and with their versions, so that these turns can continue."""
    ended = EndEpisode(episode=ended_episode(0, 0), at_s=2.0)
    first, second = (
        record_parts(turn_part(0, 1, sampled_tokens(3, version=4))),
        record_parts(turn_part(0, 1, sampled_tokens(2, version=6))),
    )
    ledger = _reopen(_open_and_apply(open_ledger, *start_group(0), first, ended, second), open_ledger)
    assert ledger.conservation().tokens == UnitCounts(submitted=9, in_flight=9)
    (group,) = ledger.roll_back(0).groups
    assert (group.state, len(group.episodes), group.kept_version()) == (GroupState.SUBMITTED, 1, 0)
    (turn,) = group.partial_turns
    assert (turn.key, turn.turn, turn.prompt) == (EpisodeKey(0, 1), 0, "p")
    assert turn.tokens.ids_T.tolist() == [0, 1, 2, 0, 1]
    assert turn.tokens.versions_T.tolist() == [4, 4, 4, 6, 6]
    ledger.close()


def check_ended_episode_replaces_its_parts(open_ledger: OpenLedger) -> None:
    """Check that the tokens of an ended episode replace the parts that were recorded before: no token is counted twice,
    and tokens that the episode does not contain count as discarded."""
    parts = record_parts(turn_part(0, 0, sampled_tokens(3)), turn_part(0, 1, sampled_tokens(7)))
    ends = [EndEpisode(episode=ended_episode(0, place), at_s=2.0) for place in range(2)]
    ledger = _open_and_apply(open_ledger, *start_group(0), parts, *ends)
    assert ledger.conservation().tokens == UnitCounts(submitted=11, dropped={"discarded": 3}, in_flight=8)
    (group,) = ledger.roll_back(0).groups
    assert (len(group.episodes), group.partial_turns) == (2, ())
    ledger.close()


def check_restarted_turn_loses_its_parts(open_ledger: OpenLedger) -> None:
    """Check that if a turn was restarted from its prompt, its earlier parts are dropped and their tokens are counted
    under the reason in ``lost``."""
    first, other = turn_part(0, 0, sampled_tokens(5)), turn_part(0, 0, sampled_tokens(2), turn=1)
    again = turn_part(0, 0, sampled_tokens(1), lost="restarted")
    ledger = _open_and_apply(open_ledger, *start_group(0), record_parts(first, other), record_parts(again))
    assert ledger.conservation().tokens == UnitCounts(submitted=8, dropped={"restarted": 5}, in_flight=3)
    (group,) = ledger.roll_back(0).groups
    assert [(turn.turn, len(turn.tokens)) for turn in group.partial_turns] == [(0, 1), (1, 2)]
    ledger.close()


def check_dropped_group_drops_its_parts(open_ledger: OpenLedger) -> None:
    """Check that the tokens of running turns in a dropped group are dropped, and counted under the group's reason."""
    parts = record_parts(turn_part(0, 1, sampled_tokens(5)))
    ledger = _open_and_apply(open_ledger, *start_group(0), parts, move_group(0, GroupState.DROPPED, reason="row_gone"))
    books = ledger.conservation()
    assert books.tokens == UnitCounts(submitted=5, dropped={"row_gone": 5})
    assert books.episodes == UnitCounts(submitted=2, dropped={"row_gone": 2})
    assert ledger.roll_back(0).dropped == {"row_gone": 1}
    ledger.close()


def check_removed_episodes_are_dropped_for_their_reason(open_ledger: OpenLedger) -> None:
    """Check that the tokens of an episode that is left out of its group count as dropped under its reason, and that the
    episode has its status and reason after a restart."""
    out = DropEpisodes(number=0, places=(1,), status=EpisodeStatus.LEFT_OUT, reason="too_long", at_s=2.0)
    before, after = complete_group(0)[:5], complete_group(0)[5:]
    ledger = _open_and_apply(open_ledger, *before, out, *after)
    assert ledger.conservation().tokens == UnitCounts(submitted=8, dropped={"too_long": 4}, in_flight=4)
    (group,) = ledger.roll_back(0).groups
    assert [(each.status.value, each.cause) for each in group.episodes] == [("scored", ""), ("left_out", "too_long")]
    ledger.close()


def check_steps_after_the_checkpoint_are_repeated(open_ledger: OpenLedger) -> None:
    """Check that if a run resumes from the checkpoint of step 1, the groups of later steps become ready for the same
    steps again, and groups of earlier steps count as trained."""
    ledger = _open_and_apply(
        open_ledger, *train_group(0), commit_version(1, 0), *train_group(1), commit_version(2, 1), *start_group(2)
    )
    for _ in range(2):  # a second roll-back, after a crash before any operation, returns the same
        resumed = ledger.roll_back(1)
        assert (resumed.num_submitted, resumed.num_released) == (3, 1)
        assert resumed.checksums == {1: "hash 1", 2: "hash 2"}
        states = [(group.number, group.state, group.step) for group in resumed.groups]
        assert states == [(1, GroupState.READY, 1), (2, GroupState.SUBMITTED, None)]
        assert ledger.conservation().tokens == UnitCounts(submitted=16, trained=8, in_flight=8)
        ledger = _reopen(ledger, open_ledger)
    ledger.close()


def check_groups_without_loss_are_listed_by_step(open_ledger: OpenLedger) -> None:
    """Check that the groups of a step that carried no loss, because columns of them could not be read, are known over a
    restart until their step is made again; and that a step that has dropped tokens for this reason without naming the
    groups is known, too."""
    lost = (LostGroup(number=0, left_out=False, why="the file is gone"),)
    *before, named = train_group(0, tokens=5)
    *others, unnamed = train_group(1, tokens=5)
    assert isinstance(named, EndStep)
    assert isinstance(unnamed, EndStep)
    dropped = {COLUMNS_LOST: GROUP_SIZE * NUM_TOKENS - 5}
    ends = (replace(named, dropped_tokens=dropped, lost=lost), replace(unnamed, dropped_tokens=dropped))
    operations = (*before, ends[0], commit_version(1, 0), *others, ends[1], commit_version(2, 1), *train_group(2))
    ledger = _reopen(_open_and_apply(open_ledger, *operations), open_ledger)
    assert ledger.lost() == {0: lost, 1: ()}
    ledger.roll_back(1)
    assert ledger.lost() == {0: lost}
    ledger = _reopen(ledger, open_ledger)
    ledger.roll_back(0)
    assert ledger.lost() == {}
    ledger.close()


def check_refused_operation_changes_nothing(open_ledger: OpenLedger) -> None:
    """Check that an operation that the ledger refuses with an error changes nothing, neither in the open ledger nor
    after it is opened again."""
    ledger = _open_and_apply(open_ledger, *start_group(0))
    invalid = (
        Submit(numbers=(1, 0), rows=(1, 0), at_s=1.0),
        DropEpisodes(number=0, places=(1,), status=EpisodeStatus.MASKED, reason="r", at_s=2.0),
    )
    for operation in invalid:
        try:
            ledger.apply(operation)
        except LedgerError:
            continue
        raise AssertionError(f"taken: {operation}")
    ledger = _reopen(ledger, open_ledger)
    assert ledger.conservation().groups == UnitCounts(submitted=1, in_flight=1)
    ledger.apply(Submit(numbers=(1,), rows=(1,), at_s=1.0))
    assert ledger.conservation().groups.submitted == 2
    ledger.persist()
    ledger.close()


def check_failed_episode_is_dropped_for_its_cause(open_ledger: OpenLedger) -> None:
    """Check that a failed episode counts as dropped under the reason in its cause (the text before the colon), and that
    the rest of its group is still in flight."""
    ended = [EndEpisode(episode=ended_episode(0, 0, cause="reward_error: line 3"), at_s=2.0)]
    ledger = _open_and_apply(open_ledger, *start_group(0), *ended, EndEpisode(episode=ended_episode(0, 1), at_s=2.0))
    books = ledger.conservation()
    assert books.tokens == UnitCounts(submitted=8, dropped={"reward_error": 4}, in_flight=4)
    assert books.episodes == UnitCounts(submitted=2, dropped={"reward_error": 1}, in_flight=1)
    ledger.close()


LEDGER_CHECKS: tuple[Callable[[OpenLedger], None], ...] = (
    check_reopened_ledger_keeps_all_records,
    check_running_groups_keep_episodes_and_parts,
    check_ended_episode_replaces_its_parts,
    check_restarted_turn_loses_its_parts,
    check_dropped_group_drops_its_parts,
    check_removed_episodes_are_dropped_for_their_reason,
    check_steps_after_the_checkpoint_are_repeated,
    check_groups_without_loss_are_listed_by_step,
    check_refused_operation_changes_nothing,
    check_failed_episode_is_dropped_for_its_cause,
)
"""All checks of the contract."""
