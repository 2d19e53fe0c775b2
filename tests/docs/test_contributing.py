"""CONTRIBUTING's five minutes: the loss is added to a copy of the source as the page says, and its commands are run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, read_blocks
from tests.run.session.runs import make_run, tiny_model

PAGE = ROOT / "CONTRIBUTING.md"
FILES = [block for block in read_blocks(PAGE) if block.title.startswith(("src/", "tests/"))]
SHELL = "".join(block.text for block in read_blocks(PAGE) if block.language == "sh" and "huber" in block.text)
COMMANDS = SHELL.splitlines()


def lay_in(block: Block, home: Path) -> None:
    """Write the file of a block, or change it as a diff says."""
    file = home / block.title
    if block.language != "diff":
        assert not file.exists()
        file.write_text(block.text)
        return
    lines = block.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = file.read_text()
    assert text.count(before) == 1, f"{block} does not fit {block.title}"
    file.write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with the loss, and a run file."""
    home = tmp_path_factory.mktemp("contributor")
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "docs").mkdir()
    shutil.copytree(ROOT / "tests/algo", home / "tests/algo", ignore=shutil.ignore_patterns("__pycache__"))
    for block in FILES:
        lay_in(block, home)
    make_run(home / "there", tiny_model(home / "tiny"))
    for path in (home / "there").iterdir():
        path.rename(home / path.name)
    return home


def test_the_page_has_a_file_its_rows_and_commands() -> None:
    assert [block.language for block in FILES] == ["python", "diff", "diff", "diff"]
    assert [line.split()[0] for line in COMMANDS] == ["headrace", "python", "headrace"]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_page_do_what_it_says(line: str, home: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(home / "src")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=home, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout or (home / "docs/formulas.md").read_text()
    assert "huber" in said
    assert "  fail  " not in said


def test_the_suites_pass_with_the_loss_and_its_reference(home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/algo/test_losses.py",
        "-k",
        "huber",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(home / "src"), str(home)])}
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=110, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
