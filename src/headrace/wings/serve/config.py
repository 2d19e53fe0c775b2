"""The settings of ``headrace serve``."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.tls import refuse_incomplete_tls
from headrace.engine.config import EngineConfig
from headrace.models.config import ModelConfig


class ServeSection(Section):
    """The settings of the address at which the server listens and of the requests that it accepts."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. An address other than a loopback address needs a token."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    name: str = ""
    """Name of the model in requests and answers; empty takes the name of its directory."""
    tool_parser: str = "auto"
    """Name of the parser that finds calls of tools in answers, with the same values as ``env.tool_parser``; ``auto``
    selects the parser that fits the chat template."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1)
    """Size of the longest request body that is read, in bytes. A longer body is refused with status 413."""
    max_prompts: int = Field(default=128, ge=1)
    """Largest number of prompts in one request."""
    max_n: int = Field(default=128, ge=1)
    """Largest number of choices per prompt."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest ``max_tokens`` that a request may set; unset: only the engine's context limits it."""
    max_sequences: int = Field(default=1024, ge=1)
    """Largest number of choices of all requests that run or wait at once. Requests beyond it are refused with status
    429, so that the client tries again later."""
    max_priority: int = Field(default=0, ge=0, le=2**31 - 1)
    """Highest priority that a request may set; any lower priority is always allowed."""
    idle_timeout_s: int = Field(default=30, ge=1)
    """Seconds after which the server closes a connection that sends no request or reads nothing of its answer."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for the whole body of a request, in seconds."""
    grace_s: float = Field(default=10.0, ge=0)
    """Seconds that running requests may continue after Ctrl-C. After that, each choice ends with the tokens sampled so
    far."""
    tls_certificate: str = ""
    """PEM file with the server's certificate, followed by the intermediate certificates up to its authority; unset: no
    TLS."""
    tls_key: str = ""
    """PEM file with the private key of ``tls_certificate``, without a password."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        """Refuse a certificate without its key, and a key without its certificate."""
        refuse_incomplete_tls("serve", self.tls_certificate, self.tls_key)
        return self


class ServeEngineConfig(EngineConfig):
    """The settings of the engine in a server: it sends each token at once, since readers of streams wait for it."""

    flush_tokens: int = Field(default=1, ge=1)
    """Number of tokens of one choice that are sent in one piece."""


class ServeConfig(Section):
    """The settings of ``headrace serve``, all in one tree."""

    model: ModelConfig
    """The model that is served."""
    engine: ServeEngineConfig = ServeEngineConfig()
    """The engine that samples the completions."""
    serve: ServeSection = ServeSection()
    """The address and the limits of the server."""
