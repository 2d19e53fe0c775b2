"""Import of Python files that the user wrote, such as losses and rewards, and checks of the files before that."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
import traceback
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

from headrace.base.errors import ConfigError


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """A module loader that always compiles the source code. Cached bytecode could be outdated, since Python compares
    modification times in whole seconds only."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module, compiled from the source file without the bytecode cache."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_file(path: Path) -> ModuleType:
    """Import the Python file ``path`` and return the module. The file is executed once per process, and again after it
    has changed.

    The file's folder is added to ``sys.path``, so that the file can import other files in this folder. The module is
    registered in ``sys.modules``, as dataclasses and pickle require. Raises :class:`ConfigError` with file and line for
    any failure.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"there is no file {path}: {error.strerror}", remedy="give the path of a .py file") from None
    return _load(path.resolve(), (state.st_mtime_ns, state.st_size))


@cache
def _load(path: Path, state: tuple[int, int]) -> ModuleType:
    """Import the file ``path`` and return the module. ``state``, the modification time in nanoseconds and the size in
    bytes, is part of the cache key, so that a changed file is imported again."""
    name = f"headrace_user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    loader = _UncachedLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of user code: any failure becomes a ConfigError
        del sys.modules[name]
        raise ConfigError(f"{path} cannot be imported: {where(error, str(path))}", remedy="fix it") from None
    return module


def find_in_file(reference: str, setting: str) -> tuple[Path, str]:
    """Split ``reference``, in the form ``file.py:name``, into the path and the name, and check that the file defines
    the name. The file is parsed, but not executed. Raises :class:`ConfigError`, which names ``setting``, the setting
    with the value ``reference``."""
    file, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(
            f"{setting}={reference!r} does not name a function or class of a file",
            remedy=f"write {setting} = 'my_file.py:my_name'",
        )
    path = Path(file)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{setting}={reference!r}: {file} does not exist", remedy="give the path of the file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{setting}={reference!r}: {file} cannot be read: {error}", remedy="make it readable"
        ) from None
    except SyntaxError as error:
        raise ConfigError(f"{setting}: {file}:{error.lineno or 1}: {error.msg}", remedy="fix that line") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {file} is not Python: {error}", remedy="name a .py file") from None
    names = top_level_names(tree)
    if name not in names:
        raise ConfigError(
            f"{setting}={reference!r}: {file} defines no {name!r}",
            remedy=f"name one of: {', '.join(sorted(names)) or 'nothing is defined there'}",
        )
    return path, name


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that the parsed file ``tree`` defines or imports at its top level."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
    return names


_HARMLESS = frozenset(
    {
        "datasets", "headrace", "math_verify", "msgspec", "numpy", "openai", "pandas", "pydantic", "regex", "requests",
        "scipy", "sympy", "torch", "transformers",
    }
)  # fmt: skip
"""Installed packages whose import, like that of the standard library, does not change where Python finds modules."""
_PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
    ast.unaryop, ast.operator, ast.expr_context,
)  # fmt: skip
"""The types of syntax nodes that a plain value consists of: a value that is computed without a call."""


def refuse_missing_imports(path: Path, setting: str) -> None:
    """Raise :class:`ConfigError` for the first module that the file ``path`` imports and that this Python does not
    have, before the file is executed. ``setting`` is the setting that names the file.

    Only an import that must certainly fail is refused. The check parses the top level of the file, and of the files in
    the same folder that it imports, and stops at the first statement that could change where Python finds modules. The
    following statements cannot, and the check continues after them: imports of the standard library, of a few
    well-known packages (:data:`_HARMLESS`) and of files in the same folder that were checked to their end; definitions
    of functions without decorators; and assignments of plain values. Any other import is the last one that is checked,
    since a package may add a folder or a finder when it is imported.
    """
    path = path.resolve()
    _ImportChecker(path.parent, setting).check(path)


@dataclass(frozen=True, slots=True)
class _ImportChecker:
    """The checker of :func:`refuse_missing_imports` for the files in one folder."""

    folder: Path
    """The folder of the files."""
    setting: str
    """The setting that names the first file, for errors."""
    checked_files: set[Path] = field(default_factory=set)
    """The files that have been checked, or are being checked."""

    def check(self, path: Path) -> bool:
        """Raise :class:`ConfigError` at the first import of the file ``path`` that must fail. Return true if the whole
        file was checked and none of its statements can change where Python finds modules; false if the check stopped at
        a statement that could."""
        self.checked_files.add(path)
        for node in _parsed(path, self.setting).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                place = f"{self.setting}: {path}:{node.lineno}"
                if not all(self._is_harmless(module, path, place) for module in _imported(node)):
                    return False
            elif not _is_plain(node):
                return False
        return True

    def _is_harmless(self, module: str, path: Path, location: str) -> bool:
        """Return whether importing ``module`` in the file ``path`` certainly does not change where Python finds
        modules. Raises :class:`ConfigError` if that import must fail. ``location`` names the setting, the file and the
        line in the error."""
        if module.startswith("."):
            if path.name == "__init__.py":
                return False
            raise ConfigError(
                f"{location}: a relative import ({module}), and the file is not loaded as part of a package",
                remedy=f"write the name without dots: files in {self.folder} can be imported by their names",
            )
        first = module.partition(".")[0]
        known = first in sys.stdlib_module_names or first in _HARMLESS
        beside = _find_beside(first, self.folder)
        if beside is None:
            if not _is_found(first, self.folder):
                raise ConfigError(
                    f"{location}: there is no module {first!r} in this Python ({sys.executable})",
                    remedy=f"install the package that has it ({sys.executable} -m pip install {first}, if it is called "
                    f"so), put {first}.py into {self.folder}, or correct the name",
                )
            return known
        if known or first in sys.modules:
            return False  # which of the two is imported depends on the modules that the worker has imported before
        # the submodules that a package imports are not checked
        return beside in self.checked_files or (self.check(beside) and beside.name != "__init__.py")


def _parsed(path: Path, setting: str) -> ast.Module:
    """Return the syntax tree of the file ``path``, parsed from bytes, since a file may declare its encoding. Raises
    :class:`ConfigError`, which names ``setting``, if the file cannot be read or parsed."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{setting}: {path}:{error.lineno or 1}: {error.msg}", remedy="fix that line") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error}", remedy="make it a readable .py file") from None


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the names of the modules that a statement imports; a relative import keeps its leading dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")]


def _find_beside(module: str, folder: Path) -> Path | None:
    """Return the file in ``folder`` that ``import module`` would execute: the ``__init__.py`` of a package, or else a
    module file. Return ``None`` if there is neither."""
    files = (folder / module / "__init__.py", folder / f"{module}.py")
    return next((file for file in files if file.is_file()), None)


def _is_plain(node: ast.stmt) -> bool:
    """Return whether the statement ``node`` executes no code from elsewhere: it is a constant, assigns plain values to
    names, or defines a function without decorators or calls in its signature."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and all(
                isinstance(part, _PLAIN) for part in ast.walk(value)
            )
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            signature = [node.args, *([node.returns] if node.returns else [])]
            calls = any(isinstance(part, ast.Call) for each in signature for part in ast.walk(each))
            return not node.decorator_list and not calls
    return False


def _is_found(module: str, folder: Path) -> bool:
    """Return whether a worker process could import ``module`` from ``folder``, from the working directory, or from the
    locations where this process finds modules. The module itself is not imported."""
    if module in sys.modules or importlib.util.find_spec(module) is not None:
        return True
    return importlib.machinery.PathFinder.find_spec(module, [str(folder), str(Path.cwd())]) is not None


def where(error: BaseException, source: str | None) -> str:
    """Return an error as ``Kind: message at file.py:12``. The location is the deepest line of the file ``source`` in
    the traceback; it is omitted if ``source`` is ``None`` or does not occur in the traceback. This function
    never raises an error, even if the error cannot be printed."""
    name = type(error).__name__
    try:
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if source is not None and Path(frame.filename) == Path(source)]
        place = f" at {Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""
        if isinstance(error, SyntaxError) and error.filename:
            place, error = f" at {Path(error.filename).name}:{error.lineno}", SyntaxError(error.msg)
        words = " ".join(str(error).split())[:200]
    except BaseException:  # noqa: BLE001 - the user's ``__str__`` is user code too
        return f"{name}, which cannot be printed"
    return f"{name}: {words}{place}" if words else f"{name}{place}"
