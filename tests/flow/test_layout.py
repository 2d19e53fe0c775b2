"""The batch that a learner lays out from an outline is, bit for bit, the batch of the groups."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.messages import learner
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import TokenResults, paths
from headrace.base.types.versions import oldest
from headrace.flow.layout import inline, lay_out, make_outline
from headrace.flow.ledger.bundles import GroupBundle, encode_group
from tests.flow.outlines import groups_with, make_credit, outline_with

CODEC = MessageCodec(learner.Message)


def directly(seed: int, *, agents: tuple[str, ...] = ("critic",)) -> Batch:
    """The batch made from the groups themselves, without an outline."""
    groups = groups_with(seed)
    episodes = [episode for group in groups for episode in group.counted]
    credited = zip(episodes, make_credit(groups, seed), strict=True)
    samples = [paths(episode, credit) for episode, credit in credited if episode.status is EpisodeStatus.SCORED]
    return Batch.collate(seed, [sample for of_episode in samples for sample in of_episode], agents)


@pytest.mark.parametrize("seed", range(8))
def test_the_batch_of_an_outline_is_that_of_its_groups(seed: int) -> None:
    order = CODEC.decode(CODEC.encode(learner.Train(call=0, outline=outline_with(seed))))
    assert CODEC.encode(lay_out(order.outline, inline).unmasked) == CODEC.encode(directly(seed))


def test_stale_tokens_and_tokens_without_a_teacher_lose_their_loss_and_are_counted() -> None:
    whole, laid_out = directly(3), lay_out(outline_with(3), inline)
    assert whole.teacher_scores is not None
    taught_N = whole.mask_N & whole.teacher_scores.known_T
    fresh_N = taught_N & (oldest(whole.versions_N) >= 1)
    np.testing.assert_array_equal(laid_out.batch.mask_N, fresh_N)
    untaught, stale = int((whole.mask_N & ~taught_N).sum()), int((taught_N & ~fresh_N).sum())
    assert laid_out.masked == {"untaught": untaught, "stale": stale}
    assert min(untaught, stale) > 0
    assert sum(laid_out.ages.values()) == int(fresh_N.sum())
    assert laid_out.ages[3 - 1] == int((whole.versions_N[fresh_N] == 1).sum())


def test_the_report_has_the_results_of_each_token_and_no_column_of_the_batch() -> None:
    groups, whole, laid_out = groups_with(4), directly(4), lay_out(outline_with(4), inline)
    log_pi_N = np.arange(whole.num_tokens, dtype=np.float32)
    report = StepReport(step=4, metrics={}, trained_tokens=9, dropped_tokens={"odd": 2}, log_pi_N=log_pi_N, seconds=1.0)
    told = laid_out.complete_report(report)
    keys = [episode.key for group in groups for episode in group.scored]
    assert msgspec.msgpack.encode(list(told.learned.sizes_E.tolist())) == msgspec.msgpack.encode(
        TokenResults.from_batch(keys, whole, log_pi_N).sizes_E.tolist()
    )
    np.testing.assert_array_equal(told.learned.log_pi_L, log_pi_N[whole.mask_N])
    assert told.learned.groups_E.tolist() == [key.group for key in keys]
    assert told.learned.places_E.tolist() == [key.place for key in keys]
    assert told.dropped_tokens == {"odd": 2, **laid_out.masked}
    assert told.ages == laid_out.ages
    assert not len(told.log_pi_N)


def test_a_group_that_cannot_be_read_is_left_out_and_the_others_stay() -> None:
    outline = outline_with(5)
    lost = outline.groups[1].number
    laid_out = lay_out(outline, lambda group: None if group.number == lost else inline(group))
    rest = msgspec.structs.replace(outline, groups=tuple(g for g in outline.groups if g.number != lost))
    assert CODEC.encode(laid_out.batch) == CODEC.encode(lay_out(rest, inline).batch)
    assert lost not in {key.group for key in laid_out.keys}


def test_a_batch_whose_episodes_are_all_masked_is_empty() -> None:
    groups = groups_with(0)[-1:]
    outline = make_outline(0, groups, make_credit(groups, 0))
    assert not outline.groups
    laid_out = lay_out(outline, inline)
    assert not len(laid_out.batch.lengths_S)
    assert laid_out.ages == {}


def test_the_size_of_a_batch_is_known_before_it_is_laid_out() -> None:
    outline = outline_with(6)
    turns = [t for group in groups_with(6) for episode in group.scored for t in episode.turns]
    assert outline.num_tokens == sum(len(turn.tokens) for turn in turns)
    loss = sum(turn.tokens.num_sampled for turn in turns if not turn.untrained)
    assert sum(group.num_loss_tokens for group in outline.groups) == loss


def test_a_bundle_of_a_group_is_aligned_and_read_without_a_copy() -> None:
    (group, *_) = groups_with(7)
    data = encode_group(group.episodes)
    assert len(data) % 8 == 0
    bundle = GroupBundle(memoryview(data))
    for entry, episode in enumerate(group.episodes):
        turns = bundle.turns(entry)
        assert [turn.author for turn in turns] == [turn.author for turn in episode.turns]
        for turn in turns:
            assert turn.tokens.logprobs_T.base is not None
            assert not turn.tokens.ids_T.flags.writeable


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:20], lambda d: d[:8] + b"\xff" * 8 + d[16:]])
def test_bytes_that_are_no_bundle_are_refused(damage: object) -> None:
    assert callable(damage)
    data = damage(encode_group(groups_with(1)[0].episodes))
    with pytest.raises(msgspec.MsgspecError):
        GroupBundle(memoryview(data))


def test_an_episode_that_a_bundle_does_not_have_is_refused() -> None:
    bundle = GroupBundle(memoryview(encode_group(groups_with(1)[0].episodes)))
    with pytest.raises(msgspec.MsgspecError):
        bundle.turns(4)
    with pytest.raises(IndexError):
        bundle.plain_tokens(4)
