"""The search for calls that block the event loop, in the source code of ``async`` functions. ``headrace check env``
warns about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_CALLS = frozenset(
    {
        *("time.sleep", "input", "os.system", "os.wait", "os.waitpid"),
        *("urllib.request.urlopen", "urllib.request.urlretrieve"),
        *(f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output", "getoutput")),
        *("socket.create_connection", "socket.getaddrinfo", "socket.gethostbyname", "select.select"),
        *(
            f"{package}.{verb}"
            for package in ("requests", "httpx")
            for verb in ("get", "post", "put", "patch", "delete", "head", "request")
        ),
    }
)  # fmt: skip
"""The full names of functions that block."""


def find_blocking_calls(tree: ast.Module, name: str = "") -> list[tuple[int, str, str]]:
    """Return the line number, the called function and the enclosing function of every blocking call in an ``async def``
    of ``tree``, the syntax tree of a file. With a ``name``, only the definition of that name and the definitions that
    it uses are searched.

    >>> code = "from time import sleep as nap\\nasync def step():\\n    nap(1)\\n    def later(): nap(2)\\n"
    >>> find_blocking_calls(ast.parse(code))
    [(3, 'time.sleep', 'step')]
    """
    names = _import_names(tree)
    nodes = tree.body if not name else _definitions_used(tree, name)
    functions = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.AsyncFunctionDef))
    return sorted(
        (call.lineno, called, function.name)
        for function in functions
        for call in _own_calls(function)
        if (called := _full_name(call.func, names)) in _CALLS
    )


def _definitions_used(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the top-level functions and classes that the definition ``name`` uses, directly or through other
    definitions, including the definition itself."""
    definition_types = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    definitions = {node.name: node for node in tree.body if isinstance(node, definition_types)}
    used: dict[str, ast.stmt] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in definitions and name not in used:
            used[name] = definitions[name]
            pending += [node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)]
    return list(used.values())


def _import_names(tree: ast.Module) -> dict[str, str]:
    """Return the full dotted name for each name that an import in the file binds."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _own_calls(function: ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    """Yield the calls in the body of an ``async`` function that run in the event loop. Calls in nested functions are
    skipped."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending.extend(ast.iter_child_nodes(node))


def _full_name(called: ast.expr, names: dict[str, str]) -> str:
    """Return the full dotted name of a called function. The first part of the name is replaced by its full name in
    ``names``, the imports of the file. The result is empty if the call is not to a dotted name."""
    parts: list[str] = []
    while isinstance(called, ast.Attribute):
        parts.append(called.attr)
        called = called.value
    if not isinstance(called, ast.Name):
        return ""
    return ".".join([names.get(called.id, called.id), *reversed(parts)])
