"""The parameters of a reward function, and the check that each parameter receives a value. The parameters are read from
the function or from the text of its file. A value is a column of the rows, or one of the arguments that the scoring
stage passes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import EnvError, nearest

COMMON_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
"""Arguments that every reward function may have."""
GROUP_ARGUMENTS = ("prompts", "completions", "completion_ids", *COMMON_ARGUMENTS)
"""The arguments, besides columns of the row, of a function over all completions of a group, as in TRL."""
COMPLETION_ARGUMENTS = ("prompt", "completion", "completion_ids", *COMMON_ARGUMENTS)
"""The arguments, besides columns of the row, of a function of one completion."""
TURN_ARGUMENTS = ("history", "turn")
"""The additional arguments of a function of one completion that scores turns."""
NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Names that are never passed as columns to a function over a group, as in TRL: such a function receives the lists
``prompts``, ``completions`` and ``completion_ids`` instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSignature:
    """The parameters of a reward function. The scoring stage uses them to decide which arguments to pass."""

    names: tuple[str, ...]
    """All parameters that can be passed by name."""
    required: frozenset[str]
    """The parameters without a default value."""
    accepts_any: bool = False
    """Whether the function accepts any name, through ``**columns``."""
    positional: tuple[str, ...] = ()
    """The required parameters that cannot be passed by name."""

    @property
    def by_group(self) -> bool:
        """Whether the function scores all completions of a group in one call, as TRL's functions do."""
        return "completions" in self.names or ("completion" not in self.names and self._has_group_parameter)

    @property
    def _has_group_parameter(self) -> bool:
        """Whether the function has a parameter whose value is a list over all completions of a group."""
        return bool({"prompts", "completion_ids"} & set(self.names))

    def accepts(self, name: str) -> bool:
        """Return whether the function accepts an argument called ``name``, such as a column of the row."""
        return self.accepts_any or name in self.names

    def is_passed(self, name: str) -> bool:
        """Return whether ``name``, an argument that is not a column, is passed to the function. Such arguments are part
        of ``**columns`` only for a function over a group, as in TRL; the ``**row`` of a function of one completion
        contains only the row."""
        return name in self.names or (self.accepts_any and self.by_group)

    def passable_arguments(self, *, by_turn: bool) -> tuple[str, ...]:
        """Return the names of all arguments, other than columns of the row, that can be passed to the function.
        ``by_turn`` says that the function scores single turns."""
        if self.by_group:
            return GROUP_ARGUMENTS
        return (*COMPLETION_ARGUMENTS, *TURN_ARGUMENTS) if by_turn else COMPLETION_ARGUMENTS

    def columns(self, *, by_turn: bool) -> frozenset[str]:
        """Return the required parameters whose value can come only from a column of the row."""
        return self.required - set(self.passable_arguments(by_turn=by_turn))

    def refuse_form(self, function: str, *, by_turn: bool = False) -> None:
        """Raise :class:`~headrace.base.errors.EnvError` if the function is not a reward function, or if it scores
        groups although ``by_turn`` requires single turns. ``function`` is its name."""
        if self.positional:
            raise EnvError(
                f"reward function {function} takes {self.positional[0]!r} by position alone, and rewards are called "
                "with arguments by name",
                remedy="remove the / from its parameters",
            )
        if not self.by_group and "completion" not in self.names:
            raise EnvError(
                f"reward function {function} takes ({', '.join(self.names)})",
                remedy="write reward(completion, **row) or reward(prompts, completions, **columns)",
            )
        if by_turn and self.by_group:
            raise EnvError(
                f"reward function {function} is scored by turn, and it wants all completions of a group",
                remedy="write reward(completion, history, turn, **row), or leave by_turn out",
            )

    def refuse_missing(self, function: str, columns: Collection[str], *, by_turn: bool) -> None:
        """Raise :class:`~headrace.base.errors.EnvError` if a required parameter would receive no value, because it is
        neither in ``columns``, the columns of the rows, nor an argument that is always passed. ``function`` is the name
        of the function."""
        missing = sorted(self.columns(by_turn=by_turn) - set(columns))
        if not missing:
            return
        passed = self.passable_arguments(by_turn=by_turn)
        if self.by_group:
            columns = [column for column in columns if column not in NOT_COLUMNS]
        name, has = missing[0], f"the rows have the columns {', '.join(sorted(columns)) or '(none)'}"
        if name == "environments":
            raise EnvError(
                f"reward function {function} requires 'environments', the objects of an environment, which live in "
                "other processes",
                remedy="let the environment say what was earned (get_reward), or leave the parameter out",
            )
        raise EnvError(
            f"reward function {function} requires the parameter {name!r}, which is neither a column of every row nor "
            f"passed to rewards: {has}; passed are {', '.join(passed)}",
            remedy=f"{nearest(name, {*columns, *passed})}; or give the parameter a default",
        )


def inspect_signature(function: Callable[..., Any]) -> RewardSignature:
    """Return the signature of a function or of a callable object. Raises :class:`~headrace.base.errors.EnvError` for a
    class."""
    if inspect.isclass(function):
        name = function.__name__
        raise EnvError(
            f"reward function {name} is a class",
            remedy=f"write score = {name}() in its file, and name score: rewards are what its __call__ returns",
        )
    kinds, parameters = inspect.Parameter, inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    unnamed = [each.name for each in parameters if each.kind is kinds.POSITIONAL_ONLY and each.default is kinds.empty]
    return RewardSignature(
        names=tuple(each.name for each in named),
        required=frozenset(each.name for each in named if each.default is kinds.empty),
        accepts_any=any(each.kind is kinds.VAR_KEYWORD for each in parameters),
        positional=tuple(unnamed),
    )


def read_signature(path: Path, name: str) -> RewardSignature | None:
    """Return the signature of the function ``name`` from the text of its file ``path``. Return ``None`` if the
    signature can be determined only by running the file, because the name is imported, assigned, decorated, or defined
    more than once."""
    tree = ast.parse(path.read_bytes())
    definitions = [node for node in ast.walk(tree) if name in _bound_names(node)]
    if len(definitions) != 1 or definitions[0] not in tree.body:
        return None
    node = definitions[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    args = node.args
    positional_args = [*args.posonlyargs, *args.args]
    num_without_default = len(positional_args) - len(args.defaults)
    keywords = {arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None}
    required = {arg.arg for arg in positional_args[:num_without_default]} | keywords
    positional = tuple(arg.arg for arg in args.posonlyargs if arg.arg in required)
    return RewardSignature(
        names=tuple(arg.arg for arg in (*args.args, *args.kwonlyargs)),
        required=frozenset(required - set(positional)),
        accepts_any=args.kwarg is not None,
        positional=positional,
    )


def _bound_names(node: ast.AST) -> set[str]:
    """Return the names that ``node`` itself binds: a definition, an assigned name, or an import."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Name(ctx=ast.Store()):
            return {node.id}
        case ast.alias():
            return {(node.asname or node.name).partition(".")[0]}
    return set()
