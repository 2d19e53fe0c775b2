"""The prediction heads of checkpoints (multi-token prediction). A prediction head is a layer behind the layers of a
model, and drafts are drawn from its logits.

    state of token i, after the model's last norm ─▶ norm ─┐
                                                           ├─▶ projection ─▶ decoder layer ─▶ norm ─▶ hidden state
    embedding of token i + 1 ──────────────────────▶ norm ─┘

The model's own output layer computes the logits of token i + 2 from the new hidden state. The head can then be applied
to this state and token i + 2 (DeepSeek-V3, arXiv 2412.19437, section 2.2). The head uses the embedding and the output
layer of the model, so both change with the model's weights. The weights of the head itself stay as they are in the
checkpoint.

The decoder layer of a head is loaded as a model of the same kind with one layer. Transformers then converts its weights
in the same way as the weights of the model, and its attention follows the same plans. Importing this module imports
neither torch nor transformers.

Shape legend: N tokens of a pass, H hidden size.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ModelError
from headrace.models.config import WHOLE, ModelConfig
from headrace.models.load import INDEX_FILE, ready, weight_headers
from headrace.models.settings import BUILDING, model_directory, num_later_layers, read_config, read_whole_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from headrace.models.predicting import PredictionHead

HEADS_FILE = "model-heads.safetensors"
"""The name of the file in a snapshot that contains the tensors of prediction heads, unchanged from the checkpoint that
was trained."""
REMEDY = "set engine.speculation = 'history', which needs no heads, or copy the checkpoint's files again"
_UNREAD = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""The endings of the names of tensors of a head that are not needed: they are copies of the model's tensors, or are
computed from the model's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The names of the tensors of a checkpoint's first prediction head, and the order of its inputs."""

    prefix: str
    """The beginning of all names; ``{layer}`` stands for the number of the model's own layers."""
    embedding_norm: str
    """The name of the norm of the embedding, after the prefix."""
    hidden_norm: str
    """The name of the norm of the hidden state."""
    projection: str
    """The name of the layer that projects the embedding and the hidden state to one hidden state."""
    last_norm: str
    """The name of the norm after the decoder layer."""
    hidden_first: bool
    """Whether the projection takes the hidden state before the embedding."""

    def start(self, config: PreTrainedConfig) -> str:
        """Return the beginning of the names of the head's tensors in a checkpoint with these settings."""
        return self.prefix.format(layer=config.num_hidden_layers)

    @property
    def own(self) -> tuple[str, str, str, str]:
        """The names of the tensors that are not part of the decoder layer: the norms of both inputs, the projection,
        and the last norm."""
        return self.embedding_norm, self.hidden_norm, self.projection, self.last_norm


_BEHIND = HeadLayout(
    prefix="model.layers.{layer}.",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    projection="eh_proj.weight",
    last_norm="shared_head.norm.weight",
    hidden_first=False,
)
"""The layout of DeepSeek-V3 and GLM-4.5."""
_MIMO = HeadLayout(
    prefix="model.mtp_layers.0.",
    embedding_norm="token_layernorm.weight",
    hidden_norm="hidden_layernorm.weight",
    projection="input_proj.weight",
    last_norm="final_layernorm.weight",
    hidden_first=True,
)
"""The layout of MiMo, whose model is of the kind Qwen 2."""
LAYOUTS: dict[str, HeadLayout] = {"deepseek_v3": _BEHIND, "glm4_moe": _BEHIND, "qwen2": _MIMO}
"""The layout of the prediction heads of each kind of model whose heads can be loaded, by ``model_type``."""


def refuse_headless(path: str) -> HeadLayout:
    """Return the layout of the prediction heads of the model in ``path``. Read only the settings of the model and the
    headers of its files.

    Raises :class:`~headrace.base.errors.ModelError` for a kind of model whose heads cannot be loaded, for a model
    without heads, and if tensors of the head are missing or have other shapes than the settings describe.
    """
    config, said = read_config(path), f"engine.speculation='heads', and model.path={path!r} is a "
    layout = LAYOUTS.get(config.model_type)
    if layout is None or _is_part(path):
        kinds = ", ".join(sorted(LAYOUTS))
        raise ModelError(
            f"{said}{read_whole_config(path).model_type}, of which no prediction heads can be loaded",
            remedy=f"set engine.speculation = 'history', or use a model of one of these kinds: {kinds}",
        )
    if not num_later_layers(config):
        raise ModelError(
            f"{said}{config.model_type} without prediction heads: config.json does not say that "
            "num_nextn_predict_layers is at least 1",
            remedy="set engine.speculation = 'history', or copy config.json from where the model comes from",
        )
    start, hidden = layout.start(config), int(config.hidden_size)
    shapes = {name: shape for _, name, shape in weight_headers(model_directory(path))}
    if not shapes:
        return layout  # the weights of a model of a hub are fetched later; other models without weights were refused
    wanted = {name: [hidden, 2 * hidden] if name == layout.projection else [hidden] for name in layout.own}
    if lacking := [start + name for name in wanted if start + name not in shapes]:
        raise ModelError(
            f"{said}{config.model_type} whose config.json says num_nextn_predict_layers={num_later_layers(config)}, "
            f"but its files hold no {', '.join(lacking)}",
            remedy=REMEDY,
        )
    if wrong := [name for name, shape in wanted.items() if shapes[start + name] != shape]:
        raise ModelError(
            f"{said}{config.model_type}: {start}{wrong[0]} has the shape {shapes[start + wrong[0]]}, and a hidden size "
            f"of {hidden} asks for {wanted[wrong[0]]}",
            remedy=REMEDY,
        )
    return layout


def load_head(config: ModelConfig, model: PreTrainedModel) -> PredictionHead:
    """Load and return the first prediction head of the checkpoint from which ``model`` was loaded with the settings
    ``config``. The head is on the device of the model and has its dtype. Raises the same errors as
    :func:`refuse_headless`, and :class:`~headrace.base.errors.ModelError` if tensors of the decoder layer are missing
    or do not fit."""
    from headrace.models.predicting import PredictionHead

    layout = refuse_headless(config.path)
    read = read_config(config.path)
    start = layout.start(read)
    tensors = {
        name.removeprefix(start): tensor for name, tensor in _read(model_directory(config.path), (start,)).items()
    }
    own = [tensors.pop(name) for name in layout.own]
    layer = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNREAD)}
    small = _one_layer(config, read, layer, own[-1])
    head = PredictionHead(small, own[:3], hidden_first=layout.hidden_first).to(model.device)
    if config.deterministic:
        from headrace.models.kernels.deterministic import make_head_deterministic

        make_head_deterministic(head)
    return head


def wanted_head(speculation: str, config: ModelConfig, model: PreTrainedModel) -> PredictionHead | None:
    """Return the prediction head that an engine with the setting ``speculation`` needs; ``None`` if it needs no head.
    :func:`load_head` describes the other arguments and the errors."""
    return load_head(config, model) if speculation == "heads" else None


def later_tensors(base: Path) -> list[str]:
    """Return the names of the tensors in the checkpoint ``base`` that belong to prediction heads, for any kind of
    model, in the order of its files. A multimodal checkpoint and a directory without a model have none. The loaded
    model does not contain these tensors, so a snapshot of the model copies them from the checkpoint."""
    if not (base / "config.json").is_file() or _is_part(str(base)):
        return []
    num_layers = int(read_config(str(base)).num_hidden_layers)
    return [name for _, name, _ in weight_headers(base) if _is_later(name, num_layers)]


def later_bytes(base: Path) -> int:
    """Return an estimate of the largest number of bytes that :func:`copy_later` writes for the checkpoint ``base``."""
    later = set(later_tensors(base))
    return sum(4 * math.prod(shape) for _, name, shape in weight_headers(base) if name in later)


def copy_later(base: Path, directory: Path) -> None:
    """Copy the tensors of the prediction heads of the checkpoint ``base`` bit for bit into ``directory``, a snapshot of
    its model whose weights have been written. The tensors become the file :data:`HEADS_FILE`. They are listed in the
    index of the weights, which is created if there is none. If there are no tensors to copy, nothing is written."""
    from safetensors.torch import save_file

    held = {name for _, name, _ in weight_headers(directory)}
    names = [name for name in later_tensors(base) if name not in held]
    if not names:
        return
    tensors = _read(base, tuple(names))
    save_file({name: tensors[name] for name in names}, directory / HEADS_FILE, metadata={"format": "pt"})
    index = directory / INDEX_FILE
    if index.is_file():
        tree = json.loads(index.read_text(encoding="utf-8"))
        tree["weight_map"] |= dict.fromkeys(names, HEADS_FILE)
    else:
        size = sum(file.stat().st_size for file in {file for file, _, _ in weight_headers(directory)})
        files = {name: file.name for file, name, _ in weight_headers(directory)}
        tree = {"metadata": {"total_size": size}, "weight_map": files}
    index.write_text(json.dumps(tree, indent=1), encoding="utf-8")


def _is_part(path: str) -> bool:
    """Return whether the checkpoint in ``path`` is multimodal, so that only a part of it is used as the model."""
    whole = read_whole_config(path)
    return type(whole) is not type(read_config(path)) or bool(whole.to_dict().get(WHOLE))


def _is_later(name: str, num_layers: int) -> bool:
    """Return whether the tensor ``name`` belongs to a prediction head, in a checkpoint of ``num_layers`` layers.

    >>> [_is_later(name, 2) for name in ("model.layers.1.norm", "model.layers.2.enorm.weight", "mtp.fc.weight")]
    [False, True, True]
    """
    numbers = re.findall(r"(?:^|\.)layers\.(\d+)\.", name)
    return any(part.startswith("mtp") for part in name.split(".")) or any(int(one) >= num_layers for one in numbers)


def _read(directory: Path, starts: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of the weights in ``directory`` whose names begin with one of ``starts``."""
    from safetensors import safe_open

    files = dict.fromkeys(file for file, name, _ in weight_headers(directory) if name.startswith(starts))
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name.startswith(starts)]  # noqa: SIM118 - it cannot be iterated
            found |= {name: opened.get_tensor(name) for name in names}
    return found


def _one_layer(
    config: ModelConfig, read: PreTrainedConfig, layer: Mapping[str, Tensor], norm: Tensor
) -> PreTrainedModel:
    """Return a model of the kind that ``read`` describes, with the tensors ``layer`` as its only layer and ``norm`` as
    its last norm. Its vocabulary has one token, which is never used. Raises :class:`~headrace.base.errors.ModelError`
    if the tensors do not form such a layer."""
    import torch

    from headrace.models.attention import NAME
    from headrace.models.text_part import causal_class
    from headrace.models.weights import refuse_not_finite

    small, said = copy.deepcopy(read), f"engine.speculation='heads': the prediction head of model.path={config.path!r}"
    changes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None}
    changes |= {"layer_types": ["full_attention"], "first_k_dense_replace": 0}  # the head of a mixture has experts
    for name, value in changes.items():
        if name in small.to_dict():
            setattr(small, name, value)
    blank = torch.zeros(1, small.hidden_size)
    state = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    state |= {"model.norm.weight": norm, "model.embed_tokens.weight": blank, "lm_head.weight": blank}
    kind, dtype = causal_class(small), getattr(torch, config.dtype)
    assert kind is not None, "refused when the model was loaded"
    try:
        with BUILDING:
            model, info = kind.from_pretrained(
                None, config=small, state_dict=state, dtype=dtype, attn_implementation=NAME, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # tensors of a foreign checkpoint may cause any error
        raise ModelError(f"{said} cannot be loaded: {type(error).__name__}: {error}", remedy=REMEDY) from error
    wrong = [f"{name} has the shape {list(found)}, not {list(fit)}" for name, found, fit in info["mismatched_keys"]]
    wrong += [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [f"{name} has no place in it" for name in sorted(info["unexpected_keys"])]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ModelError(f"{said} does not fit config.json: {shown}", remedy=REMEDY)
    refuse_not_finite(model, config.path)
    return ready(model).requires_grad_(requires_grad=False)
