"""The contract of an endpoint at which programs reach their episodes over HTTP, and the registry of endpoints.

A *program* is an agent that an environment starts, for example a coding agent. It sends its requests for answers of the
model to the endpoint, with the key of its own episode. An endpoint implements the protocols that such agents use.
:mod:`headrace.wings.agents` contains an endpoint for OpenAI's and Anthropic's protocols.
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
    """The address at which an endpoint listens, on a free port, and the certificate for TLS."""

    host: str = "127.0.0.1"
    """An address of this machine that the programs can reach."""
    tls_certificate: str = ""
    """Path of a PEM file with the certificate; empty: without TLS."""
    tls_key: str = ""
    """Path of a PEM file with the certificate's private key."""


HERE = ListenAddress()
"""The loopback address without TLS: only programs on this machine can reach it."""


class EpisodeAccess(Protocol):
    """The address and the key with which a program reaches its episode."""

    last_refusal: str
    """The reason why the latest request was refused; empty if no request was refused."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables from which clients read the address and the key."""
        ...


class EpisodeEndpoint(Protocol):
    """An endpoint that accepts the HTTP requests of programs. The pool of environment workers uses it."""

    def session(self, episode: OpenEpisode) -> AbstractAsyncContextManager[EpisodeAccess]:
        """Let programs reach ``episode`` within the returned context, which provides the address and the key for them.
        When the context has ended, the key is refused and no request of the episode is running."""
        ...


class OpenEndpoint(Protocol):
    """A function that opens an endpoint. The endpoint listens within the returned context."""

    def __call__(
        self,
        sampling: Sampling,
        *,
        clock: Clock,
        warn: Callable[[str], None],
        agents: frozenset[str] = frozenset(),
        at: ListenAddress = HERE,
    ) -> AbstractAsyncContextManager[EpisodeEndpoint]:
        """Listen at ``at``. The policy always samples with the parameters ``sampling``, even if requests contain
        others; ``warn`` then receives a text, once for each parameter that differs. A request whose model is the name
        of one of ``agents`` is answered by that agent."""
        ...


ENDPOINTS = Registry[OpenEndpoint](
    group="headrace.endpoints",
    setting="the endpoint",
    check=lambda made: None if callable(made) else "cannot be called",
)
"""The installed endpoints, by name."""


def open_endpoint() -> OpenEndpoint:
    """Return the function that opens the endpoint named ``agents``, which the package of agents registers.

    Raises :class:`~headrace.base.errors.ConfigError` if no such endpoint is installed.
    """
    return ENDPOINTS.load("agents")
