"""The newest client that the package index has, if it is newer than the one of constraints.txt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_newest_client_passes_what_the_pinned_one_passes(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(tmp_path)]
    subprocess.run([*install, "tinker"], check=True)
    version = "import tinker; print(tinker.__file__)"
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE.parents[2]}"}
    found = subprocess.run([sys.executable, "-c", version], env=own, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(tmp_path)), "the tests below use that one"
    names = ["test_client.py", "test_losses.py", "test_samplers.py"]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *(str(HERE / name) for name in names)]
    ran = subprocess.run(tests, env=own, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
