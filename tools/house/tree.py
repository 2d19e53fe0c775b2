"""The Python files of a checkout, each parsed once, divided into core, wings and lab."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

PACKAGE = Path("src/headrace")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield every node of a syntax tree that is a statement or holds statements, and no expressions, which are most of
    the nodes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]


class Layer(StrEnum):
    """The part of the repository that a file belongs to."""

    CORE = "core"
    WINGS = "wings"
    LAB = "lab"


@dataclass(frozen=True)
class Module:
    """One Python file."""

    path: Path
    """Path relative to the root of the checkout."""
    layer: Layer
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def name(self) -> str:
        """The dotted name for imports; empty outside the package."""
        if not self.path.is_relative_to("src"):
            return ""
        parts = self.path.relative_to("src").with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def functions(self) -> list[FunctionNode]:
        """Every function and method, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FunctionNode)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """The numbers of the lines with code: neither blank, nor docstring, nor only a comment."""
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
        return frozenset(lines - self._docstring_lines)

    @cached_property
    def num_comments(self) -> int:
        """The number of comments on lines of their own, without directives for tools."""
        lines = (line.strip() for line in self.text.splitlines())
        return sum(line.startswith("#") and not line.startswith(("# gate:", "# noqa", "# type:")) for line in lines)

    @cached_property
    def _docstring_lines(self) -> set[int]:
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            # a string as a statement is a docstring of a module, a class, a function or a field
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines


class Tree:
    """The Python files of the package and the lab; tests, tools and examples are left out."""

    def __init__(self, root: Path, wings: Sequence[str] = ("wings",)) -> None:
        """Read the files below ``root``; ``wings`` are the folders and files of the package that count as wings."""
        self.root = root
        self._wings = tuple(Path(wing) for wing in wings)
        self.modules = sorted(self._read(), key=lambda module: module.path)

    def list_modules(self, layer: Layer) -> list[Module]:
        """Return the modules in ``layer``."""
        return [module for module in self.modules if module.layer is layer]

    def _read(self) -> Iterable[Module]:
        for base in (PACKAGE, Path("lab")):
            for path in (self.root / base).rglob("*.py"):
                inside = path.relative_to(self.root)
                yield Module(inside, self._layer(inside), path.read_text(encoding="utf-8"))

    def _layer(self, path: Path) -> Layer:
        if not path.is_relative_to(PACKAGE):
            return Layer.LAB
        inside = path.relative_to(PACKAGE)
        is_wing = any(inside.is_relative_to(wing) or inside == wing.with_suffix(".py") for wing in self._wings)
        return Layer.WINGS if is_wing else Layer.CORE
