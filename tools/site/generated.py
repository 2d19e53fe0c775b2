"""Generates Markdown from the code: settings, commands and recipes."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from headrace.algo.formulas import CHAPTERS
from headrace.algo.registry import classes_by_kind
from headrace.base.config import Section, descriptions
from headrace.base.config.kinds import NameOf
from headrace.engine.config import ENGINES, EngineSettings
from tools.site.docstrings import as_markdown

_ELSEWHERE = {id(kind) for _, _, union in CHAPTERS for kind in classes_by_kind(union).values()}
"""Formulas, which have their own document."""


def settings() -> str:
    """Return a heading and a table for each section of a run file."""
    from headrace.run.session.config import RunConfig

    return "\n".join(line for name, field in RunConfig.model_fields.items() for line in _field(name, field.annotation))


def _field(name: str, annotation: Any) -> Iterator[str]:
    for kind in _sections(annotation):
        yield from _table(name, kind)


def _table(path: str, kind: type[Section]) -> Iterator[str]:
    """Yield the table of the section ``kind`` at ``path``, and the tables of the sections in it."""
    chosen = _selected_by(kind)
    yield f"\n{'###' if '.' in path else '##'} {path}{f': {chosen}' if chosen else ''}\n"
    yield f"{_prose(kind.__doc__ or '')}\n"
    fields = {name: field for name, field in kind.model_fields.items() if name != "kind" or not chosen}
    meanings = descriptions(kind)
    if fields:
        yield "| key | takes | default | meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        default = "*required*" if field.is_required() else _value(field.get_default(call_default_factory=True))
        meaning = _prose(meanings.get(name, "")).replace("|", "\\|").replace("\n\n", " ").replace("\n", " ")
        yield f"| `{name}` | {_takes(_form(field))} | {default} | {meaning} |"
    yield ""
    for name, field in fields.items():
        yield from _field(f"{path}.{name}", field.annotation)


def _form(field: FieldInfo) -> Any:
    """Return the annotation of a setting, with its :class:`NameOf` note if it has one."""
    notes = [note for note in field.metadata if isinstance(note, NameOf)]
    return typing.Annotated[field.annotation, notes[0]] if notes else field.annotation


def _selected_by(kind: type[Section]) -> str:
    """Return the ``kind`` that selects a section among others; empty if it is the only one."""
    field = kind.model_fields.get("kind")
    return str(field.default) if field is not None and len(get_args(field.annotation)) == 1 else ""


def _sections(annotation: Any) -> list[type[Section]]:
    """Return the sections that a setting may hold, without formulas."""
    if annotation is EngineSettings:
        kinds = {ENGINES.load(name).settings for name in ENGINES.own_names()} - {EngineSettings}
        return [kind for kind in kinds if not any(kind is not other and issubclass(kind, other) for other in kinds)]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [] if id(annotation) in _ELSEWHERE else [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _takes(annotation: Any) -> str:
    """Return the type ``annotation`` in words.

    >>> _takes(int), _takes(str | None), _takes(tuple[str, ...])
    ('int', 'str', 'list of str')
    """
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        named = [note for note in get_args(annotation)[1:] if isinstance(note, NameOf)]
        if named:
            return ", ".join([*(f'`"{each}"`' for each in named[0].own()), "the name of a plugin"])
        return _takes(get_args(annotation)[0])
    if origin is typing.Literal:
        return ", ".join(f"`{each!r}`".replace("'", '"') for each in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if all(isinstance(part, type) and issubclass(part, Section) for part in parts):
            return "table"
        return ", ".join(dict.fromkeys(_takes(part) for part in parts))
    if origin in (tuple, list):
        return f"list of {_takes(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type):
        return "table" if issubclass(annotation, Section) else _name(annotation)
    return "any"


def _name(kind: type) -> str:
    choices: Mapping[str, Any] = getattr(kind, "__members__", {})
    return ", ".join(f'`"{each.value}"`' for each in choices.values()) or kind.__name__


def _value(value: Any) -> str:
    """Return the default ``value`` of a setting as Markdown."""
    if isinstance(value, Section):
        fields = value.model_dump()
        return f'`"{fields["kind"]}"`' if "kind" in fields else "as below"
    if value is None:
        return "unset"
    if isinstance(value, tuple | list):
        return ", ".join(_value(each) for each in value) or "none"
    if isinstance(value, dict):
        return "none" if not value else f"`{value}`"
    return (
        f"`{str(value).lower()}`"
        if isinstance(value, bool)
        else f'`"{value}"`'
        if isinstance(value, str)
        else f"`{value}`"
    )


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown, without its examples."""
    text = as_markdown(re.split(r"\n\s*>>>", docstring)[0]).replace("``", "`")
    return "\n".join(line.strip() for line in text.strip().split("\n"))


def commands() -> str:
    """Return every command with its arguments and options."""
    import typer

    from headrace.run.cli.app import app

    return "\n".join(_verb(typer.main.get_command(app), "headrace"))


def _verb(command: Any, path: str) -> Iterator[str]:
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    if not subcommands:
        yield f"\n## {path.removeprefix('headrace ')}\n\n{_prose(command.help or '')}\n"
        yield "```text\n" + " ".join([path, *(_shown(each) for each in command.params)]) + "\n```\n"
        yield "| option | default | meaning |\n|---|---|---|"
        for each in command.params:
            names = _argument(each) if each.param_type_name == "argument" else ", ".join(each.opts)
            default = "" if each.default in (None, False, "", []) or callable(each.default) else f"`{each.default}`"
            yield f"| `{names}` | {default} | {_prose(each.help or '').replace('|', chr(92) + '|')} |"
    for name, sub in subcommands.items():
        yield from _verb(sub, f"{path} {name}")


def _shown(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = _argument(parameter)
        return name if parameter.required or name.startswith("[") else f"[{name}]"
    return f"[{parameter.opts[0]}]" if parameter.is_flag else f"[{parameter.opts[0]} ...]"


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def recipes() -> str:
    """Return a table row for each recipe with its choices on the axes, and a description of each."""
    from headrace.run.session.recipes import AXES
    from headrace.run.session.recipes import recipes as known

    shown = [axis for axis in AXES if axis != "learner"]
    lines = [f"| recipe | {' | '.join(axis.replace('_', ' ') for axis in shown)} |", "|---" * (len(shown) + 1) + "|"]
    for each in known().values():
        lines.append(f"| `{each.name}` | {' | '.join(each.axes[axis] for axis in shown)} |")
    lines += [
        "",
        *(f"- **{each.name}** ({each.system}). {each.says} Here: {each.differs}" for each in known().values()),
    ]
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {
    "<!-- settings -->": settings,
    "<!-- program -->": commands,
    "<!-- recipes -->": recipes,
}
"""Functions that generate a part of a page, by the marker line that the part replaces."""
