"""Access to Redis servers: settings give an address without a password, and the environment variable that has it."""

from __future__ import annotations

from typing import Any

from headrace.base.environ import secret
from headrace.base.errors import ConfigError


def redis_package(setting: str) -> Any:
    """Import and return the package ``redis``. Raises :class:`ConfigError` that names ``setting`` if it is not
    installed."""
    try:
        import redis
    except ImportError:
        raise ConfigError(f"{setting} needs the package redis", remedy="pip install 'headrace[redis]'") from None
    return redis


def read_password(setting: str, variable: str) -> str | None:
    """Return the value of the environment variable that ``setting`` names; ``None`` if it names no variable. Raises
    :class:`ConfigError` if the variable is not set."""
    if variable and not secret(variable):
        raise ConfigError(
            f"{setting}={variable!r}, and that environment variable is not set",
            remedy=f"export {variable}=..., or leave {setting} out",
        )
    return secret(variable) or None


def without_password(url: str) -> str:
    """Return ``url`` without its user name and password.

    >>> without_password("redis://me:hush@10.0.0.9:6379/0")
    'redis://10.0.0.9:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
