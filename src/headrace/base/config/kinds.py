"""Settings whose value is an entry of a registry: a table with a ``kind``, or a name alone.

A section that may hold one of several tables declares them as a union, annotated with the registry::

    LOSSES = Kinds(AnyLoss, group="headrace.losses", setting="algo.loss", contract=LossSection)
    LossConfig = Annotated[AnyLoss, LOSSES]

Pydantic's discriminated union validates the tables of the union. For any other kind, the class that an installed
package offers under that name is imported and validates the table: each package brings its own settings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, get_args

import pydantic
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from headrace.base.config.section import Section
from headrace.base.errors import ConfigError, nearest
from headrace.base.plugins import Registry


@dataclass(frozen=True, eq=False)
class Kinds:
    """The registry of the classes of settings that one table of a run file can have. The ``kind`` in the table chooses
    the class. As an annotation of a field, it makes pydantic validate the table with that class."""

    union: Any
    """The union of Headrace's own classes, each with a field ``kind: Literal["name"] = "name"``."""
    group: str
    """The group of entry points in which installed packages offer more classes, for example ``headrace.losses``."""
    setting: str
    """The dotted name of the table in a run file, for error messages."""
    contract: type[Section]
    """The base class of every class of settings in this registry."""
    implied: Mapping[str, str] = field(default_factory=dict)
    """The kind of a table that does not name one: a key that only tables of one kind have, mapped to that kind."""

    @cached_property
    def registry(self) -> Registry[type[Section]]:
        """Return the registry of all classes by kind: Headrace's own and those of installed packages."""
        return Registry(
            group=self.group,
            setting=f"{self.setting}.kind",
            rows={name: f"{kind.__module__}:{kind.__qualname__}" for name, kind in self.own.items()},
            check=self._problem,
        )

    @cached_property
    def own(self) -> Mapping[str, type[Any]]:
        """Return Headrace's own classes, the members of :attr:`union`, by kind."""
        return {str(kind.model_fields["kind"].default): kind for kind in get_args(self.union)}

    def find(self, kind: str) -> type[Any]:
        """Return the class of settings for ``kind``, imported if a package offers it. Raises :class:`ConfigError` for
        an unknown kind and for a package that cannot be used."""
        offer = self.registry.offer(kind)
        if kind in self.own:
            return self.own[kind]
        found = self.registry.load(kind)
        if _tags(found) != (kind,):
            raise ConfigError(
                f"{self.setting}.kind={kind!r}, which the package {offer.package} offers as {offer.target}, has no "
                f"field kind: Literal[{kind!r}] = {kind!r}",
                remedy=f"report it to the authors of {offer.package}",
            )
        return found

    def of(self, table: Any) -> type[Any] | None:
        """Return the class of settings for ``table``, a mapping or a section; ``None`` if it names no known kind."""
        kind = self._kind_of(table)
        return self.find(kind) if kind is not None and kind in self.registry else None

    def _problem(self, made: Any) -> str | None:
        """Return what is wrong with ``made``, an object that a package offers as a class of settings, as the end of a
        sentence; ``None`` if it inherits the contract."""
        if isinstance(made, type) and issubclass(made, self.contract):
            return None
        return f"is not a class that inherits {self.contract.__module__}.{self.contract.__name__}"

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that validates tables of Headrace's own kinds with pydantic's union, and tables of packages
        with their own classes. Pydantic calls this for a field that is annotated with this registry."""
        ours = handler.generate_schema(Annotated[source, pydantic.Field(discriminator="kind")])
        return core_schema.no_info_wrap_validator_function(
            self._validate, ours, serialization=core_schema.simple_ser_schema("any")
        )

    def _validate(self, value: Any, handler: Any) -> Any:
        """Return the record of settings for ``value``, the table of a run file. ``handler`` validates Headrace's own
        kinds; any other kind is imported from the package that offers it, and validates its own settings."""
        kind = self._kind_of(value)
        if kind is None:
            return handler(value)
        if isinstance(value, Mapping):
            value = {**value, "kind": kind}
        if kind not in self.registry:
            known = ", ".join(map(repr, self.registry.names()))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'kind'", "tag": kind, "expected_tags": known}
            )
        found = self.find(kind)
        if kind in self.own:
            return handler(value)
        try:
            return found.model_validate(value)
        except pydantic.ValidationError as error:
            raise _below(kind, error) from None

    def _kind_of(self, value: Any) -> str | None:
        """Return the kind that a table or a section names or, through :attr:`implied`, implies; ``None`` if there is
        neither."""
        if isinstance(value, pydantic.BaseModel):
            value = dict(value)
        if not isinstance(value, Mapping):
            return None
        kind = value.get("kind", next((kind for key, kind in self.implied.items() if key in value), None))
        return kind if isinstance(kind, str) else None


def classes_of(form: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the sections that a setting whose type annotation is ``form`` may hold. A section of a package is included
    only if its module has been imported already, because a run file named it."""
    if isinstance(form, Kinds):
        yield from (form.find(name) for name in form.registry if name not in form.own and _is_imported(form, name))
    elif isinstance(form, type) and issubclass(form, pydantic.BaseModel):
        yield form
    else:
        for part in get_args(form):
            yield from classes_of(part)


def _is_imported(kinds: Kinds, name: str) -> bool:
    """Return whether the module of the class that is registered under ``name`` has been imported already."""
    return kinds.registry.offer(name).target.partition(":")[0] in sys.modules


@dataclass(frozen=True, eq=False)
class NameOf:
    """An annotation of a ``str`` setting whose value must be a name in a registry, as in ``Annotated[str,
    NameOf(ENGINES)]``."""

    registry: Registry[Any]
    """The registry that has the names."""
    also: tuple[str, ...] = ()
    """Names that are allowed beside those of the registry, with a meaning of their own."""

    def names(self) -> tuple[str, ...]:
        """Return every allowed name: those of the registry, and those in ``also``."""
        return (*self.also, *self.registry.names())

    def own(self) -> tuple[str, ...]:
        """Return the allowed names that come with Headrace: those of its core and of its wings (optional packages of
        Headrace itself), without those of other packages."""
        return (*self.also, *self.registry.own_names())

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that validates the value as text, and then as a name of the registry. Pydantic calls this
        for a field that is annotated with this object."""
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def _validate(self, name: str) -> str:
        """Return ``name`` if it is allowed; otherwise raise an error of validation whose remedy suggests the nearest
        names. Raises :class:`ConfigError` if several packages offer the name."""
        if name in self.also:
            return name
        if name not in self.registry:
            raise PydanticCustomError("unknown_name", "does not exist", {"remedy": nearest(name, self.names())})
        self.registry.offer(name)
        return name


def _tags(model: type[pydantic.BaseModel]) -> tuple[Any, ...]:
    """Return the values that the field ``kind`` of a section may have; empty if it has no such field."""
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _below(kind: str, error: pydantic.ValidationError) -> pydantic.ValidationError:
    """Return the errors of ``error`` with ``kind`` put before their locations: the location that pydantic's
    discriminated union gives to errors of Headrace's own kinds."""
    details = [
        {
            "type": PydanticCustomError(each["type"], each["msg"], each.get("ctx")),
            "loc": (kind, *each["loc"]),
            "input": each["input"],
        }
        for each in error.errors(include_url=False)
    ]
    return pydantic.ValidationError.from_exception_data(error.title, details)  # type: ignore[arg-type]
