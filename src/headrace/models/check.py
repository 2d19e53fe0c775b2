"""The check that a loaded architecture computes the same logits with our attention as with its own.

The loaded model itself is tested on a few tokens, since flags and names are not reliable: a layer may mix tokens
outside attention, attend to later tokens, drop the plan, or need a term that we do not support.

Shape legend: N tokens, V vocabulary.
"""

# gate: getattr - the settings of a foreign config differ from model to model

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headrace.base.errors import ModelError
from headrace.models.attention import NAME, PackedPlan, Rule, forward
from headrace.models.config import SUPPORTED
from headrace.models.recurrent import recurrent_layers
from headrace.models.recurrent.base import Key, Recurrence, Tensors
from headrace.models.rope import context_limit

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest allowed relative difference of the median token. Tokens above it may choose other experts in low
precision."""

FIRST, SECOND, FAR = 3, 6, 1
"""The lengths of the sequences that are packed together. The last one is at the end of the longest context: a change
that a model makes for long sequences, such as scaled position embeddings, must not affect its neighbours."""


MASKED = "headrace_masked"
"""The name of the attention implementation that reads the masks which transformers makes for each layer."""

TOKENWISE = frozenset({"mlp", "moe"})
"""The types of layers that compute each token by itself."""


class _RuleRecorder(PackedPlan):
    """A plan that records the parameters of each layer's attention, and which layers keep a state. The last sequence
    is at position ``far``."""

    def __init__(self, device: torch.device, far: int) -> None:
        """Lay out three short sequences on ``device``, the last of which has one token, at position ``far``."""
        super().__init__([FIRST, SECOND, FAR], device)
        self.positions_N[FIRST + SECOND :] = far
        self.rules: list[Rule] = []
        self.recurrent: set[int] = set()

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the layer's rule, then attend as :class:`PackedPlan` does."""
        self.rules.append(rule)
        return super().attend(query_NHD, key_NKD, value_NKD, rule)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Record that the layer keeps a state, then compute as :class:`PackedPlan` does."""
        self.recurrent.add(key[0])
        return super().recur(key, recurrence, inputs_N)


@torch.no_grad()  # under inference mode, gathered parameters could not be trained later
def check_packing(model: PreTrainedModel, path: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` unless a packed sequence gets the logits that it gets alone
    with the architecture's own attention. It is packed behind another one, and before one at the end of the longest
    context."""
    ids_N = torch.arange(FIRST + SECOND + FAR, device=model.device) % model.config.vocab_size
    limit = context_limit(model.config)
    far = 0 if limit is None else limit.length - 1
    plan = _RuleRecorder(model.device, far)
    keep = torch.arange(FIRST, FIRST + SECOND, device=model.device)
    try:
        packed_NV = forward(model, ids_N, plan, keep).float()
    except Exception as error:  # an unsupported architecture may raise anything
        words = error.problem if isinstance(error, ModelError) else str(error)
        raise _refusal(model, path, f"a packed forward pass fails: {words}") from error
    _refuse_strange_layers(model, path, plan)
    _refuse_other_limits(model, path, plan)
    model.set_attn_implementation("eager")
    try:
        alone_NV = model(input_ids=ids_N[None, FIRST : FIRST + SECOND], use_cache=False).logits[0].float()
    except Exception as error:  # as above
        raise _refusal(
            model, path, f"transformers' own attention fails, so that nothing can be compared: {error}"
        ) from error
    model.set_attn_implementation(NAME)
    if alone_NV.isnan().any():
        raise _refusal(model, path, "its logits are not numbers (NaN), as transformers itself computes them")
    difference = ((packed_NV - alone_NV).abs().amax(-1).median() / alone_NV.abs().max()).item()
    if difference > TOLERANCE[model.dtype]:  # weights that are not finite may pass: their logits fail later
        raise _refusal(
            model,
            path,
            f"packed behind another, beside one that reaches position {far}, a sequence gives logits that differ by "
            f"{difference:.2g} (relative)",
        )


def _refuse_strange_layers(model: PreTrainedModel, path: str, plan: _RuleRecorder) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` unless every layer attends once or keeps a state, or its type
    says that it does neither. ``plan`` has recorded the calls of a forward pass."""
    layers = [rule.layer for rule in plan.rules]
    kinds = getattr(model.config, "layers_block_type", None) or getattr(model.config, "layer_types", None) or []
    free = {layer for layer, kind in enumerate(kinds) if kind in TOKENWISE}
    every = range(model.config.num_hidden_layers)
    if len(set(layers)) != len(layers) or {*layers, *plan.recurrent} | free != set(every):
        rest = sorted({*every} - {*layers} - plan.recurrent - free)
        if rest and {*rest} <= {*recurrent_layers(model)}:
            words = f"layers {rest} do not tell their mixers which tokens belong together"
            raise _refusal(model, path, words)
        raise _refusal(
            model,
            path,
            f"each of its {len(every)} layers must call transformers' attention interface once, or have a mixer whose "
            f"state can be kept; the calls come from layers {layers}, the states from layers {sorted(plan.recurrent)}"
            + (f", and layers {rest} compute in another way" if rest else ""),
        )
    sliding = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    blind = [rule.layer for rule in plan.rules if rule.layer in sliding and not rule.window]
    if blind:
        raise _refusal(model, path, f"layers {blind} are of type sliding_attention but do not say their window")


def _refuse_other_limits(model: PreTrainedModel, path: str, plan: _RuleRecorder) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if a layer's mask has another window, or another size of chunks,
    than the layer says: transformers computes by the mask. What is longer than the longest context limits nothing."""
    limit = context_limit(model.config)
    longest = torch.inf if limit is None else limit.length
    masks = _mask_limits(model)
    for rule in plan.rules:
        if rule.layer not in masks:
            continue
        by_rule, by_mask = (min(size or longest, longest) for size in (rule.window or rule.chunk, masks[rule.layer]))
        if by_rule != by_mask:
            reason = (
                f"layer {rule.layer} sees {_in_words(by_mask)} by transformers' mask, and by what it says of itself "
                f"{_in_words(by_rule)}"
            )
            raise _refusal(model, path, reason)


def _in_words(size: float) -> str:
    """Return the number of tokens that a layer sees, in words; infinity stands for all."""
    return "all tokens" if size == torch.inf else f"the last {size:.0f} tokens"


def _mask_limits(model: PreTrainedModel) -> dict[int, int]:
    """Return by layer the window, or the size of the chunks, of the masks that transformers makes for the model: 0 for
    all tokens. Layers whose masks come from elsewhere are left out."""
    found: dict[int, int] = {}
    token = _FOUND.set(found)
    model.set_attn_implementation(MASKED)
    ids_N = torch.arange(FIRST + SECOND, device=model.device) % model.config.vocab_size
    try:
        forward(model, ids_N, PackedPlan([len(ids_N)], model.device))
    except Exception:  # noqa: BLE001 - a model may compute with its masks what fails here; then they tell nothing
        found.clear()
    finally:
        model.set_attn_implementation(NAME)
        _FOUND.reset(token)
    return found


_FOUND: ContextVar[dict[int, int]] = ContextVar("found")
"""What :func:`_note_mask` has found, of the model that this thread looks at."""


def _make_mask(*, q_length: int, kv_length: int, local_size: int | None = None, device: Any = None, **_: Any) -> Tensor:
    """Return a mask that holds the window of a layer, or the size of its chunks, in every place, and 0 for none.
    Transformers calls it to make the masks of the implementation :data:`MASKED`."""
    return torch.full((1, 1, q_length, kv_length), float(local_size or 0), device=device)


def _note_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Note the size that a layer's mask holds. Transformers calls it in place of attention, so that the returned output
    has its shape and consists of zeros."""
    size = None if attention_mask is None else attention_mask.flatten()[0].item()
    if size is not None and size >= 0:  # what a model has made of the mask itself says nothing
        _FOUND.get()[module.layer_idx] = int(size)  # type: ignore[index]
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(MASKED, _note_mask)
AttentionMaskInterface.register(MASKED, _make_mask)


def _refusal(model: PreTrainedModel, path: str, reason: str) -> ModelError:
    """Return the error for a model in ``path`` that cannot be used, for ``reason``."""
    return ModelError(
        f"model.path={path!r} is a {type(model).__name__}: {reason}",
        remedy=SUPPORTED,
    )
