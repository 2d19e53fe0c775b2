"""Settings of an engine that is a server."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import EVERYWHERE, LOOPBACK, is_loopback, refuse_secret
from headrace.base.errors import ConfigError


class ServerConfig(Section):
    """The server of ``engine.kind = "vllm"`` or ``"sglang"``: started, or found where it runs."""

    urls: tuple[str, ...] = ()
    """Servers that run already, one for each of ``engine.count``, such as ``http://127.0.0.1:8000``; empty: each engine
    starts its own. See docs/engines.md for how they have to be started."""
    token_from: str = ""
    """Environment variable with the key that ``urls`` want; empty: they want none."""
    python: str = ""
    """Interpreter of the environment that the server is installed in; empty: that of Headrace."""
    args: tuple[str, ...] = ()
    """More arguments of a server that is started, such as ``["--tensor-parallel-size", "2"]``."""
    cache_mb: int | None = Field(default=None, ge=1)
    """Memory of the key-value cache of a server that is started. Unset: on a GPU ``engine.cache_share`` of its memory,
    on processors 1,024."""
    wait_s: float = Field(default=110.0, gt=0)
    """Longest that a server may take until it answers; ``launch.start_timeout_s`` has to be longer."""
    any_version: bool = False
    """Whether a server of a version that was not tested may be used."""
    weights_dir: str = ""
    """Folder that this process and the server see, through which new weights go; empty: shared memory of this
    machine."""
    weights_by: Literal["files", "gloo", "nccl"] = "files"
    """How new weights reach the server. ``files``: it sees the folder that they lie in. ``gloo``, ``nccl``: they are
    carried to its machines by torch.distributed while it generates, for one that shares no folder with this machine
    (vLLM); ``nccl`` from a GPU of this machine to one of each of the server's."""
    weights_host: str = LOOPBACK
    """``gloo`` and ``nccl`` only: address of this machine at which the server's machines can reach it. Whoever reaches
    its ports there is not asked who they are: the network must be a trusted one."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            remedy = "name an environment variable that holds the key: engine.server.token_from"
            refuse_secret("engine.server.urls", url, remedy)
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"engine.server.urls holds {url!r}, which is no URL", remedy='write it as "http://127.0.0.1:8000"'
                )
        return urls

    @model_validator(mode="after")
    def _ways_are_used(self) -> Self:
        if self.weights_by != "files" and self.weights_dir:
            raise ConfigError(
                f"engine.server.weights_dir is a folder that the server sees, and weights_by={self.weights_by!r} uses "
                "none",
                remedy="leave one of them out",
            )
        if self.weights_by == "files" and self.weights_host != LOOPBACK:
            raise ConfigError(
                f"engine.server.weights_host={self.weights_host!r} is set, and weights_by='files' needs no address",
                remedy="set engine.server.weights_by = 'gloo' or 'nccl', or leave weights_host out",
            )
        if self.weights_host in EVERYWHERE:
            raise ConfigError(
                f"engine.server.weights_host={self.weights_host!r} is no address that a server could reach",
                remedy="name the address of one interface of this machine",
            )
        away = next((url for url in self.urls if not is_loopback(urlsplit(url).hostname or "")), "")
        if self.weights_by != "files" and away and is_loopback(self.weights_host):
            raise ConfigError(
                f"engine.server.weights_host={self.weights_host!r} is this machine alone, and engine.server.urls names "
                f"{away}, which could not reach it there",
                remedy="set it to the address at which that machine reaches this one",
            )
        return self

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.urls and (self.python or self.args or self.cache_mb is not None):
            name = "python" if self.python else "args" if self.args else "cache_mb"
            raise ConfigError(
                f"engine.server.{name} is of a server that is started, and engine.server.urls names some that run",
                remedy="leave one of them out",
            )
        if self.token_from and not self.urls:
            raise ConfigError(
                "engine.server.token_from is of servers that run already, and engine.server.urls names none",
                remedy="leave it out: a server that is started gets a key, or a socket, that only this run knows",
            )
        return self
