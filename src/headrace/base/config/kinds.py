"""Settings whose value is an entry of a registry: a table with a ``kind``, or a plain name.

A section whose table may have several kinds declares them as a union, annotated with the registry::

    LOSSES = Kinds(AnyLoss, group="headrace.losses", setting="algo.loss", contract=LossSection)
    LossConfig = Annotated[AnyLoss, LOSSES]

Pydantic's discriminated union validates the tables of the kinds in the union. A table of any other kind is validated by
the class that an installed package registers under that kind, so that each package declares its own settings.
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
    """The registry of the settings classes that one table of a run file can have. The ``kind`` in the table selects the
    class. As the annotation of a field, the registry makes pydantic validate the table with that class."""

    union: Any
    """The union of Headrace's own classes, each with a field ``kind: Literal["name"] = "name"``."""
    group: str
    """The group of entry points in which installed packages offer more classes, for example ``headrace.losses``."""
    setting: str
    """The dotted name of the table in a run file, for error messages."""
    contract: type[Section]
    """The base class of every class of settings in this registry."""
    implied: Mapping[str, str] = field(default_factory=dict)
    """Default kinds: a key that only tables of one kind have, mapped to that kind. It applies if a table has no
    ``kind``."""

    @cached_property
    def registry(self) -> Registry[type[Section]]:
        """Return the registry of all settings classes by kind: those of Headrace and those of installed packages."""
        return Registry(
            group=self.group,
            setting=f"{self.setting}.kind",
            rows={name: f"{kind.__module__}:{kind.__qualname__}" for name, kind in self.own.items()},
            check=self._problem,
        )

    @cached_property
    def own(self) -> Mapping[str, type[Any]]:
        """Return the settings classes of Headrace, which are the members of :attr:`union`, by kind."""
        return {str(kind.model_fields["kind"].default): kind for kind in get_args(self.union)}

    def find(self, kind: str) -> type[Any]:
        """Return the settings class for ``kind``, and import it if an installed package registers it. Raises
        :class:`ConfigError` for an unknown kind and for a package that cannot be used."""
        offer = self.registry.offer(kind)
        if kind in self.own:
            return self.own[kind]
        found = self.registry.load(kind)
        if get_kinds(found) != (kind,):
            raise ConfigError(
                f"{self.setting}.kind={kind!r}, which the package {offer.package} offers as {offer.target}, has no "
                f"field kind: Literal[{kind!r}] = {kind!r}",
                remedy=f"report it to the authors of {offer.package}",
            )
        return found

    def find_class(self, table: Any) -> type[Any] | None:
        """Return the settings class for ``table``, a mapping or a section; ``None`` if the table has no known kind."""
        kind = self._find_kind(table)
        return self.find(kind) if kind is not None and kind in self.registry else None

    def _problem(self, made: Any) -> str | None:
        """Return why ``made``, an object that a package registers as a settings class, cannot be used, as the end of a
        sentence; ``None`` if it inherits the contract."""
        if isinstance(made, type) and issubclass(made, self.contract):
            return None
        return f"is not a class that inherits {self.contract.__module__}.{self.contract.__name__}"

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a field that is annotated with this registry. It validates tables of Headrace's own
        kinds with pydantic's union, and tables of other kinds with the classes of their packages. Pydantic calls this
        method."""
        ours = handler.generate_schema(Annotated[source, pydantic.Field(discriminator="kind")])
        return core_schema.no_info_wrap_validator_function(
            self._validate, ours, serialization=core_schema.simple_ser_schema("any")
        )

    def _validate(self, value: Any, handler: Any) -> Any:
        """Return the section for ``value``, the table of a run file. ``handler`` validates a table of Headrace's own
        kinds. For any other kind, the class of the package is imported and validates the table."""
        kind = self._find_kind(value)
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

    def _find_kind(self, value: Any) -> str | None:
        """Return the kind that the table or section ``value`` names, or the kind that :attr:`implied` gives for one of
        its keys; ``None`` if there is neither."""
        if isinstance(value, pydantic.BaseModel):
            value = dict(value)
        if not isinstance(value, Mapping):
            return None
        kind = value.get("kind", next((kind for key, kind in self.implied.items() if key in value), None))
        return kind if isinstance(kind, str) else None


def find_classes(form: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the section classes that a setting with the type annotation ``form`` accepts. The class of a package is
    included only if its module has been imported, which happens when a run file names its kind."""
    if isinstance(form, Kinds):
        yield from (form.find(name) for name in form.registry if name not in form.own and _is_imported(form, name))
    elif isinstance(form, type) and issubclass(form, pydantic.BaseModel):
        yield form
    else:
        for part in get_args(form):
            yield from find_classes(part)


def _is_imported(kinds: Kinds, name: str) -> bool:
    """Return whether the module of the class that is registered under ``name`` is already imported."""
    return kinds.registry.offer(name).target.partition(":")[0] in sys.modules


@dataclass(frozen=True, eq=False)
class NameOf:
    """An annotation of a ``str`` setting whose value must be a name in a registry, as in ``Annotated[str,
    NameOf(ENGINES)]``."""

    registry: Registry[Any]
    """The registry that contains the allowed names."""
    also: tuple[str, ...] = ()
    """Further allowed names, which are not in the registry and have a meaning of their own."""

    def names(self) -> tuple[str, ...]:
        """Return every allowed name: the names in ``also`` and the names of the registry."""
        return (*self.also, *self.registry.names())

    def own(self) -> tuple[str, ...]:
        """Return the allowed names that Headrace provides, in its core and in its wings (optional packages of Headrace
        itself), without the names of other packages."""
        return (*self.also, *self.registry.own_names())

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a field that is annotated with this object. It validates the value as text, and then as
        a name of the registry. Pydantic calls this method."""
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def _validate(self, name: str) -> str:
        """Return ``name`` if it is allowed; otherwise raise a validation error whose remedy suggests the nearest names.
        Raises :class:`ConfigError` if several packages register the name."""
        if name in self.also:
            return name
        if name not in self.registry:
            raise PydanticCustomError("unknown_name", "does not exist", {"remedy": nearest(name, self.names())})
        self.registry.offer(name)
        return name


def get_kinds(model: type[pydantic.BaseModel]) -> tuple[Any, ...]:
    """Return the allowed values of the field ``kind`` of the section class ``model``; empty if it has no such field."""
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _below(kind: str, error: pydantic.ValidationError) -> pydantic.ValidationError:
    """Return the errors of ``error`` with ``kind`` prepended to their locations. Pydantic's discriminated union gives
    the errors of Headrace's own kinds such locations."""
    details = [
        {
            "type": PydanticCustomError(each["type"], each["msg"], each.get("ctx")),
            "loc": (kind, *each["loc"]),
            "input": each["input"],
        }
        for each in error.errors(include_url=False)
    ]
    return pydantic.ValidationError.from_exception_data(error.title, details)  # type: ignore[arg-type]
