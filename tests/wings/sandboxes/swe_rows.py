"""Rows as SWE-bench and SWE-smith write them, with the repository that they are about."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

FILES = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    "tests/test_core.py": (
        "from calc.core import add, double\n\n\ndef test_double():\n    assert double(2) == 4\n\n\n"
        "def test_nothing():\n    assert add(1, 0) == 1\n"
    ),
    ".gitattributes": "tests export-ignore\n",
}
MORE_TESTS = "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
AUTHOR = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **AUTHOR}
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, env=environment
    ).stdout


def make_row(repositories: Path) -> dict[str, Any]:
    """Write the repository ``me/calc``, whose second commit solves the task, and return the row of SWE-bench."""
    folder = repositories / "me" / "calc"
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "earlier")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "calc/core.py").write_text(FILES["calc/core.py"].replace("a - b", "a + b"))
    patch = git(folder, "diff")
    git(folder, "commit", "-q", "-a", "-m", "the solution is SECRET")
    (folder / "tests/test_core.py").write_text(FILES["tests/test_core.py"] + MORE_TESTS)
    (folder / "tests/test_new file.py").write_text("def test_new():\n    pass\n")
    git(folder, "add", "-A")
    test_patch = git(folder, "diff", "--cached")
    git(folder, "commit", "-q", "-m", "tests")
    return {
        "instance_id": "me__calc-1",
        "repo": "me/calc",
        "base_commit": base,
        "problem_statement": "add subtracts.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": '["tests/test_core.py::test_add"]',  # SWE-bench has them as text
        "PASS_TO_PASS": ["tests/test_core.py::test_double", "tests/test_core.py::test_nothing"],
    }
