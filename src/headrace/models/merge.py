"""The merge of an adapter into its base, which results in one plain model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace.models.config import ModelConfig
from headrace.models.heads import copy_later
from headrace.models.load import load_model, load_tokenizer
from headrace.models.lora import read_lora_config, wrapped_layers
from headrace.models.text_part import whole_checkpoint, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The effect of merging an adapter into its base, as counted by :func:`export_merged`."""

    changed: int
    """The number of weights that the adapter changes, compared in float32."""
    lost: int
    """The number of these weights that are equal to the base's after conversion to the number format of the files."""

    @property
    def lost_share(self) -> float:
        """Return the fraction of changed weights that rounding reverts; 0 in float32. In bfloat16, the update of an
        adapter after little training is smaller than the rounding: then serve the adapter beside its base, or write
        float32."""
        return self.lost / max(1, self.changed)


def export_merged(base: Path, adapter: Path, out: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Merged:
    """Add the adapter in ``adapter`` to the model in ``base``, in float32, and write an ordinary Hugging Face model
    with its tokenizer and the prediction heads of the base into the new directory ``out``, in ``dtype``. If ``base`` is
    a multimodal checkpoint, ``out`` is one, too, with the base's other weights.

    Raises :class:`~headrace.base.errors.ModelError` for an adapter of another base.
    """
    model = load_model(ModelConfig(path=str(base), lora=read_lora_config(adapter)))
    target = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    changed = lost = 0
    for name, wraps in wrapped_layers(model):
        plain = wraps[0].get_base_layer()
        before = {key: tensor.detach().clone() for key, tensor in plain.named_parameters(recurse=False)}
        for wrap in wraps:
            wrap.merge()
        model.set_submodule(name, plain)
        for key, tensor in plain.named_parameters(recurse=False):
            is_changed = tensor != before[key]
            changed += int(is_changed.sum())
            lost += int((is_changed & (tensor.to(target) == before[key].to(target))).sum())
    del model.peft_config
    whole, model = whole_checkpoint(model.config), model.to(target)
    if whole is not None:
        write_whole(whole, model, out)
    else:
        out.mkdir(parents=True)
        model.save_pretrained(out)
        copy_later(base, out)
        load_tokenizer(str(base)).save_pretrained(out)
    return Merged(changed=changed, lost=lost)
