"""Two packages of a stranger, installed by pip as any other, in a directory of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = "from headrace.run.cli import main; main()"
Program = Callable[..., subprocess.CompletedProcess[str]]
EACH = """
import contextlib, io, json, sys
from headrace.run.cli import main

said, (run_file, *settings) = {}, sys.argv[1:]
for setting in settings:
    sys.argv = ["headrace", "train", run_file, "--dry-run", "--set", setting]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            main()
        except SystemExit as end:
            said[setting] = end.code, stderr.getvalue()
print(json.dumps(said))
"""
"""Each setting by itself, in one interpreter: most of the time goes into starting it."""


def install(home: Path, *packages: str) -> Path:
    """Install packages of this folder; their build backend is the file beside them, so that none has to be there."""
    for package in packages:
        source = home / "sources" / package
        shutil.copytree(HERE / package, source)
        shutil.copy(HERE / "wheel_of_files.py", source)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--target", str(home / "site")]
        done = subprocess.run([*pip, *options, str(source)], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
    return home / "site"


def program_with(site: Path) -> Program:
    """``headrace``, where the packages in ``site`` are installed."""

    def run(*arguments: str | Path, cwd: Path | None = None, code: str = PROGRAM) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "TERM": "dumb"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, cwd=cwd, env=environment
        )

    return run


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program where the stranger's package is installed."""
    return program_with(install(tmp_path_factory.mktemp("stranger"), "stranger"))


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program where a broken package is installed beside the stranger's."""
    return program_with(install(tmp_path_factory.mktemp("broken"), "stranger", "broken"))


def dry_runs(program: Program, run_file: Path, settings: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The exit code and standard error of a dry run with each of ``settings``."""
    done = program(run_file, *settings, cwd=run_file.parent, code=EACH)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found
