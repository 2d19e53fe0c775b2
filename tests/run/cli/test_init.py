"""A first run file: written by flags or by questions, checked before it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from headrace.base.config.user_code import load_file
from headrace.base.errors import HeadraceError
from headrace.run.cli.app import app
from tests.run.session.runs import tiny_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and rows, in which the program is called."""
    tiny_model(tmp_path / "model")
    rows = [{"question": f"{one}+1=", "answer": one + 1} for one in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str, answers: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=answers, env={"COLUMNS": "200"})


MODEL, DATA = ("--model", "model"), ("--data", "train.jsonl")


def test_flags_write_a_file_that_a_dry_run_accepts_and_a_reward_that_works(place: Path) -> None:
    said = init(*MODEL, *DATA)
    assert said.exit_code == 0, said.output
    assert said.output.endswith("headrace train run.toml --dry-run\nheadrace train run.toml\n")
    assert 'prompt_column = "question"' in (place / "run.toml").read_text()
    planned = CliRunner().invoke(app, ["train", "run.toml", "--dry-run"])
    assert planned.exit_code == 0, planned.stdout
    assert planned.stdout.startswith("9 tasks, 0 held out; 100 steps of 8 groups")
    reward = vars(load_file(place / "reward.py"))["reward"]
    told = [("it is 1,234.", "1234"), ("12", "#### 12"), ("no, 12 or 13", 12), ("Paris.", "paris"), ("x", ""), ("", 1)]
    assert [reward(completion, answer) for completion, answer in told] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_a_file_that_is_there_stays_unless_it_may_be_written_over(place: Path) -> None:
    (place / "run.toml").write_text("mine")
    refused = init(*MODEL, *DATA)
    assert isinstance(refused.exception, HeadraceError)
    assert "run.toml is there already" in str(refused.exception)
    assert (place / "run.toml").read_text() == "mine"
    (place / "reward.py").write_text("def reward(completion, answer):\n    return 0.5\n")
    assert init(*MODEL, *DATA, "--force").exit_code == 0
    assert "[model]" in (place / "run.toml").read_text()
    assert "0.5" in (place / "reward.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (DATA, "--model is not given, and there is no terminal to ask on"),
        (("--model", "modle", *DATA), "modle"),
        ((*MODEL, "--data", "none.jsonl"), "none.jsonl does not exist"),
        ((*MODEL, *DATA, "--prompt-column", "text"), "no column 'text': it has question, answer"),
        ((*MODEL, *DATA, "--answer-column", "reply"), "called 'reply'"),
        ((*MODEL, *DATA, "--reward", "mine.py:strange"), "requires the parameter 'solution', which is neither"),
        ((*MODEL, *DATA, "--reward", "mine.py:mute"), "reward function mute takes (answer)"),
        ((*MODEL, *DATA, "--reward", "code"), "--reward code: no column of the rows (question, answer) is known"),
        ((*MODEL, *DATA, "--reward", "mine.py:none"), "mine.py defines no 'none'"),
        ((*MODEL, *DATA, "--eval", "none.jsonl"), "none.jsonl does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_and_no_run_file_is_written(
    arguments: Sequence[str], words: str, place: Path
) -> None:
    (place / "mine.py").write_text("def strange(completion, solution): ...\ndef mute(answer): ...\n")
    refused = init(*arguments)
    assert isinstance(refused.exception, HeadraceError)
    assert words in str(refused.exception)
    assert not (place / "run.toml").exists()
    assert not list(place.glob(".run.toml*"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody can be asked."""
    stand_in = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), stderr=sys.stderr)
    monkeypatch.setattr("headrace.run.cli.init.sys", stand_in)


@pytest.mark.usefixtures("terminal")
def test_what_no_flag_says_is_asked_until_the_answer_is_right(place: Path) -> None:
    (place / "test.jsonl").write_text('{"question": "9+1=", "answer": 10}\n')
    said = init(answers="modle\nmodel\ntrain.jsonl\n\n\n")
    assert said.exit_code == 0, said.output
    assert said.output.count("Model (a directory") == 2
    assert "1  file   a file to change, which compares with 'answer'" in said.output
    assert "code" not in said.output, "there is no column of tests"
    assert "headrace train run.toml" in said.output
    written = (place / "run.toml").read_text()
    assert 'reward = "reward.py:reward"' in written
    assert 'eval_path = "test.jsonl"' in written, "a file beside the rows that is called so is what Enter takes"


@pytest.mark.usefixtures("terminal")
def test_reward_and_held_out_rows_are_asked_and_wrong_answers_are_told_at_once(place: Path) -> None:
    (place / "mine.py").write_text("def strange(completion, solution): ...\n")
    (place / "other.jsonl").write_text('{"text": "1"}\n')
    said = init(*MODEL, *DATA, answers="mine.py:strange\nnone.py:reward\n2\nother.jsonl\nabsent.jsonl\nnone\n")
    assert said.exit_code == 0, said.output
    assert said.output.count("Reward (a number, or file.py:function) [1]") == 3
    assert said.output.count("Held-out rows") == 3
    for words in "requires the parameter 'solution'", "has no column 'question'", "absent.jsonl does not exist":
        assert words in said.output
    written = (place / "run.toml").read_text()
    assert '[[env.rewards]]\nkind = "exact"\nanswer_column = "answer"' in written
    assert "eval_path" not in written


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_rewards_that_are_there_are_chosen_by_their_names(place: Path, kind: str) -> None:
    said = init(*MODEL, *DATA, "--reward", kind, "--eval", "train.jsonl")
    assert said.exit_code == 0, said.output
    written = (place / "run.toml").read_text()
    assert f'kind = "{kind}"' in written
    assert 'eval_path = "train.jsonl"' in written
    assert not (place / "reward.py").exists()


@pytest.mark.usefixtures("terminal")
def test_column_of_the_answers_is_asked_where_no_name_says_it(place: Path) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "1+1=", "sum": 2}\n')
    said = init(*MODEL, "--data", "rows.jsonl", answers="some\nsum\n\n\n")
    assert said.exit_code == 0, said.output
    assert "called 'some'" in said.output
    assert "def reward(completion: str, sum)" in (place / "reward.py").read_text()


@pytest.mark.usefixtures("terminal")
def test_where_no_reward_fits_the_form_is_said_and_what_the_directory_has(place: Path) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "1+1=", "kind": "sum"}\n')
    said = init(*MODEL, "--data", "rows.jsonl", answers="\nmine.py:good\n")
    assert "no column of the rows (prompt, kind) is known to hold an expected answer or tests" in said.output
    assert "def reward(completion, prompt) returns a number" in said.output
    assert f"found in {place}: no file with such a function" in said.output
    assert "Reward (file.py:function): " in said.output
    (place / "mine.py").write_text("def good(completion, kind): ...\ndef strange(completion, solution): ...\n")
    (place / "odd.py").write_text("def f(:\n")
    said = init(*MODEL, "--data", "rows.jsonl", answers="\n\nnone\n")
    assert said.exit_code == 0, said.output
    assert f"found in {place}: mine.py:good\n" in said.output
    assert 'reward = "mine.py:good"' in (place / "run.toml").read_text()


def test_arguments_that_trl_passes_are_no_columns(place: Path) -> None:
    (place / "mine.py").write_text("def trl(prompts, completions, completion_ids, trainer_state, answer): ...\n")
    assert init(*MODEL, *DATA, "--reward", "mine.py:trl").exit_code == 0


def test_help_says_what_every_verb_is_for_and_what_every_benchmark_measures() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    groups = ("Begin and train", "Use what was trained", "Look at a run", "Plan, compare and measure")
    places = [said.index(group) for group in groups]
    assert places == sorted(places)
    assert places[0] < said.index("│ init ") < said.index("│ train ") < places[1] < said.index("│ serve ") < places[2]
    bench = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "160"}).output
    for name, measured in {"fleet": "what commits and deaths cost", "sync": "transports and codecs"}.items():
        assert f" {name}  " in bench
        assert measured in bench
