"""Every Python block of the documents runs: those of a page one after the other, in an empty directory."""

from __future__ import annotations

import ast
import inspect
import warnings
from asyncio import Runner
from pathlib import Path
from types import FunctionType

import pytest

from tests.docs.pages import Block, blocks
from tests.docs.scenes import SCENES, nothing

STARTS_A_SERVER = "docs/serving.md"
PAGES = [
    pytest.param(page, marks=[pytest.mark.slow] if page == STARTS_A_SERVER else [])
    for page in sorted({block.page for block in blocks("python")})
]
ELSEWHERE = {"docs/quickstart.md": "ask.py", "docs/serving.md": "tools.py", "docs/tinker.md": "first.py"}
"""Blocks that want more than a scene: ``test_newcomer.py`` runs the first and ``tests/wings/tinker/test_document.py``
the last; ``tests/wings/serve/test_server_tools.py`` asks as the second does, of a model with a tokenizer of bytes."""


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLICY_TOKEN", "secret")
    with Runner() as runner, SCENES.get(page, nothing)(runner) as names, warnings.catch_warnings():
        if page == "docs/bridges.md":
            warnings.simplefilter("ignore")  # other libraries warn when they are imported
        for block in blocks("python"):
            if block.page == page and ELSEWHERE.get(page) != block.title:
                run(block, names, runner)


def run(block: Block, names: dict[str, object], runner: Runner) -> None:
    """Run a block where it stands, so that an error names the page and the line; ``await`` may stand anywhere."""
    text = "\n" * block.line + block.text
    code = compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names["__name__"] = "__docs__"
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(FunctionType(code, names)())  # type: ignore[arg-type]
    else:
        exec(code, names)  # noqa: S102 - the document's own code
