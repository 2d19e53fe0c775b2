"""Settings of the model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError

AGENTS = "agents"
"""The folder of a snapshot that holds the adapters of agents which train their own, by name."""


AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=32)]
"""A part of the names of tensors, in which dots divide."""
SUPPORTED = "use a decoder-only text model whose layers all attend causally (qwen3, llama, gemma3_text, ...)"
"""What to do about a model that cannot be used."""


class LoraConfig(Section):
    """Train low-rank updates beside frozen weights: W·x + (alpha / rank) · B·A·x (Hu et al. 2021, eq. 3).

    The adapters alone are trained, published to the engines and saved. They are float32, whatever the base is.
    """

    rank: int = Field(default=16, ge=1)
    """Columns of B and rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by ``alpha / rank``."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Ends of the names of the linear layers that get an adapter, such as ``["q_proj", "v_proj"]``; or all but the
    head."""
    experts: bool = False
    """Whether every expert of a mixture gets an adapter of its own, too."""
    use_dora: bool = False
    """Whether the norms of the rows of the adapted weights are trained apart (DoRA, Liu et al. 2024)."""
    init: Literal["default", "gaussian"] = "default"
    """Of A: uniform in ±1/√inputs, or normal with a deviation of 1/rank. B is 0, so that training begins at the
    base."""
    seed: int = Field(default=0, ge=0)
    """What A is drawn from, and nothing else: engine and learner draw the same."""
    dropout: float = 0.0
    """Always 0."""
    adapter: str | None = Field(default=None, min_length=1)
    """Directory of an adapter in peft's format to begin with, such as a snapshot of such a run."""
    agents: tuple[AgentName, ...] = ()
    """Agents of the environment that each train an adapter of their own, of this shape, such as ``["proposer",
    "solver"]``; every other name is answered by the policy's. Where ``adapter`` is set all begin with it or, of a
    snapshot that holds one for each, with their own."""

    @model_validator(mode="after")
    def _agents_can_be_told_apart(self) -> Self:
        twice = next((name for name in self.agents if self.agents.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"model.lora.agents names {twice!r} twice", remedy="name each agent once")
        taken = next((name for name in self.agents if name == "default" or name.startswith("lora_")), None)
        if taken is not None:
            raise ConfigError(
                f"model.lora.agents: peft takes {taken!r} for a part of its own names", remedy="choose another name"
            )
        return self

    @model_validator(mode="after")
    def _is_a_function_of_the_weights(self) -> Self:
        if self.dropout:
            raise ConfigError(
                f"model.lora.dropout={self.dropout} would make log π random: no ratio of two of them means anything",
                remedy="leave model.lora.dropout out",
            )
        return self

    @model_validator(mode="after")
    def _adapts_something(self) -> Self:
        if self.target_modules == [] and not self.experts:
            raise ConfigError(
                "model.lora.target_modules=[] adapts nothing",
                remedy='set model.lora.target_modules = "all-linear", or model.lora.experts = true',
            )
        return self

    @model_validator(mode="after")
    def _experts_have_no_dora(self) -> Self:
        if self.experts and self.use_dora:
            raise ConfigError(
                "model.lora.experts=true with use_dora=true: peft has no DoRA for the weights of experts",
                remedy="leave one of the two out",
            )
        return self


class ModelConfig(Section):
    """Which model, and in which number format it is kept."""

    path: str = Field(min_length=1)
    """Directory of a Hugging Face causal language model with its tokenizer and safetensors weights; or its name on the
    Hugging Face hub, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, which is fetched where the cache does not hold it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights, in engine and learner alike."""
    deterministic: bool = False
    """Engine and learner compute with kernels that give a token the same bits whatever is computed beside it: the same
    request and seed give the same answer under any load, and the learner's log π of a token sampled by the same weights
    is exactly the engine's log μ. On a CPU in float32, for architectures that the kernels cover; training is slower."""
    lora: LoraConfig | None = None
    """Train an adapter on the frozen weights; ``None`` trains all weights."""

    def at(self, snapshot: str) -> Self:
        """The same model with the weights that a run has written into the directory ``snapshot``.

        >>> model = ModelConfig(path="base")
        >>> model.at("step-9").path
        'step-9'
        >>> adapted = model.model_copy(update={"lora": LoraConfig()}).at("step-9")
        >>> adapted.path, adapted.lora.adapter
        ('base', 'step-9')
        """
        if self.lora is None:
            return self.model_copy(update={"path": snapshot})
        return self.model_copy(update={"lora": self.lora.model_copy(update={"adapter": snapshot})})

    @property
    def adapter_agents(self) -> tuple[str, ...]:
        """Agents that train adapters of their own beside the policy's."""
        return () if self.lora is None else self.lora.agents

    def of_policy(self) -> Self:
        """The same model with the policy's adapter alone, where agents train their own beside it."""
        if self.lora is None or not self.lora.agents:
            return self
        return self.model_copy(update={"lora": self.lora.model_copy(update={"agents": ()})})

    @model_validator(mode="after")
    def _deterministic_in_float32(self) -> Self:
        if self.deterministic and self.dtype != "float32":
            raise ConfigError(
                f"model.deterministic=true with model.dtype={self.dtype!r}: the kernels compute float32",
                remedy="set model.dtype = 'float32', or leave model.deterministic out",
            )
        return self
