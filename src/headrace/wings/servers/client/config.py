"""The settings of an engine that samples through a server: the table ``[engine.server]`` of a run file. The engine
starts the server itself, or connects to a server that already runs at one of ``urls``."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.base.config.addresses import EVERYWHERE, LOOPBACK, is_loopback, refuse_secret
from headrace.base.errors import ConfigError
from headrace.engine.config import EngineSettings

_QUANTISING = ("quantization", "kv-cache-dtype", "kv_cache_dtype")
"""Options in ``engine.server.args`` with which a server computes in 8 bits or fewer."""


_PARALLEL = {
    "engine.tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "engine.pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size"),
    "engine.count": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}
"""The options of servers that choose the number of GPUs, by the setting of a run file with the same meaning."""


class ServerConfig(EngineSettings):
    """The settings of the server of ``engine.kind = "vllm"`` or ``"sglang"``, which an engine starts or which already
    runs."""

    urls: tuple[str, ...] = ()
    """URLs of servers that run already, one for each of ``engine.count``, such as ``http://127.0.0.1:8000``; empty:
    each engine starts its own. docs/engines.md says how they must be started."""
    token_from: str = ""
    """Environment variable with the API key of the servers in ``urls``; empty: they need none."""
    python: str = ""
    """Python interpreter of the environment in which the server is installed; empty: that of Headrace."""
    args: tuple[str, ...] = ()
    """Further arguments for a server that an engine starts, such as ``["--enable-prefix-caching"]``. The number of GPUs
    is set by ``engine.tensor`` and ``engine.pipeline``, and the server can use only these GPUs."""
    cache_mb: int | None = Field(default=None, ge=1)
    """Size of the key-value cache of a server that an engine starts, in MiB. Unset: ``engine.cache_share`` of the
    memory of a GPU, 1,024 on processors."""
    wait_s: float = Field(default=110.0, gt=0)
    """Longest wait until the server answers, in seconds; ``launch.start_timeout_s`` must be longer."""
    any_version: bool = False
    """Whether a server of an untested version is accepted."""
    weights_dir: str = ""
    """Folder that this process and the server can both access, through which new weights pass; empty: shared memory of
    this machine."""
    weights_by: Literal["files", "gloo", "nccl"] = "files"
    """How new weights reach the server. ``files``: through ``weights_dir``. ``gloo``, ``nccl``: by a broadcast of
    torch.distributed to the server's machines while it generates, for a server that shares no folder with this machine
    (vLLM only); ``nccl`` sends from a GPU of this machine to one of each server machine."""
    weights_host: str = LOOPBACK
    """Address of this machine at which the server's machines reach it, for ``gloo`` and ``nccl`` only. The ports there
    accept connections without a token: the network must be trusted."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse addresses that are not HTTP URLs or that contain a secret."""
        for url in urls:
            remedy = "name an environment variable that holds the key: engine.server.token_from"
            refuse_secret("engine.server.urls", url, remedy)
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"engine.server.urls holds {url!r}, which is not a URL",
                    remedy='write it as "http://127.0.0.1:8000"',
                )
        return urls

    @model_validator(mode="after")
    def _ways_are_used(self) -> Self:
        """Refuse settings that only another ``weights_by`` uses, and an address that the server cannot reach."""
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
                f"engine.server.weights_host={self.weights_host!r} is not an address that a server could reach",
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
        """Refuse settings for starting a server together with URLs of running servers, and an API key without URLs."""
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

    def for_engine(self, place: int) -> ServerConfig:
        """Return the settings of the engine number ``place``, in which ``urls`` has only the URL of its server."""
        return self.model_copy(update={"urls": self.urls[place : place + 1]})

    @property
    def is_fixed(self) -> bool:
        """Whether the settings name servers that run already."""
        return bool(self.urls)

    def refuse_run(self, *, count: int, width: int, start_timeout_s: float) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the settings do not fit the run: ``count`` engines of
        ``width`` GPUs each, which must have started after ``start_timeout_s`` seconds."""
        if start_timeout_s <= self.wait_s:
            raise ConfigError(
                f"launch.start_timeout_s={start_timeout_s:g} ends an engine that may wait "
                f"engine.server.wait_s={self.wait_s:g} for its server",
                remedy=f"set launch.start_timeout_s = {self.wait_s + 30:g}, or a shorter engine.server.wait_s",
            )
        if self.urls and width > 1:
            raise ConfigError(
                "engine.tensor and engine.pipeline are of a server that is started, and engine.server.urls names some "
                "that run",
                remedy="leave them out: a server that runs computes on the GPUs that it was started with",
            )
        if self.urls and len(self.urls) != count:
            raise ConfigError(
                f"engine.server.urls names {len(self.urls)} servers for engine.count={count}",
                remedy="name one for each engine",
            )

    def refuse_start(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for arguments that choose the GPUs of a server, since the
        run chooses them."""
        for arg in self.args:
            option = arg.partition("=")[0].replace("_", "-")
            setting = next((name for name, options in _PARALLEL.items() if option in options), "")
            if setting:
                raise ConfigError(
                    f"engine.server.args holds {arg!r}: the GPUs of a server are chosen by the run",
                    remedy=f"leave it out, and set {setting}",
                )

    def sentence(self, kind: str) -> str:
        """Return a sentence for the user about the server that samples answers; ``kind`` is the name of the kind of
        server."""
        python = self.python or "this environment"
        where = f"at {', '.join(self.urls)}" if self.urls else f"that each engine starts from {python}"
        return f"Answers are sampled by {kind}, {where}."

    @property
    def quantises(self) -> bool:
        """Return whether the server's arguments make it compute in 8 bits or fewer, so that its logprobs differ from
        the learner's."""
        return any(word in arg for arg in self.args for word in _QUANTISING)


class SharedFolderConfig(ServerConfig):
    """The settings of a server that can receive new weights only through a folder."""

    @model_validator(mode="after")
    def _weights_are_files(self) -> Self:
        """Refuse other ways to send weights than files, which this server does not have."""
        if self.weights_by != "files":
            raise ConfigError(
                f"engine.server.weights_by={self.weights_by!r} is of engine.kind='vllm', and this is another",
                remedy="set it to 'files', and engine.server.weights_dir to a folder that both machines see",
            )
        return self
