"""Python files of the user: how they are loaded, and what their faults look like."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from headrace.base.config.user_code import find_in_file, load_file, refuse_missing_imports
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


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import not_a_module_at_all\n", 1),
        ("import json, not_a_module_at_all.part as part\n", 1),
        ('"""Words."""\nimport json\nfrom not_a_module_at_all import x\n', 3),
        ("def f():\n    print(1)\nimport not_a_module_at_all\n", 3),
        ("import numpy as np, torch\nfrom torch import nn\nimport not_a_module_at_all\n", 3),
        ("X = Y = [-1, 'a']\nimport not_a_module_at_all\n", 2),
    ],
)
def test_module_that_is_not_installed_is_refused_by_name_before_the_file_runs(
    tmp_path: Path, code: str, line: int
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=r"env\.reward: .*there is no module 'not_a_module_at_all'") as refused:
        refuse_missing_imports(path, "env.reward")
    assert f"{path}:{line}" in refused.value.problem
    assert f"{sys.executable} -m pip install not_a_module_at_all" in refused.value.remedy


def test_module_that_a_file_beside_the_users_imports_is_refused_with_that_file(tmp_path: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("import mine\n\nimport not_a_module_at_all\n")
    (tmp_path / "mine.py").write_text("import helper_of_mine\n")
    with pytest.raises(ConfigError, match=r"helper_of_mine\.py:3: there is no module 'not_a_module_at_all'"):
        refuse_missing_imports(tmp_path / "mine.py", "env.reward")
    (tmp_path / "helper_of_mine.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"helper_of_mine\.py:1: "):
        refuse_missing_imports(tmp_path / "mine.py", "env.reward")


def test_relative_import_is_refused_since_the_file_is_no_part_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from .helper import x\n")
    with pytest.raises(ConfigError, match=r"mine\.py:1: a relative import \(\.helper\)"):
        refuse_missing_imports(tmp_path / "mine.py", "env.reward")


@pytest.mark.parametrize(
    "code",
    [
        "from __future__ import annotations\nimport sys, os.path, numpy\n",
        "import beside\nfrom package import x\nfrom spread.part import y\n",
        "import working\n",
        "try:\n    import not_a_module_at_all\nexcept ImportError:\n    pass\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import not_a_module_at_all\n",
        "def f():\n    import not_a_module_at_all\n",
        "import sys\nsys.path.append('elsewhere')\nimport not_a_module_at_all\n",
        "import sys\nsys.path += ['elsewhere']\nimport not_a_module_at_all\n",
        "import set_up\nroot = set_up.root(__file__)\nimport not_a_module_at_all\n",
        "import moving\nimport not_a_module_at_all\n",
        "import pytest\nimport not_a_module_at_all\n",  # what is installed may add a folder or a finder
        "import pytest, not_a_module_at_all\n",
        "import roots.paths\nimport not_a_module_at_all\n",
        "from roots import paths\nimport not_a_module_at_all\n",
        "import package\nimport not_a_module_at_all\n",  # its __init__ imports a part of it
        "from sys import path\npath += ['elsewhere']\nimport not_a_module_at_all\n",
        "import sys\nsys.meta_path += [1]\nimport not_a_module_at_all\n",
        "import sys\nsys.path[:0] = ['elsewhere']\nimport not_a_module_at_all\n",
        "import beside\n@beside.x\ndef f(): ...\nimport not_a_module_at_all\n",
        "import beside\ndef f(x=beside.x()): ...\nimport not_a_module_at_all\n",
        "import beside\nclass A:\n    x = beside.x()\nimport not_a_module_at_all\n",
        "try:\n    import roots.paths\nexcept OSError:\n    pass\nimport not_a_module_at_all\n",
        "import pathlib\nimport not_a_module_at_all\n",  # a file of that name is there, and is not what is imported
        "import marked, latin\n",
        "import both\n",
    ],
)
def test_imports_that_may_succeed_are_not_refused(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("beside.py", "set_up.py", "spread/part.py", "package/x.py"):
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("x = y = 1\n")
    (tmp_path / "mine" / "package" / "__init__.py").write_text("from . import x\n")
    (tmp_path / "mine" / "roots").mkdir()
    (tmp_path / "mine" / "roots" / "__init__.py").touch()
    (tmp_path / "mine" / "roots" / "paths.py").write_text("import sys\nsys.path.append('elsewhere')\n")
    (tmp_path / "mine" / "pathlib.py").write_text("import not_a_module_at_all\n")
    (tmp_path / "mine" / "marked.py").write_text("x = 1\n", encoding="utf-8-sig")
    (tmp_path / "mine" / "latin.py").write_text("# coding: latin-1\nx = 'é'\n", encoding="latin-1")
    (tmp_path / "mine" / "both").mkdir()
    (tmp_path / "mine" / "both" / "__init__.py").touch()
    (tmp_path / "mine" / "both.py").write_text("import not_a_module_at_all\n")
    (tmp_path / "mine" / "moving.py").write_text("import sys\nsys.path.append('elsewhere')\n")
    (tmp_path / "working.py").write_text("")
    path = tmp_path / "mine" / "mine.py"
    path.write_text(code)
    monkeypatch.chdir(tmp_path)
    refuse_missing_imports(path, "env.reward")


def test_file_may_say_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(): ...\n", encoding="utf-8-sig")
    assert find_in_file(f"{path}:f", "env.reward") == (path, "f")
    path.write_text("# coding: latin-1\ndef f(): return 'é'\n", encoding="latin-1")
    assert find_in_file(f"{path}:f", "env.reward") == (path, "f")
    path.write_text("def f(): return 'é'\n", encoding="latin-1")
    with pytest.raises(ConfigError, match=r"env\.reward: .*mine\.py:1: .*utf-8"):
        find_in_file(f"{path}:f", "env.reward")


def test_no_example_imports_what_is_missing() -> None:
    examples = sorted(Path("examples").rglob("*.py"))
    assert examples
    for path in examples:
        refuse_missing_imports(path, "env.reward")
