"""The registry of the verbs of ``headrace``: a table of the core's verbs, and entry points for verbs of other packages.

A package adds a verb with a :class:`Verb` and one line of its ``pyproject.toml``::

    [project.entry-points."headrace.commands"]
    greet = "my_package.greeting:VERB"

``headrace NAME`` imports the module of that verb alone. ``headrace --help`` imports the modules of all verbs, so each
of them imports its expensive dependencies inside its function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry

BEGIN, USE, LOOK, PLAN = "Begin and train", "Use what was trained", "Look at a run", "Plan, compare and measure"
"""The headings of the groups of verbs in ``headrace --help``."""
GROUPS = (BEGIN, USE, LOOK, PLAN)
"""The groups of ``headrace --help``, in order; groups of other packages follow them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A verb of the program, such as ``train`` in ``headrace train``. Its row in :data:`COMMANDS`, or its entry point,
    defines the name of the verb."""

    run: Callable[..., None] | typer.Typer
    """A function whose parameters are the arguments and options, as typer reads them; or a program with verbs of its
    own."""
    group: str
    """The heading under which ``headrace --help`` lists the verb."""
    place: int = 100
    """The position in the group: verbs are listed by this number, and those with the same number by name."""
    help: str | None = None
    """The text for ``--help``; ``None``: the docstring of the function."""


def _find_problem(registered: Any) -> str | None:
    """Return why ``registered``, an object that a package registered as a verb, cannot be used, as the end of a
    sentence whose subject is the verb; ``None`` if it is a :class:`Verb`."""
    return None if isinstance(registered, Verb) else f"is a {type(registered).__name__}, and not a headrace.extend.Verb"


COMMANDS = Registry[Verb](
    group="headrace.commands",
    setting="the verb",
    rows={
        name: f"headrace.run.cli.{module}:VERB"
        for name, module in (
            *(("init", "init"), ("train", "train"), ("check", "check")),
            *(("eval", "evaluate"), ("export", "export")),
            *((each, each) for each in ("status", "engines", "watch", "report", "ledger", "trace")),
        )
    },
    check=_find_problem,
)
"""Every verb by its name."""


class VerbGroup(TyperGroup):
    """The command group of typer that contains all verbs of ``headrace``. A verb is imported only when it is run, or
    when ``--help`` lists it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs in the order of ``--help``: by group, by place in the group, and by name; a
        verb that cannot be imported comes last. typer calls this method; ``ctx``, its context, is not used."""
        places: dict[str, tuple[int, int]] = {}
        for name in COMMANDS:
            try:
                verb = COMMANDS.load(name)
            except ConfigError:
                places[name] = (len(GROUPS) + 1, 0)
                continue
            places[name] = (GROUPS.index(verb.group) if verb.group in GROUPS else len(GROUPS), verb.place)
        return sorted(places, key=lambda name: (places[name], name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the verb ``cmd_name`` as a command of typer, or ``None`` if there is no such verb. typer calls this
        method; ``ctx``, its context, is not used.

        For a verb that cannot be imported, the command shows the reason in ``--help`` and as an error when it is run.
        """
        if cmd_name not in COMMANDS:
            return None
        try:
            return _as_command(cmd_name, COMMANDS.load(cmd_name))
        except ConfigError as error:
            return _as_command(cmd_name, _substitute_verb(error))

    @property
    def commands(self) -> dict[str, Any]:
        """Return every verb by its name, in the order of ``--help``."""
        return {name: self.get_command(None, name) for name in self.list_commands(None)}

    @commands.setter
    def commands(self, value: object) -> None:
        """Ignore ``value``, which typer assigns when it creates the group: the verbs come from the registry alone."""


def _as_command(name: str, verb: Verb) -> Any:
    """Return ``verb`` as a command of typer with the name ``name``, which :class:`VerbGroup` runs or lists."""
    program = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
    if isinstance(verb.run, typer.Typer):
        program.add_typer(verb.run, name=name, rich_help_panel=verb.group)
    else:
        program.command(name, rich_help_panel=verb.group, help=verb.help)(verb.run)
    program.callback()(lambda: None)  # without a callback typer would make a program with one verb that verb itself
    return typer.main.get_group(program).commands[name]


def _substitute_verb(error: ConfigError) -> Verb:
    """Return a substitute for a verb that cannot be imported. ``--help`` shows the reason, and a call of the substitute
    raises ``error``, the error of the import."""

    def refuse() -> None:
        """Raise the error of the import."""
        raise error

    return Verb(run=refuse, group="Cannot be used", help=error.problem.replace("[", "\\["))
