"""A verb says what it does before it imports what takes it seconds, on standard error, and nothing into its JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "asyncio", "headrace.run.session", "headrace.control")
STOP_AT_THE_FIRST_WORDS = f"""
import json, os, sys
class Heard(type(sys.stderr)):
    def write(self, text):
        print(text.strip(), *sorted(set({HEAVY!r}) & sys.modules.keys()), sep="|", flush=True)
        os._exit(0)
sys.stderr = Heard(sys.stderr.buffer, line_buffering=True)
from headrace.run.cli import main
for arguments in json.loads(sys.argv[1]):  # each in a process that has imported no more than the program itself
    if not os.fork():
        sys.argv = ["headrace", *arguments]
        main()
        os._exit(0)
    os.wait()
    print("end", flush=True)
"""
PROGRAM = "import sys; sys.argv[0] = 'headrace'; from headrace.run.cli import main; main()"
VERBS = {
    "train": ["train", "absent.toml"],
    "train --dry-run": ["train", "absent.toml", "--dry-run"],
    "train --replay": ["train", "--replay", "absent"],
    "init": ["init", "--model", "absent"],
    "demo": ["demo", "--set", "flow.absent=1", "--dir", "made", "--like", "absent"],
    "eval": ["eval", "absent.toml"],
    "export": ["export", "absent", "out"],
    "serve": ["serve", "absent"],
    "check loss": ["check", "loss", "absent.py:loss"],
    "check env": ["check", "env", "absent.py:reward"],
    "plan": ["plan", "absent.toml", "--cluster", "absent.toml"],
    "compare": ["compare", "absent"],
    "bench": ["bench", "absent"],
    "view": ["view", "absent"],
    "report": ["report", "absent"],
    "trace": ["trace", "absent"],
    "status": ["status", "absent"],
    "engines": ["engines", "absent"],
    "watch": ["watch", "absent"],
    "join": ["join", "absent"],
    "sft": ["sft", "absent.toml"],
    "dpo": ["dpo", "absent.toml"],
    "distill": ["distill", "absent.toml"],
    "stages": ["stages", "absent.toml"],
    "tinker": ["tinker", "absent"],
    "ledger": ["ledger", "absent"],
    "doctor": ["doctor", "absent"],
}


def run(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100, check=False)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each verb says first, and which heavy modules it has imported by then."""
    arguments = json.dumps(list(VERBS.values()))
    lines = run(STOP_AT_THE_FIRST_WORDS, arguments, cwd=tmp_path_factory.mktemp("said")).stdout.split("end\n")
    return dict(zip([*VERBS, ""], lines, strict=True))


@pytest.mark.parametrize("verb", VERBS)
def test_verb_speaks_before_its_heavy_imports(said: dict[str, str], verb: str) -> None:
    words, *imported = said[verb].strip().split("|")
    assert words.endswith("...")
    assert not imported


def test_every_verb_that_may_take_long_is_among_them() -> None:
    from headrace.base.plugins import OWN_PACKAGE
    from headrace.run.cli.commands import COMMANDS

    quick = {"recipes"}
    known = {name for name in COMMANDS if COMMANDS.offer(name).package == OWN_PACKAGE}
    assert known == {name.split()[0] for name in VERBS} | quick


@pytest.mark.parametrize("verb", [[], ["train"], ["eval"], ["check", "env"]], ids=" ".join)
def test_help_is_printed_alone_and_without_the_library(verb: list[str], tmp_path: Path) -> None:
    report = (
        f"import sys, atexit\natexit.register(lambda: print(set({HEAVY!r}) & sys.modules.keys(), file=sys.stderr))\n"
    )
    shown = run(report + PROGRAM, *verb, "--help", cwd=tmp_path)
    assert shown.stderr == "set()\n"
    assert "Usage" in shown.stdout


LOSS = "def loss(inputs):\n    return -(inputs.advantages * (inputs.log_pi - inputs.log_mu).exp() * inputs.mask)\n"


def test_verb_goes_on_where_its_first_words_have_no_place(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    command = [sys.executable, "-c", PROGRAM, "check", "loss", "loss.py:loss", "--json"]
    with Path("/dev/full").open("w") as full:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=tmp_path, timeout=100, check=False
        ).stdout
    assert isinstance(json.loads(said), dict)


def test_json_is_all_that_stands_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    done = run(PROGRAM, "check", "loss", "loss.py:loss", "--json", cwd=tmp_path)
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr.startswith("checking loss.py:loss")
