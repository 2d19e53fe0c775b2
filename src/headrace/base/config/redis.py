"""Redis servers that settings name: an address without a password, and the variable that holds it."""

from __future__ import annotations

from typing import Any

from headrace.base.environ import secret
from headrace.base.errors import ConfigError


def redis_package(setting: str) -> Any:
    """The package; ``setting`` needs it."""
    try:
        import redis
    except ImportError:
        raise ConfigError(f"{setting} needs the package redis", remedy="pip install 'headrace[redis]'") from None
    return redis


def password_in(setting: str, variable: str) -> str | None:
    """What the environment variable holds that ``setting`` names; ``None`` where it names none."""
    if variable and not secret(variable):
        raise ConfigError(
            f"{setting}={variable!r}, and that environment variable is not set",
            remedy=f"export {variable}=..., or leave {setting} out",
        )
    return secret(variable) or None


def without_password(url: str) -> str:
    """
    >>> without_password("redis://me:hush@10.0.0.9:6379/0")
    'redis://10.0.0.9:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
