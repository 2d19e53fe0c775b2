"""The advice for a learner that runs out of memory: the settings that need less memory, and how much each would free.

The numbers are estimates from the model's configuration. They are accurate enough to choose a setting, but not to use
the last bytes of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headrace.base.errors import RunError
from headrace.learner.auxiliary.config import KeptSection
from headrace.learner.config import LearnerConfig
from headrace.learner.cost import best_rows
from headrace.models.packed import PADDED, ChosenAttention
from headrace.models.settings import by_layer
from headrace.models.weights import is_adapted

MOMENTS_BYTES = 8
"""The bytes of AdamW's two moments of one parameter, in float32."""

LOW_BIT_BYTES = 2
"""The bytes of two 8-bit moments of one parameter, without their scales, which add about a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sizes that determine how much memory a learner needs on its device, from which the advice in out-of-memory
    errors is computed."""

    config: LearnerConfig
    """The present settings of the learner."""
    tokens: int
    """The number of tokens of the largest pass, if samples are short."""
    layer_bytes: int
    """The bytes that are kept for the backward pass for one token in one layer."""
    input_bytes: int
    """The bytes of the input of one layer for one token."""
    pair_bytes: int
    """The bytes of attention scores that all layers together keep for a pair of tokens of one sample; 0 if no scores
    are kept. A pass may be a single sample, in which all tokens form pairs."""
    layer_pair_bytes: int
    """The bytes of scores for such a pair in the layer with the most scores."""
    num_layers: int
    """The number of layers of the model."""
    trained: int
    """The number of trained parameters, over all ranks."""
    frozen: int
    """The number of parameters that are not trained, over all ranks."""
    itemsize: int
    """The bytes of one parameter."""
    adapted: bool
    """Whether an adapter is trained. Every rank has the whole adapter, and moving its small optimizer state frees
    little."""
    on_host: bool
    """Whether the device is the CPU, so that moving tensors to the host frees nothing."""

    @classmethod
    def of(cls, model: PreTrainedModel, config: LearnerConfig, attention: ChosenAttention = PADDED) -> MemoryPlan:
        """Return the plan of a loaded model with the implementation ``attention``.

        A layer keeps for each token about ten vectors of the hidden size (residuals, norms, queries, keys, values, the
        output of attention) and three vectors of the feed-forward size (gate, up, their product); see Korthikanti et
        al. 2022, eq. 1.
        """
        model_config = model.config
        hidden, itemsize = int(model_config.hidden_size), model.dtype.itemsize
        inner = max(by_layer(model_config, "intermediate_size"), default=4 * hidden)
        experts = max(by_layer(model_config, "num_experts_per_tok"), default=0)
        if experts:
            inner = max(by_layer(model_config, "moe_intermediate_size"), default=inner) * experts
        on_host, shares = model.device.type == "cpu", config.share_prefixes is not False
        pairs = [kind.pair_bytes for kind in attention.layers if kind.writes_scores(on_host=on_host, shares=shares)]
        if attention.name == "flex" and not on_host:
            pairs = []
        return cls(
            config=config,
            tokens=min(config.tokens_per_microbatch, best_rows(model) or config.tokens_per_microbatch),
            layer_bytes=(10 * hidden + 3 * inner) * itemsize,
            input_bytes=hidden * itemsize,
            pair_bytes=sum(pairs),
            layer_pair_bytes=max(pairs, default=0),
            num_layers=int(model_config.num_hidden_layers),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            itemsize=itemsize,
            adapted=is_adapted(model),
            on_host=on_host,
        )

    def levers(self) -> list[str]:
        """Return texts for the settings that would free memory, each with the approximate number of bytes that it frees
        on one rank."""
        config, memory, ways = self.config, self.config.memory, self.config.parallel
        tokens = self.tokens / ways.context
        kept = self.input_bytes if memory.recompute else self.layer_bytes
        activations = 0 if memory.offload_activations else tokens * self.num_layers * kept / ways.tensor
        scores, layer_scores = (tokens * self.tokens * each for each in (self.pair_bytes, self.layer_pair_bytes))
        if memory.recompute or memory.offload_activations:
            scores = layer_scores
        shards = ways.data * ways.context * ways.tensor
        parts = 1 if self.adapted else shards
        masters = 4 * (memory.masters and self.itemsize < 4)
        low_bit = config.optimizer.kind == "adamw8bit"
        moments = self.trained * ((LOW_BIT_BYTES if low_bit else MOMENTS_BYTES) + masters) / parts
        gradients = self.trained * (self.itemsize + 4 * bool(masters)) / parts
        sharded = self.frozen * self.itemsize / shards
        if not self.adapted:
            sharded += self.trained * self.itemsize / parts + gradients + (0 if memory.offload_optimizer else moments)
        half = max(1, self.tokens // 2)
        offloaded = self.on_host or self.adapted or memory.offload_optimizer
        inputs = tokens * self.num_layers * self.input_bytes / ways.tensor
        freed_bytes = {
            f"learner.tokens_per_microbatch = {half} (every sample must fit)": activations / 2 + scores * 3 / 4,
            "learner.attention = 'flex'": scores if config.attention == "padded" and not self.on_host else 0,
            "learner.memory.recompute = true": 0 if memory.recompute else activations - inputs + scores - layer_scores,
            "learner.memory.offload_activations = true": 0 if self.on_host else activations + scores - layer_scores,
            "learner.memory.whole_gradients = false": memory.whole_gradients * self.trained * 4 * (1 - 1 / shards),
            "learner.memory.offload_optimizer = true": 0 if offloaded else moments,
            "learner.optimizer.kind = 'adamw8bit' (headrace[low-bit])": 0
            if config.optimizer.kind != "adamw" or ways.world > 1 or self.adapted or memory.offload_optimizer
            else self.trained * (MOMENTS_BYTES - LOW_BIT_BYTES),
            f"learner.parallel.data = {2 * ways.data} (on as many devices)": 0 if low_bit else sharded / 2,
        }
        for name, policy in config.policies.items():
            if isinstance(policy, KeptSection) and policy.device == "model" and not self.on_host:
                freed_bytes[f"learner.{name}.device = 'cpu'"] = policy.num_bytes(self.trained, self.itemsize) / parts
        return [f"{setting}: about {in_words(freed)}" for setting, freed in freed_bytes.items() if freed > 0]


UNCHANGED = "there is no gradient, weights and optimizer are unchanged, and the batch can be given again"
HALF_UPDATED = "the update had begun, so that only a snapshot has whole weights: resume from the last one"
"""The descriptions of gradient and weights after a failure, for the error."""


@contextmanager
def explained_out_of_memory(plan: MemoryPlan, step: int, left: str = UNCHANGED) -> Iterator[None]:
    """Return a context that converts an out-of-memory error into a :class:`~headrace.base.errors.RunError` about
    ``step``, which names settings that free memory. ``left`` describes gradient and weights after the failure.

    The code inside the context must discard its tensors on failure.
    """
    reason = ""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error) or "no memory is left"
    except RuntimeError as error:  # torch has no narrower type for the host's memory
        if "can't allocate memory" not in str(error):
            raise
        reason = str(error)
    if reason:  # after the handlers, because the traceback keeps tensors alive
        if not plan.on_host:
            torch.cuda.empty_cache()
        raise RunError(
            f"step {step} does not fit in memory: {reason.splitlines()[0]}; {left}",
            remedy="one of these frees memory on each rank: " + "; ".join(plan.levers()),
        )


def in_words(num_bytes: float) -> str:
    """Return a number of bytes in readable units.

    >>> in_words(3 * 2**30), in_words(1500)
    ('3.0 GiB', '1.5 KiB')
    """
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"
