"""The rules on sizes: of files, functions, parameter lists and nesting."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.gate.source import Finding, FunctionNode, Source

FILE_LINES, FILE_LINES_HARD = 600, 900
FUNCTION_LINES, FUNCTION_LINES_HARD = 50, 80
"""Without the docstring."""
PARAMETERS = 5
"""Number of positional parameters besides self or cls. Keyword-only parameters are free, since callers write their
names."""
NESTING = 3

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""The nodes below which there are blocks; there are none in expressions."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def budgets(source: Source) -> Iterator[Finding]:
    """Yield findings of the rules ``file``, ``function``, ``parameters`` and ``nesting`` in ``source``; the hard limits
    cannot be excused."""
    num_lines = len(source.text.splitlines())
    if num_lines > FILE_LINES:
        yield source.find(
            "file", 1, f"{num_lines} lines, {FILE_LINES} are allowed: split it", hard=num_lines > FILE_LINES_HARD
        )
    for function in source.functions:
        yield from _check_function(source, function)


def _check_function(source: Source, function: FunctionNode) -> Iterator[Finding]:
    """Yield findings of the rules ``function``, ``parameters`` and ``nesting`` for one ``function`` of ``source``."""
    num_lines = length(function)
    if num_lines > FUNCTION_LINES:
        text = f"{function.name} has {num_lines} lines, {FUNCTION_LINES} are allowed: split it"
        yield source.find("function", function, text, hard=num_lines > FUNCTION_LINES_HARD)
    count = num_parameters(function)
    # the parameters of a command are its flags, which users write by name
    has_verbs = source.path.startswith("src/headrace/run/cli/") or source.path.endswith("/verb.py")
    is_verb = has_verbs and not function.name.startswith("_")
    if count > PARAMETERS and not is_verb:
        text = f"{function.name} has {count} positional parameters, {PARAMETERS} are allowed: make some keyword-only"
        yield source.find("parameters", function, text)
    depth = nesting(function.body)
    if depth > NESTING:
        text = f"{function.name} nests {depth} deep, {NESTING} is allowed: name the inner part"
        yield source.find("nesting", function, text)


def length(function: FunctionNode) -> int:
    """Return the number of lines of ``function`` from ``def`` to its end, without the docstring."""
    end = function.end_lineno or function.lineno
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return end - function.lineno + 1 - docstring


def num_parameters(function: FunctionNode) -> int:
    """Return the number of positional parameters of ``function`` besides ``self`` and ``cls``."""
    args = function.args
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, args.vararg) if arg]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def nesting(body: list[ast.stmt]) -> int:
    """Return the depth of nested blocks in the statements ``body``; ``elif`` adds nothing, and nested functions are
    counted separately."""
    return max((_depth(statement) for statement in body), default=0)


def _depth(statement: ast.AST) -> int:
    if isinstance(statement, _SCOPES):
        return 0
    children = [child for child in ast.iter_child_nodes(statement) if isinstance(child, _HOLD_STATEMENTS)]
    inner = max((_depth(child) for child in children if not _is_elif(statement, child)), default=0)
    chained = max((_depth(child) for child in children if _is_elif(statement, child)), default=0)
    return max(inner + isinstance(statement, _BLOCKS), chained)


def _is_elif(parent: ast.AST, child: ast.AST) -> bool:
    return (
        isinstance(parent, ast.If)
        and isinstance(child, ast.If)
        and parent.orelse == [child]
        and child.col_offset == parent.col_offset
    )
