"""Filters are pure functions of a scored group; what they say is what their papers say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.flow import FlowConfig
from headrace.flow.filters.base import FilterContext, FilterSection, Verdict, apply_filters, get_rewards, undo_filters
from headrace.flow.filters.length import LengthFilter
from headrace.flow.filters.oversampling import Redundancy, ResampleCorrect
from headrace.flow.filters.rewards import DynamicSampling, ZeroVariance

CONTEXT = FilterContext(decode=lambda ids: bytes(ids).decode(), seed=7)
REWARDS = st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.25]), min_size=2, max_size=12)


def answer(text: str, *, stop: StopReason = StopReason.STOP, author: str = "policy") -> Turn:
    ids_T = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    tokens = Tokens(ids_T=ids_T, logprobs_T=np.zeros(len(ids_T), np.float32), versions_T=np.zeros(len(ids_T), np.int32))
    return Turn(author=author, tokens=tokens, parent=None, stop_reason=stop)


def tool(*, failed: bool) -> Turn:
    return Turn(author="tool", tokens=Tokens.observed([1, 2]), failed=failed)


def group(*rewards: float | None, number: int = 0, turns: dict[int, list[Turn]] | None = None) -> ScoredGroup:
    """A reward of ``None`` is an episode that failed."""
    return ScoredGroup(
        number=number,
        episodes=tuple(
            EpisodeGraph(
                key=EpisodeKey(number, place),
                turns=(turns or {}).get(place, [answer("ab")]),
                status=EpisodeStatus.FAILED if reward is None else EpisodeStatus.SCORED,
                reward=reward,
                cause="reward_error" if reward is None else "",
            )
            for place, reward in enumerate(rewards)
        ),
    )


def test_group_whose_rewards_are_all_equal_is_dropped_and_no_other() -> None:
    drop = Verdict(reason="zero_variance", drop=True)
    assert ZeroVariance()(group(0.5, 0.5, 0.5), CONTEXT) == drop
    assert ZeroVariance()(group(0.5, None, 0.5), CONTEXT) == drop
    assert ZeroVariance()(group(0.5, 0.5, 0.5000001), CONTEXT) == Verdict()
    assert ZeroVariance(tolerance=0.1)(group(0.5, 0.55, 0.58), CONTEXT) == drop
    assert ZeroVariance(tolerance=0.1)(group(0.5, 0.55, 0.61), CONTEXT) == Verdict()


@given(rewards=REWARDS, low=st.sampled_from([0.0, 0.2, 0.5]), high=st.sampled_from([0.6, 0.9, 1.0]))
def test_dynamic_sampling_keeps_what_is_right_sometimes(rewards: list[float], low: float, high: float) -> None:
    verdict = DynamicSampling(low=low, high=high)(group(*rewards), CONTEXT)
    share = sum(1 for reward in rewards if reward == 1.0) / len(rewards)
    assert verdict.drop == (not low < share < high)
    if verdict.drop:
        assert verdict.reason == ("accuracy_too_low" if share <= low else "accuracy_too_high")


def test_daposs_bounds_drop_exactly_what_is_right_never_or_always() -> None:
    verdicts = {right: DynamicSampling()(group(*[1.0] * right, *[0.0] * (4 - right)), CONTEXT) for right in range(5)}
    assert [right for right, verdict in verdicts.items() if verdict.drop] == [0, 4]


def cut(text: str = "abcdef") -> list[Turn]:
    return [answer(text, stop=StopReason.LENGTH)]


def test_answers_that_were_cut_off_are_masked_or_left_out() -> None:
    whole = group(1.0, 0.0, 1.0, turns={1: cut()})
    assert LengthFilter()(whole, CONTEXT) == Verdict(reason="overlong", mask=frozenset({1}))
    assert LengthFilter(action="leave_out")(whole, CONTEXT) == Verdict(reason="overlong", leave_out=frozenset({1}))
    assert LengthFilter(max_tokens=2)(group(1.0, 0.0), CONTEXT) == Verdict()
    long = group(1.0, 0.0, turns={0: [answer("abc")]})
    assert LengthFilter(max_tokens=2)(long, CONTEXT).mask == {0}


def test_masked_episode_stays_in_the_baseline_and_one_left_out_does_not() -> None:
    whole = group(1.0, 0.0, 1.0, 0.0, turns={1: cut()})
    masked = apply_filters(whole, [LengthFilter()], min_episodes=2, context=CONTEXT).group
    assert get_rewards(masked.counted) == [1.0, 0.0, 1.0, 0.0]
    assert get_rewards(masked.scored) == [1.0, 1.0, 0.0]
    assert (masked.episodes[1].status, masked.episodes[1].cause) == (EpisodeStatus.MASKED, "overlong")
    left = apply_filters(whole, [LengthFilter(action="leave_out")], min_episodes=2, context=CONTEXT).group
    assert get_rewards(left.counted) == get_rewards(left.scored) == [1.0, 1.0, 0.0]
    assert whole.episodes[1].status is EpisodeStatus.SCORED, "a filter changes nothing by itself"


def test_group_with_too_few_left_is_dropped_for_the_reason_of_the_filter_that_took_the_last() -> None:
    turns = {1: cut(), 2: cut()}
    left = apply_filters(
        group(1.0, 0.0, 1.0, turns=turns), [LengthFilter(action="leave_out")], min_episodes=2, context=CONTEXT
    )
    assert left.dropped == "overlong"
    assert [episode.status for episode in left.group.episodes] == [EpisodeStatus.SCORED] * 3
    masks = apply_filters(
        group(1.0, 0.0, turns={0: cut(), 1: cut()}), [LengthFilter()], min_episodes=2, context=CONTEXT
    )
    assert masks.dropped == "overlong", "nothing is left to train"


def test_group_of_which_every_answer_is_masked_stays_where_the_filter_keeps_it() -> None:
    whole = group(1.0, 0.0, turns={0: cut(), 1: cut()})
    kept = apply_filters(whole, [LengthFilter(all_masked="keep")], min_episodes=2, context=CONTEXT)
    assert kept.dropped == ""
    assert [episode.status for episode in kept.group.episodes] == [EpisodeStatus.MASKED] * 2
    assert get_rewards(kept.group.counted) == [1.0, 0.0]
    equal = group(1.0, 1.0, turns={0: cut(), 1: cut()})
    both = [LengthFilter(all_masked="keep"), ZeroVariance()]
    assert apply_filters(equal, both, min_episodes=2, context=CONTEXT).dropped == "zero_variance"
    with pytest.raises(ConfigError, match="all_masked='keep' and action='leave_out': nothing is masked"):
        validate(FlowConfig, {"filters": [{"kind": "length", "action": "leave_out", "all_masked": "keep"}]})


def test_filters_see_what_the_one_before_left() -> None:
    whole = group(1.0, 1.0, 0.0, turns={2: cut()})
    first, second = LengthFilter(action="leave_out"), ZeroVariance()
    assert apply_filters(whole, [first, second], min_episodes=2, context=CONTEXT).dropped == "zero_variance"
    assert apply_filters(whole, [second, first], min_episodes=2, context=CONTEXT).dropped == ""
    assert apply_filters(whole, [LengthFilter(), second], min_episodes=2, context=CONTEXT).dropped == "", (
        "masked ones count"
    )


class Any_(FilterSection):
    """Says what it is told."""

    advice = ""
    verdict: Any

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        given: Verdict = self.verdict
        here = frozenset(episode.key.place for episode in group.scored)
        return Verdict(
            reason=given.reason, drop=given.drop, leave_out=given.leave_out & here, mask=given.mask & here
        )  # fmt: skip


PLACES = st.frozensets(st.integers(0, 7), max_size=4)
VERDICTS = st.builds(
    lambda reason, drop, out, mask: Verdict(reason=reason, drop=drop, leave_out=out, mask=mask - out),
    st.sampled_from(["a", "b", "c"]), st.sampled_from([False, False, False, True]), PLACES, PLACES,
)  # fmt: skip


@given(verdicts=st.lists(VERDICTS, max_size=4), failed=PLACES)
def test_every_episode_is_kept_or_gone_for_one_reason_whatever_filters_say(
    verdicts: list[Verdict], failed: frozenset[int]
) -> None:
    whole = group(*(None if place in failed else float(place) for place in range(8)))
    left = apply_filters(whole, [Any_(verdict=verdict) for verdict in verdicts], min_episodes=2, context=CONTEXT)
    if left.dropped:
        assert left.group is whole
        return
    gone: dict[int, str] = {}
    for verdict in verdicts:
        for place in (verdict.leave_out | verdict.mask) - failed:
            gone.setdefault(place, verdict.reason)
    for before, after in zip(whole.episodes, left.group.episodes, strict=True):
        place = before.key.place
        assert after.status.untrained == (place in gone or place in failed)
        assert after.cause == gone.get(place, before.cause)
        assert after.turns is before.turns
        assert after.reward == before.reward
    assert undo_filters(left.group.episodes) == whole.episodes


def errors(turns: list[Turn], **settings: Any) -> float:
    (episode,) = group(1.0, turns={0: turns}).episodes
    return ResampleCorrect(keep=2, **settings).errors(episode, CONTEXT)


@pytest.mark.parametrize(
    ("turns", "settings", "expected"),
    [
        ([answer("a")], {}, 0.5),
        ([answer("a"), tool(failed=False), answer("b")], {}, 0.0),
        ([answer("a"), tool(failed=True), answer("b"), tool(failed=False), answer("c")], {}, 0.5),
        ([answer("a"), tool(failed=True), answer("b")], {}, 1.0),
        ([answer("a"), tool(failed=False), *cut()], {}, 1.0),
        ([answer("<a>1</a>"), tool(failed=False)], {"answer_tags": ("<a>", "</a>")}, 0.0),
        ([answer("1"), tool(failed=False)], {"answer_tags": ("<a>", "</a>")}, 1.0),
        ([answer("<a>1"), tool(failed=False)], {"answer_tags": ("<a>", "</a>")}, 1.0),
        ([answer("<a>1</a>"), tool(failed=False), answer("<a>2</a>")], {"answer_tags": ("<a>", "</a>")}, 0.5),
        ([answer("<a>1</a><a>2</a><a>3</a>"), tool(failed=False)], {"answer_tags": ("<a>", "</a>")}, 1.0),
    ],
)
def test_errors_of_an_answer_are_those_of_the_paper(
    turns: list[Turn], settings: dict[str, Any], expected: float
) -> None:
    assert errors(turns, **settings) == expected


@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=16),
    keep=st.integers(2, 8),
    min_each=st.integers(0, 4),
    number=st.integers(0, 50),
)
def test_resampling_keeps_the_cleanest_right_ones_and_the_proportion(
    rewards: list[float], keep: int, min_each: int, number: int
) -> None:
    min_each = min(min_each, keep // 2)
    dirty = {place: [answer("a"), tool(failed=place % 3 == 0)] for place in range(len(rewards))}
    whole = group(*rewards, number=number, turns=dirty)
    rule = ResampleCorrect(keep=keep, min_each=min_each)
    verdict = rule(whole, CONTEXT)
    assert verdict == rule(whole, CONTEXT), "the same draw each time"
    kept = [episode for episode in whole.episodes if episode.key.place not in verdict.leave_out]
    assert len(kept) == min(keep, len(rewards))
    right, wrong = (sum(reward == value for reward in rewards) for value in (1.0, 0.0))
    kept_right = [episode for episode in kept if episode.reward == 1.0]
    kept_wrong = len(kept) - len(kept_right)
    assert len(kept_right) >= min(min_each, right)
    assert kept_wrong >= min(min_each, wrong)
    if min(len(kept_right), kept_wrong) > min_each and keep < len(rewards):
        assert abs(kept_wrong - wrong * keep / len(rewards)) <= 0.5
    flaws = [rule.errors(episode, CONTEXT) for episode in whole.episodes if episode.reward == 1.0]
    assert sorted(rule.errors(episode, CONTEXT) for episode in kept_right) == sorted(flaws)[: len(kept_right)]


def test_wrong_answers_are_drawn_evenly() -> None:
    rule = ResampleCorrect(keep=4)
    kept: Counter[int] = Counter()
    for number in range(4000):
        whole = group(*[0.0] * 6, 1.0, 1.0, number=number)
        kept.update(set(range(6)) - rule(whole, CONTEXT).leave_out)
    share = np.array([kept[place] for place in range(6)]) / 4000
    assert np.allclose(share, 0.5, atol=0.04), share  # 5 standard deviations


@pytest.mark.parametrize(
    ("values", "words", "remedy"),
    [
        ({"filters": ["zero_varianse"]}, "filters[0].kind='zero_varianse' does not exist", "mean 'zero_variance'"),
        ({"filters": [{"kind": "length", "max_token": 5}]}, "filters[0].max_token is not a setting", "'max_tokens'"),
        ({"filters": "redundancy"}, "filters[0].keep is missing", "set filters[0].keep"),
        ({"filters": [{"kind": "redundancy", "keep": 9}]}, "none would be redundant", "keep <= 7"),
        ({"filters": [{"kind": "redundancy", "keep": 1}]}, "every group would be dropped", "keep >= 2"),
        (
            {"filters": ["zero_variance", "length", "zero_variance"]},
            "flow.filters[2] 'zero_variance' stands twice",
            "keep one",
        ),
        (
            {"filters": [{"kind": "redundancy", "keep": 6}, {"kind": "redundancy", "keep": 4}]},
            "flow.filters[1] 'redundancy' stands twice",
            "keep one",
        ),
        (
            {"filters": [{"kind": "redundancy", "keep": 4}, {"kind": "resample_correct", "keep": 4}]},
            "flow.filters[1] 'resample_correct': keep=4, and a group has 4 episodes",
            "keep <= 3",
        ),
        ({"filters": [{"kind": "dynamic_sampling", "low": 0.5, "high": 0.5}]}, "it drops every group", "low < high"),
        (
            {"group_size": 2, "filters": [{"kind": "dynamic_sampling", "low": 0.5, "high": 0.9}]},
            "of 2 episodes a share of 0, 0.5, 1 can be right",
            "widen low and high",
        ),
        ({"filters": [{"kind": "resample_correct", "keep": 4, "min_each": 3}]}, "both kinds do not fit", "<= 2"),
        ({"filters": [{"kind": "resample_correct", "keep": 4, "answer_tags": ["", "x"]}]}, "an empty tag", "two texts"),
    ],
)
def test_filters_that_cannot_work_are_refused(values: dict[str, Any], words: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(FlowConfig, values)
    assert words in refused.value.problem
    assert remedy in refused.value.remedy


def test_name_alone_stands_for_its_table() -> None:
    tables = FlowConfig(filters=[{"kind": "zero_variance"}, {"kind": "length", "action": "mask"}])
    assert FlowConfig(filters=["zero_variance", "length"]) == tables
    assert FlowConfig(filters="zero_variance").filters == (ZeroVariance(),)
    assert FlowConfig(filters="none").filters == ()
    with pytest.raises(ValidationError):
        FlowConfig(filters=[3])


def test_redundancy_says_how_many_are_enough() -> None:
    assert FlowConfig(filters=(Redundancy(keep=6), ZeroVariance())).first == 6
    assert FlowConfig().first is None
