"""Detection of mixture-of-experts models, and of whether their routing can be recorded and replayed. Importing this
module imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.models.settings import BUILDING, get_layer_values

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The settings whose value is a number of experts, in various architectures."""


def routes(config: PreTrainedConfig) -> bool:
    """Return whether a model with this configuration routes its tokens to experts.

    Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts with unsupported routers.
    """
    if not _expert_counts(config):
        return False
    import torch

    from headrace.models.routing import find_routing
    from headrace.models.text_part import causal_class

    kind = causal_class(config)
    assert kind is not None, "checked by load.supported_config"
    with BUILDING, torch.device("meta"):
        model = kind(config)
    return find_routing(model) is not None


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model with this configuration has several experts."""
    return num_experts(config) > 1


def num_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts per layer of a model with the configuration ``config``, the largest if layers
    differ; 0 for a dense model."""
    return max(_expert_counts(config), default=0)


def _expert_counts(config: PreTrainedConfig) -> list[int]:
    """Return the numbers of experts in a configuration; empty for a dense model."""
    read = config.ffn_config if config.model_type == "dbrx" else config
    return [count for name in _EXPERTS if (count := max(get_layer_values(read, name), default=0))]
