"""Import of Python files that the user wrote, such as losses and rewards."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
import traceback
import zlib
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

from headrace.base.errors import ConfigError


class _Source(importlib.machinery.SourceFileLoader):
    """A loader that always compiles the source: cached bytecode is invalidated by whole seconds only, and could be
    stale."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_file(path: Path) -> ModuleType:
    """Import the file ``path`` and return the module. The file runs once, and again after it has changed.

    The file's folder is added to ``sys.path``, so that it can import its neighbours. The module is in
    ``sys.modules``, as dataclasses and pickle need. Raises :class:`ConfigError` with file and line for any failure.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"there is no file {path}: {error.strerror}", remedy="give the path of a .py file") from None
    return _load(path.resolve(), (state.st_mtime_ns, state.st_size))


@cache
def _load(path: Path, state: tuple[int, int]) -> ModuleType:
    """Import the file ``path``. ``state`` is the cache key: modification time and size tell one content from the
    next."""
    name = f"headrace_user_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    loader = _Source(name, str(path))
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
    """Split ``file.py:name`` into path and name. The file is parsed to check the name, and its code is not run.
    Raises :class:`ConfigError`, which names ``setting``."""
    file, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(
            f"{setting}={reference!r} does not name a function or class of a file",
            remedy=f"write {setting} = 'my_file.py:my_name'",
        )
    path = Path(file)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{setting}={reference!r}: {file} does not exist", remedy="give the path of the file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{setting}={reference!r}: {file} cannot be read: {error}", remedy="make it readable"
        ) from None
    except SyntaxError as error:
        raise ConfigError(f"{setting}: {file}:{error.lineno}: {error.msg}", remedy="fix that line") from None
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
    """Return the names that a file defines or imports at its top level."""
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


def refuse_missing_imports(path: Path, setting: str) -> None:
    """Raise :class:`ConfigError` for the first module that the file ``path`` imports and this Python does not have,
    before the file runs. ``setting`` is the setting that names the file.

    Files beside ``path`` that it imports are read too. Only imports that always happen are read: those at the top level
    of a file, not those inside ``try``, ``if`` or a function, up to the first statement that could change where modules
    are found.
    """
    path = path.resolve()
    _refuse_missing(path, path.parent, setting, set())


def _refuse_missing(path: Path, folder: Path, setting: str, known: set[Path]) -> bool:
    """Refuse what :func:`refuse_missing_imports` says for one file, whose neighbours are in ``folder``. Return whether
    all its statements were read."""
    known.add(path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{setting}: {path}:{error.lineno}: {error.msg}", remedy="fix that line") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error}", remedy="make it a readable .py file") from None
    for node in tree.body:
        if _may_move_modules(node):
            return False
        for module in _imported(node):
            _refuse_unimportable(module, folder, path, f"{setting}: {path}:{node.lineno}")
            beside = next((each for each in _beside(module, folder) if each not in known), None)
            if beside is not None and not _refuse_missing(beside, folder, setting, known):
                return False
    return True


def _imported(node: ast.stmt) -> list[str]:
    """Return the modules that a statement imports, each with its leading dots."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            return ["." * node.level + (node.module or "")]
    return []


def _beside(module: str, folder: Path) -> list[Path]:
    """Return the file in ``folder`` that ``import module`` runs first, if there is one."""
    first = module.partition(".")[0]
    files = (folder / f"{first}.py", folder / first / "__init__.py") if first else ()
    return [file for file in files if file.is_file()][:1]


def _refuse_unimportable(module: str, folder: Path, path: Path, place: str) -> None:
    """Raise :class:`ConfigError` where the file ``path`` cannot import ``module``; ``place`` is the line in words."""
    if module.startswith("."):
        if path.name == "__init__.py":
            return
        raise ConfigError(
            f"{place}: a relative import ({module}), and the file is not loaded as part of a package",
            remedy=f"write the name without dots: files in {folder} can be imported by their names",
        )
    first = module.partition(".")[0]
    if not _beside(module, folder) and not _is_found(first, folder):
        raise ConfigError(
            f"{place}: there is no module {first!r} in this Python ({sys.executable})",
            remedy=f"install the package that has it ({sys.executable} -m pip install {first}, if it is called so), "
            f"put {first}.py into {folder}, or correct the name",
        )


def _may_move_modules(node: ast.stmt) -> bool:
    """Return whether a statement could change where modules are found: it calls something, or names ``sys.path``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(
        isinstance(part, ast.Call) or (isinstance(part, ast.Attribute) and part.attr in ("path", "modules"))
        for part in ast.walk(node)
    )


def _is_found(module: str, folder: Path) -> bool:
    """Return whether a worker could import the module: from ``folder``, from the working directory or from where this
    process finds modules. It is not imported."""
    if module in sys.modules or importlib.util.find_spec(module) is not None:
        return True
    return importlib.machinery.PathFinder.find_spec(module, [str(folder), str(Path.cwd())]) is not None


def where(error: BaseException, source: str | None) -> str:
    """Return an error as ``Kind: words at file.py:12``, with the deepest line of the file ``source`` in its
    traceback, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if source is not None and Path(frame.filename) == Path(source)]
    place = f" at {Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""
    if isinstance(error, SyntaxError) and error.filename:
        place, error = f" at {Path(error.filename).name}:{error.lineno}", SyntaxError(error.msg)
    words = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {words}{place}" if words else f"{type(error).__name__}{place}"
