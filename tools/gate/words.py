"""The rules on names and docstrings: of the fields of records, the methods of protocols, functions and classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tools.gate.source import Finding, FunctionNode, Source, dotted_name

_UNIT = re.compile(r"(_(s|ms|bytes|frac|tok_s|tokens|version|seed|std|min|max|T|N|S|G|B|L|V)|^num_\w+)$")
"""Matches field names that contain their unit or shape."""
_SAYS_IT = re.compile(
    r"""(?x) ^(
    name|kind|version|steps?|call|token|pid|slot|path|directory|dtype|shape|key|problem|remedy|text|level|row
    |seconds|tokens|prompt|request_ids?|chunks|entries|stats|spans|metrics|seed|numbers?|batch_size|max_age|lead|capacity
    |groups?|episodes?|tasks?|rewards?|submitted|trained|dropped|in_flight )$"""
)
"""Matches field names that mean the same everywhere, by docs/glossary.md."""
_NUMBERS = frozenset({"int", "float", "complex", "NDArray", "ndarray", "Tensor"})
"""Types that do not tell what a field measures, unlike a record, an enumeration, a text or a flag."""

NOT_OURS = frozenset({
    "Asked", "Board", "Companion", "Crew", "Desk", "Door", "Drought", "Errand", "Guest", "Held", "Hold", "Homes",
    "Journey", "Knock", "Met", "Parts", "Room", "Seat", "Seen", "Sheet", "Shift", "Terms", "Told", "Visit", "Wanted",
    "Way", "Wish",
})  # fmt: skip
"""Class names that are not terms of the field; docs/glossary.md has the terms to use instead."""


def unique_classes(sources: Iterable[Source]) -> list[Finding]:
    """Return findings in ``sources`` of the rules ``unique`` (each class name is used once) and ``word`` (no class name
    of :data:`NOT_OURS`)."""
    places: dict[str, list[tuple[Source, ast.ClassDef]]] = defaultdict(list)
    for source in sources:
        for cls in source.classes:
            places[cls.name].append((source, cls))
    findings: list[Finding] = []
    for name, found in places.items():
        first = found[0][0].path
        text = f"there is another class {name} in {first}: give each a name of its own"
        findings += [source.find("unique", cls, text) for source, cls in found[1:]]
        if name.lstrip("_") in NOT_OURS:
            text = f"{name} does not say what it is: take a word of the field (docs/glossary.md)"
            findings += [source.find("word", cls, text) for source, cls in found]
    return findings


def words(source: Source) -> Iterator[Finding]:
    """Yield findings of the rules ``field``, ``contract``, ``sentence`` and ``verb`` in ``source``."""
    if source.path.startswith("tests/"):
        yield from _sentences(source)
    if source.package or source.path.startswith(("lab/", "tools/")):
        yield from _verbs(source)
    if source.package:
        for cls in source.classes:
            yield from _fields(source, cls)
            yield from _contract(source, cls)


def _sentences(source: Source) -> Iterator[Finding]:
    for function in source.functions:
        if function.name.startswith("test_") and len(function.name.split("_")) < 4:
            yield source.find("sentence", function, f"{function.name} is no sentence: say what holds")


def _verbs(source: Source) -> Iterator[Finding]:
    """Yield a finding for each function of ``source`` whose name is ``of`` or ends in ``_of``, which is not a verb."""
    for function in source.functions:
        if function.name == "of" or function.name.endswith("_of"):
            text = f"{function.name} does not say what it does: name it by a verb, as get_, find_, make_ or from_"
            yield source.find("verb", function, text)


def _fields(source: Source, cls: ast.ClassDef) -> Iterator[Finding]:
    """Yield a finding for each setting of ``cls`` without a docstring, or if ``cls`` is another record, for each field
    whose meaning follows neither from its name nor its type, or whose ``None`` is not explained."""
    is_section = any(_last(base).endswith(("Section", "Config")) for base in cls.bases)
    if not is_section and (cls.name.startswith("_") or not _is_record(cls)):
        return
    docstring = ast.get_docstring(cls) or ""
    for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if _last(field.annotation) == "ClassVar":
            continue
        name = field.target.id
        needs = name != "kind" if is_section else _is_open(name, field.annotation, docstring)
        if needs and not name.startswith("_") and not _is_string(after):
            yield source.find("field", field, f"{cls.name}.{name} has no docstring: unit, shape, what None means")


def _is_open(name: str, annotation: ast.expr, docstring: str) -> bool:
    """Return whether the meaning of a field is unclear from its name, its type and the docstring of its class."""
    if re.search(rf"\b{name}\b", docstring):
        return False
    nodes = list(ast.walk(annotation))
    if any(isinstance(node, ast.Constant) and node.value is None for node in nodes):
        return "``None``" not in docstring
    types = {dotted_name(node).rpartition(".")[2] for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    return bool(types & _NUMBERS) and not _UNIT.search(name) and not _SAYS_IT.search(name)


def _contract(source: Source, cls: ast.ClassDef) -> Iterator[Finding]:
    if not any(_last(base) in ("Protocol", "ABC") for base in cls.bases):
        return
    for method in cls.body:
        if isinstance(method, FunctionNode) and not method.name.startswith("_") and not ast.get_docstring(method):
            yield source.find("contract", method, f"{cls.name}.{method.name} promises nothing: write its docstring")


def _is_record(cls: ast.ClassDef) -> bool:
    bases = {_last(base) for base in cls.bases}
    decorators = {_last(decorator) for decorator in cls.decorator_list}
    return bool(bases & {"Struct", "NamedTuple", "TypedDict"}) or "dataclass" in decorators


def _last(node: ast.expr) -> str:
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last(inner)
    return dotted_name(node).rpartition(".")[2]


def _is_string(statement: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
