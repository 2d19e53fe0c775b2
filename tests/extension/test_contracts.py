"""The contracts of ``headrace.extend``: each exists, has a registry, and stands in the documents."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from headrace import extend

ROOT = Path(__file__).parents[2]
INTERNAL = {
    "headrace.endpoints",
    "headrace.example",
    "headrace.harnesses",
    "headrace.joining",
    "headrace.previews",
    "headrace.reports",
}
"""Groups by which the core finds its wings, and the one of a doctest."""
PLAIN = {"headrace.bundles", "headrace.env_options", "headrace.reductions", "headrace.shapings"}
"""Groups of plain tables, which have no class of their own to inherit."""
FUNCTIONS = {"headrace.readers", "headrace.sandboxes"}
"""Groups of functions."""


def test_each_contract_is_the_class_of_its_module() -> None:
    for name, contract in extend.CONTRACTS.items():
        assert vars(import_module(contract.module))[name] is getattr(extend, name)
    assert set(extend.__all__) == {*extend.CONTRACTS, "CONTRACTS", "Contract"}


def test_each_group_of_entry_points_has_a_contract_and_a_line_in_the_documents() -> None:
    files = (path for path in (ROOT / "src/headrace").rglob("*.py") if path.name != "extend.py")
    source = "".join(path.read_text() for path in files)
    groups = set(re.findall(r'group="(headrace\.\w+)"', source)) - INTERNAL
    page = (ROOT / "docs/extending.md").read_text()
    assert groups - PLAIN - FUNCTIONS == {contract.group for contract in extend.CONTRACTS.values()}
    assert [group for group in groups if f"`{group}`" not in page] == []


def test_the_contracts_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, headrace.extend; print([name for name in ('torch', 'typer', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
