"""What is noted of groups and episodes: their environments until they are trained, and a span of each end, once."""

from headrace.base.types.episode import EpisodeGraph, EpisodeKey
from headrace.control.metrics.counters import Attempts


def test_a_span_of_each_end_is_told_once_and_the_episode_knows_when_it_was() -> None:
    attempts = Attempts("env")
    episodes = [EpisodeGraph(key=EpisodeKey(number, place)) for number, place in ((7, 0), (8, 0), (7, 1))]
    attempts.end(episodes[0], 1.0, 2.0)
    attempts.end(episodes[1], 1.0, 2.5)
    told = [(span.of, span.start_s, span.end_s) for span in attempts.pop_spans()]
    assert told == [(EpisodeKey(7, 0), 1.0, 2.0), (EpisodeKey(8, 0), 1.0, 2.5)]
    attempts.end(episodes[2], 1.0, 3.0)
    assert [span.of for span in attempts.pop_spans()] == [EpisodeKey(7, 1)]
    assert attempts.pop_spans() == []
    assert [episode.ended_s for episode in episodes] == [2.0, 2.5, 3.0]


def test_environments_are_kept_until_their_groups_are_trained_or_gone() -> None:
    attempts = Attempts("env")
    for number, row in enumerate(({"env": "sums"}, {}, {"env": "games"}, {"env": "sums"})):
        attempts.begin(number, row)
    assert attempts.pop_envs([0, 1, 99], alive={2}) == ["sums", "", ""]  # nobody knows of 99: a former life began it
    assert attempts.pop_envs([2, 3], alive=()) == ["games", ""]
