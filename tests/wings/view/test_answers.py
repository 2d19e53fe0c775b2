"""What the dashboard's server answers, and what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient

from headrace.base.clock import RealClock
from headrace.base.errors import DataError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.recorded import Routing
from headrace.flow.ledger import SqliteLedger
from headrace.flow.ledger.base import Submit
from headrace.flow.ledger.browse import EpisodeQuery
from headrace.run.cli.status import read_run_state
from headrace.wings.view.app import make_app
from headrace.wings.view.episodes import count_routing_differences
from headrace.wings.view.figures import TRAINING_FIGURES
from headrace.wings.view.run import OpenRun, find_runs
from tests.wings.view.asking import ask, opened, stranger
from tests.wings.view.browsing import LET_IN, TOKEN
from tests.wings.view.synthetic import GROUP_SIZE, write_run, write_sheets, write_status

TRAINED = 6 * 2 * GROUP_SIZE + GROUP_SIZE


def test_overview_says_state_verdict_and_figures(client: TestClient) -> None:
    told = ask(client, "overview")
    assert (told["name"], told["state"], told["steps_done"], told["steps_total"]) == ("additions", "finished", 6, 40)
    assert told["verdict"].startswith("generation-bound: 38%")
    assert told["figures"]["eval_after"] == 0.93
    assert told["warnings"] == ["alarm entropy: it fell"]
    assert told["notes"] == []
    assert told["evaluations"] == [[0, 0.41], [6, 0.93]]
    assert told["about"].startswith("additions/model")


def test_the_name_of_a_run_cannot_turn_the_line_round(tmp_path: Path) -> None:
    run = OpenRun(write_run(tmp_path / "run", steps=1, name="a\u202eb\x1b[31m"), RealClock())
    assert run.name == r"a\u202eb\x1b[31m"
    run.close()


def test_series_are_columns_under_registered_names(client: TestClient) -> None:
    found = ask(client, "series?names=reward_mean,loss,nothing_like_it")
    assert found["step"] == [1, 2, 3, 4, 5, 6]
    assert found["columns"]["loss"][1] == pytest.approx(0.05)
    assert found["columns"]["nothing_like_it"] == [None] * 6
    metrics = {row["name"]: row for row in ask(client, "metrics")}
    assert metrics["ess"]["unit"] == "frac"
    assert metrics["ess"]["what"]


def test_a_long_run_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    from tests.run.observe.synthetic import write_run as write_steps

    client = opened(write_steps(tmp_path, 4500))
    steps = ask(client, "series?names=reward_mean")["step"]
    assert (len(steps), steps[0], steps[-1]) == (2000, 1, 4500)


def test_timeline_gives_spans_of_a_short_window_and_fills_of_a_long_one(client: TestClient, tmp_path: Path) -> None:
    lanes = {lane["lane"]: lane for lane in ask(client, "timeline")["lanes"]}
    assert lanes["engine"]["busy"] == pytest.approx(0.97, abs=0.02)
    spans = next(part for part in lanes["learner"]["parts"] if part["name"] == "forward_backward")
    assert spans["spans"][0][0] == pytest.approx(0.6)
    from tests.run.observe.synthetic import write_run as write_steps

    long = opened(write_steps(tmp_path, 2000))
    learner = next(lane for lane in ask(long, "timeline?bins=100")["lanes"] if lane["lane"] == "learner")
    assert all(len(part["bins"]) == 100 for part in learner["parts"])
    few = ask(long, "timeline?from=10&to=13")
    assert all("spans" in part for lane in few["lanes"] for part in lane["parts"])


def test_episodes_are_listed_filtered_and_sorted(client: TestClient) -> None:
    first = ask(client, "episodes?limit=3")
    assert [row["key"] for row in first["rows"]] == ["13.3", "13.2", "13.1"]
    assert first["total"] == TRAINED + 1
    assert {row["step"] for row in ask(client, "episodes?step=2")["rows"]} == {2}
    assert all(row["reward"] == 1.0 for row in ask(client, "episodes?reward_from=0.9")["rows"])
    failed = ask(client, "episodes?status=failed")["rows"]
    assert [(row["cause"], row["reason"]) for row in failed] == [("reward_error: <b>boom</b>", "too_few_scored")]
    assert ask(client, "episodes?status=trained")["total"] == TRAINED
    assert ask(client, "episodes?cause=BOOM")["total"] == 1
    ages = [row["age"] for row in ask(client, "episodes?order=age&limit=10")["rows"]]
    assert ages == sorted(ages, reverse=True)


def test_an_episode_of_the_list_shows_the_end_of_its_prompt_and_its_last_answer(client: TestClient) -> None:
    plain, *_, branching = ask(client, "episodes?limit=4")["rows"]
    assert (plain["prompt"], plain["answer"]) == ("What is 13 + 3?", "16")
    assert (branching["prompt"], branching["answer"]) == ("Look it up: ", "Or not at all.")
    failed = ask(client, "episodes?status=failed")["rows"][0]
    assert {"prompt", "answer"} <= failed.keys()


def test_one_episode_has_its_graph_its_siblings_and_its_advantage(client: TestClient) -> None:
    told = ask(client, "episodes/3.0")
    assert [each["key"] for each in told["siblings"]] == ["3.0", "3.1", "3.2", "3.3"]
    assert told["parts"] == {"right": 1.0, "short": 0.5}
    policy = told["turns"][1]
    assert (policy["author"], policy["parent"], policy["preview"], policy["versions"]) == ("policy", 0, "3", [0, 0])
    assert policy["advantage"] == pytest.approx(0.5 / 0.57735, rel=1e-4)  # rewards 1, 0, 0, 1 of one group, ddof 1
    branching = ask(client, "episodes/13.0")
    assert [turn["parent"] for turn in branching["turns"]] == [None, 0, 1, 2, 1]
    assert branching["turns"][1]["rerouted"] == 15


def test_tokens_come_in_windows_with_everything_recorded(client: TestClient) -> None:
    window = ask(client, "episodes/13.0/turns/1?from=2&count=4")
    assert (window["text"], window["total"], window["first"]) == (["a", "s", "k", " "], 15, 2)
    assert window["kept"] == [2, 2, 2, 2]
    assert window["rerouted"] == [4, 4, 4, 4]  # two layers of two experts, all of them others
    detail = ask(client, "episodes/13.0/turns/1/2")
    assert [each["text"] for each in detail["kept"]] == ["a", "b"]
    assert detail["experts"] == [[1, 1], [1, 1]]


def test_one_other_expert_counts_as_one_wherever_it_sorts() -> None:
    from tests.wings.view.synthetic import given, sampled

    def layer(*experts_TK: list[int]) -> Routing:
        return Routing(known_T=np.ones(len(experts_TK), bool), experts_RLK=np.array(experts_TK, np.uint8)[:, None])

    first = sampled("abc", version=0, parent=0)
    tokens = replace(first.tokens, routing=layer([1, 2, 3], [1, 2, 3], [1, 2, 3]))
    context = layer([0, 1, 2], [4, 3, 2], [3, 1, 2], [7, 8, 9])
    again = replace(sampled("d", version=0, parent=1), context_routing=context)
    turns = [given("?"), replace(first, tokens=tokens), again]
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=turns, status=EpisodeStatus.SCORED, reward=1.0)
    differing = count_routing_differences(episode)
    assert differing is not None
    assert differing[1] is not None
    assert differing[1].tolist() == [1, 0, 3]


def test_characters_of_several_tokens_stand_at_their_last(tmp_path: Path) -> None:
    from tests.wings.view.synthetic import plain_episode, sampled

    episode = plain_episode(0, 0, 0)
    episode.turns[1] = sampled("aé→\U0001f600", version=0, parent=0)
    client = opened(write_run(tmp_path / "run", steps=1, extra=[episode]))
    text = ask(client, "episodes/3.0/turns/1")["text"]
    assert text == ["a", "", "é", "", "", "→", "", "", "", "\U0001f600"]
    assert ask(client, "episodes/3.0/turns/1?from=5&count=3")["text"] == ["→", "", ""]


def test_search_reads_text_backwards_and_goes_on_where_it_stopped(client: TestClient) -> None:
    found = ask(client, "search?words=THE TOOL")
    assert [(each["key"], each["turn"]) for each in found["found"]] == [("13.0", 1)]
    assert found["next"] == ""
    assert found["read"] == TRAINED + 1
    many = ask(client, "search?words=What is")
    assert (len(many["found"]), many["found"][0]["key"], many["next"]) == (25, "13.3", "6.2")
    rest = ask(client, f"search?words=What is&before={many['next']}")
    assert ([each["key"] for each in rest["found"]][-1], rest["next"]) == ("0.1", "0.1")


def test_flow_balances_the_books(client: TestClient) -> None:
    told = ask(client, "flow")
    assert all(fates["balance"] == 0 for fates in told["fates"].values())
    assert told["fates"]["groups"]["dropped"] == {"too_few_scored": 1}
    assert told["ages"] == {"0": 180, "1": 360}
    assert len(told["by_step"]) == 6


def test_outliers_are_the_tokens_about_which_engine_and_learner_differ_most(client: TestClient) -> None:
    found = ask(client, "outliers/5")
    assert found["by"] == "gap"
    gaps = [abs(each["gap"]) for each in found["tokens"]]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(0.2)
    assert found["looked"] == found["episodes"]


def test_outliers_of_a_step_without_the_learners_side_are_its_least_expected_tokens(client: TestClient) -> None:
    found = ask(client, "outliers/6")
    assert found["by"] == "logprob"
    logprobs = [each["logprob"] for each in found["tokens"]]
    assert logprobs == sorted(logprobs)
    assert len(logprobs) == 20
    assert all(each["gap"] is None for each in found["tokens"])


def test_a_token_tells_how_far_engine_and_learner_are_apart(client: TestClient) -> None:
    found = ask(client, "outliers/5")["tokens"][0]
    shown = ask(client, f"episodes/{found['key']}")["turns"][found["turn"]]
    window = ask(client, f"episodes/{found['key']}/turns/{found['turn']}?from={found['place']}&count=1")
    assert window["gap"] == [pytest.approx(found["gap"])]
    assert shown["gap"] == pytest.approx(abs(found["gap"]))


def test_compared_runs_show_only_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [OpenRun(write_run(tmp_path / name, steps=1, name=name), RealClock()) for name in ("one", "two")]
    with TestClient(make_app(runs, clock=RealClock(), token=TOKEN, ending=lambda: True), headers=LET_IN) as client:
        told = client.get("/api/compare").json()
    assert [run["name"] for run in told["runs"]] == ["one", "two"]
    assert {row["name"] for row in told["settings"]} == {"run.name", "run.dir", "model.path"}
    for run in runs:
        run.close()


def test_a_run_still_being_written_is_read_on(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "summary.json").unlink()
    write_status(directory, living=True, steps=2)
    client = opened(directory)
    assert ask(client, "overview")["state"] == "running"
    line = (
        (directory / "metrics.jsonl")
        .read_bytes()
        .splitlines()[-1]
        .replace(b'"step":1,"version":2', b'"step":2,"version":3')
    )
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(line[:40])
        file.flush()
        assert ask(client, "series?names=loss")["step"] == [1, 2]
        file.write(line[40:] + b"\n")
        file.flush()
    assert ask(client, "series?names=loss")["step"] == [1, 2, 3]


def test_a_killed_run_is_told_from_a_living_one(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "summary.json").unlink()
    write_status(directory, living=True, steps=2)
    status = json.loads((directory / "status.json").read_text())
    (directory / "status.json").write_text(json.dumps({**status, "written_s": status["written_s"] - 60}))
    assert ask(opened(directory), "overview")["state"] == "killed"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a controller holds it that is stopped
        assert ask(opened(directory), "overview")["state"] == "stopped"


def test_a_run_that_trained_nothing_has_no_figures_of_training(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    summary = {**json.loads((directory / "summary.json").read_text()), "status": "failed", "tokens_trained": 0}
    (directory / "summary.json").write_text(json.dumps({**summary, "commit_gap_ms": {"p50": 0.0, "p99": 0.0}}))
    figures = ask(opened(directory), "overview")["figures"]
    assert {figures[name] for name in TRAINING_FIGURES} == {None}


def test_a_run_that_ended_before_it_had_a_status_has_failed(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    for name in ("summary.json", "status.json"):
        (directory / name).unlink(missing_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ask(opened(directory), "overview")["state"] == "starting"
        with pytest.raises(DataError, match="its parts are starting"):
            read_run_state(directory)
        lock.write("x")
        lock.flush()
        with pytest.raises(DataError, match="its parts are starting"):  # damaged
            read_run_state(directory)
        lock.seek(0)
        lock.write(str(os.getpid()))
        lock.flush()
        with subprocess.Popen(["sleep", "1000"]) as part:
            part.send_signal(signal.SIGSTOP)
            os.waitpid(part.pid, os.WUNTRACED)  # until it stands
            with pytest.raises(DataError, match=rf"has started process {part.pid}, which is stopped \(SIGSTOP"):
                read_run_state(directory)
            part.kill()
    assert ask(opened(directory), "overview")["state"] == "failed"
    with pytest.raises(DataError, match="ended before its parts had started") as ended:
        read_run_state(directory)
    assert "with the same command and --resume" in ended.value.remedy


@pytest.mark.parametrize("file", ["metrics.jsonl", "trace.jsonl", "ledger.sqlite", "config.json", "summary.json"])
@pytest.mark.parametrize("damage", ["truncated", "foreign", "gone", "empty"])
def test_a_damaged_file_is_told_and_the_rest_still_shows(file: str, damage: str, run_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run_dir, directory)
    path = directory / file
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {"truncated": whole[: len(whole) // 3], "foreign": b"\x00\xffnot a run\n" * 9, "empty": b""}[damage]
        )
    with opened(directory) as client:
        told = ask(client, "overview")
        for page in ("metrics", "series?names=loss", "timeline", "flow", "system"):
            ask(client, page)
        listed = client.get("/api/runs/0/episodes")
    if damage == "foreign" or (file == "ledger.sqlite" and damage != "gone"):
        assert any(file in note for note in told["notes"])
    if file == "ledger.sqlite":
        assert listed.status_code == 422
        assert listed.json()["remedy"]
    else:
        assert listed.json()["total"] == TRAINED + 1


def test_a_ledger_of_another_format_says_how_to_read_it(run_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run_dir, directory)
    with sqlite3.connect(directory / "ledger.sqlite") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    answer = opened(directory).get("/api/runs/0/episodes").json()
    assert "has ledger format 1" in answer["problem"]
    assert "headrace ledger" in answer["remedy"]


def test_looking_changes_no_file_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run_dir, directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    client = opened(directory)
    for page in ("overview", "flow", "episodes", "episodes/13.0", "search?words=a", "timeline"):
        ask(client, page)
    after = {path: path.read_bytes() for path in before}
    assert before == after


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_to_is_shown(run_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run_dir, directory)
    directory.chmod(0o500)
    assert ask(opened(directory), "episodes")["total"] == TRAINED + 1


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("runs/9/overview", "there is no run 9"),
        ("runs/0/episodes?order=sideways", "order='sideways'"),
        ("runs/0/episodes?limit=many", "limit='many'"),
        ("runs/0/episodes?colour=red", "colour"),
        ("runs/0/episodes?step=soon", "step"),
        ("runs/0/episodes/3", "is no key of an episode"),
        ("runs/0/episodes/999.9", "there is no episode 999.9"),
        ("runs/0/episodes/3.0/turns/7", "has no turn 7"),
        ("runs/0/episodes/3.0/turns/1/77", "has no token 77"),
        ("runs/0/timeline?from=5&to=4", "is empty"),
        ("runs/0/timeline?from=nan", "not a number of seconds"),
        ("runs/0/search?words=", "the search text is empty"),
        (f"runs/0/series?names={',a' * 30}", "30 series are requested"),
        ("nowhere", "Not Found"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(path: str, problem: str, client: TestClient) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code in (404, 422)
    assert problem in answer.json()["problem"]


WILD = (
    "9" * 19,
    "9" * 5000,
    str(2**63),
    str(-(2**63) - 1),
    "1e400",
    "-1",
    "nan",
    "inf",
    "٣",
    "²",
    "0x1",
    "1_0",
    " 1",
    "",
)
WITH_NUMBERS = (
    "/api/runs/{}/overview",
    "/api/runs/0/outliers/{}",
    "/api/runs/0/episodes/{}.0",
    "/api/runs/0/episodes/0.{}",
    "/api/runs/0/episodes/0.0/turns/{}",
    "/api/runs/0/episodes/0.0/turns/0/{}",
    "/api/runs/0/search?words=a&before={}.0",
    *(f"/api/runs/0/episodes/0.0/turns/0?{name}={{}}" for name in ("from", "count")),
    *(f"/api/runs/0/timeline?{name}={{}}" for name in ("from", "to", "bins")),
    *(f"/api/runs/0/episodes?{name}={{}}" for name in ("offset", "limit", *EpisodeQuery.__struct_fields__)),
)


@pytest.mark.parametrize("path", WITH_NUMBERS)
def test_no_number_breaks_an_answer(path: str, client: TestClient) -> None:
    for number in WILD:
        assert client.get(path.format(quote(number))).status_code in (200, 404, 422), number[:40]


def test_every_answer_forbids_foreign_scripts(client: TestClient) -> None:
    for path in ("/", "/static/js/main.js", "/api/runs", "/api/runs/9/overview", "/static/../pyproject.toml"):
        policy = client.get(path).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


def test_without_the_token_there_is_a_form_at_the_door_and_nothing_else(run_dir: Path) -> None:
    client = stranger(run_dir)
    for path in ("/api/runs", "/api/nothing", "/static/js/main.js", "/?token=wrong", "/"):
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, path)
            assert answer.status_code == 401
            assert ("needs its token" in answer.text) is (path[:2] in ("/", "/?"))
            assert run_dir.name not in answer.text


def test_a_token_is_asked_for_once_and_kept_in_a_cookie_without_it(run_dir: Path) -> None:
    client = stranger(run_dir, token="sesame é")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"host": "127.0.0.1"}):
        assert client.get("/api/runs", headers=headers).status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    let_in = client.get("/", params={"token": "sesame é"})
    assert (let_in.status_code, let_in.headers["location"]) == (303, "/")
    cookie = let_in.headers["set-cookie"]
    assert "sesame" not in cookie
    assert {"HttpOnly", "SameSite=lax"} <= {part.strip() for part in cookie.split(";")}
    assert client.get("/api/runs").status_code == 200
    bearer = stranger(run_dir, token="sesame")
    assert bearer.get("/api/runs", headers={"authorization": "Bearer sesame"}).status_code == 200


def test_runs_are_found_below_a_directory_the_latest_first(tmp_path: Path) -> None:
    for place, name in enumerate(("old", "new")):
        write_run(tmp_path / name, steps=1)
        for path in (tmp_path / name).iterdir():
            os.utime(path, (1e9 + place, 1e9 + place))
    assert [path.name for path in find_runs([tmp_path])] == ["new", "old"]
    with pytest.raises(DataError, match="holds no run"):
        find_runs([tmp_path / "old" / "model"])
    with pytest.raises(DataError, match="is not a directory"):
        find_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize("begun", ["settings", "empty files", "an open ledger", "a status"])
def test_a_run_that_has_just_begun_shows_what_there_is(begun: str, tmp_path: Path) -> None:
    write_sheets(tmp_path, "young")
    (tmp_path / "summary.json").unlink()
    (tmp_path / "parts.json").unlink()
    ledger: SqliteLedger | None = None
    if begun != "settings":
        for name in ("metrics.jsonl", "trace.jsonl", "events.jsonl", "ledger.sqlite"):
            (tmp_path / name).touch()
    if begun in ("an open ledger", "a status"):
        (tmp_path / "ledger.sqlite").unlink()
        ledger = SqliteLedger(tmp_path / "ledger.sqlite", group_size=4, groups_per_step=2)
        ledger.apply(Submit(numbers=(0,), rows=(0,), at_s=1.0))
    if begun == "a status":
        write_status(tmp_path, living=True, steps=0)
    with opened(tmp_path) as client:
        for page in ("overview", "metrics", "series?names=loss", "timeline", "flow", "system"):
            ask(client, page)
        assert ask(client, "overview")["state"] == ("starting" if begun == "a status" else "unknown")
        if ledger is not None:
            assert ask(client, "episodes")["total"] == 0
            assert ask(client, "flow")["fates"]["groups"]["in_flight"] == 1
            ledger.close()
