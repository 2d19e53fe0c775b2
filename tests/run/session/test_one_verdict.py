"""Every place that tells where a run's time went tells the same."""

import json
import re
import shutil
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from headrace.base.types.observation import Cause
from headrace.run.observe import load_run
from headrace.run.observe.words import percent
from headrace.wings.view.figures import overview
from headrace.wings.view.run import OpenRun
from headrace.wings.view.timeline import timeline
from tests.run.session.runs import make_run, tiny_model, verb


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a run that has ended, and what the program said."""
    place = tmp_path_factory.mktemp("finished")
    observe = {"view": "plain", "report": True}
    run_file = make_run(place, tiny_model(place / "tiny"), run={"dir": "run", "steps": 4}, observe=observe)
    return place / "run", verb("train", run_file)


def test_summary_dashboard_report_and_sentence_have_the_same_figures(finished: tuple[Path, str]) -> None:
    run_dir, said = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    account, verdict = summary["account"], summary["verdict"]
    for side in ("learner", "engine"):
        whole_s = account[f"{side}_busy_s"] + sum(account[f"{side}_waits_s"].values())
        assert whole_s == pytest.approx(account["seconds"])
        assert set(account[f"{side}_waits_s"]) <= {str(cause) for cause in Cause}
        assert summary[f"{side}_idle_frac"] == pytest.approx(1 - account[f"{side}_busy_s"] / account["seconds"])
    assert account["controller_busy_s"] > 0
    assert summary["trained_tok_s"] == pytest.approx(account["trained_tokens"] / account["seconds"])
    idle = percent(summary["learner_idle_frac"])
    assert re.search(rf"The learner works \d+% of the time and waits {idle}", verdict)

    run = OpenRun(run_dir, RealClock())
    shown = overview(run)
    assert shown["verdict"] == verdict
    assert shown["figures"]["engine_idle_frac"] == summary["engine_idle_frac"]
    lanes = {lane["lane"]: lane["busy_overall"] for lane in timeline(run, "", "", "")["lanes"]}
    run.close()
    assert lanes["learner"] == pytest.approx(1 - summary["learner_idle_frac"])
    assert lanes["engine"] == pytest.approx(1 - summary["engine_idle_frac"])
    assert lanes["controller"] == pytest.approx(account["controller_busy_s"] / account["seconds"])

    assert load_run(run_dir).verdict == verdict
    assert json.loads((run_dir / "live.json").read_text())["verdict"] == verdict
    words = " ".join(verdict.partition(": ")[2].split()[:12])
    page = (run_dir / "report" / "report.html").read_text()
    assert words in page
    assert f'"learner_idle_frac":{json.dumps(summary["learner_idle_frac"])}' in page
    for told in (said, verb("status", run_dir), verb("trace", run_dir)):
        assert words in " ".join(told.split())
    assert json.loads(verb("status", run_dir, "--json"))["verdict"] == verdict


def test_the_trace_alone_says_what_the_run_has_said(finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    told = load_run(run_dir).account
    assert told is not None
    for name in ("summary.json", "live.json"):
        (run_dir / name).unlink()
    found = load_run(run_dir).account
    assert found is not None
    assert found.seconds == pytest.approx(told.seconds)
    assert found.engine_busy_s == pytest.approx(told.engine_busy_s, abs=0.02 * told.seconds)
    assert found.learner_busy_s == pytest.approx(told.learner_busy_s, abs=0.02 * told.seconds)
    assert found.controller_busy_s == pytest.approx(told.controller_busy_s, abs=0.02 * told.seconds)
