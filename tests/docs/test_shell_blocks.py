"""Every command line in the documents is one that there is: verbs, options, settings, recipes, targets, extras."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from headrace.base.config import parse_override, validate
from headrace.run.cli.app import app
from headrace.run.session import load_config
from headrace.wings.serve.config import ServeConfig
from headrace.wings.supervised.config import DpoConfig, SftConfig, TuningConfig, load_tuning
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.test_toml_blocks import BASE, merged

INLINE = re.compile(r"`(headrace [a-z][^`\n]*)`")
PROSE = re.compile(r"^`{3,}.*?^`{3,} *$", re.MULTILINE | re.DOTALL)
ELSEWHERE = frozenset(
    {"source", "curl", "ray", "vllm", "run-api", "hf", "ssh", "cd", "docker", "kubectl", "openssl", "sbatch"}
)
"""Programs of others; what they take is theirs to say."""
TUNING: dict[str, type[TuningConfig]] = {"sft": SftConfig, "dpo": DpoConfig}
PROGRAM: Any = typer.main.get_command(app)


def lines_of(block: Block) -> Iterator[str]:
    """The commands of a block, without comments and prompts; of a session (``console``) without what it printed."""
    text = block.text.replace("\\\n", " ")
    for line in text.split("\n"):
        if block.language == "console":
            if line.startswith("$ "):
                yield line[2:]
        elif line.strip() and not line.lstrip().startswith("#"):
            yield line


def words_of(line: str) -> list[str]:
    """As a shell splits it, assignments in front left away."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


COMMANDS = [
    pytest.param(line, block, id=f"{block}: {line[:40]}")
    for block in blocks("sh", "console")
    for line in lines_of(block)
]
MENTIONED = sorted(
    {
        (page.relative_to(ROOT).as_posix(), match[1])
        for page in PAGES
        for match in INLINE.finditer(PROSE.sub("", page.read_text(encoding="utf-8")))
    }
)


@pytest.mark.parametrize(("line", "block"), COMMANDS)
def test_command_line_is_one_that_there_is(line: str, block: Block) -> None:
    assigned = re.fullmatch(r"[A-Z_]+=\$\((.*)\)", line)
    for command in re.split(r"&&|\|\|", assigned[1] if assigned else line):
        words = words_of(command)
        if words:
            check(words)


@pytest.mark.parametrize(("page", "command"), MENTIONED)
def test_command_that_the_text_mentions_is_one_that_there_is(page: str, command: str) -> None:
    headrace(words_of(command.replace("...", ""))[1:], whole=False)


def check(words: list[str]) -> None:
    """Refuse a command that the program, the Makefile or the package does not know."""
    name = words[0]
    if name in ELSEWHERE:
        rest = words[words.index("--") + 1 :] if "--" in words else []  # ray job submit -- headrace ...
        if rest:
            check(rest)
        return
    assert name in KNOWN, f"no checked program: {name}"
    KNOWN[name](words[1:])


def headrace(words: list[str], *, whole: bool = True) -> None:
    """Verb and options exist, and settings and recipes that are named; of what a text mentions, arguments may lack."""
    command = PROGRAM
    names: list[str] = []
    while hasattr(command, "commands"):
        if not words and not whole:
            return
        names.append(words[0])
        assert words[0] in command.commands, f"headrace {' '.join(names)}: there is no such verb"
        command, words = command.commands[words[0]], words[1:]
    if not whole:
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
        return
    values = command.make_context(" ".join(names), list(words)).params
    settings = list(values.get("overrides") or [])
    if names[0] == "serve":
        validate(ServeConfig, merged({"model": {"path": "m"}}, *map(parse_override, settings)))
    elif names[0] in TUNING:
        load_tuning(TUNING[names[0]], BASE, settings)
    elif names[0] in ("train", "demo", "eval", "plan", "compare"):
        load_config(BASE, settings, like=values.get("like") or "")


def make(words: list[str]) -> None:
    """The target exists."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


def python(words: list[str]) -> None:
    """A module can be found, a command runs; a file is one of the repository or one that a page has the reader make."""
    if words[0] == "-c":
        exec(compile(words[1], "-c", "exec"), {})  # noqa: S102 - the document's own code
    elif words[0] == "-m":
        assert words[1] in ("http.server",) or importlib.util.find_spec(words[1]), words[1]
    else:
        made = {block.title for block in blocks("python")} | {"my_environment.py"}
        assert words[0] in made or (ROOT / words[0]).exists(), f"nobody makes {words[0]}"


def pip(words: list[str]) -> None:
    """An extra of ours is one that there is."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"headrace\[([^\]]*)\]", " ".join(words)):
        assert set(named.split(",")) <= set(extras)


KNOWN: dict[str, Callable[[list[str]], None]] = {
    "headrace": headrace, "make": make, "python": python, "pip": pip,
}  # fmt: skip


def test_extras_that_the_documents_name_exist() -> None:
    for page in PAGES:
        for named in re.findall(r"headrace\[([a-z-]+)\]", page.read_text(encoding="utf-8")):
            pip([f"headrace[{named}]"])


def test_wrong_command_lines_are_found() -> None:
    for line in ("headrace trane run.toml", "make cheque", "pip install headrace[nothing]", "gcc x.c"):
        with pytest.raises(AssertionError):
            check(words_of(line))
    for line in ("headrace train run.toml --set flow.max_aeg=1", "headrace train --like nobody run.toml"):
        with pytest.raises(ValueError, match=r"did you mean|there is no recipe"):
            check(words_of(line))
