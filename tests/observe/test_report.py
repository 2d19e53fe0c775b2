"""The report tells what the files of a run say, whatever state they are in."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from headrace.base.errors import DataError, RunError
from headrace.base.types.observation import StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe import JsonlWriter, write_report
from headrace.run.observe.pictures import LIGHT
from headrace.run.observe.pictures.reward import draw_reward
from headrace.run.observe.pictures.timeline import lanes_of, training, zoom_window
from headrace.run.observe.rundata import load_run
from headrace.run.observe.summary import evaluations
from tests.observe.synthetic import CLOCK_ZERO, MakeRun, step_record, write_run

HOSTILE = "<script>alert(1)</script> '\"><img src=x onerror=y> \x1b[31m \u202e $\\frac{"


class Page(HTMLParser):
    """The tags and the visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("num_steps", [0, 1, 1000])
def test_a_run_of_any_length_gets_a_report_with_four_pictures(make_run: MakeRun, num_steps: int) -> None:
    run = make_run(num_steps)
    report = Page(write_report(run))
    images = [attrs for tag, attrs in report.tags if tag == "img"]
    assert len(images) == 4
    assert all(len(str(attrs["alt"])) > 20 for attrs in images)
    pictures = sorted(path.name for path in (run / "report").glob("*.png"))
    assert pictures == ["ages.png", "reward.png", "throughput.png", "timeline.png"]
    assert all((run / "report" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert "arithmetic" in report.text
    assert "0.41 → 0.93" in report.text
    assert ("generation-bound" in report.text) is (num_steps > 0)


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(make_run: MakeRun) -> None:
    report = Page(write_report(make_run(2)))
    for tag, attrs in report.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        assert not [name for name in attrs if name.startswith("on")]
        assert all(str(attrs[name]).startswith("data:image/png") for name in ("src", "srcset", "href") if name in attrs)
    policies = [attrs for tag, attrs in report.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0]["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_hostile_text_anywhere_is_shown_as_text(make_run: MakeRun) -> None:
    run = make_run(2, name=HOSTILE, **{HOSTILE: HOSTILE, "ledger": {"groups": {"dropped": {HOSTILE: 3}}}})
    with JsonlWriter[Span](run / "trace.jsonl") as trace:
        trace.write([Span(lane=HOSTILE, name=HOSTILE, start_s=CLOCK_ZERO, end_s=CLOCK_ZERO + 1)])
    path = write_report(run)
    report = Page(path)
    assert not [tag for tag, _ in report.tags if tag == "script"]
    assert [attrs.get("src", "")[:5] for tag, attrs in report.tags if tag == "img"] == ["data:"] * 4
    assert "<script>alert(1)</script>" in report.text
    assert "\x1b" not in path.read_text(encoding="utf-8")
    assert "\u202e" not in path.read_text(encoding="utf-8")


def test_conservation_is_shown_with_what_is_unaccounted_for(make_run: MakeRun) -> None:
    lost = {"submitted": 1100, "trained": 80, "dropped": {"zero_variance": 12}, "in_flight": 1}
    report = Page(write_report(make_run(1, ledger={"groups": lost})))
    words = report.text.split("Conservation")[1]
    assert "dropped: zero_variance12" in words
    assert "unaccounted for1,007" in words


def test_a_killed_run_gets_its_numbers_from_the_steps(make_run: MakeRun) -> None:
    run = make_run(10)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "ver')
    report = Page(write_report(run))
    assert "summary.json is not there: the run has not ended, or was killed" in report.text
    assert "0.4 → 0.409" in report.text
    assert "generation-bound" in report.text


def test_a_run_that_failed_says_why_and_what_it_warned_of(make_run: MakeRun) -> None:
    report = Page(write_report(make_run(1, status="failed", cause="the engine died", warnings=["disk nearly full"])))
    assert "The run failed. the engine died" in report.text
    assert "Warning: disk nearly full" in report.text


def test_a_damaged_file_becomes_a_note_and_the_rest_is_told(make_run: MakeRun) -> None:
    run = make_run(5)
    (run / "trace.jsonl").write_bytes(b"\xff\xfe not a trace\n{}\n")
    (run / "config.json").write_text("[1, 2]")
    report = Page(write_report(run))
    assert "trace.jsonl, line 1 is not a Span" in report.text
    assert "config.json cannot be read" in report.text
    assert "0.41 → 0.93" in report.text


def test_a_summary_of_the_wrong_shape_does_not_stop_the_report(make_run: MakeRun) -> None:
    strange = {"commit_gap_ms": 3, "wall_s": "long", "steps": None, "ledger": {"groups": {"trained": "x"}, "tokens": 7}}
    report = Page(write_report(make_run(1, **strange)))
    assert "0.41 → 0.93" in report.text


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError) as caught:
            write_report(directory)
        assert str(directory) in caught.value.problem
        assert "metrics.jsonl" in caught.value.remedy


def test_a_report_that_cannot_be_written_says_so(make_run: MakeRun) -> None:
    run = make_run(0)
    (run / "report").write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run)


def test_evaluations_before_during_and_after_are_points_by_version(make_run: MakeRun) -> None:
    run = make_run(9)
    with JsonlWriter[StepRecord](run / "metrics.jsonl") as metrics:
        metrics.write([step_record(9, eval_accuracy=0.6), step_record(10)])
    read = load_run(run)
    assert evaluations(read.steps, read.summary) == [(0, 0.41), (10, 0.6), (11, 0.93)]


@pytest.mark.parametrize(("evaluated_at", "joined"), [((), False), ((2, 4), True)])
def test_two_held_out_points_are_points_and_more_are_joined(
    evaluated_at: tuple[int, ...], joined: bool, make_run: MakeRun
) -> None:
    run = make_run(0)
    with JsonlWriter[StepRecord](run / "metrics.jsonl") as metrics:
        metrics.write(step_record(step, eval_accuracy=0.5 if step in evaluated_at else None) for step in range(6))
    figure = Figure()
    draw_reward(figure, load_run(run), LIGHT)
    held_out = next(line for line in figure.axes[0].lines if line.get_label() == "held-out evaluation")
    assert len(held_out.get_xdata()) == 2 + len(evaluated_at)
    assert (held_out.get_linestyle() != "None") is joined


def test_a_report_names_its_run_by_more_than_the_word_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sums" / "run", 3, name="")
    settings = {"model": {"path": "/models/Qwen3-0.6B"}, "data": {"path": "rows/sums.jsonl"}}
    (run / "config.json").write_text(json.dumps({**settings, "env": {"reward": "grade.py:exact"}}))
    page = write_report(run)
    assert "<h1>sums/run</h1>" in page.read_text(encoding="utf-8")
    assert "<title>sums/run · headrace</title>" in page.read_text(encoding="utf-8")
    assert f"Qwen3-0.6B · sums.jsonl · grade.py:exact · {run}" in Page(page).text


def test_one_version_is_not_called_versions(make_run: MakeRun) -> None:
    text = Page(write_report(make_run(3, max_token_age=1, commit_gap_ms={"p50": 0.0, "p99": 0.0}))).text
    assert "oldest trained token1 version" in text
    assert "1 versions" not in text
    assert "commit gap0 s" in text


def test_the_zoom_shows_five_steps_from_the_middle(make_run: MakeRun) -> None:
    start, end = zoom_window(load_run(make_run(101)))
    assert end - start == pytest.approx(5.0)
    assert (start + end) / 2 == pytest.approx(CLOCK_ZERO + 50.5, abs=3)


def test_a_step_is_computed_from_its_first_to_its_last_span(make_run: MakeRun) -> None:
    zero = CLOCK_ZERO
    steps = training(load_run(make_run(3)).spans, (zero + 1.5, zero + 9))
    assert steps == {1: pytest.approx((zero + 1.6, zero + 2.0)), 2: pytest.approx((zero + 2.6, zero + 3.0))}


def test_lanes_come_in_the_usual_order_with_strangers_last() -> None:
    spans = [Span(lane=lane, name="work", start_s=0, end_s=1) for lane in ("zebra", "sync", "engine", "learner")]
    assert lanes_of(spans) == ["engine", "learner", "sync", "zebra"]


def test_time_before_a_resume_does_not_count_as_idle(make_run: MakeRun) -> None:
    run = make_run(3)
    later = [step_record(step, clock_s=CLOCK_ZERO + 9000 + step, wall_s=1.0 + step) for step in (0, 1)]
    with JsonlWriter[StepRecord](run / "metrics.jsonl") as metrics:
        metrics.write([step_record(3 + i, clock_s=late.clock_s, wall_s=late.wall_s) for i, late in enumerate(later)])
    loaded = load_run(run)
    assert len(loaded.steps) == 5
    assert loaded.loop == pytest.approx((CLOCK_ZERO + 8999, CLOCK_ZERO + 9001))
    told = Page(write_report(run)).text
    assert "The run was resumed: times, rates, shares and the verdict are of the 2 steps since then" in told
    assert "the last 2 in" in told


def test_the_report_does_not_invent_a_verdict_without_a_trace(make_run: MakeRun) -> None:
    run = make_run(3)
    (run / "trace.jsonl").unlink()
    assert "No verdict yet" in Page(write_report(run)).text
    summary = json.loads((run / "summary.json").read_text())
    told = "learner-bound: The learner works 97% of the time and waits 3%."
    (run / "summary.json").write_text(json.dumps({**summary, "verdict": told}))
    assert "The learner works 97% of the time and waits 3%." in Page(write_report(run)).text
