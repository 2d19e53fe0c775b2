"""Where the dashboard listens, and for whom."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.config.tls import refuse_half
from headrace.base.errors import ConfigError

DEFAULT_PORT = 8321


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTerms:
    """What ``headrace view`` is asked for."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = DEFAULT_PORT
    """0 for a free one."""
    token: str = ""
    """What callers must bring; empty for a new one."""
    tls_certificate: str = ""
    """PEM file with the certificate of the server; empty: no TLS."""
    tls_key: str = ""
    """PEM file with its key."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is no port", remedy="give 0 (a free one) to 65535")
        if not self.host:
            raise ConfigError("--host is empty", remedy="give an address, 127.0.0.1 for this machine only")
        refuse_half("view", self.tls_certificate, self.tls_key)
