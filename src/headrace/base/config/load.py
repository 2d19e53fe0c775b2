"""From a TOML file and ``--set`` overrides to one validated record."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import pydantic
from pydantic_core import ErrorDetails

from headrace.base.config.addresses import refuse_secret
from headrace.base.config.section import Section
from headrace.base.config.words import allowed, is_choice
from headrace.base.errors import ConfigError, nearest

_URL = re.compile(r"(?:[^\s:]*?)([A-Za-z][A-Za-z0-9+.-]*://\S+)")
"""Of a text without spaces; names of an environment may precede it, as in ``openenv/http://HOST:PORT``."""
C = TypeVar("C", bound=Section)


def load_toml(path: Path, what: str = "run file") -> dict[str, Any]:
    """The tree of a TOML file; :class:`ConfigError` names file, line and reason. ``what`` it is, for people."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}", remedy="give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} {path} is not TOML: {error}", remedy="mend that line") from None


def parse_override(text: str) -> dict[str, Any]:
    """``"learner.lr=1e-6"`` as a tree. The value is read as TOML, or as a string where it is not TOML.

    >>> parse_override("learner.lr=1e-6"), parse_override("data.path=rows.jsonl")
    ({'learner': {'lr': 1e-06}}, {'data': {'path': 'rows.jsonl'}})
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} has no '='", remedy="write --set section.key=value")
    try:
        read = tomllib.loads(f"value = {value}")
        parsed = read["value"] if len(read) == 1 else value
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    tree: Any = parsed
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def merge(base: Mapping[str, Any], *overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with each override laid over it, table by table.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    merged = dict(base)
    for override in overrides:
        for key, value in override.items():
            here = merged.get(key)
            both_tables = isinstance(here, Mapping) and isinstance(value, Mapping)
            merged[key] = merge(here, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value of a tree by its dotted name.

    >>> leaves({"flow": {"lead": 1, "policy": {"kind": "bounded"}}})
    {'flow.lead': 1, 'flow.policy.kind': 'bounded'}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def validate(kind: type[C], tree: Mapping[str, Any]) -> C:
    """``tree`` as a ``kind``; :class:`ConfigError` lists every key that is wrong: value, reason and remedy."""
    try:
        record = kind.model_validate(tree)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    else:
        _refuse_secrets(record.model_dump(mode="json"), "")
        return record
    lines = [_explain(kind, detail) for detail in details]
    raise ConfigError("\n".join(_unique(p for p, _ in lines)), remedy="; ".join(_unique(r for _, r in lines)))


def _refuse_secrets(value: Any, name: str) -> None:
    """Refuse URLs with secrets in settings whose section does not check them itself. A text with spaces is no URL."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            _refuse_secrets(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _refuse_secrets(each, f"{name}[{number}]")
    elif isinstance(value, str) and (found := _URL.fullmatch(value)):
        refuse_secret(name, found[1], "give it through the environment variables or files that its client reads")


def _explain(kind: type[Section], detail: ErrorDetails) -> tuple[str, str]:
    original = detail.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original.problem, original.remedy
    place, above = _locate(kind, detail["loc"]), _locate(kind, detail["loc"][:-1])
    name, value = place.name, detail["input"]
    if is_choice(place.form):  # each of its forms says why it is not meant: one line says what is
        return f"{name}={value!r}: expected {allowed(place.form)}", f"change {name}"
    match detail["type"]:
        case "extra_forbidden":
            known = {key for model in above.models for key in model.model_fields}
            return f"{name} is not a setting", nearest(str(detail["loc"][-1]), known)
        case "missing":
            fields = [(key, f) for model in place.models for key, f in model.model_fields.items()]
            required = [f"{name}.{key}" for key, f in fields if f.is_required()]
            return f"{name} is missing", f"set {' and '.join(required) or name}"
        case "union_tag_invalid":
            ctx = detail["ctx"]
            tags = [tag.strip().strip("'") for tag in str(ctx["expected_tags"]).split(",")]
            return f"{name}.kind={ctx['tag']!r} does not exist", nearest(str(ctx["tag"]), tags)
        case "union_tag_not_found":
            kinds = sorted({str(model.model_fields["kind"].default) for model in place.models})
            return f"{name} does not say its kind", f"set {name}.kind to one of {', '.join(kinds)}"
        case "model_type" | "model_attributes_type":
            return f"{name}={value!r} is not a table of settings", f"write [{name}] and its settings below"
        case "string_type":
            return f"{name}={value!r} is not text", f'put it in quotes: {name} = "{value}"'
    return f"{name}={value!r}: {detail['msg'].lower()}", f"change {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyLocation:
    name: str
    """As a run file writes it."""
    models: list[type[pydantic.BaseModel]]
    """The sections that can stand there."""
    form: Any
    """Its annotation."""


def _locate(kind: type[Section], location: tuple[int | str, ...]) -> _KeyLocation:
    """The place of an error. A union's tag stands in a location too: it chooses among the sections; so do the names of
    a union's forms, which choose among nothing. Neither is a part of the name."""
    name, form = "", cast(Any, kind)
    here: list[type[pydantic.BaseModel]] = [kind]
    for part in location:
        tagged = [model for model in here if part in _tags(model)]
        if isinstance(part, int):
            name += f"[{part}]"
            form = next(iter(get_args(form)), None)
        elif len(here) > 1 and tagged:
            here = tagged
        elif here:
            name += f".{part}" if name else part
            fields = [model.model_fields[part].annotation for model in here if part in model.model_fields]
            form = next(iter(fields), None)
            here = [model for field in fields for model in _models(field)]
        elif get_origin(form) is dict:
            name += f".{part}"
            form = get_args(form)[1]
    return _KeyLocation(name=name, models=here, form=form)


def _tags(model: type[pydantic.BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
