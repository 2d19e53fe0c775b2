"""The search for calls that block the event loop, in the source of ``async`` functions."""

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


def blocking_calls(tree: ast.Module, name: str = "") -> list[tuple[int, str, str]]:
    """Return the line, call and function of every blocking call in an ``async def``. With a ``name``, only the
    definition of that name and the definitions that it mentions are searched.

    >>> code = "from time import sleep as nap\\nasync def step():\\n    nap(1)\\n    def later(): nap(2)\\n"
    >>> blocking_calls(ast.parse(code))
    [(3, 'time.sleep', 'step')]
    """
    names = _imported(tree)
    nodes = tree.body if not name else _mentioned(tree, name)
    functions = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.AsyncFunctionDef))
    return sorted(
        (call.lineno, called, function.name)
        for function in functions
        for call in _own_calls(function)
        if (called := _resolved(call.func, names)) in _CALLS
    )


def _mentioned(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the functions and classes at the top level of a file that ``name`` reaches: the definition of that name,
    those that it mentions, and so on."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
    found: dict[str, ast.stmt] = {}
    pending = [name]
    while pending:
        name = pending.pop()
        if name in defined and name not in found:
            found[name] = defined[name]
            pending += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    return list(found.values())


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full dotted name behind each name that the imports of a file bind."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _own_calls(function: ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    """Yield the calls in the body of an ``async`` function that run in the event loop: without those in nested
    functions."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call):
            yield node
        pending.extend(ast.iter_child_nodes(node))


def _resolved(called: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted name of a called function, whose first part is replaced by its full name in ``names``, the
    imports of its file; an empty string if it is no such name."""
    parts: list[str] = []
    while isinstance(called, ast.Attribute):
        parts.append(called.attr)
        called = called.value
    if not isinstance(called, ast.Name):
        return ""
    return ".".join([names.get(called.id, called.id), *reversed(parts)])
