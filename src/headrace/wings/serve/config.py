"""Settings of the server."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.tls import refuse_half
from headrace.engine.config import EngineConfig
from headrace.models.config import ModelConfig


class ServeSection(Section):
    """Where the server listens, and what it accepts."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind; any other than a loopback address needs a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 for a free one."""
    name: str = ""
    """The model's name in requests and answers; empty for the name of its directory."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1)
    """Longest request body."""
    max_prompts: int = Field(default=128, ge=1)
    """Most prompts of one request."""
    max_n: int = Field(default=128, ge=1)
    """Most choices per prompt."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that a choice may ask for; unset: the engine's context."""
    max_sequences: int = Field(default=1024, ge=1)
    """Most choices at once, running or waiting, of all requests; beyond, requests are told to come back later."""
    max_priority: int = Field(default=0, ge=0, le=2**31 - 1)
    """The highest priority that a request may ask for; lower ones anybody may."""
    idle_timeout_s: int = Field(default=30, ge=1)
    """A connection that brings no request for so long, or takes nothing of its answer, is cut."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for a request's body."""
    grace_s: float = Field(default=10.0, ge=0)
    """After Ctrl-C, how long running requests may go on before they end with what they have."""
    tls_certificate: str = ""
    """PEM file with the certificate of the server, and those that lead to its authority; unset: no TLS."""
    tls_key: str = ""
    """PEM file with its key, without a password."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        refuse_half("serve", self.tls_certificate, self.tls_key)
        return self


class ServeEngineConfig(EngineConfig):
    """The engine of a server: readers of streams wait for each token."""

    flush_tokens: int = Field(default=1, ge=1)
    """Tokens of a choice that travel together."""


class ServeConfig(Section):
    """All settings of ``headrace serve``."""

    model: ModelConfig
    """Which model is served."""
    engine: ServeEngineConfig = ServeEngineConfig()
    """How its completions are sampled."""
    serve: ServeSection = ServeSection()
    """Where, and within which limits."""
