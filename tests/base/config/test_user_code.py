"""Python files of the user: how they are loaded, and what their faults look like."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from headrace.base.config.user_code import load_file
from headrace.base.errors import ConfigError


def test_file_runs_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = [1]\n")
    first = load_file(path)
    assert load_file(path) is first
    path.write_text("x = [2]\n")
    os.utime(path, ns=(1, 1))
    assert load_file(path).x == [2]
    assert first.x == [1]


def test_dataclasses_and_pickle_find_the_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass(slots=True)\nclass Pair:\n    a: int = 1\n"
    )
    module = load_file(path)
    assert sys.modules[module.__name__] is module
    assert pickle.loads(pickle.dumps(module.Pair(3))) == module.Pair(3)


def test_what_stands_beside_the_file_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "beside_the_users_file.py").write_text("x = 7\n")
    path = tmp_path / "mine.py"
    path.write_text("from beside_the_users_file import x\n")
    assert load_file(path).x == 7


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    modules = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(f"x = {folder!r}\n")
        modules.append(load_file(path))
    assert [module.x for module in modules] == ["a", "b"]
    assert modules[0].__name__ != modules[1].__name__


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1\nraise ValueError('oh')\n", r"ValueError: oh at mine\.py:2"),
        ("x = 1\ndef f(:\n", r"SyntaxError: .* at mine\.py:2"),
        ("import sys\nsys.exit('needs a GPU')\n", r"SystemExit: needs a GPU at mine\.py:2"),
        ("import not_a_module_at_all\n", r"No module named .* at mine\.py:1"),
    ],
)
def test_fault_is_told_with_its_line(tmp_path: Path, code: str, problem: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=problem):
        load_file(path)
    assert set(sys.modules) == before


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_file(tmp_path / "nowhere.py")
