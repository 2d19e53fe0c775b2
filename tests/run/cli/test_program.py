"""The program: its verbs, its exit codes, and errors as words."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import headrace as library
from headrace.base.errors import RunError
from headrace.run.cli import main
from headrace.run.cli.output import complain, this_command
from headrace.run.session import load_config
from headrace.wings.plan.preview import plan_line
from tests.run.session.runs import headrace, make_run, tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    code: int
    out: str
    err: str


Program = Callable[..., Said]


def after_first_words(said: str) -> str:
    """What stands on standard error behind the lines that say what the verb is about to do."""
    first, *rest = said.splitlines(keepends=True)
    assert first.endswith(" ...\n"), said
    return "".join(itertools.dropwhile(lambda line: line.endswith(" ...\n"), rest))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """The program in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Said(code=code, out=out, err=err)

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def run_file(tmp_path: Path, model_dir: Path) -> Path:
    return make_run(tmp_path / "work", model_dir)


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program is called."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def test_the_version_is_printed_and_nothing_else(program: Program) -> None:
    assert program("--version") == Said(code=0, out=library.__version__ + "\n", err="")


@pytest.mark.parametrize("verb", ["train", "demo", "eval", "status", "ledger", "bench", "check"])
def test_every_verb_explains_itself(program: Program, verb: str) -> None:
    said = program(verb, "--help")
    assert said.code == 0
    assert f"Usage: headrace {verb}" in said.out
    assert verb in program("--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["train", "a.toml", "--resum"], "No such option: --resum"),
        (["train", "a.toml", "--set"], "'--set' requires an argument"),
        (["status"], "Missing argument"),
    ],
)
def test_a_call_that_makes_no_sense_is_a_usage_error(program: Program, arguments: list[str], words: str) -> None:
    said = program(*arguments)
    assert said.code == 2
    assert words in said.err


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["train", "none.toml"], "run file none.toml does not exist", "give the path of a TOML file"),
        (["train", "RUN", "--set", "learner.rl=1"], "learner.rl is not a setting", "did you mean 'lr'?"),
        (["train", "RUN", "--set", "learner.lr"], "--set 'learner.lr' has no '='", "--set section.key=value"),
        (["train", "RUN", "--set", "flow.capacity=1"], "flow.capacity=1 is smaller than one batch", "capacity >= 2"),
        (["train", "RUN", "--set", "model.path=no"], "no' does not exist", "give the directory of a Hugging Face"),
        (["train", "RUN", "--set", "data.path=no.csv"], "no.csv does not exist", "give the path of a data file"),
        (["train", "RUN", "--set", "env.reward=no.py:f"], "no.py does not exist", "give the path of the file"),
        (["train", "RUN", "--resume"], "holds no run to resume", "leave --resume out"),
        (["train", "RUN", "--set", "run.dir=RUN"], "cannot be used", "choose a directory that can be written"),
        (["eval", "RUN"], "data.eval_path is not set", "set data.eval_path"),
        (["eval", "."], "holds no run", "name a run file"),
        (["eval", "nowhere"], "nowhere does not exist", "or the directory of a run"),
        (["status", "."], "holds no run", "name the directory of a run"),
        (["ledger", "."], "holds no run: neither config.json nor ledger.sqlite", "give the directory of a run"),
        (["bench", "lop"], "lop", "loop"),
        (["check", "loss", "no.py:loss"], "no.py", ""),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("empty_directory")
def test_an_error_is_told_in_words_with_a_remedy(
    program: Program, run_file: Path, arguments: list[str], problem: str, remedy: str
) -> None:
    said = program(*(argument.replace("RUN", str(run_file)) for argument in arguments))
    assert (said.code, said.out) == (1, "")
    told, _, remedies = after_first_words(said.err).partition("remedy: ")
    assert told.startswith("error: ")
    assert problem in told
    assert remedy in remedies


def test_a_dry_run_says_what_would_happen_and_starts_nothing(program: Program, run_file: Path) -> None:
    said = program("train", run_file, "--dry-run", "--set", "flow.max_age=2", "--set", "run.steps=6")
    assert (said.code, after_first_words(said.err)) == (0, "")
    for words in (
        "12 tasks, 0 held out; 6 steps of 2 groups × 4 = 8 episodes",
        "1 epoch.", "Up to 4 new tokens, 10 with the prompt; generation runs up to 2 batches ahead",
        "Engine: 1 thread; learner: 1 thread;",
    ):  # fmt: skip
        assert words in said.out
    tree = json.loads(program("train", run_file, "--dry-run", "--json").out)
    assert set(tree) == {
        "model", "data", "env", "engine", "flow", "algo", "learner", "sync", "launch", "observe", "run",
    }  # fmt: skip
    assert not (run_file.parent / "run").exists()
    assert "take turns" in program("train", run_file, "--dry-run", "--set", "flow.max_age=0").out
    assert "Plan (" in said.out


def test_a_dry_run_begins_with_what_it_means_and_prints_only_what_is_set(program: Program, run_file: Path) -> None:
    given = ("--set", "flow.max_age=2", "--set", "learner.reference.kind=ema", "--set", "flow.filters=['length']")
    said = program("train", run_file, "--dry-run", *given).out
    assert said.startswith("12 tasks, 0 held out;")
    assert "  flow.max_age = 2  (default 1)\n      The staleness bound: no token is trained by a learner" in said
    assert '  learner.reference = {"kind": "ema"}  (default (unset))\n' in said
    assert "  flow.filters = [{" in said
    for usual in ("flow.order", "learner.eps", "[flow]", "(unset)\n\n"):
        assert usual not in said
    assert said.count("\n") < 60
    assert "--dry-run --defaults prints them all" in said
    everything = program("train", run_file, "--dry-run", "--defaults", *given).out
    assert everything.startswith("12 tasks, 0 held out;")
    assert "\n[flow]\n" in everything
    assert "\nmax_age = 2\n" in everything
    assert "\nlead = (unset)\n" in everything
    assert program("train", run_file, "--defaults").code == 2


def test_a_dry_run_on_a_cluster_says_where_its_plan_is(run_file: Path) -> None:
    ours = run_file.read_text().replace("engine_threads = 1\n", "").replace("learner_threads = 1\n", "")
    run_file.write_text(ours)
    config = load_config(run_file, ["launch.kind=ray", "sync.transport=http"])
    line = plan_line(SimpleNamespace(config=config, devices=None))
    assert "headrace plan RUN.toml --cluster" in line
    assert "Plan (" not in line


def test_a_dry_run_finds_what_the_run_would_refuse(program: Program, run_file: Path) -> None:
    said = program("train", run_file, "--dry-run", "--set", "engine.max_new_tokens=40")
    assert said.code == 1
    assert "no prompt fits" in said.err


def test_a_dry_run_refuses_a_model_that_the_learner_would_refuse(
    program: Program, model_dir: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model_dir, tmp_path / "model"))
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**settings, "rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}})
    )
    said = program("train", make_run(tmp_path / "work", other), "--dry-run")
    assert said.code == 1
    assert "rope_type='ntk' is unknown here" in said.err


def test_a_demo_does_not_write_over_another(program: Program, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.sqlite").touch()
    said = program("demo", "--dir", tmp_path)
    assert said.code == 1
    assert "holds a demo already" in said.err
    assert os.listdir(tmp_path) == ["run"]


def test_what_a_part_says_of_its_failure_reaches_the_user(tmp_path: Path, model_dir: Path) -> None:
    torn = tmp_path / "torn"
    subprocess.run(["cp", "-r", model_dir, torn], check=True)
    tensors = load_file(torn / "model.safetensors")  # a whole file of other shapes: only a part that loads it sees that
    save_file({name: tensor[..., :-1].contiguous() for name, tensor in tensors.items()}, torn / "model.safetensors")
    run_file = make_run(tmp_path / "work", torn, env={"reward": "reward.py:reward", "reward_workers": 2})
    said = headrace("train", run_file)
    assert said.returncode == 1
    assert after_first_words(said.stderr).startswith("error: the weights of model.path=")
    assert "expected [64, 32]" in said.stderr
    assert "remedy: save the whole model again, or make config.json fit the weights" in said.stderr


def test_escape_sequences_of_a_cause_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain(RunError("a reward failed: \x1b[2Jgone\nloops: \x07", remedy="fix it\x1b]0;title"))
    err = capsys.readouterr().err
    assert "\x07" not in err
    assert not {"\x1b[2J", "\x1b]0;"} & {part for part in ("\x1b[2J", "\x1b]0;") if part in err}
    assert "\\x1b[2Jgone\nloops: \\x07" in err


def test_program_runs_as_a_module_and_then_names_itself_so(monkeypatch: pytest.MonkeyPatch) -> None:
    call = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == library.__version__
    monkeypatch.setattr(sys, "argv", ["/somewhere/headrace/__main__.py", "train", "my run.toml"])
    assert this_command("--resume") == f"{sys.executable} -m headrace train 'my run.toml' --resume"
