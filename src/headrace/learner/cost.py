"""The cost of a token for a model, which balances micro-batches."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.learner.packing import Cost
from headrace.models.routing import RoutedModel
from headrace.models.settings import by_layer

CACHED_NUMBERS = 2**21
"""Number of elements of a layer's widest activation that fits into the cache of a CPU. With a feed-forward size of
1536, passes of 1024 to 1536 tokens take a sixth less CPU time than passes of 4096, and half of their memory."""


def cost_of(model: PreTrainedModel, routed: RoutedModel | None) -> Cost:
    """Return the cost of attention relative to everything else, by which micro-batches are packed. A token is
    multiplied with every parameter that it uses, and with each earlier token of its sample in every layer and head.
    ``routed`` is the routing of a mixture of experts; ``None`` for a dense model.

    Per token there are 2 · parameters operations in the forward pass; per pair of a sample's T² (half of which
    causality hides) and layer 4 · heads · head size, so the cost of a pair is layers · heads · head size / parameters.
    Of a mixture only the chosen experts count; a sliding window is not considered.

    On a CPU, a dense model is fastest in passes whose activations stay in the cache. Ranks that gather their parameters
    for every pass need few passes, and experts need many tokens in each pass.
    """
    chosen = 1.0 if routed is None else routed.top_k / routed.num_experts
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding
    parameters = sum(
        parameter.numel() * (chosen if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if tied or parameter is not embedding
    )
    config = model.config
    heads = max(by_layer(config, "num_attention_heads"), default=0)
    head_size = max(by_layer(config, "head_dim"), default=config.hidden_size // max(heads, 1))
    per_pair = int(config.num_hidden_layers) * heads * head_size / parameters
    return Cost(per_pair=per_pair, best_rows=best_rows(model))


def best_rows(model: PreTrainedModel) -> int | None:
    """Return the number of tokens of the largest pass of a dense model that stays in the cache of a CPU; ``None`` for
    other devices and for parameters that are sharded over ranks."""
    inner = max(by_layer(model.config, "intermediate_size"), default=0)
    mixture = by_layer(model.config, "num_experts_per_tok")
    if not inner or mixture or model.device.type != "cpu" or isinstance(model.get_input_embeddings().weight, DTensor):
        return None
    return max(1, CACHED_NUMBERS // inner)
