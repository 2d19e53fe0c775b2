"""What ``headrace check env`` is told to try."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from headrace.base.config.user_code import find_in_file
from headrace.base.errors import ConfigError, EnvError
from headrace.rollout.environments.program import with_absolute_files
from headrace.rollout.scoring.fit import looked_at
from headrace.wings.bridges import BRIDGES, find_bridge

_COMPLETIONS = frozenset({"completion", "completions", "completion_ids"})
"""Parameters that only a reward has."""


def kind_of(reference: str) -> tuple[str, str, ast.Module | None]:
    """What it is, the reference with a full path, and the file's syntax."""
    library, _, what = reference.partition("/")
    if library in BRIDGES and what and (BRIDGES[library].names_file or ".py:" not in what):
        find_bridge(reference)
        return "bridge", _with_full_path(library, what), None
    if ".py:" not in reference:
        return "program", _with_absolute_command(reference), None
    path, name = find_in_file(reference, "the environment")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    entry = f"{path.resolve()}:{name}"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "env", entry, tree
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ("reward" if _is_reward(node) else "rollout"), entry, tree
    # the file imports or makes it: only its parameters tell what it is
    try:
        signature = looked_at([entry])[entry]
    except EnvError:  # no function, or a file that cannot be imported
        signature = None
    if signature is not None and _COMPLETIONS & set(signature.names):
        return "reward", entry, tree
    raise ConfigError(
        f"{reference}: {name!r} is no class and no function that this file defines, and no reward that it imports",
        remedy="name the file that defines it",
    )


def _with_absolute_command(command: str) -> str:
    """A program runs in a directory of its own: the files of the working directory that its command names are found
    from there too, as those of a run file are."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be split: {error}", remedy="close the quotation") from None
    if not parts:
        raise ConfigError("the command is empty", remedy="write headrace check env 'python agent.py'")
    return shlex.join(with_absolute_files(parts, Path.cwd()))


def _is_reward(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is meant to be one: it takes completions, or cannot be a rollout, which takes a task and a policy."""
    parameters = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    meant_as_rollout = isinstance(function, ast.AsyncFunctionDef) or len(parameters) == 2
    return bool(parameters & _COMPLETIONS) or not meant_as_rollout


def _with_full_path(library: str, what: str) -> str:
    if not BRIDGES[library].names_file:
        return f"{library}/{what}"
    path, name = find_in_file(what, "the environment")
    return f"{library}/{path.resolve()}:{name}"
