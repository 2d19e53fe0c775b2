"""The dashboard in a real browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.observation import StepRecord
from headrace.run.observe import JsonlWriter
from tests.wings.view.browsing import ARGUMENTS, CHROMIUM, PAGES, Watched, viewed
from tests.wings.view.synthetic import (
    LONG,
    branching_episode,
    given,
    ids,
    record,
    sampled,
    set_teachers,
    taught_episode,
    write_run,
    write_status,
)

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright: the pages are looked at in a browser"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'><svg onload='window.pwned = 3'>\n"
    "# Heading\n[a link](javascript:window.pwned=4) **bold** ![image](http://192.0.2.1/x.png)\n"
    "\x1b[31mred\x1b[0m \x07 \x1b]0;title\x07 \u202eright to left\u202c \u2066שלום عالم\u2069 "
    "zero\u200bwidth \ufeff\x00 end"
)

SCROLL = """async () => {
    const bottom = document.documentElement.scrollHeight;
    let most = 0;
    const bare = [];
    for (let at = 0; at < 90; at += 1) {
        scrollTo(0, (bottom * at) / 90);
        let seen = false;
        for (let frame = 0; frame < 600 && !seen; frame += 1) {  // two are enough on a quiet machine
            await new Promise(requestAnimationFrame);
            most = Math.max(most, document.querySelectorAll(".t").length);
            seen = [...document.querySelectorAll(".t")].some((token) => {
                const box = token.getBoundingClientRect();
                return box.bottom > 0 && box.top < innerHeight;
            });
        }
        if (!seen) bare.push(at);
    }
    return { most, bare };
}"""
"""Leap over four screens at a time: how many tokens the page held at most, and where none came to be seen."""


def hostile_episode() -> EpisodeGraph:
    """Text that would like to be something else, and a line of a megabyte."""
    line = [256] * (2**20 // len(LONG))
    turns = [
        given("Be nasty: <b>now</b>"),
        sampled(HOSTILE, version=3, parent=0, author="<script>alert(1)</script>"),
        sampled([*ids("x"), *line], version=4, parent=1),
    ]
    return EpisodeGraph(key=EpisodeKey(0, 0), turns=turns, status=EpisodeStatus.SCORED, reward=0.0)


def long_episode() -> EpisodeGraph:
    """32,768 tokens, in lines."""
    text = "".join(f"{number}: the quick brown fox\n" for number in range(1300))[: 32 * 1024]
    turns = [given("Write much: "), sampled(text.ljust(32 * 1024, "."), version=2, parent=0)]
    return EpisodeGraph(key=EpisodeKey(0, 0), turns=turns, status=EpisodeStatus.SCORED, reward=1.0)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Groups 13, 14 and 15 are the branching, the hostile and the long episode."""
    directory = tmp_path_factory.mktemp("view")
    episodes = [branching_episode(0, 0), hostile_episode(), long_episode()]
    one = write_run(directory / "one", extra=episodes, name="one")
    write_status(one, living=False, steps=6)
    with viewed(one, write_run(directory / "two", steps=4, name="two")) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any, view: str) -> Iterator[Watched]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    watched = Watched(context.new_page(), view)
    yield watched
    context.close()


def worked_s(tab: Watched) -> float:
    """Processor time of the page's main thread so far: what a frame costs, however busy the machine is besides."""
    if tab.meter is None:
        tab.meter = tab.tab.context.new_cdp_session(tab.tab)
        tab.meter.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = tab.meter.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in found if each["name"] == "TaskDuration"))


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_page_opens_without_errors_and_is_accessible(theme: str, tab: Watched) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab.tab.emulate_media(color_scheme=theme, reduced_motion="reduce")
    found: list[str] = []
    for page in PAGES:
        tab.open(page)
        for broken in Axe().run(tab.tab).response["violations"]:
            if broken["impact"] in ("serious", "critical"):
                found.append(f"{page}: {broken['id']}: {broken['nodes'][0]['html'][:300]}")
    assert found == []
    assert tab.errors == []
    assert all(url.startswith(tab.base) for url in tab.asked), tab.asked


@pytest.mark.parametrize("width", [360, 390])
def test_no_page_is_wider_than_a_telephone_and_no_figure_is_cut(width: int, tab: Watched) -> None:
    tab.tab.set_viewport_size({"width": width, "height": 844})
    for page in PAGES:
        tab.open(page)
        assert tab.tab.evaluate("document.documentElement.scrollWidth") <= width, page
        cut = "[...document.querySelectorAll('.cards dd')].filter((dd) => dd.scrollWidth > dd.clientWidth).length"
        assert tab.tab.evaluate(cut) == 0, page
        rows = "Math.max(0, ...[...document.querySelectorAll('.wide tbody tr')].map((row) => row.clientHeight))"
        assert tab.tab.evaluate(rows) < 140, f"{page}: words of a table stand below one another, letter by letter"


def test_the_first_page_shows_what_is_learned_beside_the_reward(tab: Watched) -> None:
    tab.open("overview")
    shown = tab.tab.locator("main figure.chart h2").all_inner_texts()
    assert shown[:6] == ["Reward", "Loss", "Gradient norm", "KL", "Entropy", "Learning rate"]
    for title in shown[:6]:
        words = tab.tab.locator("main figure.chart", has=tab.tab.get_by_role("heading", name=title)).locator(".plot")
        assert re.search(r": from [-−0-9.]", words.get_attribute("aria-label")), title
    reward = tab.tab.locator("main figure.chart").first.locator(".plot")
    assert "held out: from 0.41 to 0.93" in reward.get_attribute("aria-label")
    assert reward.locator("circle").count() == 2
    assert reward.locator("path.series[stroke='var(--orange)']").get_attribute("d") == ""


def test_a_single_answer_is_one_turn_and_stands_in_the_list(tab: Watched) -> None:
    tab.open("episodes", ready="tbody a")
    assert "What is 15 + 3?" in tab.tab.locator("tbody tr").first.inner_text()
    tab.tab.locator("tbody a").first.click()
    tab.tab.wait_for_selector(".t")
    assert "in 1 turn" in tab.tab.locator("dl.cards").inner_text().split("\n")


def test_amounts_are_written_by_one_function(tab: Watched) -> None:
    code = """async () => { const f = await import("/static/js/format.js");
      return [f.duration(0), f.duration(2e-6), f.plural(1, "version"), f.plural(0, "version"),
        f.plural(12345, "turn")]; }"""
    assert tab.tab.evaluate(code) == ["0 s", "2 µs", "1 version", "0 versions", "12,345 turns"]


def test_what_is_learned_stands_near_the_top_of_all_numbers(tab: Watched) -> None:
    tab.open("steps")
    assert tab.tab.locator("main h2").all_inner_texts()[:2] == ["Reward", "Learning"]


def test_a_page_shows_a_new_step_within_two_seconds(chromium: Any, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    (directory / "summary.json").unlink()
    write_status(directory, living=True, steps=3)
    with viewed(directory) as address, JsonlWriter[StepRecord](directory / "metrics.jsonl") as metrics:
        watched = Watched(chromium.new_page(), address)
        watched.open("overview")
        watched.tab.get_by_text("3 / 40", exact=True).wait_for()
        clock = RealClock()
        began_s = clock.now()
        metrics.write([record(3)])
        watched.tab.get_by_text("4 / 40", exact=True).wait_for(timeout=5000)
        took_s = clock.now() - began_s
        assert watched.errors == []
        watched.tab.close()
    assert took_s < 2.0


def test_an_episode_of_32k_tokens_is_painted_where_one_looks_and_nowhere_else(tab: Watched) -> None:
    tab.open("episodes/15.0", ready="#turn-1 .t")
    scrolled = tab.tab.evaluate(SCROLL)
    assert scrolled["most"] < 8000  # what a leap costs depends on these alone
    assert scrolled["bare"] == []
    tab.tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    tab.tab.wait_for_selector("#turn-1 .t[data-at='32767']")
    assert tab.tab.locator(".t").count() < 8000
    assert tab.errors == []


@pytest.mark.slow
def test_an_episode_of_32k_tokens_is_painted_at_once_and_scrolls(tab: Watched) -> None:
    clock = RealClock()
    took_s: list[float] = []
    while len(took_s) < 8 and min(took_s, default=9.0) >= 1.5:  # one quiet moment of a busy machine is enough
        tab.tab.goto("about:blank")
        began_s = clock.now()
        tab.open("episodes/15.0", ready="#turn-1 .t")
        took_s.append(clock.now() - began_s)
    assert min(took_s) < 1.5
    before_s = worked_s(tab)
    frames = tab.tab.evaluate(
        """async () => {
            const bottom = document.documentElement.scrollHeight;
            for (let at = 0; at < 90; at += 1) {
                scrollTo(0, (bottom * at) / 90);
                await new Promise(requestAnimationFrame);
            }
            return 90;
        }"""
    )
    assert (worked_s(tab) - before_s) / frames < 1 / 60  # each of them leaps over four screens


def test_a_hostile_completion_is_shown_as_text(tab: Watched) -> None:
    tab.open("episodes/14.0", ready="#turn-1 .t")
    shown = tab.tab.locator("#turn-1").inner_text()
    for words in (
        "<script>window.pwned = 1</script>",
        "<img src=x onerror=",
        "[a link](javascript:",
        "**bold**",
        "# Heading",
    ):
        assert words in shown
    for spelled in ("⟨U+001B⟩", "⟨U+202E⟩", "⟨U+0007⟩", "⟨U+200B⟩", "⟨U+0000⟩", "⟨U+FEFF⟩", "⟨U+2066⟩"):
        assert spelled in shown
    assert "שלום" in shown.replace("·", "")  # the tokens of one letter's bytes stand before it
    assert not any(character in shown for character in "\x1b\u202e\u200b\x00")
    assert tab.tab.evaluate("window.pwned") is None
    assert tab.tab.locator("#turn-1 :is(img, a, svg, script, strong)").count() == 0
    assert "<script>alert(1)</script>" in tab.tab.locator("#turn-1 h2").inner_text()
    tab.tab.locator("#turn-2").scroll_into_view_if_needed()
    tab.tab.wait_for_selector("#turn-2 .t")
    assert tab.tab.locator(".t").count() < 8000  # of 32,769 in the line of a megabyte
    assert tab.tab.evaluate("document.documentElement.scrollWidth") <= 1280
    tab.open("episodes?words=onerror", ready=".around mark")
    assert tab.tab.evaluate("window.pwned") is None
    assert tab.errors == []


def test_tokens_and_timeline_are_read_with_the_keyboard(tab: Watched) -> None:
    tab.open("episodes/13.0")
    tab.tab.locator("#turn-1 .tokens").focus()
    for _ in range(3):
        tab.tab.keyboard.press("ArrowRight")
    tab.tab.wait_for_selector("#turn-1 .t.hot[data-at='2']")
    told = tab.tab.locator("#turn-1 .tip")
    told.get_by_text("experts by layer").wait_for()
    assert "version" in told.inner_text()
    assert "log μ" in told.inner_text()
    tab.open("timeline")
    before = tab.tab.locator("canvas[tabindex]").get_attribute("aria-label")
    tab.tab.locator("canvas[tabindex]").focus()
    tab.tab.keyboard.press("+")
    tab.tab.wait_for_function(
        "before => document.querySelector('canvas[tabindex]').getAttribute('aria-label') !== before", arg=before
    )
    assert tab.errors == []


def test_filters_are_kept_in_the_address_and_colours_can_be_chosen(tab: Watched) -> None:
    tab.open("episodes")
    tab.tab.get_by_label("fate", exact=True).select_option("failed")
    tab.tab.wait_for_function("location.hash.includes('status=failed')")
    tab.tab.get_by_text("1 episode", exact=True).wait_for()
    assert "reward error" in tab.tab.locator("tbody").inner_text()
    tab.open("episodes/13.0")
    for name in ("Age", "Surprise", "Advantage", "Kept-set", "Routing"):
        button = tab.tab.get_by_role("button", name=name, exact=True)
        if button.is_enabled():
            button.click()
            assert button.get_attribute("aria-pressed") == "true"
    assert tab.tab.locator("#turn-1 .t.c5").count() == 15  # all four experts of every token differ
    assert tab.errors == []


def test_what_a_teacher_says_of_a_token_is_seen_and_heard(chromium: Any, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "taught", steps=1, extra=[taught_episode(0, 0)])
    set_teachers(directory, {"kind": "reverse_kl"}, {"kind": "frozen", "engine": {}})
    with viewed(directory) as address:
        watched = Watched(chromium.new_page(), address)
        watched.open("episodes/3.0?by=teacher")
        page = watched.tab
        assert page.get_by_role("button", name="Teacher", exact=True).get_attribute("aria-pressed") == "true"
        page.locator("#turn-1 .t.u2").first.wait_for()  # the shades come a moment after the button
        shades = [page.locator(f"#turn-1 .t.{name}").count() for name in ("u2", "d4")]
        assert shades == [3, 3]  # the last of the seven has no colour: no teacher was asked about it
        assert "taught by math" in page.locator("#turn-1 header").inner_text()
        page.locator("#turn-1 .t[data-at='1']").hover()
        told = page.locator("#turn-1 .tip")
        told.get_by_text("likeliest by the teacher: t 0.5 ▏! 0.25").wait_for()
        words = told.inner_text()
        for shown in ("log ν of math", "log ν − log μ\n-0.5", "teacher's version\n0", "of it -0.5 by the teacher"):
            assert shown in words
        page.locator("#turn-1 .tokens").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.querySelector('#turn-1 [aria-live]').textContent.includes('log ν of math')")
        watched.open("episodes/0.0?by=teacher")
        page.wait_for_selector("button:text-is('Teacher'):disabled")  # the page before had it, too, and not disabled
        assert watched.errors == []
        watched.tab.close()


def test_of_a_ledger_that_cannot_be_read_nothing_is_claimed(chromium: Any, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "ledger.sqlite").write_bytes(b"no ledger at all" * 300)
    with viewed(directory) as address:
        watched = Watched(chromium.new_page(), address)
        watched.open("flow")
        watched.tab.get_by_text("file is not a database").wait_for()
        assert "Nothing has been submitted" not in watched.tab.inner_text("main")
        watched.tab.close()


def test_a_token_opens_the_view_and_leaves_the_address(chromium: Any, run_dir: Path) -> None:
    with viewed(run_dir, "--token", "sesame") as address:
        assert address.endswith("/?token=sesame")
        context = chromium.new_context()
        page = context.new_page()
        page.goto(address.partition("?")[0])
        assert "needs its token" in page.inner_text("body")
        page.fill("input[name=token]", "sesame")
        page.click("button")
        page.wait_for_selector(".verdict")
        assert "sesame" not in page.url
        context.close()


def test_the_pictures_of_the_document_are_of_these_pages() -> None:
    pictures = Path(__file__).parents[3] / "docs" / "pictures"
    names = {f"view-{page.replace('/13.0', '')}" for page in PAGES if "/" not in page} | {"view-episode"}
    missing = {name for name in names if not os.path.exists(pictures / f"{name}.png")}
    assert missing == set()
