"""What is noted of episodes that end: their groups know of it when they are taken, and a span is told of each, once."""

from headrace.control.attempts import Attempts
from headrace.types.episode import EpisodeKey


def test_ends_reach_their_groups_and_are_told_once_in_whatever_order_they_are_asked_for() -> None:
    attempts = Attempts("env")
    for number in (7, 8):
        attempts.begin(number, {"env": "sums"})
    attempts.ended(EpisodeKey(7, 0), 1.0, 2.0)
    attempts.ended(EpisodeKey(8, 0), 1.0, 2.5)
    assert [(span.of, span.start_s, span.end_s) for span in attempts.spans()] == [("7.0", 1.0, 2.0), ("8.0", 1.0, 2.5)]
    attempts.ended(EpisodeKey(7, 1), 1.0, 3.0)
    attempts.ended(EpisodeKey(99, 0), 1.0, 3.5)  # of a group that a former life began
    assert {number: (each.env, each.ends_s) for number, each in attempts.take([7]).items()} == {7: ("sums", [2.0, 3.0])}
    assert [span.of for span in attempts.spans()] == ["7.1", "99.0"]
    assert attempts.spans() == []
    assert attempts.take([8])[8].ends_s == [2.5]
