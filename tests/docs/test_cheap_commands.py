"""Commands of the documents that cost nothing are run, on the files of their own page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.run.cli.app import app
from tests.docs.pages import ROOT, Block, blocks, read_blocks
from tests.docs.test_shell_blocks import lines_of, words_of

RECIPES = [
    (str(block), line) for block in blocks("sh") for line in lines_of(block) if line.startswith("headrace recipes")
]
EXTENDING = read_blocks(ROOT / "docs" / "extending.md")
CHECKS = [line for block in EXTENDING if block.language == "sh" for line in lines_of(block)]


def run(line: str) -> str:
    done = CliRunner().invoke(app, words_of(line)[1:], catch_exceptions=False)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


@pytest.mark.parametrize(("where", "line"), RECIPES)
def test_recipes_are_shown(where: str, line: str) -> None:
    assert "pipelinerl" in run(line), where


@pytest.mark.parametrize("line", CHECKS)
def test_checks_of_the_page_about_extending_pass_on_its_own_files(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in EXTENDING:
        write(block, tmp_path)
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run(line)
    assert "  fail  " not in said


def write(block: Block, home: Path) -> None:
    if block.title:
        (home / block.title).write_text(block.text)


def test_there_are_such_commands() -> None:
    assert len(RECIPES) >= 2
    assert [line.split()[1:3] for line in CHECKS] == [["check", "env"], ["check", "loss"]]
