"""Imports point down the list of rooms; an optional package is imported in one file, when it is chosen."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.gate.source import Finding, Source

ROOMS = (
    *("base", "models", "algo", "engine", "sync", "flow", "rollout", "learner", "control", "launch", "run", "policy"),
    *("wings", "testing", "headrace", "__main__"),
)
"""A room imports only rooms that stand before it, or itself. The core does without the wings."""

WITHOUT_TORCH = frozenset({"base", "flow"})
"""Rooms of pure data and pure decisions."""

KNOWN_WINGS = frozenset(
    {
        ("engine/config", "servers"),
        ("launch/clients/environment", "agents"),
        ("launch/config", "cluster"),
        ("launch/environments", "agents"),
        ("launch/environments", "cluster"),
        ("launch/hosts/environment", "bridges"),
        ("launch/hosts/served", "servers"),
        ("launch/hosts/trial", "bridges"),
        ("launch/local", "cluster"),
        ("launch/starters", "cluster"),
        ("launch/trial", "agents"),
        ("run/cli/ahead", "plan"),
        ("run/cli/bench", "bench"),
        ("run/cli/compare", "compare"),
        ("run/cli/compare", "recipes"),
        ("run/cli/demo", "recipes"),
        ("run/cli/join", "cluster"),
        ("run/cli/plan", "plan"),
        ("run/cli/recipes", "recipes"),
        ("run/cli/serve", "serve"),
        ("run/cli/view", "view"),
        ("run/observe/calibrating", "plan"),
        ("run/observe/pictures/plan", "plan"),
        ("run/session/config", "cluster"),
        ("run/session/config", "recipes"),
        ("run/session/prepare", "bridges"),
        ("run/session/prepare", "cluster"),
        ("run/session/references", "bridges"),
    }
)
"""Modules of the core that still import a wing, and the wing: to be turned round by registration. None may be added."""


def imports(source: Source) -> Iterator[Finding]:
    """Rule ``import``: only downwards, wherever in the file it stands."""
    if not source.room:
        return
    if source.room not in ROOMS:
        yield source.find(
            "import", 1, f"{source.room} is no room: add it to the list in tools/gate/imports.py", hard=True
        )
        return
    for node, module in imported(source):
        top, _, rest = module.partition(".")
        if source.room in WITHOUT_TORCH and top in ("torch", "transformers"):
            yield source.find("import", node, f"{source.room} does without {top}")
        if top == "headrace":
            target, _, inner = rest.partition(".")
            yield from _direction(source, node, target, inner.partition(".")[0])


def _direction(source: Source, node: ast.stmt, target: str, wing: str) -> Iterator[Finding]:
    room = target if target in ROOMS else "headrace"
    module = source.path.removeprefix("src/headrace/").removesuffix(".py")
    if room == "wings" and (module, wing) in KNOWN_WINGS:
        return
    if target != "__version__" and ROOMS.index(room) > ROOMS.index(source.room):
        yield source.find("import", node, f"{source.room} imports {room}, which stands above it")


def imported(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """Every import with the full dotted name of what it brings; a relative import is resolved."""
    package = Path(source.path).with_suffix("").parts[1:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node, f"{stem}.{alias.name}") for alias in node.names)


def optional_packages(pyproject: str) -> frozenset[str]:
    """The import names of the packages that only extras bring, the developer's extra aside."""
    extras = tomllib.loads(pyproject)["project"].get("optional-dependencies", {})
    names = [need for extra, needs in extras.items() if extra != "dev" for need in needs]
    return frozenset(re.split(r"[^A-Za-z0-9_-]", name)[0].replace("-", "_") for name in names) - {"headrace"}


def optional_imports(sources: Iterable[Source], packages: frozenset[str]) -> list[Finding]:
    """Rule ``optional``: each of ``packages`` in one file only, and inside a function."""
    homes: dict[str, list[tuple[Source, ast.stmt]]] = defaultdict(list)
    findings: list[Finding] = []
    for source in sources:
        for node, module in imported(source):
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
