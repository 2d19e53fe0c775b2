"""What a drafting engine remembers, and when it drafts."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.native.history import HistoryIndex, OwnText, extract_contexts
from headrace.engine.native.rows import Rows
from headrace.engine.native.sequence import Sequence
from headrace.engine.native.speculation import Trust, cheapest
from tests.engine.native.harness import request

KEY, OTHER = np.uint64(2**63 + 5), np.uint64(77)


def drafted(index: HistoryIndex, key: np.uint64, last: list[int], num: int = 4) -> list[list[int]]:
    """What each way of looking up finds, up to its end."""
    ids_LDK, chances_LDK = index.find(np.array([key]), extract_contexts(np.array([last])), num)
    return [ids[chances > 0].tolist() for ids, chances in zip(ids_LDK[:, 0], chances_LDK[:, 0], strict=True)]


def add(index: HistoryIndex, key: np.uint64, context: list[int], ids: list[int]) -> None:
    index.add(key, np.array(context, np.int32), np.array(ids, np.int32), np.full(len(ids), 0.5, np.float32))


def test_answers_are_found_by_prompt_and_by_their_last_tokens() -> None:
    index = HistoryIndex(1024)
    assert not index.knows(KEY)
    add(index, KEY, [1, 2, 3], list(range(10, 30)))
    assert index.knows(KEY)
    assert not index.knows(OTHER)
    assert drafted(index, KEY, [1, 2, 3]) == [[10, 11, 12, 13]] * 3
    assert drafted(index, KEY, [9, 9, 9, 9, 9, 11, 12, 13]) == [[], [], [14, 15, 16, 17]]
    assert drafted(index, OTHER, [1, 2, 3, *range(10, 17)]) == [[], [17, 18, 19, 20], []]
    assert drafted(index, KEY, [1, 2, 3, *range(10, 28)]) == [[28, 29]] * 3
    assert drafted(index, KEY, [29, 30]) == [[], [], []]


def test_the_newest_answers_stay_within_the_memory() -> None:
    index = HistoryIndex(1024)
    size = index.store.facts()["history_bytes"]
    rng = np.random.default_rng(0)
    answers = [rng.integers(100, 10_000, 60).tolist() for _ in range(100)]
    for answer in answers:
        add(index, KEY, answer[:5], answer[5:])
    assert index.store.facts()["history_bytes"] == size
    assert drafted(index, KEY, answers[-1][:20])[0] == answers[-1][20:24]
    assert drafted(index, KEY, answers[-10][:20])[0] == answers[-10][20:24]
    assert drafted(index, KEY, answers[0][:20]) == [[], [], []]
    longer = rng.integers(100, 10_000, 3000).tolist()
    add(index, OTHER, [1, 2], longer)
    found = [drafted(index, OTHER, longer[:end])[0] == longer[end : end + 4] for end in range(2100, 2990)]
    assert sum(found) > 0.7 * len(found)
    assert drafted(index, OTHER, longer[:100]) == [[], [], []]


@pytest.mark.parametrize("period", [1, 3, 40])
def test_text_that_repeats_itself_is_continued(period: int) -> None:
    rows = Rows(3, 256)
    own = OwnText(rows)
    text = (np.arange(200) % period + 7).astype(np.int32)
    for row, ids in enumerate((np.arange(10, 100, dtype=np.int32), text[:100])):
        given = request(row, ids.tolist())
        rows.add(
            Sequence(request=given, given_ids_T=given.prompt_ids_T, num_prompt=len(ids), arrival=row, deadline_s=9.0),
            [],
            0,
        )
        own.add(row)
    both = np.arange(2)
    own.read(both)
    ids_DK, repeats_D = own.find(both, 12)
    assert repeats_D.tolist() == [False, True]
    assert ids_DK[1].tolist() == text[100:112].tolist()
    rows.remove([0])
    own.move(np.array([1]), np.array([0]))
    rows.record(np.array([0, 0]), text[100:102], np.zeros(2, np.float32), 0, offsets_D=np.arange(2))
    own.read(np.array([0]))
    ids_DK, repeats_D = own.find(np.array([0]), 4)
    assert repeats_D.all()
    assert ids_DK[0].tolist() == text[102:106].tolist()


def test_poor_drafts_are_left_out_and_tried_again_later() -> None:
    trust, likely = Trust(), np.full((8, 4), 0.9).cumprod(axis=1)
    assert cheapest(likely * trust.factors_W[0], 0).all()
    for _ in range(20):
        trust.fade()
        trust.note(np.zeros(8, np.int64), np.full(8, 0.9, np.float32), np.zeros(8, bool))
    assert not cheapest(likely * trust.factors_W[0], 0).any()
    assert trust.factors_W[1] == Trust().factors_W[1]
    for _ in range(1500):
        trust.fade()
    assert cheapest(likely * trust.factors_W[0], 0).any()


def test_a_full_batch_drafts_less_than_a_small_one() -> None:
    chances_DK = np.full((64, 8), 0.8).cumprod(axis=1)
    lengths = [cheapest(chances_DK[:num], 0)[0] for num in (1, 8, 64)]
    assert lengths[0] > lengths[1] > lengths[2] > 0
