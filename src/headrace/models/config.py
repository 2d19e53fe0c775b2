"""The settings of the model and of its adapters: ``[model]`` of a run file."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError

AGENTS = "agents"
"""The folder in a snapshot that contains the adapters of agents, each in a subfolder with the agent's name."""


AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=32)]
"""The name of an agent with its own adapter. It becomes a part of the names of tensors, which dots separate."""
AttentionName = Literal["auto", "flex", "padded"]
"""The ways in which a learner computes attention (:mod:`headrace.models.packed`), and ``auto`` for the fastest way that
runs on the device."""
WHOLE = "headrace_text_of"
"""The setting in the configuration of a text model that names the multimodal checkpoint from which it was loaded."""
SUPPORTED = "use a decoder-only text model that docs/models.md says works, such as qwen3, llama, gemma3 or qwen3_5"
"""The remedy in errors about a model that is not supported."""


class LoraConfig(Section):
    """Train low-rank updates beside frozen weights: W·x + (alpha / rank) · B·A·x (Hu et al. 2021, eq. 3).

    Only the adapters are trained, published to the engines and saved. Their numbers are float32, whatever the dtype of
    the base.
    """

    rank: int = Field(default=16, ge=1)
    """The rank r: the number of columns of B and of rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale α: the update is multiplied by ``alpha / rank``."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The linear layers that get an adapter, as suffixes of their names, such as ``["q_proj", "v_proj"]``.
    ``"all-linear"``: all linear layers except the head, routers, ``out_proj`` of Mamba models for which peft refuses it
    (falcon_h1, mamba2, nemotron_h), and the dense layers and shared experts of mixtures in which peft confuses their
    names with experts (qwen3_moe, deepseek_v3, mixtral, and others that were saved in parts)."""
    experts: bool = False
    """Whether every expert of a mixture-of-experts model gets its own adapter, too. This requires that all experts of a
    layer are in one tensor."""
    use_dora: bool = False
    """Whether the norms of the rows of the adapted weights are trained separately (DoRA, Liu et al. 2024)."""
    init: Literal["default", "gaussian"] = "default"
    """The initial distribution of A: uniform in ±1/√inputs (``"default"``), or normal with a standard deviation of
    1/rank. B starts at 0, so that training begins at the base."""
    seed: int = Field(default=0, ge=0)
    """The seed of A's initial values only. Engine and learner draw the same values."""
    dropout: float = 0.0
    """Always 0; another value is refused."""
    adapter: str | None = Field(default=None, min_length=1)
    """The directory of an adapter in peft's format from which training starts, such as a snapshot of a LoRA run;
    ``None`` for a new adapter."""
    agents: tuple[AgentName, ...] = ()
    """The agents of the environment that each train their own adapter of this shape, such as ``["proposer",
    "solver"]``. All other agents use the policy's adapter. With ``adapter``, all of these adapters start from it or, if
    it is a snapshot with one adapter per agent, each from its own."""

    @model_validator(mode="after")
    def _refuse_reserved_agents(self) -> Self:
        """Refuse names of agents that occur twice, or that peft reserves."""
        repeated = next((name for name in self.agents if self.agents.count(name) > 1), None)
        if repeated is not None:
            raise ConfigError(f"model.lora.agents names {repeated!r} twice", remedy="name each agent once")
        reserved = next((name for name in self.agents if name == "default" or name.startswith("lora_")), None)
        if reserved is not None:
            raise ConfigError(
                f"model.lora.agents: peft takes {reserved!r} for a part of its own names", remedy="choose another name"
            )
        return self

    @model_validator(mode="after")
    def _refuse_dropout(self) -> Self:
        """Refuse dropout, with which the model would not be a function of its weights."""
        if self.dropout:
            raise ConfigError(
                f"model.lora.dropout={self.dropout} would make log π random: no ratio of two of them means anything",
                remedy="leave model.lora.dropout out",
            )
        return self

    @model_validator(mode="after")
    def _refuse_empty_adapter(self) -> Self:
        """Refuse an adapter without layers."""
        if self.target_modules == [] and not self.experts:
            raise ConfigError(
                "model.lora.target_modules=[] adapts nothing",
                remedy='set model.lora.target_modules = "all-linear", or model.lora.experts = true',
            )
        return self

    @model_validator(mode="after")
    def _refuse_dora_of_experts(self) -> Self:
        """Refuse DoRA for experts, which peft does not support."""
        if self.experts and self.use_dora:
            raise ConfigError(
                "model.lora.experts=true with use_dora=true: peft has no DoRA for the weights of experts",
                remedy="leave one of the two out",
            )
        return self


class ModelConfig(Section):
    """The model and the number format of its weights."""

    path: str = Field(min_length=1)
    """The directory of a Hugging Face causal language model with its tokenizer and safetensors weights; or its name
    on the Hugging Face hub, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``. A model from the hub is downloaded unless the
    cache contains it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The number format of the weights, in engine and learner alike."""
    deterministic: bool = False
    """Whether engine and learner use kernels whose result for a token does not depend on the rest of the batch. The
    same request and seed then give the same answer under any load, and the learner's log π of a token sampled by the
    same weights is exactly the engine's log μ. Supported on a CPU in float32, for architectures that the kernels cover.
    Training is slower."""
    lora: LoraConfig | None = None
    """The adapter that is trained on the frozen weights; ``None``: all weights are trained."""

    def with_snapshot(self, snapshot: str) -> Self:
        """Return the configuration of the same model with the weights that a run has written into the directory
        ``snapshot``.

        >>> model = ModelConfig(path="base")
        >>> model.with_snapshot("step-9").path
        'step-9'
        >>> adapted = model.model_copy(update={"lora": LoraConfig()}).with_snapshot("step-9")
        >>> adapted.path, adapted.lora.adapter
        ('base', 'step-9')
        """
        if self.lora is None:
            return self.model_copy(update={"path": snapshot})
        return self.model_copy(update={"lora": self.lora.model_copy(update={"adapter": snapshot})})

    @property
    def adapter_agents(self) -> tuple[str, ...]:
        """Return the agents that train their own adapters beside the policy's adapter."""
        return () if self.lora is None else self.lora.agents

    def keep_policy_adapter(self) -> Self:
        """Return the configuration of the same model with only the policy's adapter."""
        if self.lora is None or not self.lora.agents:
            return self
        return self.model_copy(update={"lora": self.lora.model_copy(update={"agents": ()})})

    @model_validator(mode="after")
    def _refuse_deterministic_formats(self) -> Self:
        """Refuse deterministic kernels for number formats other than float32."""
        if self.deterministic and self.dtype != "float32":
            raise ConfigError(
                f"model.deterministic=true with model.dtype={self.dtype!r}: the deterministic kernels compute float32",
                remedy="set model.dtype = 'float32', or leave model.deterministic out",
            )
        return self
