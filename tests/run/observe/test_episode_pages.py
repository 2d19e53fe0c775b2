"""Pages of episodes: whatever a model says stands on them, and does nothing there."""

from __future__ import annotations

import asyncio
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.tokens import Tokens
from headrace.control.evaluation import IntervalEstimate
from headrace.run.observe.pages import PageInputs, PageWriter
from headrace.run.observe.pages.episode import make_episode_page

KEY = EpisodeKey(0, 0)
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e'\"&"


class Parsed(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "circle", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def given_turn(text: str, parent: int | None) -> Turn:
    return Turn(author="user", tokens=Tokens.observed([ord(character) for character in text]), parent=parent)


def sampled(text: str, parent: int, *, logprobs: list[float] | None = None, author: str = "policy") -> Turn:
    ids = [ord(character) for character in text]
    tokens = Tokens(ids_T=ids, logprobs_T=logprobs or [-0.1] * len(ids), versions_T=[3] * len(ids))
    return Turn(author=author, tokens=tokens, parent=parent, stop_reason=StopReason.STOP, reward=0.25)


def episode(*turns: Turn, key: EpisodeKey = KEY) -> EpisodeGraph:
    return EpisodeGraph(
        key=key, turns=list(turns), status=EpisodeStatus.SCORED, reward=0.5, parts={"digits": 0.125, "style": 2.0}
    )


def test_a_page_shows_turns_tokens_logprobs_and_reward_parts() -> None:
    answer = sampled("ab", 0, logprobs=[math.log(0.95), math.log(0.001)])
    page = Parsed(make_episode_page(episode(given_turn("2+3", None), answer), {"question": "2+3"}, decode))
    assert not page.open
    for words in ("task 1, attempt 1", "0.5", "digits", "0.125", "0 · user · 3 tokens", "1 · policy · 2 tokens · 0.25"):
        assert words in page.text
    tokens = [attributes for tag, attributes in page.tags if tag == "span"]
    assert [each["class"] for each in tokens] == ["", "l4"]
    assert tokens[1]["title"] == "98: logprob -6.908, version 3"


def test_branches_are_drawn_beside_each_other() -> None:
    turns = [given_turn("q", None), sampled("a", 0), sampled("b", 0), given_turn("r", 1), sampled("c", 3)]
    page = Parsed(make_episode_page(episode(*turns, given_turn("other root", None)), {}, decode))
    marks = [attributes for tag, attributes in page.tags if tag == "circle"]
    lanes = [int(mark["cx"] or "") for mark in marks]
    assert lanes[0] == lanes[1] == lanes[3] == lanes[4]
    assert len(set(lanes)) == 3
    assert [mark["class"] for mark in marks] == ["given", "sampled", "sampled", "given", "sampled", "given"]
    assert sum(tag == "path" for tag, _ in page.tags) == 4
    assert "3 branches" in page.text


def test_what_a_model_says_is_shown_and_does_nothing() -> None:
    wild = EpisodeGraph(
        key=EpisodeKey(0, 0),
        turns=[given_turn(HOSTILE, None), sampled(HOSTILE, 0, author=HOSTILE)],
        status=EpisodeStatus.FAILED,
        cause=f"env_error: {HOSTILE}",
        parts={HOSTILE: math.nan},
    )
    page = Parsed(make_episode_page(wild, {HOSTILE: HOSTILE}, decode))
    assert not page.open
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "link"})
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "alert(1)" in page.text
    assert not set(page.text) & {"\x1b", "\u202e"}
    policy = next(a for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


@settings(max_examples=50)
@given(st.text(max_size=30), st.lists(st.floats(width=32, allow_subnormal=False), max_size=5))
def test_any_text_and_any_logprob_make_a_sound_page(text: str, logprobs: list[float]) -> None:
    answer = sampled("x" * len(logprobs), 0, logprobs=[float(np.float32(each)) for each in logprobs] or None)
    page = Parsed(make_episode_page(episode(given_turn("q", None), answer), {"text": text}, lambda _: text))
    assert not page.open


def test_characters_of_several_tokens_stand_together_and_broken_ones_alone() -> None:
    snowman = "☃".encode()

    def bytewise(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    tokens = Tokens(ids_T=[*snowman, 104, 0xE2], logprobs_T=[-1.0, -2.0, -3.0, -0.5, -0.25], versions_T=[0] * 5)
    turn = Turn(author="policy", tokens=tokens, parent=0, stop_reason=StopReason.LENGTH)
    page = Parsed(make_episode_page(episode(given_turn("q", None), turn), {}, bytewise))
    told = [attributes["title"] or "" for tag, attributes in page.tags if tag == "span"]
    assert [each.count("logprob") for each in told] == [3, 1, 1]
    assert "☃h\ufffd" in page.text


def test_a_book_has_a_line_for_each_attempt_a_page_for_the_first_ones_and_an_index(tmp_path: Path) -> None:
    async def main() -> None:
        inputs = PageInputs(rows=[{"q": 1}, {"q": 2}], num_attempts=2, decode=decode, max_pages=3)
        book = PageWriter(tmp_path / "eval", inputs)
        for task in range(2):
            for attempt in range(2):
                turns = (given_turn("q", None), sampled("a", 0))
                await book.keep(episode(*turns, key=EpisodeKey(task, attempt)))
        figures = {
            "pass@2": IntervalEstimate(value=0.75, low=0.5, high=0.9),
            "avg@2": IntervalEstimate(value=-0.5, low=None, high=None),
        }
        book.finish("<model>", figures, ["one <b>failed</b>"])

    asyncio.run(main())
    directory = tmp_path / "eval"
    lines = [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]
    assert {(line["task"], line["attempt"]) for line in lines} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert lines[0]["parts"] == {"digits": 0.125, "style": 2.0}
    assert sorted(page.name for page in (directory / "episodes").iterdir()) == ["0-0.html", "0-1.html", "1-0.html"]
    index = Parsed((directory / "index.html").read_text())
    assert not index.open
    for words in ("<model>", "pass@2", "0.75", "95 %: 0.5 to 0.9", "one <b>failed</b>", "−0.5"):
        assert words in index.text
    links = [attributes["href"] for tag, attributes in index.tags if tag == "a"]
    assert sorted(filter(None, links)) == ["episodes/0-0.html", "episodes/0-1.html", "episodes/1-0.html"]
    with pytest.raises(ConfigError, match="holds an evaluation already"):
        PageWriter(directory, PageInputs(rows=[], num_attempts=1, decode=decode, max_pages=0))
