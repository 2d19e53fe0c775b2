"""``headrace compare``: runs in directories of their own, one table, and what is refused before anything runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import ConfigError, DataError
from headrace.run.session import load_config
from headrace.run.session.directory import read_summary, write_json
from headrace.run.session.recipes import DECIDED, left_open, recipes
from headrace.wings.compare.rows import RecipeRow, read_recipe_row, select_decided
from headrace.wings.compare.running import ComparisonConfig, compare
from headrace.wings.compare.tables import COLUMNS, make_document
from headrace.wings.compare.writing import draw_comparison
from tests.run.session.runs import make_run, tiny_model, verb
from tests.wings.compare.rows import BUSY_ENGINE, BUSY_LEARNER, PROMISES, STEPS, check_depth, check_interrupt
from tests.wings.compare.rows import check_whatever_is_busy as check_always
from tests.wings.compare.seen import Seen
from tests.wings.compare.test_rows import bytes_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("task")
    contrary = {"groups_per_step": 2, "group_size": 4, "max_age": 3, "policy": "windowed"}
    return make_run(
        directory / "work",
        tiny_model(directory / "model", max_positions=64),
        flow=contrary,
        sync={"codec": "cast_bf16"},
    )


@pytest.fixture(scope="session")
def compared(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a comparison of two."""
    directory = tmp_path_factory.mktemp("compared")
    terms = ComparisonConfig(
        recipes=["trl-sync", "areal"], directory=directory, run_file=run_file, steps=STEPS, overrides=list(BUSY_ENGINE)
    )
    told: list[str] = []
    made = compare(terms, told.append)
    assert [(row.recipe, row.status) for row in made.rows] == [("trl-sync", "finished"), ("areal", "finished")]
    assert told == [f"1/2 trl-sync: {STEPS} steps", f"2/2 areal: {STEPS} steps"]
    return directory


@pytest.mark.parametrize("name", ["trl-sync", "areal"])
def test_recipes_do_at_a_commit_what_their_rows_say(name: str, compared: Path, run_file: Path) -> None:
    seen = Seen(compared / name)
    check_always(PROMISES[name], seen, bytes_of(run_file.parent))
    check_interrupt(PROMISES[name], seen)


@pytest.mark.slow
def test_a_recipe_that_rejects_trains_nothing_older_and_counts_what_left(tmp_path: Path, run_file: Path) -> None:
    settings = [*BUSY_LEARNER, "flow.groups_per_step=16"]
    terms = ComparisonConfig(
        recipes=["pipelinerl"], directory=tmp_path, run_file=run_file, steps=STEPS, overrides=settings
    )
    (row,) = compare(terms).rows
    seen = Seen(tmp_path / "pipelinerl")
    check_always(PROMISES["pipelinerl"], seen, bytes_of(run_file.parent))
    check_depth(PROMISES["pipelinerl"], seen)
    assert set(row.wasted_tokens) == {"stale"}
    assert row.wasted_frac is not None
    assert 0 < row.wasted_frac < 1


def test_a_row_says_what_the_files_of_its_run_say(compared: Path, run_file: Path) -> None:
    settings = {"directory": str(compared), "run_file": str(run_file), "steps": STEPS}
    rows = {row.recipe: row for row in again(settings).rows}
    for name, row in rows.items():
        seen, summary = Seen(compared / name), read_summary(compared / name)
        assert summary is not None
        tokens = sum(seen.ages.values())
        assert row.age_mean == pytest.approx(sum(age * count for age, count in seen.ages.items()) / tokens)
        assert row.trained_tok_s == pytest.approx(tokens / row.seconds)
        assert row.sync_bytes == bytes_of(run_file.parent)
        assert (row.carried_over > 0) == (name == "areal")
        assert row.gain == pytest.approx(summary["reward_last"] - summary["reward_first"])
        assert row.gain_per_minute == pytest.approx(row.gain / row.seconds * 60)
        assert (row.status, row.resumed, row.steps) == ("finished", False, STEPS)
    assert rows["areal"].settings["policy"] == "bounded"
    assert rows["trl-sync"].age_max == 0


def again(settings: dict[str, Any], **changes: Any) -> Any:
    terms = {
        "recipes": ["trl-sync", "areal"],
        "directory": Path(settings["directory"]),
        "run_file": Path(settings["run_file"]),
        "steps": settings["steps"],
        "overrides": list(BUSY_ENGINE),
    }
    return compare(ComparisonConfig(**{**terms, **changes}))


def test_what_has_finished_is_not_run_again_and_the_program_prints_and_writes_it(
    compared: Path, run_file: Path
) -> None:
    before = {name: (compared / name / "ledger.sqlite").stat().st_mtime_ns for name in ("trl-sync", "areal")}
    sets = [word for text in BUSY_ENGINE for word in ("--set", text)]
    call = ["compare", "trl-sync", "areal", "--run", run_file, "--dir", compared, "--steps", str(STEPS), *sets]
    out = verb(*call)
    assert "trl-sync: has finished before" in out
    assert all(title.split()[0] in out for title in COLUMNS)
    found = json.loads((compared / "compare.json").read_text())
    assert [row["recipe"] for row in found["rows"]] == ["trl-sync", "areal"]
    assert found["machine"]["cores"] >= 1
    assert "| areal |" in (compared / "compare.md").read_text()
    assert ">areal</text>" in (compared / "compare.svg").read_text()
    after = {name: (compared / name / "ledger.sqlite").stat().st_mtime_ns for name in before}
    assert after == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": STEPS + 1}, rf"trl-sync holds a run with run.steps={STEPS}, and {STEPS + 1} is requested"),
        ({"seed": 5}, r"run.seed=0, and 5 is requested"),
        ({"overrides": [*BUSY_ENGINE, "learner.lr=0.5"]}, r"learner.lr=0.0001, and 0.5 is requested"),
        ({"recipes": ["trl-snyc"]}, "there is no recipe 'trl-snyc'"),
        ({"overrides": ["run.dir=x"]}, "a directory for each run, and one budget and seed for all"),
        ({"overrides": ["flow.max_age=3"]}, r"trl-sync: flow.max_age=3 does not fit"),
    ],
)
def test_what_could_not_be_compared_is_refused_before_anything_runs(
    compared: Path, run_file: Path, changes: dict[str, Any], words: str
) -> None:
    settings = {"directory": str(compared), "run_file": str(run_file), "steps": STEPS}
    with pytest.raises(ConfigError, match=words):
        again(settings, **changes)


def test_a_setting_that_fits_no_recipe_is_refused_before_the_demo_learns_its_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trl-sync: .*learner\.lrr"):
        compare(ComparisonConfig(recipes=["trl-sync"], directory=tmp_path, overrides=["learner.lrr=1"]))
    assert not (tmp_path / "demo" / "model").exists()


def test_a_recipe_that_fails_says_why_and_the_others_are_run(tmp_path: Path, run_file: Path) -> None:
    terms = ComparisonConfig(
        recipes=["oat", "tunix"], directory=tmp_path, run_file=run_file, overrides=["data.path=none.jsonl"]
    )  # fmt: skip
    rows = compare(terms).rows
    assert [(row.recipe, row.status) for row in rows] == [("oat", "failed"), ("tunix", "failed")]
    assert "none.jsonl does not exist" in rows[0].cause
    assert "- oat failed: " in make_document("it", rows)
    assert draw_comparison(rows).startswith(b"<svg")


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on(compared: Path, run_file: Path, tmp_path: Path) -> None:
    name, terms = "trl-sync", {"run_file": run_file, "steps": 2, "recipes": ["trl-sync"], "overrides": []}
    (row,) = compare(ComparisonConfig(directory=tmp_path, **terms)).rows
    summary = read_summary(tmp_path / name)
    assert summary is not None
    write_json(tmp_path / name / "summary.json", {**summary, "status": "stopped"})
    (resumed,) = compare(ComparisonConfig(directory=tmp_path, **terms)).rows
    assert (row.status, resumed.status, resumed.steps) == ("finished", "finished", 2)


def test_row_of_a_resumed_run_gives_no_share_of_what_an_earlier_part_generated(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "areal", tmp_path / "areal")
    file = tmp_path / "areal" / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    steps[-1] |= {"generated_tokens": 5, "wasted_tokens": {"stale": 9}}
    for clock_s, resumed, share in ((steps[-1]["clock_s"], False, 9 / 5), (0.0, True, None)):
        steps[-1]["clock_s"] = clock_s
        file.write_text("".join(json.dumps(step) + "\n" for step in steps))
        row = read_recipe_row("areal", tmp_path / "areal")
        assert (row.resumed, row.wasted_frac, row.wasted_tokens) == (resumed, share, {"stale": 9})


def test_recipes_decide_and_the_run_file_says_the_rest() -> None:
    file = {
        "model": {"path": "m"},
        "flow": {"groups_per_step": 4, "max_age": 3, "policy": {"kind": "windowed", "window": 2}},
        "sync": {"codec": "delta", "deadline_s": 9.0},
        "algo": {"loss": "gspo", "advantage": "rloo"},
    }
    config = load_config(left_open(file), like="oat")
    assert (config.flow.groups_per_step, config.flow.policy.kind, config.flow.max_age) == (4, "one_ahead", 1)
    assert (config.sync.codec, config.sync.deadline_s) == ("full", 9.0)
    assert (config.algo.loss.kind, config.algo.advantage.kind) == ("dr_grpo", "rloo")


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_says_nothing_of_the_task_but_an_adapter_and_an_advantage(name: str) -> None:
    filled_in = {"model": {"lora"}, "algo": {"advantage"}}  # where the run file does not say them
    for section, table in recipes()[name].settings.items():
        assert set(table) <= DECIDED.get(section, frozenset()) | filled_in.get(section, set())


def test_the_advantage_of_a_recipe_holds_where_the_run_file_has_none() -> None:
    differences = {"kind": "grpo", "std": "none"}
    for own, advantage in ({}, differences), ({"advantage": "rloo"}, "rloo"):
        algo = load_config(left_open({"model": {"path": "m"}, "algo": own}), like="prime-rl").algo
        assert algo.loss.kind == "dppo"
        assert algo.advantage == load_config({"model": {"path": "m"}, "algo": {"advantage": advantage}}).algo.advantage


def test_a_table_of_another_kind_replaces_that_of_a_recipe() -> None:
    mine = {"model": {"path": "m"}, "algo": {"advantage": {"kind": "rloo"}}}
    algo = load_config(mine, like="prime-rl").algo
    assert algo.advantage == load_config(mine).algo.advantage
    assert algo.loss.kind == "dppo"
    set_so = load_config({"model": {"path": "m"}}, ["algo.advantage.kind=rloo"], like="prime-rl").algo
    assert set_so.advantage == algo.advantage
    mine = {"model": {"path": "m"}, "algo": {"advantage": {"kind": "grpo", "std": "ddof0"}}}
    assert load_config(mine, like="prime-rl").algo.advantage == load_config(mine).algo.advantage


def test_a_table_without_a_kind_changes_what_a_recipe_names() -> None:
    loss = load_config({"model": {"path": "m"}}, ["algo.loss.clip_high=0.3"], like="areal").algo.loss
    assert loss == load_config({"model": {"path": "m"}, "algo": {"loss": {"kind": "grpo", "clip_high": 0.3}}}).algo.loss


def test_a_directory_without_a_run_makes_no_row(tmp_path: Path) -> None:
    from headrace.wings.compare.rows import read_recipe_row

    with pytest.raises(DataError, match="is not a directory"):
        read_recipe_row("oat", tmp_path / "none")


def test_a_row_of_which_little_is_known_is_shown_with_dashes() -> None:
    row = RecipeRow(recipe="oat", status="stopped", resumed=True)
    shown = {title: of(row) for title, of in COLUMNS.items()}
    assert shown["recipe"] == "oat*"
    assert set(list(shown.values())[5:]) == {"–"}
    assert select_decided({}) == {}
    assert msgspec.to_builtins(row)["age_mean"] is None
