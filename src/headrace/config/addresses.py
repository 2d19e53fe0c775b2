"""Addresses of machines, as settings name them."""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""
EVERYWHERE = frozenset({"", "*", "0.0.0.0", "::"})
"""Addresses to listen at, and none to reach."""


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
