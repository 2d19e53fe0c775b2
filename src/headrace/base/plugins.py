"""Registries: the objects that a run file can name by ``kind``, from Headrace itself and from installed packages.

A package registers a loss, a transport, an engine, a command and so on with one line of its ``pyproject.toml``::

    [project.entry-points."headrace.losses"]
    huber = "my_package.huber:HUBER"

Headrace registers its wings, the optional packages in ``headrace.wings``, in the same way. Names are read from the
metadata of the installed packages. A package is imported only when a run uses one of its names, so that a broken
package stops only the runs that use it.
"""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from headrace.base.errors import ConfigError, nearest

log = logging.getLogger("headrace")

OWN_PACKAGE = "headrace"
"""The distribution name of Headrace. Another package cannot replace a name that Headrace registers."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The entry of one name that a package registers in one registry."""

    name: str
    """The name as a run file writes it."""
    target: str
    """The location of the object, as ``package.module:object``; without ``:object`` the object is the module itself."""
    package: str
    """The name of the installed distribution that registers the name."""


@dataclass(frozen=True, kw_only=True)
class Registry(Generic[T]):
    """The objects that one setting can name: Headrace's own objects and those that installed packages register as entry
    points. An object is imported when it is loaded.

    >>> CODECS = Registry[object](group="headrace.example", setting="sync.codec", rows={"full": "json:loads"})
    >>> CODECS.names()
    ('full',)
    >>> CODECS.load("full")('[1]')
    [1]
    """

    group: str
    """The group of entry points, for example ``headrace.losses``."""
    setting: str
    """The setting whose value is a name of this registry, or a phrase with a space, such as ``the verb``. Error
    messages contain it."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """The entries of Headrace's core: each name, mapped to its object as ``module:object``. They take precedence over
    the entries of every package, so that installing a package does not change the meaning of a run file."""
    former: Mapping[str, str] = field(default_factory=dict)
    """Former names, each mapped to the present name, which the error for a former name contains."""
    check: Callable[[Any], str | None] | None = None
    """A function that checks a loaded object. It returns the problem of the object, as the end of a sentence, or
    ``None``. If this field is ``None``, nothing is checked."""

    def names(self) -> tuple[str, ...]:
        """Return every registered name, sorted."""
        return tuple(sorted(self._offers))

    def own_names(self) -> tuple[str, ...]:
        """Return the names that Headrace itself registers: those of its core in the order of ``rows``, then those of
        its wings (its optional packages), sorted."""
        ours = [name for name, offers in self._offers.items() if any(each.package == OWN_PACKAGE for each in offers)]
        return tuple(dict.fromkeys([*self.rows, *sorted(ours)]))

    def __contains__(self, name: object) -> bool:
        """Return whether Headrace or an installed package registers ``name``."""
        return name in self._offers

    def __iter__(self) -> Iterator[str]:
        """Iterate over every registered name, sorted."""
        return iter(self.names())

    def offer(self, name: str) -> Registered:
        """Return the entry of ``name``, which contains its package and the location of its object, without importing
        the object. Headrace's own entry takes precedence over those of other packages. Raises
        :class:`~headrace.base.errors.ConfigError` for an unknown name, and for a name that several other packages
        register."""
        offers = self._offers.get(name, [])
        if not offers and name in self.former:
            now = self.former[name]
            raise ConfigError(f"{self._named(name)} has another name now: {now}", remedy=f"write {now}")
        if not offers:
            stale = "install Headrace again (pip install -e . in a clone): what is installed is older than its source"
            raise ConfigError(
                f"{self._named(name)} is not known", remedy=nearest(name, self._offers) if self._offers else stale
            )
        own = [offer for offer in offers if offer.package == OWN_PACKAGE]
        if own:
            for offer in offers:
                if offer.package != OWN_PACKAGE:
                    _warn_once(
                        f"the package {offer.package} offers {self._named(name)}, which is Headrace's own: "
                        "Headrace's is used"
                    )
            return own[0]
        if len(offers) > 1:
            packages = " and ".join(sorted(offer.package for offer in offers))
            raise ConfigError(
                f"{self._named(name)} is offered by the packages {packages}",
                remedy="uninstall all of them but one, or have one give it another name",
            )
        return offers[0]

    def load(self, name: str) -> T:
        """Import and return the object that is registered under ``name``.

        Raises :class:`~headrace.base.errors.ConfigError` as :meth:`offer` does, and for a package that cannot be
        imported or whose object violates its contract. The error names the package.
        """
        offer = self.offer(name)
        made: T = _load(offer.target, offer.package, self._named(name))
        problem = self.check(made) if self.check is not None else None
        if problem is not None:
            raise ConfigError(
                f"{self._named(name)}, which the package {offer.package} offers as {offer.target}, {problem}",
                remedy=f"report it to the authors of {offer.package}, or name another one",
            )
        return made

    def _named(self, name: str) -> str:
        """Return the setting with the value ``name``, for error messages, such as ``env.kind='gem'``."""
        return f"{self.setting} {name!r}" if " " in self.setting else f"{self.setting}={name!r}"

    @cached_property
    def _offers(self) -> Mapping[str, list[Registered]]:
        """Return all entries of each name: those of Headrace's core and the entry points of installed packages."""
        offers: dict[str, list[Registered]] = defaultdict(list)
        for name, target in self.rows.items():
            offers[name].append(Registered(name=name, target=target, package=OWN_PACKAGE))
        for entry in get_entry_points(self.group):
            package = entry.dist.name if entry.dist is not None else entry.value.partition(":")[0]
            offer = Registered(name=entry.name, target=entry.value, package=package)
            # an editable installation beside an older installation lists a package twice
            if offer not in offers[entry.name]:
                offers[entry.name].append(offer)
        return dict(offers)


def make_class_check(kind: type) -> Callable[[Any], str | None]:
    """Return the check of a registry whose objects are instances of the class ``kind``."""
    return lambda made: (
        None if isinstance(made, kind) else f"is a {type(made).__name__}, not a {kind.__module__}.{kind.__qualname__}"
    )


def lazy_attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package`` that imports a public name when it is first used.

    ``homes`` maps each public name to the module that defines it; a module name that begins with a dot denotes a
    submodule of ``package``. This keeps ``headrace --help`` fast: it imports the packages of all commands, but not the
    modules that only the execution of a command needs.
    """

    def find(name: str) -> Any:
        """Import and return the object with the public name ``name``."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(importlib.import_module(homes[name], package))[name]

    return find


def get_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of the group ``group``, such as ``headrace.losses``, in all installed packages."""
    return _entry_points().get(group, ())


@cache
def _entry_points() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of all groups whose name begins with ``headrace.``, by group. They are read once per
    process, from the metadata files of all installed packages."""
    found = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith("headrace.")}


@cache
def _warn_once(text: str) -> None:
    """Log ``text`` as a warning, only once per process: later calls with the same text return the cached result."""
    log.warning(text)


def _load(target: str, package: str, named: str) -> Any:
    """Import and return the object that ``package`` registers as ``target``, in the form ``module:attribute``.
    ``named`` is the setting with its value, for the message of :class:`~headrace.base.errors.ConfigError`, which is
    raised if the import fails in any way."""
    module, _, attribute = target.partition(":")
    try:
        made: Any = importlib.import_module(module)
        for part in filter(None, attribute.split(".")):
            made = getattr(made, part)
    except ConfigError:
        raise
    # importing the package of another author can raise any exception
    except Exception as error:
        raise ConfigError(
            f"{named} is offered by the package {package} as {target}, which cannot be imported: "
            f"{type(error).__name__}: {error}",
            remedy=f"fix or uninstall {package}; if it needs a package that is not installed, install that",
        ) from error
    return made
