"""The rules on imports: they follow the order of the packages, and each optional package is imported in one file,
lazily."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.gate.source import Finding, Source
from tools.house.graph import Graph
from tools.house.tree import Tree

PACKAGES = (
    *("base", "models", "algo", "engine", "sync", "flow", "rollout", "learner", "control", "launch", "run", "policy"),
    *("extend", "wings", "testing", "headrace", "__main__"),
)
"""The packages of the library in order: each imports only itself and earlier ones. The core does not import the
wings."""

WING = re.compile(r"headrace\.wings[\w.:]*")
"""Matches the dotted name of a wing, or of something in it."""
WITHOUT_TORCH = frozenset({"base", "flow"})
"""Packages that must not import torch."""


def imports(source: Source) -> Iterator[Finding]:
    """Yield findings of the rule ``import`` in ``source``: a package imports only earlier packages, also within
    functions."""
    if not source.package:
        return
    if source.package not in PACKAGES:
        yield source.find(
            "import", 1, f"{source.package} is no known package: add it to the list in tools/gate/imports.py", hard=True
        )
        return
    for node, module in imported_modules(source):
        top, _, rest = module.partition(".")
        if source.package in WITHOUT_TORCH and top in ("torch", "transformers"):
            yield source.find("import", node, f"{source.package} does without {top}")
        if top == "headrace":
            target = rest.partition(".")[0]
            yield from _direction(source, node, target)
    if PACKAGES.index(source.package) < PACKAGES.index("wings"):
        yield from _wings_by_name(source)


def _wings_by_name(source: Source) -> Iterator[Finding]:
    """Yield a finding for each string in the core that names a wing: wings register themselves by entry points."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WING.fullmatch(node.value):
            yield source.find("import", node, f"{source.package} names {node.value!r}: register it in pyproject.toml")


def _direction(source: Source, node: ast.stmt, target: str) -> Iterator[Finding]:
    package = target if target in PACKAGES else "headrace"
    if target != "__version__" and PACKAGES.index(package) > PACKAGES.index(source.package):
        yield source.find("import", node, f"{source.package} imports {package}, which stands above it")


def circles(root: Path) -> list[Finding]:
    """Return findings of the rule ``circle`` in the repository at ``root``: no modules import one another in a circle,
    also not by imports within functions or for type checkers."""
    tree = Tree(root)
    paths = {module.name: str(module.path) for module in tree.modules}
    return [
        Finding(
            rule="circle",
            path=paths[circle[0]],
            line=1,
            text=f"modules import one another in a circle: {', '.join(circle)}; move what they share below them",
        )
        for circle in Graph(tree).circles()
    ]


def imported_modules(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import statement of ``source`` with the full dotted name that it imports; relative imports are
    resolved."""
    package = Path(source.path).with_suffix("").parts[1:-1]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{stem}.{alias.name}") for alias in node.names)


def optional_packages(pyproject: str) -> frozenset[str]:
    """Return the import names of the packages that only extras install, without the extra for developers. ``pyproject``
    is the text of pyproject.toml."""
    extras = tomllib.loads(pyproject)["project"].get("optional-dependencies", {})
    names = [need for extra, needs in extras.items() if extra != "dev" for need in needs]
    return frozenset(re.split(r"[^A-Za-z0-9_-]", name)[0].replace("-", "_") for name in names) - {"headrace"}


def optional_imports(sources: Iterable[Source], packages: frozenset[str]) -> list[Finding]:
    """Return findings of the rule ``optional`` in ``sources``: each of ``packages`` is imported in one file only, and
    within a function."""
    homes: dict[str, list[tuple[Source, ast.stmt]]] = defaultdict(list)
    findings: list[Finding] = []
    for source in sources:
        for node, module in imported_modules(source):
            top = module.partition(".")[0]
            if top not in packages:
                continue
            homes[top].append((source, node))
            if node in source.tree.body:
                findings.append(source.find("optional", node, f"{top} is optional: import it when it is chosen"))
    for package, places in homes.items():
        for source, node in places[1:]:
            if source.path != places[0][0].path:
                findings.append(source.find("optional", node, f"{package} already has a home: {places[0][0].path}"))
    return findings
