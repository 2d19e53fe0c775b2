"""From a TOML file and ``--set`` overrides to one validated record."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic
from pydantic_core import ErrorDetails

from headrace.config.section import Section
from headrace.errors import ConfigError, nearest

C = TypeVar("C", bound=Section)


def load_toml(path: Path) -> dict[str, Any]:
    """The tree of a TOML file; :class:`ConfigError` names file, line and reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"run file {path} does not exist", remedy="give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}", remedy="give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"run file {path} is not TOML: {error}", remedy="mend that line") from None


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


def validate(kind: type[C], tree: Mapping[str, Any]) -> C:
    """``tree`` as a ``kind``; :class:`ConfigError` lists every key that is wrong: value, reason and remedy."""
    try:
        return kind.model_validate(tree)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    lines = [_explain(kind, detail) for detail in details]
    raise ConfigError("\n".join(problem for problem, _ in lines), remedy="; ".join(_unique(r for _, r in lines)))


def _explain(kind: type[Section], detail: ErrorDetails) -> tuple[str, str]:
    original = detail.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        return original.problem, original.remedy
    (name, inner), (_, around) = _locate(kind, detail["loc"]), _locate(kind, detail["loc"][:-1])
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            known = {key for model in around for key in model.model_fields}
            return f"{name} is not a setting", nearest(str(detail["loc"][-1]), known)
        case "missing":
            required = [f"{name}.{key}" for model in inner for key, f in model.model_fields.items() if f.is_required()]
            return f"{name} is missing", f"set {' and '.join(required) or name}"
        case "union_tag_invalid":
            ctx = detail["ctx"]
            tags = [tag.strip().strip("'") for tag in str(ctx["expected_tags"]).split(",")]
            return f"{name}.kind={ctx['tag']!r} does not exist", nearest(str(ctx["tag"]), tags)
        case "union_tag_not_found":
            return f"{name} does not say its kind", f"set {name}.kind"
        case "model_type" | "model_attributes_type":
            return f"{name}={value!r} is not a table of settings", f"write [{name}] and its settings below"
        case "string_type":
            return f"{name}={value!r} is not text", f'put it in quotes: {name} = "{value}"'
    return f"{name}={value!r}: {detail['msg'].lower()}", f"change {name}"


def _locate(kind: type[Section], location: tuple[int | str, ...]) -> tuple[str, list[type[pydantic.BaseModel]]]:
    """The name of a place as a run file writes it, and the sections that can stand there. A union's tag stands in a
    location too: it chooses among the sections and is no part of the name."""
    name = ""
    here: list[type[pydantic.BaseModel]] = [kind]
    for part in location:
        tagged = [model for model in here if part in _tags(model)]
        if isinstance(part, int):
            name += f"[{part}]"
        elif len(here) > 1 and tagged:
            here = tagged
        else:
            name += f".{part}" if name else part
            fields = [model.model_fields[part].annotation for model in here if part in model.model_fields]
            here = [model for field in fields for model in _models(field)]
    return name, here


def _tags(model: type[pydantic.BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
