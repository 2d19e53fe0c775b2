"""The parameters of a reward function, read from the function or from the text of its file, and the check that each
gets a value: a column of the rows, or one that every reward function is passed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import EnvError, nearest

LOGGED = ("trainer_state", "log_extra", "log_metric")
OF_A_GROUP = ("prompts", "completions", "completion_ids", *LOGGED)
"""The arguments of a function over all completions of a group, beside the columns of the row: those of TRL."""
OF_ONE = ("prompt", "completion", "completion_ids", *LOGGED)
"""The arguments of a function of one completion, beside the row."""
OF_A_TURN = ("history", "turn")
"""The further arguments of a function of one completion that scores turns."""
NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that a function over a group is not passed, as in TRL: it gets them in the plural."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSignature:
    """The parameters of a reward function, by which the scoring stage decides what to pass."""

    names: tuple[str, ...]
    """Every parameter that can be given by name."""
    required: frozenset[str]
    """The parameters without a default."""
    takes_any: bool = False
    """Whether it ends in ``**columns``."""
    positional: tuple[str, ...] = ()
    """Required parameters that cannot be given by name."""

    @property
    def by_group(self) -> bool:
        """Whether it scores all completions of a group at once, as TRL's functions do."""
        return "completions" in self.names or ("completion" not in self.names and self._plural)

    @property
    def _plural(self) -> bool:
        """Return whether the function has a parameter that is given for all completions of a group."""
        return bool({"prompts", "completion_ids"} & set(self.names))

    def takes(self, name: str) -> bool:
        """Return whether a value of that name, such as a column of the row, can be passed."""
        return self.takes_any or name in self.names

    def wants(self, name: str) -> bool:
        """Return whether it is passed a value that is not a column. ``**columns`` gets such values only over a group,
        as in TRL; the ``**row`` of a function of one completion has only the row."""
        return name in self.names or (self.takes_any and self.by_group)

    def passed(self, *, by_turn: bool) -> tuple[str, ...]:
        """Return the names of the arguments, other than columns of the row, that the function can be passed.
        ``by_turn`` says that it scores single turns."""
        if self.by_group:
            return OF_A_GROUP
        return (*OF_ONE, *OF_A_TURN) if by_turn else OF_ONE

    def columns(self, *, by_turn: bool) -> frozenset[str]:
        """Return the parameters that only a column of the rows can give a value."""
        return self.required - set(self.passed(by_turn=by_turn))

    def refuse_form(self, function: str, *, by_turn: bool = False) -> None:
        """Raise :class:`~headrace.base.errors.EnvError` for a function that is not a reward function, or that scores
        groups where ``by_turn`` asks for single turns. ``function`` is its name."""
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
        """Raise :class:`~headrace.base.errors.EnvError` if a required parameter gets no value: it is neither among
        ``columns``, those of the rows, nor an argument that every reward function is passed. ``function`` is the
        function's name."""
        missing = sorted(self.columns(by_turn=by_turn) - set(columns))
        if not missing:
            return
        passed = self.passed(by_turn=by_turn)
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


def signature_of(function: Callable[..., Any]) -> RewardSignature:
    """Return the signature of a function or of a callable object. Raises :class:`~headrace.base.errors.EnvError` for a
    class."""
    if inspect.isclass(function):
        name = function.__name__
        raise EnvError(
            f"reward function {name} is a class",
            remedy=f"write score = {name}() in its file, and name score: rewards are what its __call__ returns",
        )
    kinds, found = inspect.Parameter, inspect.signature(function).parameters.values()
    named = [each for each in found if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    bare = [each.name for each in found if each.kind is kinds.POSITIONAL_ONLY and each.default is kinds.empty]
    return RewardSignature(
        names=tuple(each.name for each in named),
        required=frozenset(each.name for each in named if each.default is kinds.empty),
        takes_any=any(each.kind is kinds.VAR_KEYWORD for each in found),
        positional=tuple(bare),
    )


def signature_in(path: Path, name: str) -> RewardSignature | None:
    """Return the signature of the function ``name`` from the text of its file; ``None`` if only running the file can
    show it: the name is imported, assigned, decorated, or defined more than once."""
    tree = ast.parse(path.read_bytes())
    bound = [node for node in ast.walk(tree) if name in _bound(node)]
    if len(bound) != 1 or bound[0] not in tree.body:
        return None
    node = bound[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    taken = node.args
    either = [*taken.posonlyargs, *taken.args]
    bare = len(either) - len(taken.defaults)
    alone = {arg.arg for arg, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None}
    required = {arg.arg for arg in either[:bare]} | alone
    positional = tuple(arg.arg for arg in taken.posonlyargs if arg.arg in required)
    return RewardSignature(
        names=tuple(arg.arg for arg in (*taken.args, *taken.kwonlyargs)),
        required=frozenset(required - set(positional)),
        takes_any=taken.kwarg is not None,
        positional=positional,
    )


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a node of the syntax tree binds by itself: a definition, an assigned name, or an import."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Name(ctx=ast.Store()):
            return {node.id}
        case ast.alias():
            return {(node.asname or node.name).partition(".")[0]}
    return set()
