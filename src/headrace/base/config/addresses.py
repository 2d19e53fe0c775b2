"""Checks of the network addresses and URLs that settings contain."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, urlsplit

from headrace.base.errors import ConfigError

LOOPBACK = "127.0.0.1"
"""The loopback address, which only this machine can reach."""
EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::"})
"""The wildcard addresses: a server may listen at them, and a client cannot connect to them."""


_HOST_HEADER = re.compile(
    r"(?:\[(?P<ip>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?))(?::(?P<port>[0-9]{1,5}))?"
)


_SECRET_PARAMETER = re.compile(
    r"(?i)(?:.*[_-])?(?:password|passwd|pwd|secret|token|(?:api|access)?[_-]?key|auth|code|credentials?|sig|signature)"
)


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an IP address without a port, can be reached from this machine only.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``address``, which must be ``HOST:PORT``, into its host and its port. Raises
    :class:`~headrace.base.errors.ConfigError` for any other text.

    >>> host_and_port("10.0.0.5:7781"), host_and_port("[fd00::5]:7781")
    (('10.0.0.5', 7781), ('fd00::5', 7781))
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is not an address with a port", remedy="write HOST:PORT, as in 10.0.0.5:7781")
    return host, int(port)


def parse_host(header: str) -> str:
    """Return the host that a ``Host`` header names, without its port. Return "" for a header that is not exactly what
    RFC 9112, section 3.2, allows: a user name, or text behind a bracket or a port, could hide another host.

    >>> [parse_host(text) for text in ("localhost:80", "[::1]:80", "[::1].evil.com", "localhost:80@evil.com")]
    ['localhost', '::1', '', '']
    """
    found = _HOST_HEADER.fullmatch(header)
    return "" if found is None or int(found["port"] or 0) > 65535 else found["ip"] or found["name"]


def find_secret(url: str) -> str:
    """Return a description of the secret that a URL contains, or "" if the URL contains none that is recognised. Three
    parts count as secrets: a password; the user name of a web address, which may be a token; and a query parameter
    whose name denotes a key, such as ``api_key``. The user name of any other address is not a secret.

    >>> find_secret("redis://:hush@10.0.0.9"), find_secret("https://x.org/v1?api_key=hush"), find_secret("redis://me@10.0.0.9")
    ('a password', 'a password or key (the parameter api_key)', '')
    >>> [find_secret(f"https://x.org/v1?{name}=hush") != "" for name in ("subscription-key", "code", "model")]
    [True, True, False]
    >>> find_secret("http://[me:hush@x.org")
    'what may be a password'
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # not a URL: the caller that expects a URL reports the text
        return "what may be a password" if "@" in url else ""
    if parts.password:
        return "a password"
    if parts.username and parts.scheme in ("http", "https"):
        return "a user name or token"
    names = (name for name, value in parse_qsl(parts.query) if value and _SECRET_PARAMETER.fullmatch(name))
    return next((f"a password or key (the parameter {name})" for name in names), "")


def refuse_secret(
    setting: str, url: str, remedy: str, *, reason: str = "the settings of a run stand in its files"
) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``url``, the value of the setting ``setting``, contains a
    secret. The message does not show the URL. It contains ``remedy``, which says where the secret belongs, and
    ``reason``, which says why a URL must not contain it."""
    if found := find_secret(url):
        raise ConfigError(f"{setting} holds {found}, and {reason}", remedy=f"leave it out of the URL, and {remedy}")
