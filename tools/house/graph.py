"""The import graph of the modules: its circles, and the imports of wings by the core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import networkx

from tools.house.tree import Layer, Module, Tree, statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement."""

    importer: str
    """Dotted name of the importing module."""
    imported: str
    """Dotted name of the imported module."""
    line: int


class Graph:
    """The imports between the modules of the package, including those within functions."""

    def __init__(self, tree: Tree) -> None:
        """Find the imports of all modules in ``tree``."""
        self._modules = {module.name: module for module in tree.modules if module.name}
        """The modules of the package, by their dotted names."""
        self.imports = [edge for module in self._modules.values() for edge in self._find_imports(module)]

    def circles(self) -> list[list[str]]:
        """Return the groups of modules that import one another in a circle."""
        graph: networkx.DiGraph[str] = networkx.DiGraph((edge.importer, edge.imported) for edge in self.imports)
        return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)

    def core_to_wings(self) -> list[Import]:
        """Return the imports of wings by core modules."""
        layers = {name: module.layer for name, module in self._modules.items()}
        return [
            edge
            for edge in self.imports
            if layers[edge.importer] is Layer.CORE and layers[edge.imported] is Layer.WINGS
        ]

    def _find_imports(self, module: Module) -> Iterator[Import]:
        is_package = module.path.stem == "__init__"
        for node in statements(module.tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for name in _names(node, module.name, is_package):
                target = name if name in self._modules else name.rpartition(".")[0]
                if target in self._modules and target != module.name:
                    yield Import(importer=module.name, imported=target, line=node.lineno)


def _names(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=stem, names=names, level=level):
            parts = importer.split(".")
            base = parts[: len(parts) - level + is_package] if level else []
            yield from (".".join([*base, *([stem] if stem else []), alias.name]) for alias in names)
