"""The contract of the endpoint at which programs reach their episodes over HTTP, and the registry of endpoints.

An endpoint speaks the protocols that agents know. :mod:`headrace.wings.agents` has one for OpenAI's and Anthropic's
protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from headrace.base.clock import Clock
from headrace.base.plugins import Registry
from headrace.base.types.sampling import Sampling
from headrace.rollout.environments.base import OpenEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """The addresses at which an endpoint listens."""

    host: str = "127.0.0.1"
    """An address of this machine."""
    tls_certificate: str = ""
    """Path of a PEM file with the certificate; empty: without TLS."""
    tls_key: str = ""
    """Path of a PEM file with the certificate's key."""


HERE = At()


class EpisodeAccess(Protocol):
    """The address and the key by which a program reaches its episode."""

    last_refusal: str
    """The reason why the latest request was refused; empty if no request was."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables in which clients look for the address and the key."""
        ...


class EpisodeEndpoint(Protocol):
    """An endpoint that listens for requests."""

    def session(self, episode: OpenEpisode) -> AbstractAsyncContextManager[EpisodeAccess]:
        """Let programs reach ``episode`` during the body. After the body the episode is complete: its key is refused,
        and none of its requests runs."""
        ...


class OpenEndpoint(Protocol):
    """Opens an endpoint during a body."""

    def __call__(
        self,
        sampling: Sampling,
        *,
        clock: Clock,
        warn: Callable[[str], None],
        agents: frozenset[str] = frozenset(),
        at: At = HERE,
    ) -> AbstractAsyncContextManager[EpisodeEndpoint]:
        """Listen at ``at``. The policy samples as ``sampling`` says, whatever requests say; ``warn`` is called once for
        each field in which they differ. A request whose model is one of ``agents`` is answered by that agent."""
        ...


ENDPOINTS = Registry[OpenEndpoint](
    group="headrace.endpoints",
    setting="the endpoint",
    check=lambda made: None if callable(made) else "cannot be called",
)
"""The endpoints that are installed, by name."""


def open_endpoint() -> OpenEndpoint:
    """Return the function that opens the endpoint of agents.

    Raises :class:`~headrace.base.errors.ConfigError` if it is not installed.
    """
    return ENDPOINTS.load("agents")
