"""What an engine refuses that comes over process groups, and that the next version arrives all the same."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from headrace.base.errors import NeedsFull, WeightsError
from headrace.sync import group
from headrace.sync.config import Route
from headrace.testing.sync import Pair, are_equal, open_pair

torch.set_num_threads(1)


@pytest.fixture(params=["full", "delta"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with open_pair(Route(transport="group", codec=request.param, deadline_s=1.0), seed=3) as made:
        made.transfer()
        made.learn()
        yield made


def assert_next_arrives(pair: Pair) -> None:
    """Without being sent again: the ranks use new groups after a failure."""
    pair.learn()
    update = pair.publish()
    if update.base is not None:
        update = pair.resend()  # a difference is taken only from a version that has arrived
    pair.receiver.stage(update)
    pair.receiver.commit(pair.version)
    assert are_equal(pair.engine, pair.expected_weights())


def test_pieces_that_do_not_cover_the_weights_are_refused_before_a_byte_is_used(pair: Pair) -> None:
    update = pair.publish()
    (layout,) = update.layouts
    starts = (tuple(start + 1 for start in layout.starts[0]), *layout.starts[1:])
    wrong = msgspec.structs.replace(update, layouts=(msgspec.structs.replace(layout, starts=starts),))
    with pytest.raises(WeightsError, match="is not a version of the weights"):
        pair.receiver.stage(wrong)
    assert_next_arrives(pair)


def test_another_version_than_the_announced_one_is_refused_by_both_numbers(pair: Pair) -> None:
    update = msgspec.structs.replace(pair.publish(), version=7)
    with pytest.raises(NeedsFull, match="announced was version 7, and rank 0 of the learner sends version 1"):
        pair.receiver.stage(update)
    assert_next_arrives(pair)


def test_more_bytes_than_a_bucket_has_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    if pair.route.codec == "full":
        return  # only buckets of differences announce a size
    monkeypatch.setattr(
        group.GroupOutbox,
        "_send_bucket",
        lambda self, members, bucket, request: members.broadcast_one(group._numbers(1, bucket.num_bytes + 1)),
    )
    with pytest.raises(NeedsFull, match=r"sends \d+ bytes for a bucket of \d+"):
        pair.receiver.stage(pair.publish())
    monkeypatch.undo()
    assert_next_arrives(pair)
