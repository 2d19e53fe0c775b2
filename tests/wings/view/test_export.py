"""The dashboard as one file: what it holds of runs in any state, and how it looks in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import DataError, RunError, visible
from headrace.base.types.observation import Event, StepRecord
from headrace.base.types.trace import Span
from headrace.run.cli.app import app
from headrace.run.observe import JsonlWriter, write_report
from headrace.run.observe.rundata import load_run
from headrace.wings.view import export
from headrace.wings.view.export import write_page
from tests.run.observe.synthetic import CLOCK_ZERO, MakeRun, step_record, step_spans
from tests.run.observe.synthetic import write_run as write_bare_run
from tests.wings.view.browsing import ARGUMENTS, CHROMIUM, READY
from tests.wings.view.synthetic import branching_episode, write_run

HOSTILE = "</script><script>window.pwned = 1</script> '\"><img src=x onerror=y> \x1b[31m \u202e $\\frac{"
PAGES = ("overview", "timeline", "flow", "episodes", "episodes/13.0", "steps", "system")


class Page(HTMLParser):
    """The tags of a file, and the answers that it holds."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = path.read_text(encoding="utf-8")
        self._inside = ""
        self.answers: Any = None
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        if self._inside == "answers" and self.answers is None:
            self.answers = json.loads(data)

    def __getitem__(self, path: str) -> Any:
        return self.answers[f"runs/0/{path}"]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return lambda *steps, **more: write_bare_run(tmp_path, *steps, **more)


def resumed(run: Path, *, clock_s: float) -> None:
    """Two more steps of a run of three, made by a life whose clock began at ``clock_s``."""
    with JsonlWriter[StepRecord](run / "metrics.jsonl") as metrics:
        metrics.write(
            step_record(3 + place, clock_s=clock_s + place + 1, wall_s=2.0 + place, generated_tokens=100 * (place + 1))
            for place in range(2)
        )
    moved = [
        Span(lane=span.lane, name=span.name, start_s=span.start_s + shift, end_s=span.end_s + shift, step=3 + place)
        for place in range(2)
        for shift in [clock_s - CLOCK_ZERO]
        for span in step_spans(place)
    ]
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        trace.write(moved)


@pytest.mark.parametrize("num_steps", [0, 1, 1500])
def test_a_run_of_any_length_gets_a_page_with_every_chart(make_run: MakeRun, num_steps: int) -> None:
    page = Page(write_report(make_run(num_steps)))
    told, series = page["overview"], page["series"]
    assert told["name"] == "arithmetic"
    assert (told["figures"]["eval_before"], told["figures"]["eval_after"]) == (0.41, 0.93)
    assert ("generation-bound" in told["verdict"]) is (num_steps > 0)
    assert len(series["step"]) == min(num_steps, export.POINTS)
    assert bool(num_steps) is ("reward_mean" in series["columns"])
    lanes = {lane["lane"] for lane in page["timeline"][0]["lanes"]}
    assert lanes == ({"engine", "learner", "scoring", "sync", "rollout"} if num_steps else set())


def test_a_page_needs_nothing_from_elsewhere_and_runs_no_script_but_its_own(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(2)))
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        assert not [name for name in attributes if name.startswith("on")]
        assert all(str(attributes[name]).startswith(("data:", "#")) for name in ("src", "href") if name in attributes)
    policies = [attributes for _, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    policy = re.sub(r"'sha256-[^']+'", "OWN", str(policies[0]["content"]))
    assert policy == "default-src 'none'; script-src OWN; style-src 'unsafe-inline'; img-src data:"


def test_hostile_text_anywhere_ends_no_element_and_steers_no_editor(make_run: MakeRun) -> None:
    run = make_run(2, name=HOSTILE, **{HOSTILE: HOSTILE, "ledger": {"groups": {"dropped": {HOSTILE: 3}}}})
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        trace.write([Span(lane=HOSTILE, name=HOSTILE, start_s=CLOCK_ZERO, end_s=CLOCK_ZERO + 1)])
    page = Page(write_report(run))
    assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
        "application/json",
        "module",
    ]
    assert page["overview"]["name"] == visible(HOSTILE)
    assert not set(page.text) & {"\x1b", "\u202e"}


def test_books_of_a_summary_are_shown_with_what_is_unaccounted_for(make_run: MakeRun) -> None:
    lost = {"submitted": 1100, "trained": 80, "dropped": {"zero_variance": 12}, "in_flight": 1}
    page = Page(write_report(make_run(1, ledger={"groups": lost, "tokens": {"trained": "x"}})))
    assert page["flow"]["fates"]["groups"]["balance"] == 1007
    assert page["flow"]["fates"]["tokens"]["balance"] is None


def test_a_killed_run_gets_its_numbers_from_the_steps_and_its_verdict_from_the_trace(make_run: MakeRun) -> None:
    run = make_run(10)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "ver')
    told = Page(write_report(run))["overview"]
    assert "summary.json is not there: the run has not ended, or was killed" in told["notes"]
    assert told["figures"]["reward_last"] == pytest.approx(0.409)
    assert "generation-bound" in told["verdict"]


def test_a_run_that_failed_says_why_and_what_it_warned_of(make_run: MakeRun) -> None:
    told = Page(write_report(make_run(1, status="failed", cause="the engine died", warnings=["disk nearly full"])))
    assert told["overview"]["state"] == "failed"
    assert told["overview"]["cause"] == "the engine died"
    assert told["overview"]["warnings"] == ["disk nearly full"]


def test_a_damaged_file_becomes_a_note_and_the_rest_is_told(make_run: MakeRun) -> None:
    run = make_run(5)
    (run / "trace.jsonl").write_bytes(b"\xff\xfe not a trace\n{}\n")
    (run / "config.json").write_text("[1, 2]")
    told = Page(write_report(run))["overview"]
    assert any("trace.jsonl has a line that is not a Span" in note for note in told["notes"])
    assert any("config.json cannot be read" in note for note in told["notes"])
    assert told["figures"]["eval_after"] == 0.93


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=str(directory)):
            write_report(directory)


def test_a_page_that_cannot_be_written_says_so(make_run: MakeRun) -> None:
    run = make_run(0)
    (run / "report").write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run)


def test_a_page_names_its_run_by_more_than_the_word_run(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "sums" / "run", 3, name="")
    settings = {"model": {"path": "/models/Qwen3-0.6B"}, "data": {"path": "rows/sums.jsonl"}}
    (run / "config.json").write_text(json.dumps({**settings, "env": {"reward": "grade.py:exact"}}))
    page = Page(write_report(run))
    assert "<title>sums/run · headrace</title>" in page.text
    assert page["overview"]["about"] == "Qwen3-0.6B · sums.jsonl · grade.py:exact"


def test_no_verdict_is_invented_without_a_trace(make_run: MakeRun) -> None:
    run = make_run(3)
    (run / "trace.jsonl").unlink()
    assert Page(write_report(run))["overview"]["verdict"] == ""
    summary = json.loads((run / "summary.json").read_text())
    told = "learner-bound: The learner works 97% of the time and waits 3%."
    (run / "summary.json").write_text(json.dumps({**summary, "verdict": told}))
    assert Page(write_report(run))["overview"]["verdict"] == told


def test_the_end_and_the_middle_of_a_timeline_are_held_span_by_span(make_run: MakeRun) -> None:
    whole, end, middle = Page(write_report(make_run(1000)))["timeline"]
    assert "bins" in whole["lanes"][0]["parts"][0]
    assert end["window"] == pytest.approx([992, 1000], abs=0.2)
    assert middle["window"] == pytest.approx([496.5, 504.5], abs=0.2)
    assert all("spans" in part for lane in (*end["lanes"], *middle["lanes"]) for part in lane["parts"])


@pytest.mark.parametrize("clock_s", [CLOCK_ZERO + 9000, 40.0])
def test_every_life_of_a_run_is_on_its_timeline_and_in_its_charts(make_run: MakeRun, clock_s: float) -> None:
    """A life on the same machine has a clock that continues; one on another machine may begin far below."""
    run = make_run(3)
    resumed(run, clock_s=clock_s)
    page = Page(write_report(run))
    whole, series = page["timeline"][0], page["series"]
    assert whole["extent"] == pytest.approx([0, 5.1], abs=0.01)
    assert [mark["at"] for mark in whole["steps"]] == pytest.approx([1, 2, 3, 4, 5])
    assert whole["lives"] == [{"step": 4, "at": pytest.approx(3)}]
    generate = next(part for lane in whole["lanes"] for part in lane["parts"] if part["name"] == "generate")
    assert generate["spans"][0] == pytest.approx([0, 1, 2, 3, 4])
    assert next(lane["busy"] for lane in whole["lanes"] if lane["lane"] == "engine") == pytest.approx(0.95, abs=0.01)
    assert series["lives"] == [4]
    assert series["columns"]["generated_tokens"] == [100, 200, 300, 400, 500]
    assert series["wall_s"] == sorted(series["wall_s"])
    assert any("The run was resumed" in note and "the 2 steps since" in note for note in page["overview"]["notes"])


def test_time_before_a_resume_does_not_count_as_idle(make_run: MakeRun) -> None:
    run = make_run(3)
    resumed(run, clock_s=CLOCK_ZERO + 9000)
    loaded = load_run(run)
    assert len(loaded.steps) == 5
    assert loaded.loop == pytest.approx((CLOCK_ZERO + 9000, CLOCK_ZERO + 9002))


def test_held_out_points_of_every_life_are_shown(make_run: MakeRun) -> None:
    run = make_run(3, eval_before=0.41, eval_after=0.95)
    with JsonlWriter[Event](run / "events.jsonl") as events:
        events.write(
            Event(wall_s=1.0, text=f"held-out mean reward {reward} at version {version}")
            for version, reward in ((0, 0.41), (3, 0.7), (9, 0.1))
        )
    resumed(run, clock_s=CLOCK_ZERO + 9000)
    assert Page(write_report(run))["overview"]["evaluations"] == [[0, 0.41], [3, 0.7], [5, 0.95]]


def test_a_page_holds_the_tokens_of_the_latest_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", extra=[branching_episode(0, 0)])
    page = Page(write_page(run))
    listed = page["episodes"]
    assert (len(listed["rows"]), listed["total"]) == (50, 53)
    for row in listed["rows"]:
        turns = page[f"episodes/{row['key']}"]["turns"]
        for turn in turns:
            assert len(page[f"episodes/{row['key']}/turns/{turn['index']}?from=0&count=2048"]["id"]) == turn["tokens"]
    monkeypatch.setattr(export, "EPISODE_BYTES", 20_000)
    fewer = Page(write_page(run))["episodes"]
    assert 0 < len(fewer["rows"]) < 20
    assert fewer["rows"][0]["key"] == listed["rows"][0]["key"]


def test_view_writes_a_page_into_every_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=1, name=name) for name in ("one", "two")]
    said = CliRunner().invoke(app, ["view", "--export", str(tmp_path)])
    assert said.exit_code == 0, said.exception
    assert all((run / "report" / "report.html").stat().st_size > 50_000 for run in runs)
    assert said.output.count("written") == 2


playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright: the file is looked at")
browser_wanted = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


class Opened:
    """A file in a tab that keeps what went wrong, and what it fetched."""

    def __init__(self, tab: Any, file: Path) -> None:
        self.tab, self.base = tab, file.as_uri()
        self.errors: list[str] = []
        self.fetched: set[str] = set()
        tab.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("request", lambda request: self.fetched.add(request.url.partition("#")[0][:60]))

    def open(self, page: str, ready: str = "") -> None:
        self.tab.goto(f"{self.base}#/0/{page}")
        self.tab.wait_for_selector(ready or READY.get(page, "main h1"), timeout=10_000)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_file(file: Path, **more: Any) -> Opened:
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 900}, **more))
        return Opened(contexts[-1].new_page(), file)

    yield open_file
    for context in contexts:
        context.close()


@browser_wanted
@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_every_page_of_a_file_is_accessible_fits_a_telephone_and_fetches_nothing(
    theme: str, opened: Any, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    file = write_page(write_run(tmp_path / "run", extra=[branching_episode(0, 0)]))
    found = opened(file, color_scheme=theme, reduced_motion="reduce", bypass_csp=True)  # axe is put in as a script
    broken: list[str] = []
    for page in PAGES:
        found.open(page)
        broken += [
            f"{page}: {each['id']}: {each['nodes'][0]['html'][:300]}"
            for each in Axe().run(found.tab).response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    assert broken == []
    phone = opened(file, color_scheme=theme)
    phone.tab.set_viewport_size({"width": 360, "height": 844})
    for page in PAGES:
        phone.open(page)
        assert phone.tab.evaluate("document.documentElement.scrollWidth") <= 360, page
    assert [*found.errors, *phone.errors] == []
    assert {url for url in phone.fetched if not url.startswith("data:image/svg")} == {phone.base[:60]}


@browser_wanted
def test_a_file_answers_what_the_server_would(opened: Any, tmp_path: Path) -> None:
    found = opened(write_page(write_run(tmp_path / "run", extra=[branching_episode(0, 0)])))
    found.open("overview")
    reward = found.tab.locator("main figure.chart").first.locator(".plot")
    assert "held out: from 0.41 to 0.93" in reward.get_attribute("aria-label")
    assert found.tab.locator("nav.side a").all_inner_texts() == [
        "Overview", "Timeline", "Flow", "Episodes", "Steps", "System",
    ]  # fmt: skip
    found.open("timeline")
    found.tab.get_by_role("button", name="Last five steps").click()
    # the policy of the file forbids the strings that wait_for_function would have evaluated
    canvas = found.tab.locator("canvas[tabindex]").first
    playwright.expect(canvas).to_have_attribute("aria-label", re.compile(r"From 1\.0 s to 6\.0 s"))
    found.open("episodes", ready="tbody a")
    found.tab.locator("tbody a").first.click()
    found.tab.wait_for_selector(".t")
    found.tab.locator("#turn-1 .t").first.hover()
    found.tab.locator("#turn-1 .tip").get_by_text("log μ").wait_for()
    found.open("episodes/99.0", ready=".notice.bad")
    assert "this file does not hold that" in found.tab.inner_text("main")
    found.open("system")
    found.tab.get_by_text("Every number of the summary").click()
    found.tab.get_by_text("eval before").wait_for()
    assert found.errors == []


@browser_wanted
@pytest.mark.parametrize(("evaluated_at", "joined"), [((), False), ((2, 4), True)])
def test_two_held_out_points_are_points_and_more_are_joined(
    evaluated_at: tuple[int, ...], joined: bool, opened: Any, make_run: MakeRun
) -> None:
    run = make_run(0, max_token_age=1, commit_gap_ms={"p50": 0.0, "p99": 0.0})
    with JsonlWriter[StepRecord](run / "metrics.jsonl") as metrics:
        metrics.write(step_record(step, eval_accuracy=0.5 if step in evaluated_at else None) for step in range(6))
    found = opened(write_page(run))
    found.open("overview")
    plot = found.tab.locator("main figure.chart").first.locator(".plot")
    assert plot.locator("circle").count() == 2 + len(evaluated_at)
    assert bool(plot.locator("path.series[stroke='var(--orange)']").get_attribute("d")) is joined
    text = found.tab.inner_text("main")
    assert "1 version" in text
    assert "1 versions" not in text


@browser_wanted
def test_strange_summaries_and_hostile_names_still_show_every_page(opened: Any, make_run: MakeRun) -> None:
    strange = {"commit_gap_ms": 3, "wall_s": "long", "steps": None, "ledger": {"groups": {"trained": "x"}, "tokens": 7}}
    run = make_run(3, name=HOSTILE, **strange, **{HOSTILE: HOSTILE})
    resumed(run, clock_s=CLOCK_ZERO + 9000)
    found = opened(write_page(run))
    for page in ("overview", "timeline", "flow", "steps", "system"):
        found.open(page)
        assert "window.pwned = 1" in found.tab.inner_text("body")
    assert found.tab.evaluate("window.pwned") is None
    assert found.errors == []


@browser_wanted
def test_a_mark_stands_where_a_run_was_resumed(opened: Any, make_run: MakeRun) -> None:
    run = make_run(3)
    resumed(run, clock_s=CLOCK_ZERO + 9000)
    found = opened(write_page(run))
    found.open("overview")
    assert found.tab.locator("figure.chart.lead line.life").count() == 1
    assert "resumed" in found.tab.locator("figure.chart.lead svg").text_content()


@browser_wanted
def test_every_usual_lane_has_a_colour_of_its_own(opened: Any, make_run: MakeRun) -> None:
    run = make_run(1)
    lanes = ("controller", "environment", "ledger", "teachers")
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        trace.write(Span(lane=lane, name=lane, start_s=CLOCK_ZERO, end_s=CLOCK_ZERO + 1) for lane in lanes)
    found = opened(write_page(run))
    found.open("timeline")
    keys = found.tab.locator(".legend li")
    shades = {
        words: keys.nth(place).locator(".key").evaluate("key => getComputedStyle(key).backgroundColor")
        for place, words in enumerate(keys.all_inner_texts())
    }
    assert len(set(shades.values())) == len(shades)
    assert {*lanes, "episode", "score", "generate"} <= set(shades)


@browser_wanted
def test_work_of_one_name_in_two_kinds_of_lanes_says_whose_it_is(opened: Any, make_run: MakeRun) -> None:
    run = make_run(1)
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        lanes = ("controller", "environment-0", "environment-1")
        trace.write(Span(lane=lane, name="run", start_s=CLOCK_ZERO, end_s=CLOCK_ZERO + 1) for lane in lanes)
    found = opened(write_page(run))
    found.open("timeline")
    words = ", ".join(found.tab.locator(".legend li").all_inner_texts()).split(", ")
    assert {"run (controller)", "run (environment)"} <= set(words)
    assert len(words) == len(set(words))
