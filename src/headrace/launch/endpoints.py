"""The contract of the endpoint at which programs reach their episodes over HTTP, and the registry of endpoints.

A *program* is an agent that an environment starts, for example a coding agent: it asks the model through the endpoint,
with a key of its own episode. An endpoint speaks the protocols that agents know. :mod:`headrace.wings.agents` has one
for OpenAI's and Anthropic's protocols.
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
class ListenAddress:
    """The address at which an endpoint listens, at a free port, and the certificate with which it encrypts."""

    host: str = "127.0.0.1"
    """An address of this machine, by which the programs can reach it."""
    tls_certificate: str = ""
    """Path of a PEM file with the certificate; empty: without TLS."""
    tls_key: str = ""
    """Path of a PEM file with the certificate's key."""


HERE = ListenAddress()
"""The address that only programs of this machine can reach, without TLS."""


class EpisodeAccess(Protocol):
    """The address and the key by which a program reaches its episode."""

    last_refusal: str
    """The reason why the latest request was refused; empty if no request was."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables in which clients look for the address and the key."""
        ...


class EpisodeEndpoint(Protocol):
    """An endpoint that listens for the HTTP requests of programs. The pool of environment workers uses it."""

    def session(self, episode: OpenEpisode) -> AbstractAsyncContextManager[EpisodeAccess]:
        """Let programs reach ``episode`` within the context, which has the address and the key for them. Afterwards the
        episode is complete: its key is refused, and none of its requests runs."""
        ...


class OpenEndpoint(Protocol):
    """A function that opens an endpoint, which listens within the context that is returned."""

    def __call__(
        self,
        sampling: Sampling,
        *,
        clock: Clock,
        warn: Callable[[str], None],
        agents: frozenset[str] = frozenset(),
        at: ListenAddress = HERE,
    ) -> AbstractAsyncContextManager[EpisodeEndpoint]:
        """Listen at ``at``. The policy samples with the parameters ``sampling``, whatever requests say; ``warn`` is
        called with a text once for each parameter in which they differ. A request whose model is the name of one of
        ``agents`` is answered by that agent."""
        ...


ENDPOINTS = Registry[OpenEndpoint](
    group="headrace.endpoints",
    setting="the endpoint",
    check=lambda made: None if callable(made) else "cannot be called",
)
"""The endpoints that are installed, by name."""


def open_endpoint() -> OpenEndpoint:
    """Return the function that opens the endpoint ``agents``, which the package of agents registers.

    Raises :class:`~headrace.base.errors.ConfigError` if it is not installed.
    """
    return ENDPOINTS.load("agents")
