"""The rules on ownership: every task has an owner, every queue a bound, every random generator a seed, every exception
to a linter's rule a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tools.gate.source import Finding, Source, dotted_name

_QUEUES = frozenset({"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "JoinableQueue"})
_UNSEEDED = frozenset({"default_rng", "SeedSequence", "Random", "SystemRandom"})
_DRAWS = frozenset({"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"})
_NOQA = re.compile(r"#\s*noqa\b(?P<codes>:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?(?P<rest>.*)")


def owners(source: Source) -> Iterator[Finding]:
    """Yield findings of the rules ``task``, ``queue``, ``random``, ``getattr``, ``sleep`` and ``reason`` in
    ``source``."""
    is_library = source.path.startswith("src/")
    groups = _task_groups(source.nodes) if is_library else frozenset()
    for name, call in source.calls:
        if name == "time.sleep":
            yield source.find("sleep", call, "wait for what you wait for; time passes on the virtual clock")
        if is_library:
            yield from _library(source, name, call, groups)
    for line, _, comment in source.comments:
        if (match := _NOQA.match(comment)) and not re.search(r"\w", match["rest"]):
            yield source.find("reason", line, "say why beside the exception: # noqa: CODE - reason", hard=True)


def _library(source: Source, name: str, call: ast.Call, groups: frozenset[str]) -> Iterator[Finding]:
    last = name.rpartition(".")[2]
    arguments = len(call.args) + len(call.keywords)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "create_task" and name not in groups:
        yield source.find("task", call, "a task without an owner: use asyncio.TaskGroup")
    if last in _QUEUES and not _is_bounded(last, call):
        yield source.find("queue", call, f"{name} has no bound: give maxsize")
    if last in _UNSEEDED and not arguments:
        yield source.find("random", call, f"{name}() without a seed")
    if name.startswith("torch.") and last in _DRAWS and "generator" not in {k.arg for k in call.keywords}:
        yield source.find("random", call, f"{name} without generator= draws from the global state")
    if name == "hasattr" or (name == "getattr" and arguments == 3):
        yield source.find("getattr", call, f"{name} guesses: only adapters to foreign objects may")


def _task_groups(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return ``NAME.create_task`` for every name that is opened, assigned or annotated as a task group in ``nodes``."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.withitem(context_expr=ast.Call(func=function), optional_vars=ast.expr() as target):
                names |= {dotted_name(target)} if _is_group(function) else set()
            case ast.Assign(targets=[target], value=ast.Call(func=function)):
                names |= {dotted_name(target)} if _is_group(function) else set()
            case ast.Assign(targets=[target], value=ast.Name(id=source)) if source in names:
                names.add(dotted_name(target))
            case ast.AnnAssign(target=target, annotation=annotation) if _mentions_group(annotation):
                names |= {dotted_name(target), f"self.{dotted_name(target)}"}
            case ast.arg(arg=name, annotation=ast.expr() as annotation) if _mentions_group(annotation):
                # a parameter is often kept under its own name
                names |= {name, f"self.{name}", f"self._{name}"}
    return frozenset(f"{name}.create_task" for name in names)


def _is_group(function: ast.expr) -> bool:
    return dotted_name(function).rpartition(".")[2] in ("TaskGroup", "task_group")


def _mentions_group(annotation: ast.expr) -> bool:
    return "TaskGroup" in ast.unparse(annotation)


def _is_bounded(kind: str, call: ast.Call) -> bool:
    sizes = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "maxsize")]
    return kind != "SimpleQueue" and any(not (isinstance(size, ast.Constant) and size.value == 0) for size in sizes)
