"""The references of user code for ``headrace check env``: what a name on the command line stands for, and where it is
defined. A *reference* is ``file.py:Name``, the command of a program, ``LIBRARY/WHAT`` of a bridge, or the name of an
environment of an installed package."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path

from headrace.base.config.user_code import find_in_file, refuse_missing_imports
from headrace.base.errors import ConfigError, EnvError
from headrace.rollout.environments.bridges import BRIDGES, find_bridge
from headrace.rollout.environments.program import refuse_missing_script, with_absolute_files
from headrace.rollout.environments.registry import BUILT_IN, ENVIRONMENTS
from headrace.rollout.scoring.fit import import_signatures

_COMPLETIONS = frozenset({"completion", "completions", "completion_ids"})
"""Parameter names that only rewards have."""


def resolve_reference(reference: str) -> tuple[str, str, ast.Module | None]:
    """Return the kind of ``reference``, the reference with an absolute path, and the syntax tree of its file, if any.

    Raises :class:`~headrace.base.errors.ConfigError` if the name is neither a class, a function nor a reward.
    """
    library, _, what = reference.partition("/")
    if library in BRIDGES and what and (BRIDGES.load(library).names_file or ".py:" not in what):
        find_bridge(reference)
        return "bridge", _with_full_path(library, what), None
    if reference in ENVIRONMENTS and reference not in BUILT_IN:
        return reference, "", None
    if reference.endswith(".py") and " " not in reference and not os.access(reference, os.X_OK):
        text = f"{reference} names no function or class, and is no program that can be started"
        remedy = f"write {reference}:NAME for what the file defines, or 'python {reference}' for a program"
        raise ConfigError(text, remedy=remedy)
    if ".py:" not in reference:
        return "program", _with_absolute_command(reference), None
    path, name = find_in_file(reference, "the environment")
    refuse_missing_imports(path, "the environment")
    tree = ast.parse(path.read_bytes())
    entry = f"{path.resolve()}:{name}"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "env", entry, tree
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ("reward" if _is_reward(node) else "rollout"), entry, tree
    # the file imports or computes the name: its parameters are known only once the file is imported
    try:
        signature = import_signatures([entry])[entry]
    except EnvError:  # no function, or a file that cannot be imported
        signature = None
    if signature is not None and _COMPLETIONS & set(signature.names):
        return "reward", entry, tree
    raise ConfigError(
        f"{reference}: {name!r} is neither a class nor a function that this file defines, nor a reward that it imports",
        remedy="name the file that defines it",
    )


def _with_absolute_command(command: str) -> str:
    """Return the command of a program with absolute paths of its files, since a program runs in another working
    directory. Raises :class:`~headrace.base.errors.ConfigError` for a command that cannot be used."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be split: {error}", remedy="close the quotation") from None
    if not parts:
        raise ConfigError("the command is empty", remedy="write headrace check env 'python agent.py'")
    absolute_parts = with_absolute_files(parts, Path.cwd())
    refuse_missing_script(absolute_parts)
    return shlex.join(absolute_parts)


def _is_reward(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether the function is a reward: whether a parameter is a completion, or the function is no rollout. A
    rollout is async, or has two parameters, a task and a policy."""
    parameters = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    is_rollout = isinstance(function, ast.AsyncFunctionDef) or len(parameters) == 2
    return bool(parameters & _COMPLETIONS) or not is_rollout


def _with_full_path(library: str, what: str) -> str:
    """Return the entry ``LIBRARY/WHAT`` of a bridge, with an absolute path if its ``WHAT`` is ``file.py:name``."""
    if not BRIDGES.load(library).names_file:
        return f"{library}/{what}"
    path, name = find_in_file(what, "the environment")
    refuse_missing_imports(path, "the environment")
    return f"{library}/{path.resolve()}:{name}"
