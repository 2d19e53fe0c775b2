"""Load a TOML file and ``--set`` overrides, and validate them as one section, a record of settings.

The functions here raise :class:`~headrace.base.errors.ConfigError`, which describes in words what a setting accepts.
"""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from headrace.base.config.addresses import refuse_secret
from headrace.base.config.kinds import Kinds, NameOf, find_classes, get_kinds
from headrace.base.config.section import Section
from headrace.base.errors import ConfigError, nearest

_URL = re.compile(r"(?:[^\s:]*?)([A-Za-z][A-Za-z0-9+.-]*://\S+)")
"""The pattern of a URL in a text without spaces. The name of an environment may precede it, as in
``openenv/http://HOST:PORT``."""
C = TypeVar("C", bound=Section)


def load_toml(path: Path, what: str = "run file") -> dict[str, Any]:
    """Return the content of the TOML file ``path`` as nested dictionaries. ``what`` describes the file in errors.
    Raises :class:`ConfigError`, which names file, line and reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}", remedy="give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} {path} is not TOML: {error}", remedy="fix that line") from None


def parse_override(text: str) -> dict[str, Any]:
    """Return the argument ``text`` of a ``--set`` option, such as ``"learner.lr=1e-6"``, as nested dictionaries. The
    value is parsed as TOML; if that fails, a list or a table is parsed as JSON; any other value is a string. Raises
    :class:`ConfigError` if there is no ``=`` or no key.

    >>> parse_override("learner.lr=1e-6"), parse_override("data.path=rows.jsonl")
    ({'learner': {'lr': 1e-06}}, {'data': {'path': 'rows.jsonl'}})
    >>> parse_override('algo.loss={"kind": "gspo"}')
    {'algo': {'loss': {'kind': 'gspo'}}}
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} has no '='", remedy="write --set section.key=value")
    tree: Any = _parse_value(value)
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def _parse_value(value: str) -> Any:
    """Parse ``value``, the right side of an override: as TOML, as a JSON list or object, or else return the text itself
    without surrounding spaces."""
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        pass
    else:
        # more than one key: the text contains a line break and further assignments, so it is a plain string
        return read["value"] if len(read) == 1 else value
    if value.strip().startswith(("[", "{")):
        with suppress(json.JSONDecodeError):
            return json.loads(value)
    return value.strip()


def merge(base: Mapping[str, Any], *overrides: Mapping[str, Any], whole_kinds: bool = False) -> dict[str, Any]:
    """Return ``base`` with each override merged into it, table by table; a later override wins. If a table is merged
    into a string, the string becomes the ``kind`` of the table.

    With ``whole_kinds``, a table of the override replaces the table of ``base`` as a whole if their ``kind`` differs,
    since two kinds have different settings.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    >>> merge({"a": {"kind": "k", "y": 2}}, {"a": {"kind": "other"}}, whole_kinds=True)
    {'a': {'kind': 'other'}}
    >>> merge({"a": "k"}, {"a": {"y": 2}})
    {'a': {'kind': 'k', 'y': 2}}
    """
    merged = dict(base)
    for override in overrides:
        for key, value in override.items():
            current = merged.get(key)
            if isinstance(current, str) and isinstance(value, Mapping):
                current = {"kind": current}
            if not (isinstance(current, Mapping) and isinstance(value, Mapping)):
                merged[key] = value
            elif whole_kinds and "kind" in current and value.get("kind", current["kind"]) != current["kind"]:
                merged[key] = dict(value)
            else:
                merged[key] = merge(current, value, whole_kinds=whole_kinds)
    return merged


def leaves(tree: Mapping[str, Any], above: str = "", *, with_empty: bool = False) -> dict[str, Any]:
    """Return all values in the nested dictionaries ``tree`` that are not dictionaries themselves, by dotted name. Each
    name begins with the prefix ``above``. ``with_empty`` also returns the empty dictionaries.

    >>> leaves({"flow": {"lead": 1, "policy": {"kind": "bounded"}}})
    {'flow.lead': 1, 'flow.policy.kind': 'bounded'}
    >>> leaves({"env": {"kind": "prompt", "options": {}}}, with_empty=True)
    {'env.kind': 'prompt', 'env.options': {}}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and (value or not with_empty)
        found |= leaves(value, f"{above}{key}.", with_empty=with_empty) if nested else {f"{above}{key}": value}
    return found


def validate(section_class: type[C], tree: Mapping[str, Any], above: str = "") -> C:
    """Return ``tree``, a table of a run file, as a record of the section class ``section_class``. Raises
    :class:`ConfigError`, which lists every invalid key with its value, the reason and a remedy.

    ``above`` is the dotted name of ``tree`` within the run file, for error messages; empty for a whole run file.
    """
    try:
        record = section_class.model_validate(tree)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    else:
        _refuse_secrets(record.model_dump(mode="json"), above)
        return record
    lines = [_explain(section_class, detail, above) for detail in details]
    raise ConfigError("\n".join(_unique(p for p, _ in lines)), remedy="; ".join(_unique(r for _, r in lines)))


def _refuse_secrets(value: Any, name: str) -> None:
    """Raise :class:`ConfigError` if ``value``, or a value nested in it, is a URL that contains a secret. ``name`` is
    the dotted name of ``value``. This covers settings whose section does not check for secrets itself. A text that
    contains spaces is not a URL."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            _refuse_secrets(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _refuse_secrets(each, f"{name}[{number}]")
    elif isinstance(value, str) and (found := _URL.fullmatch(value)):
        refuse_secret(name, found[1], "give it through the environment variables or files that its client reads")


def _explain(section_class: type[Section], detail: ErrorDetails, table: str) -> tuple[str, str]:
    """Return the problem and the remedy for ``detail``, one of pydantic's errors, in terms of the run file.
    ``section_class`` is the section that was validated, ``table`` its dotted name."""
    original = detail.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original.problem, original.remedy
    location, above = _locate(section_class, detail["loc"], table), _locate(section_class, detail["loc"][:-1], table)
    name, value = location.name, detail["input"]
    if is_choice(location.form):  # pydantic reports one error per alternative: one line lists them all
        return f"{name}={value!r}: expected {allowed(location.form)}", f"change {name}"
    match detail["type"]:
        case "extra_forbidden":
            if name in section_class.former_keys:
                return (
                    f"{name} has another name now: {section_class.former_keys[name]}",
                    f"write {section_class.former_keys[name]}",
                )
            known = {key for model in above.models for key in model.model_fields}
            return f"{name} is not a setting", nearest(str(detail["loc"][-1]), known)
        case "missing":
            fields = [(key, f) for model in location.models for key, f in model.model_fields.items()]
            required = [f"{name}.{key}" for key, f in fields if f.is_required()]
            return f"{name} is missing", f"set {' and '.join(required) or name}"
        case "union_tag_invalid":
            ctx = detail["ctx"]
            tags = [tag.strip().strip("'") for tag in str(ctx["expected_tags"]).split(",")]
            return f"{name}.kind={ctx['tag']!r} does not exist", nearest(str(ctx["tag"]), tags)
        case "unknown_name":
            return f"{name}={value!r} does not exist", detail["ctx"]["remedy"]
        case "union_tag_not_found":
            return f"{name} does not say its kind", _name_a_kind(location, above, str(detail["loc"][-1]))
        case "model_type" | "model_attributes_type":
            return f"{name}={value!r} is not a table of settings", f"write [{name}] and its settings below"
        case "string_type":
            return f"{name}={value!r} is not text", f'put it in quotes: {name} = "{value}"'
    return f"{name}={value!r}: {detail['msg'].lower()}", f"change {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyLocation:
    """The location of a validation error in a run file."""

    name: str
    """The dotted name of the key, as in a run file."""
    models: list[type[pydantic.BaseModel]]
    """The section classes that the key accepts; empty for a plain value."""
    form: Any
    """The type annotation of the key."""


def _name_a_kind(location: _KeyLocation, above: _KeyLocation, key: str) -> str:
    """Return the remedy for a table at ``location`` that lacks ``kind``. ``key`` is the name of the table in the
    section at ``above``. If that section has a default for the table, the remedy suggests its kind; all kinds are
    listed."""
    kinds = ", ".join(sorted({str(model.model_fields["kind"].default) for model in location.models}))
    defaults = [model.model_fields[key].default for model in above.models if key in model.model_fields]
    usual = next((dict(default)["kind"] for default in defaults if isinstance(default, Section)), None)
    of_all = f"{location.name}.kind to one of {kinds}"
    return f"set {location.name}.kind = {usual!r} too, which is the default, or {of_all}" if usual else f"set {of_all}"


def _locate(section_class: type[Section], location: tuple[int | str, ...], table: str) -> _KeyLocation:
    """Return the location in the run file that corresponds to ``location``, pydantic's path of an error in the section
    ``section_class``. ``table`` is the dotted name of that section.

    Pydantic's path also contains the tags of unions, which select one of the sections, and the names of a union's
    alternatives. Neither is part of the setting's name.
    """
    name, form = table, cast(Any, section_class)
    here: list[type[pydantic.BaseModel]] = [section_class]
    for part in location:
        tagged = [model for model in here if part in get_kinds(model)]
        if isinstance(part, int):
            name += f"[{part}]"
            form = next(iter(get_args(form)), None)
        elif len(here) > 1 and tagged:
            here = tagged
        elif here:
            name += f".{part}" if name else part
            fields = [_form(model.model_fields[part]) for model in here if part in model.model_fields]
            form = next(iter(fields), None)
            here = [model for field in fields for model in find_classes(field)]
        elif get_origin(form) is dict:
            name += f".{part}"
            form = get_args(form)[1]
    return _KeyLocation(name=name, models=here, form=form)


def _form(field: FieldInfo) -> Any:
    """Return the type annotation of a setting, together with its :class:`Kinds` registry if the setting is annotated
    with a registry."""
    notes = [note for note in field.metadata if isinstance(note, Kinds)]
    return Annotated[field.annotation, notes[0]] if notes else field.annotation


def _unique(lines: Iterable[str]) -> list[str]:
    """Return ``lines`` without repetitions, in order of first occurrence."""
    return list(dict.fromkeys(lines))


_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
"""The description of each plain type in error messages."""


def is_choice(form: Any) -> bool:
    """Return whether a setting with the type annotation ``form`` accepts one of several alternatives, ``None`` not
    counted, none of which is a section."""
    forms = [part for part in get_args(form) if part is not types.NoneType]
    return get_origin(form) in (Union, types.UnionType) and len(forms) > 1 and not any(map(_is_section, forms))


def allowed(form: Any) -> str:
    """Return a description of the values that a setting with the type annotation ``form`` accepts, for error messages.

    >>> allowed(pydantic.NonNegativeInt | Literal["auto"] | None)
    "an integer >= 0 or 'auto'"
    >>> allowed(list[str])
    'a list, each text'
    """
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, types.UnionType):
        return " or ".join(allowed(part) for part in parts if part is not types.NoneType)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin is Annotated:
        named = next((note for note in parts[1:] if isinstance(note, NameOf)), None)
        if named is not None:
            return " or ".join(map(repr, named.names()))
        bounds = [bound for note in parts[1:] for bound in _bounds(note)]
        return f"{allowed(parts[0])} {' and '.join(bounds)}".rstrip()
    if origin in (list, tuple):
        return f"a list, each {allowed(parts[0])}"
    return _KINDS.get(form, str(form))


def _is_section(form: Any) -> bool:
    """Return whether the type annotation ``form`` is a section of settings."""
    if get_origin(form) is Annotated:
        return _is_section(get_args(form)[0])
    return isinstance(form, type) and issubclass(form, pydantic.BaseModel)


def _bounds(note: Any) -> list[str]:
    """Return the limits of a number, such as ``>= 0``, that ``note``, one element of an annotation's metadata, sets;
    empty for any other metadata."""
    match note:
        case FieldInfo():
            return [bound for each in note.metadata for bound in _bounds(each)]
        case annotated_types.Ge(ge=limit):
            return [f">= {limit}"]
        case annotated_types.Gt(gt=limit):
            return [f"> {limit}"]
        case annotated_types.Le(le=limit):
            return [f"<= {limit}"]
        case annotated_types.Lt(lt=limit):
            return [f"< {limit}"]
    return []
