"""One file of Python code, parsed once, and the findings of rules in it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_EXCUSE = re.compile(r"#\s*gate:\s*(?P<rule>[a-z-]+)\s+-\s+(?P<reason>\S.*)")

_DIRECTIVE = re.compile(r"#.*\b(gate:|noqa)")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A violation of a rule."""

    rule: str
    path: str
    line: int
    text: str
    hard: bool = False
    """Whether the finding cannot be excused."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuse:
    """A comment that excuses a rule, with its reason."""

    rule: str
    line: int
    whole_file: bool


@dataclass(frozen=True)
class Source:
    """The code of one file; ``path`` is relative to the root of the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree, level by level. Rules look at this list: a walk of their own through the tree
        takes many times as long."""
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> list[tuple[int, int, str]]:
        """Line, column and text of every comment, or nothing for a file in which no comment is a directive to a tool:
        to read its tokens would take as long as all rules together."""
        if not _DIRECTIVE.search(self.text):
            return []
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(token.start[0], token.start[1], token.string) for token in tokens if token.type == tokenize.COMMENT]

    @cached_property
    def functions(self) -> list[FunctionNode]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, FunctionNode)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class, nested ones included."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Every call with the dotted name of the called function, which is empty if it has none."""
        return [(dotted_name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def package(self) -> str:
        """The top-level package of the library that the file belongs to; ``headrace`` for the package itself, empty for
        files outside of it."""
        parts = Path(self.path).with_suffix("").parts
        if parts[:2] != ("src", "headrace"):
            return ""
        return "headrace" if parts[2:] in ((), ("__init__",)) else parts[2]

    def excuses(self) -> Iterator[Excuse]:
        """Yield the comments that excuse a rule."""
        for line, column, comment in self.comments:
            if match := _EXCUSE.match(comment):
                yield Excuse(rule=match["rule"], line=line, whole_file=column == 0)

    def find(self, rule: str, node: ast.AST | int, text: str, *, hard: bool = False) -> Finding:
        """Return a finding of ``rule`` with this ``text`` at ``node``, which may be a line number; ``hard`` findings
        cannot be excused."""
        line = node if isinstance(node, int) else int(getattr(node, "lineno", 1))
        return Finding(rule=rule, path=self.path, line=line, text=text, hard=hard)


Rule = Callable[[Source], Iterable[Finding]]


def read_sources(root: Path, *folders: str) -> list[Source]:
    """Return every Python file below ``folders`` of the repository at ``root``."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [Source(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]


def excuse(source: Source, findings: Iterable[Finding]) -> list[Finding]:
    """Return ``findings`` in ``source`` without the excused ones, and a finding for every unused excuse."""
    excuses = list(source.excuses())
    used: set[Excuse] = set()
    kept: list[Finding] = []
    for finding in findings:
        matching = {
            e
            for e in excuses
            if e.rule == finding.rule and (e.whole_file or finding.line == e.line) and not finding.hard
        }
        used |= matching
        if not matching:
            kept.append(finding)
    kept += [source.find("excuse", e.line, f"excuses no {e.rule!r}: remove it") for e in excuses if e not in used]
    return sorted(kept, key=lambda finding: finding.line)


def dotted_name(node: ast.expr) -> str:
    """Return ``a.b.c`` if the expression ``node`` has this form, and an empty text for any other."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            left = dotted_name(value)
            return f"{left}.{attr}" if left else ""
    return ""
