"""The figures of a checkout."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from statistics import median

from tools.gate.budgets import length
from tools.house import ways
from tools.house.graph import Graph
from tools.house.tree import PACKAGE, Layer, Module, Tree

SHORT_FILE = 40
"""Number of lines below which a file counts as short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The figures of one checkout."""

    top_level_entries: int
    """Number of folders and files directly below the package."""
    files: int
    """Number of Python files of the package."""
    files_lab: int
    lines_core: int
    """Number of code lines."""
    lines_wings: int
    lines_src: int
    lines_lab: int
    files_under_40: int
    """Number of files with fewer than 40 lines, without ``__init__``."""
    function_median: float
    """Median number of lines of a function without its docstring."""
    function_p99: int
    function_max: int
    class_names: int
    repeated_class_names: int
    """Number of class names that are used for more than one class."""
    comments: int
    """Number of comments on lines of their own."""
    settings: int
    """Number of fields in the sections of a run file."""
    protocols: int
    protocols_of_one: int
    """Number of protocols that exactly one class of the package implements."""
    core_imports_wings: int
    circles: int
    """Number of groups of modules that import one another in a circle."""
    token_files: int
    """Number of files through which a token passes from its prompt to its gradient; 0 if ``ways.py`` does not describe
    the checkout."""
    token_records: int
    """Number of classes that hold it one after another, from the engine's sampler on."""
    weight_files: int
    """Number of files through which a weight passes from the optimizer to the logits."""

    def rows(self) -> dict[str, float]:
        """Return each figure by its name."""
        return asdict(self)


def measure(tree: Tree) -> Measures:
    """Compute all figures of ``tree``."""
    src = tree.list_modules(Layer.CORE) + tree.list_modules(Layer.WINGS)
    graph = Graph(tree)
    # a tree without functions counts as one function of no lines, so that median and maximum exist
    lengths = sorted(length(function) for module in src for function in module.functions) or [0]
    names = Counter(cls.name for module in src for cls in module.classes)
    implementations = protocols(src)
    return Measures(
        top_level_entries=len(
            {module.path.relative_to(PACKAGE).parts[0] for module in src} - {"__init__.py", "__main__.py"}
        ),
        files=len(src),
        files_lab=len(tree.list_modules(Layer.LAB)),
        lines_core=_code(tree.list_modules(Layer.CORE)),
        lines_wings=_code(tree.list_modules(Layer.WINGS)),
        lines_src=_code(src),
        lines_lab=_code(tree.list_modules(Layer.LAB)),
        files_under_40=sum(len(module.text.splitlines()) < SHORT_FILE for module in src if not _is_init(module)),
        function_median=median(lengths),
        function_p99=lengths[len(lengths) * 99 // 100],
        function_max=lengths[-1],
        class_names=len(names),
        repeated_class_names=sum(count > 1 for count in names.values()),
        comments=sum(module.num_comments for module in src),
        settings=sum(_settings(cls) for module in src for cls in module.classes),
        protocols=len(implementations),
        protocols_of_one=sum(len(classes) == 1 for classes in implementations.values()),
        core_imports_wings=len(graph.core_to_wings()),
        circles=len(graph.circles()),
        token_files=0 if ways.find_broken_hops(tree, ways.TOKEN) else ways.count_files(ways.TOKEN),
        token_records=0 if ways.find_broken_hops(tree, ways.TOKEN) else ways.count_records(ways.TOKEN),
        weight_files=0 if ways.find_broken_hops(tree, ways.WEIGHT) else ways.count_files(ways.WEIGHT),
    )


def repeated_names(tree: Tree) -> dict[str, list[str]]:
    """Return the class names that are used for more than one class in ``tree``, with their places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in tree.list_modules(Layer.CORE) + tree.list_modules(Layer.WINGS):
        for cls in module.classes:
            places[cls.name].append(f"{module.path}:{cls.lineno}")
    return {name: lines for name, lines in sorted(places.items()) if len(lines) > 1}


def protocols(modules: list[Module]) -> dict[str, list[str]]:
    """Return every protocol in ``modules`` with the classes that have all its methods, including inherited ones."""
    classes = {cls.name: cls for module in modules for cls in module.classes}
    wanted = {name: _methods(cls) for name, cls in classes.items() if "Protocol" in _bases(cls)}
    has = {name: _inherited(name, classes) for name in classes if name not in wanted}
    return {
        protocol: [name for name, methods in has.items() if wanted[protocol] and wanted[protocol] <= methods]
        for protocol in wanted
    }


def _inherited(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    methods: set[str] = set()
    pending, known = [name], set[str]()
    while pending:
        current = pending.pop()
        if current in classes and current not in known:
            known.add(current)
            methods |= _methods(classes[current])
            pending += _bases(classes[current])
    return methods


def _methods(cls: ast.ClassDef) -> set[str]:
    return {
        node.name
        for node in cls.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (not node.name.startswith("_") or node.name == "__call__")
    }


def _bases(cls: ast.ClassDef) -> list[str]:
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in cls.bases]
    return [ast.unparse(base).rpartition(".")[2] for base in plain]


def _settings(cls: ast.ClassDef) -> int:
    if not any(base.endswith(("Section", "Config")) for base in _bases(cls)):
        return 0
    return sum(isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation) for node in cls.body)


def _code(modules: list[Module]) -> int:
    return sum(len(module.code_lines) for module in modules)


def _is_init(module: Module) -> bool:
    return module.path.name in ("__init__.py", "__main__.py")
