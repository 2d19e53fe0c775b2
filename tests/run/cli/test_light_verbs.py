"""Verbs that only look or explain answer at once: they import no library of models."""

import subprocess
import sys

CODE = """
import sys
from typer.testing import CliRunner
from headrace.run.cli.app import app

looks = [[verb, "nowhere"] for verb in ("ledger", "status", "view", "report", "trace", "watch")]
for words in (["--help"], ["recipes"], ["train", "--help"], *looks):
    CliRunner().invoke(app, words)
    heavy = [name for name in ("torch", "transformers", "ray", "playwright") if name in sys.modules]
    assert not heavy, f"headrace {' '.join(words)} imports {heavy}"
"""


def test_verbs_that_only_look_import_no_library_of_models() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
