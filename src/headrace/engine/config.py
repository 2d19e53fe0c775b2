"""Settings of the engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.engine.capabilities import Capabilities, capabilities
from headrace.models.devices import AUTO, CPU, DeviceName
from headrace.wings.servers.client.config import ServerConfig

LEAST_TEMPERATURE = 0.01
"""Of what is sampled: below, 32 bits do not hold what becomes of the logits. 0 takes the most likely token."""

SHARE = 0.3
"""Of the free memory: the most that the cache takes if nothing is said. A learner, which has its optimizer's state yet
to make, may have to live beside it."""
OWN_SHARE = 0.9
"""The same on a GPU that the engine has to itself; the rest is for what a pass makes."""


_NATIVE_ONLY = ("cache_tokens", "max_pinned_versions", "stream_steps", "kernels")
"""Settings that a server knows nothing of."""


class EngineConfig(Section):
    """How sequences are sampled, and how many at once."""

    kind: Literal["native", "vllm", "sglang"] = "native"
    """``native``: the embedded engine. ``vllm``, ``sglang``: a server of those, beside this machine's other parts; what
    each can do stands in docs/engines.md, and what it cannot is refused."""
    server: ServerConfig = ServerConfig()
    """The server, where ``kind`` names one."""
    device: DeviceName = AUTO
    """Where it computes: ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: the last of the GPUs that torch sees, the processor
    where there is none."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """Sampling temperature while training; the learner uses the same."""
    top_k: int = Field(default=0, ge=0)
    """Only this many of the most likely tokens, and those exactly as likely as the last of them, can be drawn; 0 for
    all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the most likely tokens whose probabilities together reach this can be drawn; 1 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this fraction as likely as the most likely one can be drawn; 0 for all."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences in the batch at once."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens. Unset: the longest prompt of the data plus ``max_new_tokens``."""
    max_step_tokens: int = Field(default=2048, ge=1)
    """Tokens of one step: those of decoding sequences come first, pieces of prompts get the rest."""
    max_waiting: int = Field(default=65_536, ge=1)
    """Requests that may wait to join the batch; one more is refused."""
    cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose keys and values fit the cache. Unset: all that ``max_sequences`` of ``max_context`` could need, but
    at most ``cache_share`` of the free memory."""
    cache_share: float | None = Field(default=None, gt=0, le=1)
    """Of the memory that is free when the engine has loaded, the most that the cache takes. Unset: 0.9 of a GPU that no
    learner computes on, else 0.3, which leaves the rest to the learner."""
    fork_memory: int = Field(default=256, ge=0)
    """How many ended sequences can still be forked: the tokens of that many are kept."""
    max_pinned_versions: int = Field(default=2, ge=1)
    """Older versions that sequences may stay under at once: each is a copy of the model. Those that would need one
    more wait until one is free."""
    stream_steps: int = Field(default=8, ge=1)
    """Steps over which the commit mode ``stream`` spreads the exchange of the parameters."""
    kernels: Literal["auto", "off"] = "auto"
    """Whether parts of the model run as fused kernels where there are any for this machine."""
    flush_tokens: int = Field(default=64, ge=1)
    """A running sequence's tokens are reported each time there are this many of them, and when it ends."""

    @property
    def can(self) -> Capabilities:
        """What engines of that kind can do there."""
        return capabilities(self.kind, self.device)

    def refuse_server(self, what: str) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` unless it can compute in the process of ``what``."""
        if not self.can.embedded:
            raise ConfigError(
                f"engine.kind={self.kind!r} is a server of its own, and {what} computes in its own process",
                remedy="set engine.kind = 'native'",
            )

    @model_validator(mode="after")
    def _settings_act(self) -> Self:
        fields = type(self).model_fields
        if self.kind == "native":
            if self.server != ServerConfig():
                raise ConfigError(
                    "engine.server is set, and engine.kind='native' has none",
                    remedy="set engine.kind = 'vllm' or 'sglang', or leave [engine.server] out",
                )
            return self
        if self.kind != "vllm" and self.server.weights_by != "files":
            raise ConfigError(
                f"engine.server.weights_by={self.server.weights_by!r} is of engine.kind='vllm', and this is another",
                remedy="set it to 'files', and engine.server.weights_dir to a folder that both machines see",
            )
        for name in _NATIVE_ONLY:
            given = self.__dict__[name]
            if given != fields[name].default:
                raise ConfigError(
                    f"engine.{name}={given!r} is of engine.kind='native': a server decides that by itself",
                    remedy=f"leave it out, or say it in the words of {self.kind}: engine.server.args",
                )
        return self

    def on(self, device: str, *, shared: bool) -> Self:
        """The same, on ``device``, with a cache that leaves room for the learner if it is ``shared`` with one.

        >>> EngineConfig().on("cuda:1", shared=False).cache_share, EngineConfig().on("cuda:0", shared=True).cache_share
        (0.9, 0.3)
        """
        alone = device != CPU and not shared
        share = self.cache_share or (OWN_SHARE if alone else SHARE)
        return self.model_copy(update={"device": device, "cache_share": share})
