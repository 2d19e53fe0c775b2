"""What the documents name is there: files, headings, settings; and every page can be found."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.engine.config import ENGINES, EngineSettings
from headrace.run.session import RunConfig, load_config
from headrace.wings.serve.config import ServeConfig
from headrace.wings.supervised.config import DistillConfig, DpoConfig, SftConfig, TuningConfig, load_tuning
from tests.docs.pages import BLOCKS, PAGES, ROOT
from tests.docs.test_toml_blocks import BASE, merged
from tools.site.building import LINK, prose_lines

LANGUAGES = {"python", "toml", "sh", "console", "text", "json"}
SECTIONS = "model|data|env|engine|flow|algo|learner|sync|launch|observe|run"
DOTTED = re.compile(rf"`((?:{SECTIONS}|serve)\.[a-z_.]+[a-z_])(?: = [^`]*)?`")
ASSIGNED = re.compile(rf"`((?:{SECTIONS})\.[a-z_.]+ = [^`\n]+)`")
UNKNOWN = re.compile("does not exist|should be|expected|is not a setting")
TUNED: list[type[TuningConfig]] = [SftConfig, DpoConfig, DistillConfig]
NAMES = {page: page.relative_to(ROOT).as_posix() for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")}
OTHERS = {"docs/coming_from.md": {"data.", "model.name", "trainer."}}
"""Settings of other libraries, by page."""


def test_every_block_says_its_language() -> None:
    wrong = [str(block) for block in BLOCKS if block.language not in LANGUAGES]
    assert not wrong, "name one of " + ", ".join(sorted(LANGUAGES))


@pytest.mark.parametrize("page", NAMES, ids=NAMES.get)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    lines = prose_lines(page.read_text(encoding="utf-8"))
    for number, line in lines:
        for link in re.finditer(r"\]\(([^()\s]+)\)", line):
            target, _, anchor = link[1].partition("#")
            if ":" in target:
                continue
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{NAMES[page]}:{number + 1}: {link[1]} leads to nothing"
            if anchor:
                assert anchor in anchors(file), f"{NAMES[page]}:{number + 1}: {link[1]}: no such heading"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as a forge and the site make them."""
    headings = [
        line.lstrip("#").strip() for _, line in prose_lines(page.read_text(encoding="utf-8")) if line.startswith("#")
    ]
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    foreign = OTHERS.get(NAMES[page], set())
    for name in sorted(set(DOTTED.findall(text))):
        if name.endswith((".py", ".toml", ".jsonl", ".json", ".md")) or any(name.startswith(each) for each in foreign):
            continue
        assert is_setting(name), f"{NAMES[page]}: `{name}` is no setting"


ASSIGNMENTS = sorted(
    {(NAMES[page], match[1]) for page in PAGES for match in ASSIGNED.finditer(page.read_text(encoding="utf-8"))}
)


@pytest.mark.parametrize(("page", "line"), ASSIGNMENTS)
def test_values_that_a_page_names_are_ones_that_there_are(page: str, line: str) -> None:
    """By itself a line may lack what it needs beside it; its name and its value are known."""
    if "..." not in line:
        refused = refusals(tomllib.loads(line))
        assert not all(map(UNKNOWN.search, refused)), f"{page}: {refused[0]}"


def refusals(tree: dict[str, Any]) -> list[str]:
    """What is wrong with it as a run file of each verb that takes one; empty where nothing is."""
    model = {"model": BASE["model"]}
    loads: list[Callable[[], object]] = [lambda: load_config(merged(BASE, tree), [])]
    loads += [partial(load_tuning, kind, merged(model, tree)) for kind in TUNED]
    found = []
    for load in loads:
        try:
            load()
            found.append("")
        except ConfigError as error:
            found.append(error.problem)
    return found


def test_wrong_values_are_refused_in_the_words_that_are_looked_for() -> None:
    for line in ('sync.interrupt = "recompute"', 'algo.loss = "gppo"', "flow.max_age = -1", "flow.max_agee = 1"):
        assert all(map(UNKNOWN.search, refusals(tomllib.loads(line))))


def is_setting(name: str) -> bool:
    """Whether a run file of some verb (or ``headrace serve``) has it, in one of the kinds of its tables."""
    first, *rest = name.split(".")
    kinds: list[Any] = [ServeConfig] if first == "serve" else [RunConfig, *TUNED]
    for key in (first, *rest):
        kinds = [field for kind in kinds for field in fields(kind, key)]
    return bool(kinds)


def fields(kind: Any, key: str) -> list[Any]:
    """What ``key`` of a record may be; of a union or a list, of any record in it."""
    if kind is EngineSettings:
        sections = {ENGINES.load(name).settings for name in ENGINES} - {EngineSettings}
        return [found for section in sections for found in fields(section, key)]
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind.model_fields[key].annotation] if key in kind.model_fields else []
    return [found for part in get_args(kind) for found in fields(part, key)]


def test_settings_are_told_from_what_is_none() -> None:
    for name in ("flow.max_age", "algo.loss.clip_low", "learner.reference.decay", "serve.grace_s"):
        assert is_setting(name)
    for name in ("flow.max_agee", "algo.loss.clip_lower", "serve.nothing"):
        assert not is_setting(name)


def test_every_page_stands_in_the_navigation() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = leaves(nav)
    assert len(listed) == len(set(listed))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert set(listed) == pages, "name each page of docs/ once in the nav of zensical.toml"


def leaves(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def test_links_out_of_the_documents_are_all_seen() -> None:
    assert LINK.findall("a [`b`](../c.py#d) and [[e]](f.md)") == [("[`b`]", "../c.py", "#d"), ("[[e]]", "f.md", "")]
