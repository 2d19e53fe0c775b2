"""The check that a loaded architecture computes the same logits with Headrace's attention as with its own.

The loaded model itself is tested on a few tokens, since flags and names are not reliable: a layer may mix tokens
outside attention, attend to later tokens, ignore the plan, or need a term of attention that Headrace does not support.

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
"""The largest allowed relative difference of the logits, at the median token. In low precision, some tokens may choose
other experts, and differ more."""

FIRST, SECOND, FAR = 3, 6, 1
"""The lengths of the sequences that are packed together. The last sequence is at the end of the longest context: a
change that a model makes for long sequences, such as scaled position embeddings, must not affect other sequences."""


MASKED = "headrace_masked"
"""The name of the attention implementation that records the masks which transformers creates for each layer."""

TOKENWISE = frozenset({"mlp", "moe"})
"""The types of layers that compute each token independently."""


class _RuleRecorder(PackedPlan):
    """A plan that records the parameters of each layer's attention, and which layers have a recurrent state. The last
    sequence is at position ``far``."""

    def __init__(self, device: torch.device, far: int) -> None:
        """Arrange three short sequences on ``device``, the last of which has one token, at position ``far``."""
        super().__init__([FIRST, SECOND, FAR], device)
        self.positions_N[FIRST + SECOND :] = far
        self.rules: list[Rule] = []
        self.recurrent: set[int] = set()

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the layer's rule, then compute attention as :class:`PackedPlan` does."""
        self.rules.append(rule)
        return super().attend(query_NHD, key_NKD, value_NKD, rule)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Record that the layer has a state, then compute the recurrence as :class:`PackedPlan` does."""
        self.recurrent.add(key[0])
        return super().recur(key, recurrence, inputs_N)


@torch.no_grad()  # and not inference mode, under which gathered parameters could not be trained later
def check_packing(model: PreTrainedModel, path: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for the model in the directory ``path`` unless a packed sequence
    has the same logits as the sequence alone under the architecture's own attention. It is packed after another
    sequence, and before a sequence at the end of the longest context."""
    ids_N = torch.arange(FIRST + SECOND + FAR, device=model.device) % model.config.vocab_size
    limit = context_limit(model.config)
    far = 0 if limit is None else limit.length - 1
    plan = _RuleRecorder(model.device, far)
    keep = torch.arange(FIRST, FIRST + SECOND, device=model.device)
    try:
        packed_NV = forward(model, ids_N, plan, keep).float()
    except Exception as error:  # an unsupported architecture may raise anything
        reason = error.problem if isinstance(error, ModelError) else str(error)
        raise _refusal(model, path, f"a packed forward pass fails: {reason}") from error
    _refuse_unknown_layers(model, path, plan)
    _refuse_different_limits(model, path, plan)
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


def _refuse_unknown_layers(model: PreTrainedModel, path: str, plan: _RuleRecorder) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` unless every layer attends once or has a state, or has a type
    that does neither. ``plan`` has recorded the calls of a forward pass."""
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


def _refuse_different_limits(model: PreTrainedModel, path: str, plan: _RuleRecorder) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if the window or chunk size in a layer's mask differs from the
    one that the layer passes to attention: transformers computes with the mask. A limit above the longest context
    counts as none."""
    limit = context_limit(model.config)
    longest = torch.inf if limit is None else limit.length
    masks = _mask_limits(model)
    for rule in plan.rules:
        if rule.layer not in masks:
            continue
        by_rule, by_mask = (min(size or longest, longest) for size in (rule.window or rule.chunk, masks[rule.layer]))
        if by_rule != by_mask:
            reason = (
                f"layer {rule.layer} sees {_format_limit(by_mask)} by transformers' mask, and by what it says of "
                f"itself {_format_limit(by_rule)}"
            )
            raise _refusal(model, path, reason)


def _format_limit(size: float) -> str:
    """Return the number of tokens that a layer attends to, in words; infinity means all tokens."""
    return "all tokens" if size == torch.inf else f"the last {size:.0f} tokens"


def _mask_limits(model: PreTrainedModel) -> dict[int, int]:
    """Return, by layer, the window or chunk size in the mask that transformers creates for the layer; 0 for no limit.
    Layers with masks of another origin are left out."""
    found: dict[int, int] = {}
    token = _FOUND.set(found)
    model.set_attn_implementation(MASKED)
    ids_N = torch.arange(FIRST + SECOND, device=model.device) % model.config.vocab_size
    try:
        forward(model, ids_N, PackedPlan([len(ids_N)], model.device))
    except Exception:  # noqa: BLE001 - a model may compute with its masks, and fail here; its masks are then unknown
        found.clear()
    finally:
        model.set_attn_implementation(NAME)
        _FOUND.reset(token)
    return found


_FOUND: ContextVar[dict[int, int]] = ContextVar("found")
"""The sizes that :func:`_record_mask` has recorded by layer, for the model that this thread checks."""


def _make_mask(*, q_length: int, kv_length: int, local_size: int | None = None, device: Any = None, **_: Any) -> Tensor:
    """Return a mask that contains the window of a layer, or its chunk size, in every element, and 0 for none.
    Transformers calls this function to create the masks of the implementation :data:`MASKED`."""
    return torch.full((1, 1, q_length, kv_length), float(local_size or 0), device=device)


def _record_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Record the size that a layer's mask contains, and return zeros in the shape of an attention output. Transformers
    calls this function as the attention of the implementation :data:`MASKED`."""
    size = None if attention_mask is None else attention_mask.flatten()[0].item()
    if size is not None and size >= 0:  # a mask that the model itself has changed contains other numbers
        _FOUND.get()[module.layer_idx] = int(size)  # type: ignore[index]
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(MASKED, _record_mask)
AttentionMaskInterface.register(MASKED, _make_mask)


def _refusal(model: PreTrainedModel, path: str, reason: str) -> ModelError:
    """Return the error for a model in ``path`` that cannot be used, for ``reason``."""
    return ModelError(
        f"model.path={path!r} is a {type(model).__name__}: {reason}",
        remedy=SUPPORTED,
    )
