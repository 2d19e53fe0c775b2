"""The validation of a driver's arguments: its settings (``env.options.driver``), and readable paths of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.base.config import Section
from headrace.base.errors import ConfigError

S = TypeVar("S", bound=Section)


def validate_driver_settings(kind: str, section: type[S], options: Mapping[str, Any]) -> S:
    """Return ``options``, the settings of sandboxes of ``kind``, as a record of ``section``. Raises
    :class:`~headrace.base.errors.ConfigError` for an invalid setting."""
    try:
        return section(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the setting {name!r} of sandboxes of kind {kind!r}: {first['msg']}", remedy="see docs/sandboxes.md"
        ) from None


def refuse_readable(kind: str, readable: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``readable`` names paths of this machine, because a remote
    machine of a service of ``kind`` cannot read them."""
    if readable:
        raise ConfigError(
            f"readable={list(readable)} cannot be shown to sandboxes of kind {kind!r}, which run elsewhere",
            remedy="leave readable empty, and put the files into the image",
        )
