"""The types of mixture-of-experts models whose routing can be recorded and replayed. Reads a config only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.errors import ModelError
from headrace.models.settings import by_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAMES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""The model types of the supported families."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def routes(config: PreTrainedConfig) -> bool:
    """Return whether a model of this configuration routes its tokens to experts.

    Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts of an unsupported family.
    """
    if config.model_type in NAMES:
        return True
    if experts := _experts(config):
        name, count = next(iter(experts.items()))
        raise ModelError(
            f"a {config.model_type} is a mixture of experts ({name}={count}) whose routing can be neither recorded nor "
            "replayed",
            remedy=f"use a model of type {', '.join(NAMES)}, or set learner.keep_routing = false",
        )
    return False


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model of this configuration has experts, of any family."""
    return config.model_type in NAMES or bool(_experts(config))


def _experts(config: PreTrainedConfig) -> dict[str, int]:
    read = config.ffn_config if config.model_type == "dbrx" else config
    counts = {name: max(by_layer(read, name), default=0) for name in _EXPERTS}
    return {name: count for name, count in counts.items() if count > 1}
