"""The text part of a multimodal checkpoint: it is loaded as a causal language model, and written back into the
checkpoint.

    checkpoint ──▶ transformers' multimodal model ─┬─ text model (backbone) ─▶ causal language model: engine, learner
                                                   ├─ head over the vocabulary ─┘        │
                                                   └─ towers, projectors: dropped        │ snapshot: an ordinary
    checkpoint's files, tensor by tensor ◀── names by transformers' own conversions ◀────┘ directory of the text model

The multimodal model determines the names of tensors: its backbone is the only module of the text model's class, and its
head is the module that it returns as output embeddings. The mapping between files and text model (:class:`TextPlace`)
is derived from these two modules and from the conversions that transformers applies to the multimodal class; nothing is
guessed from names.

The text model computes only what the multimodal model computes for text. When it is loaded, both models are executed on
the same tokens, and a difference beyond rounding is an error.

Shape legend: T tokens of a sequence, V vocabulary.
"""

# gate: getattr - the settings and classes of foreign models differ

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from headrace.base.errors import ModelError
from headrace.models.config import SUPPORTED, WHOLE
from headrace.models.hub import local_directory, pinned_path
from headrace.models.settings import extract_text_config, read_whole_config
from headrace.models.weights import refuse_not_finite

PROBE = 24
"""The number of tokens for which the text model is compared with the multimodal model."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest allowed relative difference between the logits of the two models, by dtype."""
WEIGHTS = "*.safetensors"
"""The file pattern of weights."""
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head"


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the causal language model for a text configuration. It is transformers' class or, if
    transformers has a head only in the multimodal model, its text model with a head. ``None`` if there is neither."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return found
    if not config.model_type.endswith("_text"):
        return None
    try:
        return make_class_with_head(MODEL_MAPPING[type(config)])
    except (KeyError, ValueError):  # this version of transformers may list a class that it does not contain
        return None


@cache
def make_class_with_head(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a causal language model class that consists of ``backbone``, a class of transformers that returns hidden
    states, and a linear head, whose weights may be tied to the embedding."""
    family = next(kind for kind in backbone.__mro__[1:] if issubclass(kind, PreTrainedModel))

    class TextModelWithHead(family, GenerationMixin):  # type: ignore[misc, valid-type]
        """The class that :func:`make_class_with_head` returns: the backbone with a linear head over the vocabulary."""

        config_class = backbone.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' protocol

        def __init__(self, config: Any) -> None:
            """Build the backbone and the head for the text configuration ``config``."""
            super().__init__(config)
            self.model = backbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> CausalLMOutputWithPast:
            """Return the logits of the last ``logits_to_keep`` tokens (0 for all), or of the tokens at these
            indices."""
            hidden_BTD = self.model(input_ids=input_ids, **kwargs)[0]
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutputWithPast(logits=self.lm_head(hidden_BTD[:, kept]))

    TextModelWithHead.__module__ = backbone.__module__  # transformers looks up the abilities of the class there
    TextModelWithHead.__name__ = TextModelWithHead.__qualname__ = f"{backbone.__name__}WithHead"
    return TextModelWithHead


def load_text_part(path: str, config: PreTrainedConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the text part of the multimodal checkpoint ``path`` as a causal language model with its own attention.
    Return it with transformers' report of the loaded weights. ``config`` is the configuration of the whole checkpoint,
    and ``options`` are arguments of ``from_pretrained``.

    Raises :class:`~headrace.base.errors.ModelError` if there is not exactly one text part, or if its logits differ from
    those of the multimodal model.
    """
    kind = whole_class(path, config)
    whole, info = kind.from_pretrained(
        path, config=config, attn_implementation="eager", output_loading_info=True, **options
    )
    refuse_not_finite(whole, path)
    whole.eval()
    place = TextPlace.find(path, whole)
    text = place.take(whole)
    _refuse_difference(path, whole, text)
    text.config.name_or_path = str(path)
    setattr(text.config, WHOLE, pinned_path(str(Path(path).absolute())))
    inner = {outer: inner for inner, outer in place.prefixes(text).items()}
    unexpected = {replace_prefix(name, inner) for name in info["unexpected_keys"] if place.holds(name)}
    return text, {**info, "unexpected_keys": unexpected}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlace:
    """The position of the text part in a multimodal model."""

    backbone: str
    """The name of the module that is the text model, such as ``model.language_model``."""
    head: str
    """The name of the module that computes the logits, such as ``lm_head``."""
    causal: type[PreTrainedModel]
    """The class of the causal language model with the same backbone."""

    @classmethod
    def find(cls, path: str, whole: PreTrainedModel) -> TextPlace:
        """Return the position of the text part of ``whole``, the model in the directory ``path``. Raises
        :class:`~headrace.base.errors.ModelError` if there is not exactly one text part."""
        text = extract_text_config(path, whole.config)
        causal = causal_class(text)
        backbone_class = None if causal is None else _backbone_class(text)
        found = [
            name
            for name, module in whole.named_modules()
            if backbone_class is not None and type(module) is backbone_class
        ]
        heads = [name for name, module in whole.named_modules() if module is whole.get_output_embeddings()]
        if causal is None or len(found) != 1 or len(heads) != 1:
            raise ModelError(
                f"model.path={path!r} is a {type(whole).__name__}: its text part is ambiguous: there are {len(found)} "
                f"modules of type {text.model_type} ({', '.join(found) or 'none'}) and {len(heads)} heads over the "
                "vocabulary",
                remedy="use a model with one text model and one head over its vocabulary",
            )
        return cls(backbone=found[0], head=heads[0], causal=causal)

    def take(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Return a causal language model that consists of modules of ``whole``, with transformers' own attention."""
        backbone, head = whole.get_submodule(self.backbone), whole.get_submodule(self.head)
        config: PreTrainedConfig = backbone.config
        embedding = backbone.get_input_embeddings()
        config.tie_word_embeddings = getattr(head, "weight", None) is embedding.weight
        config.architectures = [self.causal.__name__]
        config.dtype = whole.dtype
        with torch.device("meta"):
            text = self.causal(config)
        setattr(text, trunk_name(text), backbone)
        text.set_output_embeddings(head)
        text.generation_config = whole.generation_config
        empty = [name for name, tensor in (*text.named_parameters(), *text.named_buffers()) if tensor.is_meta]
        if empty:
            raise ModelError(
                f"the text part of a {type(whole).__name__} has no {', '.join(empty[:3])}, which a "
                f"{self.causal.__name__} needs",
                remedy=SUPPORTED,
            )
        return text.eval()

    def holds(self, name: str) -> bool:
        """Return whether the tensor ``name`` of the multimodal model belongs to the text part."""
        return name.startswith((f"{self.backbone}.", f"{self.head}."))

    def renamed(self, text: PreTrainedModel) -> dict[str, Tensor]:
        """Return the tensors of the text model by their names in the multimodal model; tied tensors under each name."""
        prefixes = self.prefixes(text)
        return {replace_prefix(name, prefixes): tensor for name, tensor in text.state_dict().items()}

    def prefixes(self, text: PreTrainedModel) -> dict[str, str]:
        """Return the prefixes of the names of the text model's tensors, mapped to their prefixes in the multimodal
        model."""
        return {f"{trunk_name(text)}.": f"{self.backbone}.", f"{_head_name(text)}.": f"{self.head}."}


def replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the tensor name ``name`` with its prefix replaced. ``prefixes`` maps old prefixes to new ones; the first
    old prefix with which ``name`` begins is replaced. A name that begins with none of them is returned unchanged.

    >>> replace_prefix("model.norm.weight", {"model.": "model.language_model."})
    'model.language_model.norm.weight'
    """
    old, new = next(((old, new) for old, new in prefixes.items() if name.startswith(old)), ("", ""))
    return new + name.removeprefix(old)


def prefixes_in_base(base: str, text: PreTrainedModel) -> dict[str, str]:
    """Return the prefixes of the names in the model ``text``, mapped to their prefixes in transformers' model of
    ``base``, the directory from which it was loaded; empty if ``base`` is a text model, whose names are the same."""
    config = read_whole_config(base)
    if extract_text_config(base, config) is config:
        return {}
    with torch.device("meta"):
        whole = whole_class(base, config)(config)
    return TextPlace.find(base, whole).prefixes(text)


def whole_checkpoint(config: PreTrainedConfig) -> Path | None:
    """Return the directory of the multimodal checkpoint if a model with this configuration is its text part; ``None``
    for other models. Raises :class:`~headrace.base.errors.ModelError` if the checkpoint is on a hub and not
    available."""
    name = getattr(config, WHOLE, None)
    return None if name is None else Path(local_directory(name, "the multimodal checkpoint"))


def write_whole(base: Path, text: PreTrainedModel, out: Path) -> None:
    """Write the multimodal checkpoint ``base`` with the weights of ``text`` as its text part into the directory
    ``out``. All other tensors are copied bit for bit. The files of the configuration and the tokenizer are copied, too;
    only the number format in ``config.json`` and the total size in the index of the weights are updated.

    Raises :class:`~headrace.base.errors.ModelError` if a tensor of the text model has no place in the checkpoint.
    """
    config = read_whole_config(str(base))
    with torch.device("meta"):
        whole = whole_class(str(base), config)(config)
    files = sorted(base.glob(WEIGHTS))
    shapes: dict[str, list[int]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    trained = _tensors_by_file(base, shapes, TextPlace.find(str(base), whole).renamed(text), whole)
    out.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(path, out / path.name)
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            tensors = {
                name: trained[name] if name in trained else file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (not a mapping)
            }
            save_file(tensors, out / path.name, metadata=file.metadata() or {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
    _update_json(out / _INDEX, lambda tree: {**tree, "metadata": {**tree.get("metadata", {}), "total_size": total}})
    dtype = str(text.dtype).removeprefix("torch.")
    _update_json(out / "config.json", lambda tree: _set_dtype(tree, dtype))


def _tensors_by_file(
    base: Path, shapes: dict[str, list[int]], named: dict[str, Tensor], whole: PreTrainedModel
) -> dict[str, Tensor]:
    """Return the tensors of the text part, ``named`` as in the multimodal model ``whole``, which was loaded from
    ``base``, by their names in the checkpoint's files. These are the names of transformers' conversions or, for a
    checkpoint that was written without conversions, the names in the model. ``shapes`` are the shapes of the tensors in
    the files. Raises :class:`ModelError` if the files do not contain one of the tensors in the same shape."""
    from transformers.core_model_loading import revert_weight_conversion

    problems = []
    for candidates in (revert_weight_conversion(whole, dict(named)), named):
        matched = {name: tensor for name, tensor in candidates.items() if name in shapes}
        addresses = {tensor.data_ptr() for tensor in matched.values()}
        unmatched = [
            name
            for name, tensor in candidates.items()
            if name not in matched and tensor.data_ptr() not in addresses  # a tied tensor needs only one of its names
        ]
        unmatched += [name for name, tensor in matched.items() if list(tensor.shape) != shapes[name]]
        if not unmatched:
            return {name: tensor.detach().contiguous().clone() for name, tensor in matched.items()}
        problems.append(f"{unmatched[0]} and {len(unmatched) - 1} more")
    raise ModelError(
        f"the text part has no place in {base}: its files do not hold {', nor '.join(problems)}",
        remedy="export into the checkpoint that training was started from",
    )


def _refuse_difference(path: str, whole: PreTrainedModel, text: PreTrainedModel) -> None:
    """Raise :class:`ModelError` unless the text model ``text`` has the same logits for text as ``whole``, the
    multimodal model in the directory ``path``."""
    ids_T = torch.tensor(list(_plain_ids(whole.config, text.config.vocab_size)), device=whole.device)
    try:
        with torch.no_grad():
            expected_TV = whole(input_ids=ids_T[None], use_cache=False).logits[0].float()
            found_TV = text(input_ids=ids_T[None], use_cache=False).logits[0].float()
    except Exception as error:  # a foreign architecture may raise anything
        raise ModelError(
            f"model.path={path!r} is a {type(whole).__name__}: it cannot be run on text alone: "
            f"{type(error).__name__}: {error}",
            remedy=SUPPORTED,
        ) from error
    difference = ((found_TV - expected_TV).abs().max() / expected_TV.abs().max()).item()
    if not difference <= TOLERANCE[whole.dtype]:
        raise ModelError(
            f"model.path={path!r} is a {type(whole).__name__}: as a {type(text).__name__} its text part gives logits "
            f"that differ by {difference:.2g} (relative) from those of the whole model",
            remedy=SUPPORTED,
        )


def _plain_ids(config: PreTrainedConfig, vocab_size: int) -> Iterable[int]:
    """Return token ids of text, without special ids that a configuration contains, such as that of an image."""
    special = set(_integers(config.to_dict(), ("_token_id", "_token_index")))
    plain = [number for number in range(min(vocab_size, 8 * PROBE)) if number not in special]
    return [plain[place * 7 % len(plain)] for place in range(PROBE)]


def _integers(tree: dict[str, Any], ends: tuple[str, ...]) -> Iterable[int]:
    """Yield the integers in a nested configuration whose keys end with one of ``ends``."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _integers(value, ends)
        elif str(key).endswith(ends):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


def whole_class(path: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of the multimodal model in the directory ``path``, whose configuration is ``config``.
    Raises :class:`~headrace.base.errors.ModelError` if there is none."""
    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise ModelError(
            f"model.path={path!r} is a {config.model_type}: it takes more than text, and transformers knows no "
            "multimodal language model of that type",
            remedy=SUPPORTED,
        )
    found: type[PreTrainedModel] = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return found


def _backbone_class(text: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the backbone, which computes hidden states, in the causal language model of a text
    configuration."""
    small = copy.deepcopy(text)
    causal = causal_class(text)
    assert causal is not None
    with torch.device("meta"):
        model = causal(small)
    return type(getattr(model, trunk_name(model)))


def trunk_name(text: PreTrainedModel) -> str:
    """Return the name of the attribute of the causal language model ``text`` that contains its backbone, which computes
    hidden states. Usually it is ``base_model_prefix``. In Llama 4, that is the name of the whole in the multimodal
    model; then the backbone is the first child that is itself a ``PreTrainedModel``."""
    said = str(text.base_model_prefix)
    if said in text._modules:
        return said
    return next((str(name) for name, module in text.named_children() if isinstance(module, PreTrainedModel)), said)


def _head_name(text: PreTrainedModel) -> str:
    """Return the name of the module of a causal language model that computes its logits."""
    head = text.get_output_embeddings()
    return next(str(name) for name, module in text.named_modules() if module is head)


def _update_json(path: Path, change: Any) -> None:
    """Replace the content of a JSON file by the result of ``change``; do nothing if the file does not exist."""
    if path.is_file():
        path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), indent=2), encoding="utf-8")


def _set_dtype(tree: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the settings ``tree`` of a checkpoint with ``dtype`` as the number format of the text part, so that
    loading it loses no precision."""
    changed: dict[str, Any] = {key: dtype for key in ("dtype", "torch_dtype") if key in tree}
    inner = {
        key: _set_dtype(each, dtype)
        for key, each in tree.items()
        if isinstance(each, dict) and key.endswith("text_config")
    }
    return {**tree, **(changed or {"dtype": dtype}), **inner}
