"""The estimated cost of the tokens of a pass, by which micro-batches of about equal cost are packed."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.learner.footprint import CACHED_NUMBERS
from headrace.learner.packing import Cost
from headrace.models.routing import RoutedModel
from headrace.models.settings import get_layer_values


def estimate_cost(model: PreTrainedModel, routed: RoutedModel | None) -> Cost:
    """Return the cost of a pair of tokens in attention, relative to the cost of a token in all other operations, and
    the best size of a pass. ``routed`` is the routing of a mixture of experts; ``None`` for a dense model.

    A forward pass has 2 · parameters operations per token, and 4 · heads · head size per layer and pair of tokens.
    Causality masks half of the T² pairs of a sample, so the cost of one of T² pairs is layers · heads · head size /
    parameters. In a mixture, only the selected experts count. Sliding windows are ignored.

    On a CPU, a dense model is fastest in passes whose activations stay in the cache. Ranks that gather their parameters
    for every pass are faster with few passes, and experts with many tokens in each pass.
    """
    chosen_share = 1.0 if routed is None else routed.top_k / routed.num_experts
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding
    parameters = sum(
        parameter.numel() * (chosen_share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if tied or parameter is not embedding
    )
    config = model.config
    heads = max(get_layer_values(config, "num_attention_heads"), default=0)
    head_size = max(get_layer_values(config, "head_dim"), default=config.hidden_size // max(heads, 1))
    per_pair = int(config.num_hidden_layers) * heads * head_size / parameters
    return Cost(per_pair=per_pair, best_rows=best_rows(model))


def best_rows(model: PreTrainedModel) -> int | None:
    """Return the largest number of tokens in a pass of a dense model whose activations stay in the cache of a CPU;
    ``None`` for other devices, for mixtures, and for parameters that are sharded over ranks."""
    inner = max(get_layer_values(model.config, "intermediate_size"), default=0)
    mixture = get_layer_values(model.config, "num_experts_per_tok")
    if not inner or mixture or model.device.type != "cpu" or isinstance(model.get_input_embeddings().weight, DTensor):
        return None
    return max(1, CACHED_NUMBERS // inner)
