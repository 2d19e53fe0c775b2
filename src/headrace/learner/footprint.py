"""The memory that one rank of a learner needs at its peak, estimated from the sizes of the model and the settings.

    sizes of the model, settings ──▶ bytes by use ──┬─ when the backward pass begins: activations of all layers
                                                    ├─ when it ends: gradients of all weights
                                                    └─ in the update                  the largest sum is the peak

Plans, the map of a dry run and the advice in out-of-memory errors use this estimate. The formulas count the tensors
that torch's autograd keeps for the layers of transformers; ``tests/learner/test_footprint.py`` compares them with
torch's memory tracker. Memory of libraries and fragmentation are not included.

Importing this module imports neither torch nor transformers. In formulas, w is the number of bytes of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from headrace.learner.auxiliary.config import KeptSection
from headrace.learner.config import LearnerConfig
from headrace.models.shape import ModelShape, pair_bytes

TILE = (2048, 16384)
"""The tokens and the vocabulary entries of one tile of logits on an accelerator."""
HOST_TILE = (512, 2048)
"""The tokens and the vocabulary entries of one tile of logits on a CPU."""
CACHED_NUMBERS = 2**21
"""The number of elements of a layer's widest activation that fits the cache of a CPU. With a feed-forward size of 1536,
passes of 1024 to 1536 tokens take a sixth less CPU time and half the memory of passes of 4096 tokens."""
LOW_BIT_BYTES = 2.04
"""The bytes of two 8-bit moments of one parameter, with their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The bytes that one rank of a learner needs at its peak, by use."""

    weights_bytes: float
    gradients_bytes: float
    """Gradients that are accumulated for the update, those of the present micro-batch, and those of the update before
    if they are compared."""
    optimizer_bytes: float
    """Moments, and float32 copies of the weights."""
    copies_bytes: float
    """Kept copies of the trained weights, for references and for π_old."""
    gathered_bytes: float
    """Weights and gradients of whole layers, gathered from the ranks that have their parts."""
    activations_bytes: float
    """Tensors that layers keep for the backward pass, or need in it."""
    head_bytes: float
    """Logits of one tile, and the gradients that the head computes."""

    @property
    def total_bytes(self) -> float:
        """Return the bytes of all uses together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def by_use(self) -> dict[str, float]:
        """Return the bytes by use, without uses that need none."""
        named = {field.name.removesuffix("_bytes"): float(getattr(self, field.name)) for field in fields(self)}
        return {use: size for use, size in named.items() if size > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSizes:
    """The sizes and settings that determine the memory of a learner's ranks."""

    shape: ModelShape
    """The sizes of the model."""
    config: LearnerConfig
    """The settings of the learner."""
    itemsize: int
    """Bytes of one weight."""
    longest: float = math.inf
    """Tokens of the longest sample; a sample is never longer than a micro-batch."""
    adapter_params: float = 0.0
    """Number of parameters of all adapters, which are float32; 0 if the model is trained as a whole."""
    adapts_experts: bool = False
    """Whether adapters change the experts of a mixture: every pass merges them into a copy of the experts' weights."""
    on_host: bool = False
    """Whether the device is the CPU."""
    score_layers: int | None = None
    """Number of layers that write attention scores to memory, if they were counted; ``None``: it follows from sizes and
    settings."""

    @property
    def adapted(self) -> bool:
        """Return whether adapters are trained, and the model's own weights are not."""
        return self.adapter_params > 0

    @property
    def trained(self) -> float:
        """Return the number of trained parameters, over all ranks."""
        return self.adapter_params if self.adapted else float(self.shape.params)

    @property
    def num_shards(self) -> int:
        """Return the number of ranks over which a weight of the model is sharded."""
        ways = self.config.parallel
        return ways.data * ways.context * ways.tensor

    @property
    def gathers_layers(self) -> bool:
        """Return whether a rank gathers whole layers from other ranks."""
        return self.config.parallel.num_averaged > 1

    @property
    def tokens(self) -> float:
        """Return the tokens of a micro-batch on one rank. On a CPU, passes of a dense model are so short that
        activations stay in the cache, unless a sample is longer."""
        tokens = float(self.config.tokens_per_microbatch)
        if self.on_host and not self.shape.num_experts and not self.gathers_layers:
            least = 0.0 if math.isinf(self.longest) else self.longest
            tokens = min(tokens, max(1.0, least, CACHED_NUMBERS // self.shape.inner))
        return tokens / self.config.parallel.context

    def footprint(self) -> Footprint:
        """Return the memory of one rank at its peak: the largest of the moments of a step."""
        return max(self._moments(), key=lambda each: each.total_bytes)

    def _moments(self) -> Iterator[Footprint]:
        """Yield the memory of one rank when the backward pass begins, in its first layer, when it ends, and in the
        update."""
        static, table = self.resident(), self._table_gradient_bytes()
        layer, kept = self._layer_bytes(), self._kept_bytes()
        yield replace(
            static,
            gradients_bytes=static.gradients_bytes + table,
            gathered_bytes=self._gathered_table_bytes(),
            activations_bytes=kept * self.shape.layers + self._ends_bytes(),
            head_bytes=self._head_bytes(),
        )
        in_layer = replace(
            static,
            gradients_bytes=static.gradients_bytes + (0.0 if self.gathers_layers else table),
            gathered_bytes=self._gathered_layer_bytes(first=True) + self._held_table_bytes(),
            activations_bytes=kept * (self.shape.layers - 1) + layer,
        )
        yield in_layer
        if self.shape.layers > 2:
            yield replace(
                in_layer,
                gathered_bytes=self._gathered_layer_bytes() + self._held_table_bytes(),
                activations_bytes=kept * (self.shape.layers - 2) + layer,
            )
        ended = static.gradients_bytes + self._pass_gradient_bytes()
        yield replace(
            static,
            gradients_bytes=ended,
            gathered_bytes=max(self._gathered_layer_bytes(), self._gathered_table_bytes()),
            activations_bytes=layer,
        )
        yield replace(static, gradients_bytes=ended + self._collecting_bytes())
        yield replace(static, gradients_bytes=static.gradients_bytes + self._update_bytes())

    # weights, gradients and optimizer

    @property
    def _master_bytes(self) -> int:
        """Return the bytes of one number in which the optimizer updates a weight."""
        return 4 if self.adapted or self.config.memory.masters else self.itemsize

    @property
    def _in_place(self) -> bool:
        """Return whether the optimizer updates the weights themselves, so that the gradients of all micro-batches are
        accumulated where autograd puts them."""
        same = self._master_bytes == self.itemsize and not self.config.memory.offload_optimizer
        return self.adapted or (same and self.config.parallel.world == 1)

    def resident(self) -> Footprint:
        """Return what a rank needs at any time between two updates: weights, accumulated gradients, and the state of
        the optimizer."""
        shards = self.num_shards
        own = self.adapter_params if self.adapted else self.shape.params / shards
        weights = self.shape.params * self.itemsize / shards + 4 * self.adapter_params
        copies = 0 if self.adapted or self._master_bytes == self.itemsize else self._master_bytes
        on_device = not self.config.memory.offload_optimizer
        num_gradients = 1 if self.config.alignment is None else 2
        return Footprint(
            weights_bytes=weights,
            gradients_bytes=num_gradients * own * self._master_bytes * on_device,
            optimizer_bytes=(own * copies + self._moment_bytes(own)) * on_device,
            copies_bytes=self._copies_bytes(own),
            gathered_bytes=0.0,
            activations_bytes=0.0,
            head_bytes=0.0,
        )

    def _copies_bytes(self, params: float) -> float:
        """Return the bytes of the kept copies of ``params`` trained parameters on the device."""
        itemsize = 4 if self.adapted else self.itemsize
        kept = [each for each in self.config.policies.values() if isinstance(each, KeptSection)]
        return float(sum(each.num_bytes(int(params), itemsize) for each in kept if each.device == "model"))

    def _moment_bytes(self, params: float) -> float:
        """Return the bytes of the moments of ``params`` parameters: two for each with AdamW; with Muon one for matrices
        of layers, and two for tables and for the experts of a mixture, which are stacked and use AdamW."""
        if self.config.optimizer.kind == "adamw8bit":
            return LOW_BIT_BYTES * params
        if self.config.optimizer.kind == "muon":
            tables = (1 if self.shape.tied else 2) * self.shape.table_params
            by_adamw = 0.0 if self.adapted else (tables + self.shape.expert_params) / self.num_shards
            return self._master_bytes * (params + min(by_adamw, params))
        return 2 * self._master_bytes * params

    def _pass_gradient_bytes(self) -> float:
        """Return the bytes of the gradients of one micro-batch, in addition to the accumulated gradients."""
        if self.config.memory.whole_gradients:  # summed in float32 over the ranks, after the last micro-batch
            return 4.0 * self.shape.params / self.config.parallel.tensor
        return 0.0 if self._in_place else self.shape.params * self.itemsize / self.num_shards

    def _collecting_bytes(self) -> float:
        """Return the bytes of the largest gradient in float32, while it is added to the accumulated gradients."""
        if self._in_place or self._master_bytes == self.itemsize:
            return 0.0
        return float(self._master_bytes * self.shape.table_params) / self.num_shards

    def _table_gradient_bytes(self) -> float:
        """Return the bytes of the gradient of the head, which is computed first, on a rank that gathers nothing."""
        if self.adapted or self.gathers_layers:
            return 0.0
        return self.shape.table_params * self.itemsize / self.config.parallel.tensor

    def _update_bytes(self) -> float:
        """Return the bytes that an update needs for a short time: sums of adapters over ranks, and with Muon whole
        matrices."""
        if self.adapted:
            return 8.0 * self.adapter_params if self.config.parallel.world > 1 else 0.0
        return 16.0 * self.shape.hidden * self.shape.inner if self.config.optimizer.kind == "muon" else 0.0

    # layers and tables of other ranks

    def _gathered_layer_bytes(self, *, first: bool = False) -> float:
        """Return the bytes of the weights and the gradients of the layers that are gathered at a time; with ``first``,
        in the first layer of a backward pass, before the buffer and the sums of a former layer exist."""
        shape, ways = self.shape, self.config.parallel
        if not self.gathers_layers:
            return 0.0
        experts = shape.expert_params / shape.layers
        own = (shape.layer_params - experts) / ways.tensor
        if ways.expert == 1:
            own += experts / ways.tensor
        elif self.num_shards > ways.expert:
            own += experts / ways.expert
        numbers = self.itemsize * (2 + self._trains_base) if first else self._gathered_numbers()
        return own * numbers

    def _gathered_table_bytes(self) -> float:
        """Return the bytes of the weights and the gradients of the head, or of the embeddings, while it is gathered."""
        if not self.gathers_layers:
            return 0.0
        numbers = self._gathered_numbers() - self.itemsize  # no other table is gathered ahead
        return self.shape.table_params / self.config.parallel.tensor * numbers

    def _held_table_bytes(self) -> float:
        """Return the bytes of the gathered head of a frozen base, which is held to the end of the pass."""
        held = self.gathers_layers and self.adapted
        return self.itemsize * self.shape.table_params / self.config.parallel.tensor if held else 0.0

    def _gathered_numbers(self) -> float:
        """Return the bytes of one gathered parameter: the weight, the buffer in which it was received, the weight of
        the next layer, its gradient, and the gradient as it is summed over the ranks."""
        return 3 * self.itemsize + self._trains_base * (self.itemsize + 4)

    @property
    def _trains_base(self) -> int:
        """Return 1 if the weights of the model have gradients, and 0 if only adapters do."""
        return 0 if self.adapted else 1

    # activations

    def _kept_bytes(self) -> float:
        """Return the bytes that one layer keeps on the device for the backward pass of a micro-batch."""
        memory = self.config.memory
        if memory.offload_activations:
            return 0.0
        if memory.recompute:
            return self.tokens * self.shape.hidden * self.itemsize
        return self.tokens * self._token_bytes() + self.score_bytes(1) * self._score_share + self._merged_bytes()

    def _layer_bytes(self) -> float:
        """Return the bytes that one layer needs in its backward pass: what it keeps, or computes again, and the
        gradients of its largest tensors. The feed-forward part comes first, and what it keeps is freed before the
        gradients of attention are computed. Merged experts have gradients of their size; when the last of these is
        computed, the third of the merged weights that belongs to the last product is already freed."""
        forward = self.tokens * (self._token_bytes() + self._forward_passing_bytes())
        attention = self.tokens * self._attention_backward_bytes()
        scores, merged = self.score_bytes(1), self._merged_bytes()
        return max(forward + scores + 5 / 3 * merged, attention + 2 * scores)

    def _merged_bytes(self) -> float:
        """Return the bytes of the experts' weights of one layer after adapters are merged into them, which autograd
        keeps."""
        return self.itemsize * self.shape.expert_params / self.shape.layers if self.adapts_experts else 0.0

    def _token_bytes(self) -> float:
        """Return the bytes that autograd keeps of one layer for one token, without attention scores.

        A norm keeps its input in float32, the normalised numbers, and its output, with which a product multiplies.
        Attention keeps queries, keys, values and its output. With adapters, the norms and products of the frozen base
        keep less, and every adapter keeps its own input in float32.
        """
        shape, w, trains = self.shape, self.itemsize, self._trains_base
        queries, keys = (width / self.config.parallel.tensor for width in (shape.attention_width, shape.kv_width))
        normed = 4 if shape.has_sinks else w  # gpt-oss keeps its norms in float32
        norms: float = shape.num_norms * (4 + normed * trains) * shape.hidden + 2 * w * trains * shape.hidden
        if shape.normed_heads:
            norms += (queries + keys) * (4 + w * trains)
        attention = w * (2 * queries + 2 * keys + (queries if shape.has_sinks else 0))
        if not self.adapted:
            return norms + attention + self._feed_forward_bytes()
        shared = 1 if w == 4 else 3  # adapters of float32 models share their input
        adapters = 4 * shared * shape.hidden + (4 * queries if w < 4 else 0)
        if not shape.num_experts:
            adapters += 4 * (1 if w == 4 else 2) * shape.hidden
        return norms + attention + self._feed_forward_bytes() + adapters

    def _feed_forward_bytes(self) -> float:
        """Return the bytes that autograd keeps of the feed-forward part of one layer for one token: gate, activation,
        the other product, and the product of both. In a mixture, each selected expert also keeps its input and its
        output."""
        shape, w, trains = self.shape, self.itemsize, self._trains_base
        inner = shape.inner / self.config.parallel.tensor
        if not shape.num_experts:
            return inner * (3 * w + (w if trains else 4))
        vectors = (6 if shape.interleaved else 3) + trains
        each = w * (vectors * inner + (1 + trains) * shape.hidden) + 24
        return shape.experts_per_token * each + 4 * shape.num_experts

    def _forward_passing_bytes(self) -> float:
        """Return the bytes of the gradients in the backward pass of the feed-forward part of one layer for one token,
        beside what the layer keeps. Adapters of its products compute their gradients in float32."""
        shape, w = self.shape, self.itemsize
        inner = shape.inner / self.config.parallel.tensor * max(1, shape.experts_per_token)
        hidden = w * shape.hidden * (1 + shape.experts_per_token)
        if not self.adapted:
            return hidden + 2 * w * inner + 4 * shape.hidden
        return hidden + (12 if shape.num_experts else 4 + w) * inner

    def _attention_backward_bytes(self) -> float:
        """Return the bytes of one layer for one token while the gradients of its attention are computed: either all
        that attention keeps and the gradients of queries, keys and values, or, where heads have norms, the queries and
        keys before these norms and five tensors of the norm of the queries in float32."""
        shape, w = self.shape, self.itemsize
        queries, keys = (width / self.config.parallel.tensor for width in (shape.attention_width, shape.kv_width))
        kept = self._token_bytes() - self._feed_forward_bytes()
        core = kept + w * (3 * queries + 2 * keys)
        if not shape.normed_heads:
            return core
        freed = w * (2 * queries + 2 * keys) + self._trains_base * w * (queries + keys)
        return max(core, kept - freed + 20 * queries)

    @property
    def _score_share(self) -> float:
        """Return how many layers keep attention scores, as a fraction of all layers."""
        return self._num_score_layers / self.shape.layers

    @property
    def _num_score_layers(self) -> int:
        """Return the number of layers that write the scores of padded attention to memory. With shared prefixes, a mask
        is needed, and kernels of accelerators support no grouped heads with a mask."""
        shape, config = self.shape, self.config
        if config.attention == "flex" and not self.on_host:
            return 0
        if self.score_layers is not None:
            return self.score_layers
        if config.attention == "flex":
            return shape.layers
        if not (self.on_host or config.attention == "padded"):
            return 0
        if self.on_host:
            return shape.plain_score_layers
        return shape.layers if shape.grouped and config.share_prefixes is not False else shape.score_layers

    def score_bytes(self, num_layers: int | None = None) -> float:
        """Return the bytes of attention scores that ``num_layers`` layers keep; ``None`` for all layers with scores."""
        layers = self._num_score_layers if num_layers is None else min(num_layers, self._num_score_layers)
        weight = pair_bytes(self.itemsize, softcapped=self.shape.softcapped)
        pairs = self.tokens * min(self.longest, self.config.tokens_per_microbatch)
        return layers * self.shape.heads / self.config.parallel.tensor * weight * pairs

    def _ends_bytes(self) -> float:
        """Return the bytes that the last norm keeps, and the input of the head."""
        return self.tokens * self.shape.hidden * (4 + 2 * self.itemsize * self._trains_base + self.itemsize)

    def _head_bytes(self) -> float:
        """Return the bytes of one tile of logits with its gradients, of the gradient of the head's input, and of the
        float32 sum of the gradient of one block of the head."""
        shape, w = self.shape, self.itemsize
        most_rows, most_columns = HOST_TILE if self.on_host else TILE
        rows = min(most_rows, self.tokens)
        columns = min(most_columns, shape.vocabulary / self.config.parallel.tensor)
        tile = rows * columns * (16 + 2 * w)
        block = columns * shape.hidden * 4 * self._trains_base * (w < 4)
        return tile + block + self.tokens * shape.hidden * (4 + w)


def levers(sizes: LearnerSizes) -> dict[str, float]:
    """Return the settings that would lower the peak of one rank of a learner with ``sizes``, each with the bytes that
    it frees."""
    now = sizes.footprint().total_bytes
    freed = {
        setting: now - replace(sizes, config=config).footprint().total_bytes
        for setting, config in _changed_configs(sizes)
    }
    return {setting: num_bytes for setting, num_bytes in freed.items() if num_bytes >= 1}


def _changed_configs(sizes: LearnerSizes) -> Iterator[tuple[str, LearnerConfig]]:
    """Yield settings that may need less memory than those of ``sizes`` and that the learner would accept, each with the
    learner's settings after the change."""
    config, memory, ways = sizes.config, sizes.config.memory, sizes.config.parallel
    yield from _smaller_passes(sizes)
    if config.attention == "padded" and not sizes.on_host:
        yield "learner.attention = 'flex'", config.model_copy(update={"attention": "flex"})
    if not memory.recompute:
        yield "learner.memory.recompute = true", _memory(config, recompute=True)
    if not (memory.offload_activations or sizes.on_host):
        yield "learner.memory.offload_activations = true", _memory(config, offload_activations=True)
    if memory.whole_gradients:
        yield "learner.memory.whole_gradients = false", _memory(config, whole_gradients=False)
    moved = memory.offload_optimizer or sizes.adapted
    if not (moved or sizes.on_host):
        yield "learner.memory.offload_optimizer = true", _memory(config, offload_optimizer=True)
    if config.alignment is not None and not memory.offload_optimizer:
        yield "learner.alignment left out", config.model_copy(update={"alignment": None})
    if config.optimizer.kind == "adamw" and ways.world == 1 and not moved:
        optimizer = config.optimizer.model_copy(update={"kind": "adamw8bit"})
        name = "learner.optimizer.kind = 'adamw8bit' (headrace[low-bit])"
        yield name, config.model_copy(update={"optimizer": optimizer})
    if config.optimizer.kind != "adamw8bit":
        yield f"learner.parallel.data = {2 * ways.data} (on as many devices)", _ways(config, data=2 * ways.data)
    experts = math.gcd(sizes.num_shards, sizes.shape.num_experts)
    can_spread = sizes.shape.num_experts > 0 and not sizes.adapts_experts and experts % ways.tensor == 0
    if can_spread and experts > ways.expert:
        yield f"learner.parallel.expert = {experts} (on at least as many devices)", _ways(config, expert=experts)
    for name, policy in config.policies.items():
        if isinstance(policy, KeptSection) and policy.device == "model" and not sizes.on_host:
            on_cpu = policy.model_copy(update={"device": "cpu"})
            found = {"teachers": (on_cpu,)} if policy in config.teachers else {name: on_cpu}
            yield f"learner.{name}.device = 'cpu'", config.model_copy(update=found)


def _smaller_passes(sizes: LearnerSizes) -> Iterator[tuple[str, LearnerConfig]]:
    """Yield settings with which a rank of a learner with ``sizes`` computes fewer tokens at a time, or a part of every
    matrix, each with the learner's settings after the change. A micro-batch is halved, but not below the longest
    sample; ranks that share the tokens or the matrices of a sample are added where it cannot be halved."""
    config, shape, ways = sizes.config, sizes.shape, sizes.config.parallel
    tokens = round(sizes.tokens * ways.context)
    half, unknown = max(1, tokens // 2), math.isinf(sizes.longest)
    fewer = half if unknown else max(half, math.ceil(sizes.longest))
    if fewer < tokens:
        fits = " (every sample must fit)" if unknown else ""
        yield (
            f"learner.tokens_per_microbatch = {fewer}{fits}",
            config.model_copy(update={"tokens_per_microbatch": fewer}),
        )
    if fewer == half or shape.whole_sequences:
        return
    if config.share_prefixes is not True:
        yield (
            f"learner.parallel.context = {2 * ways.context} (on as many devices)",
            _ways(config, context=2 * ways.context),
        )
    twice = 2 * ways.tensor
    even = shape.heads % twice == shape.kv_heads % twice == 0 and (ways.expert == 1 or ways.expert % twice == 0)
    if even and not (sizes.adapted or config.memory.whole_gradients):
        yield f"learner.parallel.tensor = {twice} (on as many devices of a machine)", _ways(config, tensor=twice)


def _memory(config: LearnerConfig, **changes: bool) -> LearnerConfig:
    """Return the settings with other settings of ``learner.memory``."""
    return config.model_copy(update={"memory": config.memory.model_copy(update=changes)})


def _ways(config: LearnerConfig, **changes: int) -> LearnerConfig:
    """Return the settings with other numbers of ranks in some dimensions of parallelism."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})
