"""Addresses of machines, as settings name them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, urlsplit

from headrace.base.errors import ConfigError

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""
EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::"})
"""Addresses to listen at, and none to reach."""


_HOST_HEADER = re.compile(
    r"(?:\[(?P<ip>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?))(?::(?P<port>[0-9]{1,5}))?"
)


_SECRET_PARAMETER = re.compile(
    r"(?i)(?:.*[_-])?(?:password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key|auth|sig|signature)"
)


def is_loopback(host: str) -> bool:
    """Whether ``host`` means this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Return the host that a ``Host`` header names, without its port, and "" where it is not exactly what RFC 9112,
    section 3.2, allows: user names, and text behind a bracket or a port, could hide another name.

    >>> [host_of(text) for text in ("localhost:80", "[::1]:80", "[::1].evil.com", "localhost:80@evil.com")]
    ['localhost', '::1', '', '']
    """
    found = _HOST_HEADER.fullmatch(header)
    return "" if found is None or int(found["port"] or 0) > 65535 else found["ip"] or found["name"]


def secret_in(url: str) -> str:
    """Return what kind of secret a URL holds, and "" if none can be recognised: a password, the user name of a web
    address (which is a token where it stands alone), or a parameter of the query that is named like one. The user name
    of other addresses is none.

    >>> secret_in("redis://:hush@10.0.0.9"), secret_in("https://x.org/v1?api_key=hush"), secret_in("redis://me@10.0.0.9")
    ('a password', 'a password or key (the parameter api_key)', '')
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL, which is said where one is expected
        return ""
    if parts.password:
        return "a password"
    if parts.username and parts.scheme in ("http", "https"):
        return "a user name or token"
    names = (name for name, value in parse_qsl(parts.query) if value and _SECRET_PARAMETER.fullmatch(name))
    return next((f"a password or key (the parameter {name})" for name in names), "")


def refuse_secret(
    setting: str, url: str, remedy: str, *, reason: str = "the settings of a run stand in its files"
) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where the URL in ``setting`` holds a secret; ``remedy`` says
    where it
    belongs. The URL itself is not shown."""
    if held := secret_in(url):
        raise ConfigError(
            f"{setting} holds {held}, and {reason}",
            remedy=f"leave it out of the URL, and {remedy}",
        )
