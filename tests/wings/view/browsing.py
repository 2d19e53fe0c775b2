"""``headrace view`` as a program, and Debian's Chromium to look at it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAGES = ("overview", "timeline", "flow", "episodes", "episodes/13.0", "steps", "system", "compare")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
READY = {"timeline": ".lanes canvas", "episodes/13.0": ".t", "steps": "figure.chart path.series"}
"""What stands on a page when it has been drawn; elsewhere its heading."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb"]

TOKEN = "sesame"
LET_IN = {"authorization": f"Bearer {TOKEN}"}


@contextmanager
def viewed(*arguments: str | Path) -> Iterator[str]:
    """The address that ``headrace view`` prints; it ends by Ctrl-C."""
    command = [
        sys.executable,
        "-c",
        "from headrace.run.cli import main; main()",
        "view",
        "--port",
        "0",
        "--no-browser",
        *map(str, arguments),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        try:
            yield _address(program)
        finally:
            program.terminate()
            assert program.wait(10) == 0


def _address(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    said = ""
    for line in program.stdout:
        said += line
        if found := re.search(r"open +(https?://\S+)", line):
            return found[1]
    raise AssertionError(said)


class Watched:
    """A tab that keeps what went wrong in it."""

    def __init__(self, tab: Any, base: str) -> None:
        tab.goto(base)  # brings the token, which stays in a cookie
        self.tab, self.base = tab, base.partition("?")[0]
        self.errors: list[str] = []
        self.asked: set[str] = set()
        self.meter: Any = None
        tab.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("request", lambda request: self.asked.add(request.url))

    def open(self, page: str, ready: str = "") -> None:
        """Go to a page and wait until it has been drawn."""
        self.tab.goto(f"{self.base}#/0/{page}")
        self.tab.wait_for_selector(ready or READY.get(page.partition("?")[0], "main h1"), timeout=10_000)
