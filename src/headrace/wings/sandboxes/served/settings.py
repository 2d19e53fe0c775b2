"""The reading of what a driver is given: its settings, ``env.options.driver``, and paths of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.base.config import Section
from headrace.base.errors import ConfigError

S = TypeVar("S", bound=Section)


def driver_settings(kind: str, section: type[S], options: Mapping[str, Any]) -> S:
    """Return the settings of sandboxes of ``kind``. Raises :class:`~headrace.base.errors.ConfigError` for one that is
    wrong."""
    try:
        return section(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the setting {name!r} of sandboxes of kind {kind!r}: {first['msg']}", remedy="see docs/sandboxes.md"
        ) from None


def refuse_readable(kind: str, readable: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for paths of this machine, which no service can show."""
    if readable:
        raise ConfigError(
            f"readable={list(readable)} cannot be shown to sandboxes of kind {kind!r}, which run elsewhere",
            remedy="leave readable empty, and put the files into the image",
        )
