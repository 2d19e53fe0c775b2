"""The linter, the type checker and pytest are set up to find what the rules of the house forbid."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint(code: str, path: str = "src/headrace/flow/made_up.py") -> str:
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename", path, "-"]
    return subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import time\n\nx = time.monotonic()", "TID251"),
        ("from time import perf_counter", "TID251"),
        ("import datetime\n\nx = datetime.datetime.now()", "TID251"),
        ("import os\n\nx = os.environ['A']", "TID251"),
        ("from os import getenv", "TID251"),
        ("import random\n\nx = random.random()", "TID251"),
        ("import torch\n\ntorch.manual_seed(0)", "TID251"),
        ("import asyncio\n\nt = asyncio.create_task(f())", "TID251"),
        ("import numpy as np\n\nx = np.random.rand(3)", "NPY002"),
        ("eval('1')", "S307"),
        ("exec('1')", "S102"),
        ("try:\n    f()\nexcept Exception:\n    pass", "BLE001"),
        ("for a, b in zip(x, y):\n    f(a, b)", "B905"),
        ("for a in x:\n    f(lambda: a)", "B023"),
        ("async def f():\n    open('x')", "ASYNC230"),
        ("import asyncio\n\n\nasync def f(g):\n    asyncio.create_task(g())", "RUF006"),
        ("import os  # noqa", "PGH004"),
        ("def f():\n    return 1", "D103"),
        ("class C:\n    pass", "D101"),
    ],
)
def test_linter_finds_what_is_forbidden(code: str, rule: str) -> None:
    assert f": {rule} " in lint(f'"""M."""\n\n{code}\n')


@pytest.mark.parametrize(
    ("path", "code"), [("clock", "import time\n\nx = time.monotonic()"), ("environ", "import os\n\nx = os.environ")]
)
def test_clock_and_environment_are_read_in_their_one_file(path: str, code: str) -> None:
    assert "All checks passed" in lint(f'"""M."""\n\n{code}\n', f"src/headrace/base/{path}.py")


def test_warning_in_a_test_is_an_error() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_type_checker_is_strict(tmp_path: Path) -> None:
    file = tmp_path / "untyped.py"
    file.write_text("def f(x):\n    return x\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir"]
    done = subprocess.run([*command, str(tmp_path), str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "[no-untyped-def]" in done.stdout, done.stdout + done.stderr
