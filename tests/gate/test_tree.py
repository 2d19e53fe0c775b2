"""The repository as it is now passes the gate's own checks."""

import gc
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gate import check
from tools.gate.imports import PACKAGES, optional_imports, optional_packages
from tools.gate.source import Source, read_sources
from tools.gate.words import unique_classes
from tools.house import Graph, Tree

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def listed(findings: list[object]) -> str:
    return "\n".join(["", *map(str, findings)])


@pytest.fixture(scope="module", autouse=True)
def without_collections() -> Iterator[None]:
    """Leave the garbage collector off: with it, parsing takes four times as long."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def library() -> list[Source]:
    """The sources of the library, each of which is parsed once for the tests below."""
    return list(read_sources(ROOT, "src"))


def test_library_has_no_finding(library: list[Source]) -> None:
    assert len(library) > 30
    findings = check(library)
    assert not findings, listed([*findings])


def test_tests_tools_and_examples_have_no_finding() -> None:
    findings = check(read_sources(ROOT, "tests", "tools", "lab", "examples"))
    assert not findings, listed([*findings])


def test_each_optional_package_has_one_home(library: list[Source]) -> None:
    findings = optional_imports(library, optional_packages(PYPROJECT))
    assert not findings, listed([*findings])


def test_each_class_has_a_name_of_its_own_in_the_words_of_the_field(library: list[Source]) -> None:
    findings = unique_classes(library)
    assert not findings, listed([*findings])


def test_rooms_stand_in_the_list_once() -> None:
    assert len(PACKAGES) == len(set(PACKAGES))


def test_the_core_imports_no_wing() -> None:
    """What a wing brings, the core finds through its entry point."""
    found = Graph(Tree(ROOT)).core_to_wings()
    assert not [each for each in found if not each.importer.startswith("headrace.testing")]


def test_constraints_pin_every_dependency_of_ci_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads(PYPROJECT)["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["dev"], "reasoning-gym>=0"]
    missing = {need.partition(">")[0].partition("[")[0].lower() for need in needs} - pinned.keys()
    assert missing == {"triton"}  # each build of torch names its own
    assert pinned["torch"] == "2.13.0"
