"""From a TOML file and ``--set`` overrides to one validated record."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

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
        parsed = tomllib.loads(f"value = {value}")["value"]
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
    """``tree`` as a ``kind``; :class:`ConfigError` lists every key that is wrong, its value, the reason and the remedy."""
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
    location = [part for part in detail["loc"] if isinstance(part, str)]
    name = ".".join(location)
    match detail["type"]:
        case "extra_forbidden":
            return f"{name} is not a setting", nearest(location[-1], _known_keys(kind, location[:-1]))
        case "missing":
            return f"{name} is missing", f"set {name}"
        case "union_tag_invalid":
            ctx = detail["ctx"]
            known = [tag.strip().strip("'") for tag in str(ctx["expected_tags"]).split(",")]
            return f"{name}.kind={ctx['tag']!r} does not exist", nearest(str(ctx["tag"]), known)
        case "union_tag_not_found":
            return f"{name} does not say its kind", f"set {name}.kind"
    return f"{name}={detail['input']!r}: {detail['msg'].lower()}", f"change {name}"


def _known_keys(kind: type[Section], location: list[str]) -> list[str]:
    """The keys of the section at ``location``; tags of unions stand in the location and are walked through."""
    here: list[type[pydantic.BaseModel]] = [kind]
    for part in location:
        fields = [model.model_fields[part].annotation for model in here if part in model.model_fields]
        here = [model for field in fields for model in _models(field)] or here
    return sorted({name for model in here for name in model.model_fields})


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


def _unique(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
