"""Libraries that do not fit beside the others: each in a virtual environment of its own, over that of the tests."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path

import pytest

HEADRACE = "from headrace.run.cli import main; main()"
ROOT = Path(__file__).parents[1]


def python_with(*needs: str, no_deps: tuple[str, ...] = ()) -> Path:
    """A Python that has ``needs`` too, kept from test run to test run; ``no_deps`` come without what they ask for."""
    name = f"{zlib.crc32(' '.join([sys.version, *needs, *no_deps]).encode()):08x}"
    home = Path(tempfile.gettempdir()) / f"test-venvs-of-headrace-{os.getuid()}" / name
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        _run(sys.executable, "-m", "venv", str(home))
        own = sysconfig.get_path("purelib", vars={"base": str(home)})
        outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in outer]
        Path(own, "beneath.pth").write_text("".join(lines))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if no_deps:
            _run(*pip, "--no-deps", *no_deps)
        if needs:
            _run(*pip, *needs)
        (home / "ready").touch()
    return python


def python_with_ray() -> Path:
    """The Python of a cluster's nodes."""
    return python_with("ray>=2.49")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr[-2000:]}")


def run_tests(python: Path, *tests: Path) -> subprocess.CompletedProcess[str]:
    """These tests under that Python, the fast ones."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *map(str, tests)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)


def run_with(python: Path, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``headrace`` under that Python, to its end."""
    command = [str(python), "-c", HEADRACE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)
