"""How many files this process may have open."""

from __future__ import annotations

import resource

MOST = 1 << 16
"""This process raises its limit so far, where it may."""


def open_files() -> int:
    """So many, from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most, soft)
