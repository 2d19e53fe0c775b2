"""Loading of a model or a tokenizer from a directory; every failure is raised as an error with a remedy.

Nothing is downloaded, no code of the directory is executed, and weights are read from safetensors only. Importing this
module imports neither torch nor transformers.
"""

# gate: getattr - the settings of a foreign config differ from model to model

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.buffers import zeros
from headrace.base.errors import ConfigError, ModelError
from headrace.models.config import SUPPORTED, ModelConfig
from headrace.models.hub import pinned_path
from headrace.models.mixtures import is_mixture, num_experts
from headrace.models.rope import BY_LENGTH, BY_POSITION, unknown_rope, wrong_factors
from headrace.models.settings import (
    BUILDING,
    LAYER_TYPES,
    REMEDY,
    extract_text_config,
    get_layer_values,
    model_directory,
    num_later_layers,
    read_config,
    read_whole_config,
    spare_torch,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CACHE_LINE = 64
"""The size of a cache line in bytes."""
LARGEST_RATIO = 4
"""The largest allowed ratio of the number of weights that a configuration describes to the number in the files. Tied
weights are counted twice; a configuration without its essential settings describes thousands of times as many
weights."""
INDEX_FILE = "model.safetensors.index.json"
"""The file that lists, for each tensor of a divided checkpoint, the file that contains it."""
SHARD = "shard-"
"""The prefix of the names of a snapshot's files that contain the tensor parts of one rank."""
RESUMED = ("optimizer", SHARD)
"""The prefixes of the names of a snapshot's files that only a resumed run reads."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""The files of which a directory with a tokenizer contains at least one."""


def load_model(config: ModelConfig, device: str = "cpu") -> PreTrainedModel:
    """Load the model for :func:`headrace.models.attention.forward`: in evaluation mode, on ``device``, without dropout;
    with ``config.lora``, frozen and with an adapter.

    The model is tested on a few tokens: a packed sequence must have the same logits as the sequence alone with the
    architecture's own attention. Several threads may load models at the same time. Raises
    :class:`~headrace.base.errors.ModelError`.
    """
    from transformers.utils import logging

    from headrace.models import check

    read = supported_config(config.path)
    refuse_damaged_weights(model_directory(config.path))
    logging.disable_progress_bar()
    try:
        refuse_other_size(config.path, read_whole_config(config.path), read)
        with BUILDING:
            model, info = _from_files(config, read)
    except Exception as error:  # a foreign architecture or file may raise anything
        if isinstance(error, ModelError):
            raise
        _refuse_own_attention(config.path, error)
        if missing := _missing_of_experts(model_directory(config.path)):
            refuse_incomplete(config.path, {"missing_keys": missing, "mismatched_keys": []})
        words = _unknown_value(read, error) or f"{type(error).__name__}: {error}"
        raise ModelError(f"model.path={config.path!r} cannot be loaded: {words}", remedy=REMEDY) from error
    refuse_incomplete(config.path, info)
    refuse_superfluous(config.path, model, info)
    if config.lora is not None:
        from headrace.models.lora import add_adapters

        add_adapters(model, config.lora, config.path)  # initialised on the CPU: the same values on every device
    model = ready(model.to(device))
    _align_weights(model)
    check.check_packing(model, config.path)
    if config.deterministic:
        _make_deterministic(model, config.path)
    return model


def _missing_of_experts(directory: Path) -> list[str]:
    """Return the tensors that only some experts of a layer have, for the experts that lack them, by the names in the
    files of ``directory``. transformers joins the experts of a layer, and does not report which tensor is missing."""
    experts: dict[str, set[str]] = defaultdict(set)
    parts: dict[str, set[str]] = defaultdict(set)
    names = {name for _, name, _ in weight_headers(directory)}
    for name in names:
        if found := re.fullmatch(r"(.*\bexperts\.)(\d+)(\..+)", name):
            experts[found[1]].add(found[2])
            parts[found[1]].add(found[3])
    expected = {f"{layer}{number}{part}" for layer in experts for number in experts[layer] for part in parts[layer]}
    return sorted(expected - names)


def _unknown_value(config: PreTrainedConfig, error: Exception) -> str:
    """Return the setting of ``config`` whose value transformers does not know, in words, if ``error`` was raised for
    this reason; otherwise return an empty text."""
    if not isinstance(error, KeyError):
        return ""
    names = [name for name, value in config.to_dict().items() if value in error.args]
    return f"transformers knows no {names[0]}={error.args[0]!r}" if names else ""


def supported_config(path: str) -> PreTrainedConfig:
    """Return the settings of the model in ``path``; for a multimodal checkpoint, the settings of its text part.

    Raises :class:`~headrace.base.errors.ModelError` for a model that engine and learner cannot compute.
    """
    read = read_config(path)
    _refuse_quantised(path)
    _refuse_unsupported(path, read)
    return read


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Return ``model`` in evaluation mode, without dropout, and with Headrace's implementations of recurrent layers and
    of indexers. The correction biases of routers do not require gradients."""
    import torch

    from headrace.models import indexed, recurrent
    from headrace.models.weights import CORRECTION_BIAS

    model = model.eval()
    recurrent.install(model)
    indexed.install(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name, parameter in model.named_parameters():
        if name.endswith(CORRECTION_BIAS):  # the model's class declares this, but loading a file resets it
            parameter.requires_grad_(False)
    return model


def _from_files(config: ModelConfig, read: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model with Headrace's attention, and transformers' report of the loaded weights. ``read`` are the
    settings of the model in the files, and ``config`` those of the run. For a multimodal checkpoint, ``read`` are those
    of the text part, and the text part is returned."""
    import torch

    from headrace.models.attention import NAME
    from headrace.models.text_part import causal_class, load_text_part
    from headrace.models.weights import refuse_not_finite

    options = {
        "dtype": getattr(torch, config.dtype),
        "local_files_only": True,
        "use_safetensors": True,
        "trust_remote_code": False,
        "ignore_mismatched_sizes": True,  # refused by name
    }
    whole = read_whole_config(config.path)
    if type(whole) is not type(read):
        model, info = load_text_part(config.path, whole, **options)
        model.set_attn_implementation(NAME)
        return model, info
    kind = causal_class(read)
    assert kind is not None  # refused by its settings
    model, info = kind.from_pretrained(
        config.path, config=read, attn_implementation=NAME, output_loading_info=True, **options
    )
    refuse_not_finite(model, config.path)
    return model, info


def _align_weights(model: PreTrainedModel) -> None:
    """Move the weights on a CPU to cache-line boundaries, in large pages; the parameter objects stay the same. In a
    safetensors file, weights begin at any byte, and a vector that crosses two cache lines takes twice as long to
    read."""
    import torch

    on_cpu = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
    ends = list(itertools.accumulate(-(-parameter.nbytes // CACHE_LINE) * CACHE_LINE for parameter in on_cpu))
    memory = torch.from_numpy(zeros(ends[-1] if ends else 0))
    for parameter, start in zip(on_cpu, [0, *ends], strict=False):
        aligned = memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = aligned.copy_(parameter.data)


def refuse_damaged_weights(directory: Path) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if weights of a model or an adapter are missing, or one of their
    files cannot be read completely.

    Only the headers of the files are read. A directory in the hub's cache may lack weights, which are downloaded later.
    """
    from safetensors import SafetensorError, safe_open

    if not directory.is_dir():
        return  # refused by the setting that names it
    files = {each.name for each in directory.glob("*.safetensors") if not each.name.startswith(RESUMED)}
    missing = sorted(_indexed_files(directory) - files)
    if (missing or not files) and pinned_path(str(directory)) == str(directory):
        raise ModelError(
            f"{directory} holds no {missing[0]}, which {INDEX_FILE} beside it names"
            if missing
            else f"{directory} holds no *.safetensors file",
            remedy=_safetensors_remedy(directory),
        )
    for name in sorted(files):
        try:
            with safe_open(directory / name, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{directory / name} is damaged or incomplete: {error}",
                remedy="copy or fetch that file again, and compare its size with the original's",
            ) from None


def num_weight_bytes(directory: Path, bytes_per_number: int) -> int:
    """Return the size of the weights in ``directory`` in bytes, with ``bytes_per_number`` bytes per number. Only the
    headers of the files are read; files that are not downloaded yet are not counted."""
    return bytes_per_number * sum(math.prod(shape) for _, _, shape in weight_headers(directory))


def weight_headers(directory: Path) -> Iterator[tuple[Path, str, list[int]]]:
    """Yield the file, the name and the shape of each tensor of the weights in ``directory``."""
    from safetensors import safe_open

    for file in sorted(each for each in directory.glob("*.safetensors") if not each.name.startswith(RESUMED)):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it cannot be iterated over
                yield file, name, opened.get_slice(name).get_shape()


def _indexed_files(directory: Path) -> set[str]:
    """Return the names of the files in the index of a divided checkpoint; empty if there is no index."""
    index = directory / INDEX_FILE
    if not index.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be used: {error!r}", remedy="copy or fetch that file again") from None


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model directory ``path``, which must have an end-of-sequence token."""
    spare_torch()
    from transformers import AutoTokenizer

    directory = model_directory(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model.path={path!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)})",
            remedy="copy the tokenizer's files into the model's directory",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers package raises bare Exception
        read_config(path)  # the tokenizer's class needs the model's settings: if they are wrong, this raises the error
        raise ModelError(
            f"the tokenizer of model.path={path!r} cannot be loaded: {type(error).__name__}: {error}",
            remedy="copy the tokenizer's files into the model's directory again",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of model.path={path!r} has no end-of-sequence token: no completion could ever stop",
            remedy='set "eos_token" in tokenizer_config.json',
        )
    return tokenizer


def refuse_other_vocabulary(path: str, own: str, setting: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` unless the model in ``path`` has the same tokens for the same
    ids as the trained model, in ``own``. ``setting`` is the setting whose value is ``path``."""
    theirs, ours = load_tokenizer(path).get_vocab(), load_tokenizer(own).get_vocab()
    if theirs == ours:
        return
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    difference = f"{other!r} is {ours[other]} here and {theirs.get(other)} there" if other else "it knows more tokens"
    raise ConfigError(
        f"{setting}={path!r} has another vocabulary than this model: {difference}, so the same id means different "
        "tokens to the two models",
        remedy="give a model of the same family, whose tokenizer has the same entries",
    )


def refuse_settings(path: str, config: PreTrainedConfig) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for settings ``config`` of the model in ``path`` that no
    supported model has. The check needs neither torch nor the model's class."""
    kind = config.model_type
    if strange := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise ModelError(
            f"model.path={path!r} is a {kind}: it has layers of type {', '.join(strange)}", remedy=SUPPORTED
        )
    if strange_rope := unknown_rope(config):
        raise ModelError(
            f"model.path={path!r} is a {kind}: rope_type={strange_rope!r} is unknown here, so that its numbers might "
            "depend on the length of a sequence, or of its neighbours",
            remedy=f"use a model whose rope_type is one of {', '.join(sorted(BY_POSITION | BY_LENGTH.keys()))}",
        )
    if wrong := _impossible_setting(config):
        raise ModelError(
            f"model.path={path!r} is a {kind} whose config.json says {wrong}",
            remedy="copy config.json from where the model comes from",
        )
    if wrong := wrong_factors(config):
        raise ModelError(
            f"model.path={path!r} is a {kind} with a rope_type='longrope' whose {wrong}",
            remedy="copy config.json from where the model comes from: it has one factor for each pair of dimensions",
        )


def _refuse_unsupported(path: str, config: PreTrainedConfig) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for an architecture that engine and learner cannot compute,
    according to ``config``, the settings of the model in ``path``, and to the classes of transformers."""
    from headrace.models import indexed
    from headrace.models.recurrent import foreign_mixer
    from headrace.models.text_part import causal_class

    kind = config.model_type
    reasons = {
        "it is an encoder-decoder": config.is_encoder_decoder,
        "transformers knows no causal language model of that type": causal_class(config) is None,
    }
    if not any(reasons.values()):
        refuse_settings(path, config)
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()) and kind not in indexed.KINDS:
        reasons["it has layers of type indexed_attention, with another indexer than a deepseek_v32's"] = True
    heads = int(getattr(config, "index_n_heads", None) or 0)
    if kind in indexed.KINDS and heads < indexed.LEAST_HEADS:
        reasons[f"the scores of an indexer with index_n_heads={heads} tie, so that its choice depends on the call"] = (
            True
        )
    foreign = "" if any(reasons.values()) else foreign_mixer(config)
    reasons[f"it has layers of type linear_attention, computed by {foreign}, whose state cannot be kept"] = foreign
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"model.path={path!r} is a {kind}: {reason}", remedy=SUPPORTED)


def _impossible_setting(config: PreTrainedConfig) -> str:
    """Return the first setting of ``config`` with an impossible value, in words; empty if there is none."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < 1:
        return f"max_position_embeddings={longest}"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        size = getattr(config, "attention_chunk_size", None)
        if not isinstance(size, int) or size < 1:
            return f"attention_chunk_size={size}, with layers of type chunked_attention"
    if getattr(config, "chunk_size", None) == 0:
        return "chunk_size=0"
    chosen = max(get_layer_values(config, "num_experts_per_tok"), default=0)
    if is_mixture(config) and chosen > (most := num_experts(config)):
        return f"num_experts_per_tok={chosen}, of {most} experts"
    return ""


def refuse_multimodal(path: str, reason: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` with ``reason`` if ``path`` is a multimodal checkpoint."""
    whole = read_whole_config(path)
    if extract_text_config(path, whole) is not whole:
        raise ModelError(
            f"model.path={path!r} is a {whole.model_type}, of which the text part is trained: {reason}",
            remedy="set model.path to the text part alone: load it once with headrace.models.load_model and write it "
            "with its save_pretrained; headrace export still writes the whole checkpoint",
        )


def _refuse_quantised(path: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for a model with quantised weights."""
    config = read_whole_config(path)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ModelError(
            f"model.path={path!r} is a {config.model_type}: its weights are quantised ({method})",
            remedy="give the directory of the unquantised model; to save memory in training, set model.dtype = "
            "'bfloat16' and train an adapter: [model.lora]",
        )


def _refuse_own_attention(path: str, error: Exception) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if ``error``, which loading has raised, is that of an older
    architecture. Such an architecture looks attention up in its own table, which does not contain Headrace's name."""
    from headrace.models.attention import NAME

    if isinstance(error, KeyError) and error.args == (NAME,):
        raise ModelError(
            f"model.path={path!r} is a {read_config(path).model_type}: it does not attend through transformers' "
            "attention interface",
            remedy=SUPPORTED,
        ) from error


def refuse_incomplete(path: str, info: dict[str, Any]) -> None:
    """Raise :class:`ModelError` for weights that the files do not contain, according to ``info``, transformers' report
    of loading the model in ``path``. transformers would initialise them randomly and log a warning."""
    mismatched = [
        f"{name} ({list(found)}, expected {list(expected)})" for name, found, expected in info["mismatched_keys"]
    ]
    missing = sorted(info["missing_keys"]) + sorted(mismatched)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(
            f"the weights of model.path={path!r} lack what config.json asks for: {shown}",
            remedy="save the whole model again, or make config.json fit the weights",
        )


def refuse_superfluous(path: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise :class:`ModelError` for weights in the files that belong to the layers, the rest of the backbone or the
    head of ``model`` but that the model does not have: it would not compute the same as the model that was trained.
    ``info`` is transformers' report of loading the model in ``path``.

    Some weights are allowed: those that transformers ignores on purpose, those outside the backbone (such as the head
    of a value function), and layers that predict later tokens, which only drafts use.
    """
    import torch

    head, lists = model.get_output_embeddings(), (torch.nn.ModuleList, torch.nn.ModuleDict)
    layers = [name for name, each in model.named_modules() if isinstance(each, lists)]
    computed = [name for name, each in model.named_modules() if each is head or (name and each is model.base_model)]
    inside = tuple(f"{name}." for name in layers)
    known = {name for name, _ in model.named_buffers()}
    later = range(model.config.num_hidden_layers, model.config.num_hidden_layers + num_later_layers(model.config))
    after = tuple(
        place
        for place in (f"{name}.{number}." for name in layers for number in later)
        if any(name.startswith((f"{place}enorm", f"{place}eh_proj")) for name in info["unexpected_keys"])
    )
    found = sorted(
        name
        for name in info["unexpected_keys"]
        if name.startswith(tuple(f"{each}." for each in (*layers, *computed)))
        and not name.startswith(after)
        and (name.startswith(inside) or not any(part.startswith("mtp") for part in name.split(".")))
        and name not in known
    )
    if found:
        shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise ModelError(
            f"the files of model.path={path!r} hold weights that config.json does not ask for: {shown}",
            remedy="make config.json fit the weights, or remove from the files what the model does not compute",
        )


def refuse_other_size(path: str, whole: PreTrainedConfig, read: PreTrainedConfig) -> None:
    """Raise :class:`ModelError`, before the model is built, if ``config.json`` describes a model far larger than the
    files: if settings are missing, transformers uses those of a model with many billions of weights. ``whole`` are the
    settings of the checkpoint in ``path``, and ``read`` those of its text part; they are the same for a text model."""
    import torch

    from headrace.models.text_part import causal_class, whole_class

    kind = causal_class(read) if type(whole) is type(read) else whole_class(path, whole)
    assert kind is not None  # refused by its settings
    with torch.device("meta"):
        model = kind(copy.deepcopy(whole))
    num_described = sum(each.numel() for each in model.parameters())
    num_stored = num_weight_bytes(model_directory(path), 1)
    if num_described > LARGEST_RATIO * num_stored:
        tree = json.loads((model_directory(path) / "config.json").read_text(encoding="utf-8"))
        missing = sorted(set(whole.sub_configs) - tree.keys())
        reason = f", because it has no {' and no '.join(missing)}" if missing else ""
        raise ModelError(
            f"config.json of model.path={path!r} describes a {whole.model_type} of {num_described:,} "
            f"weights{reason}, and the files hold {num_stored:,}",
            remedy="copy or fetch config.json and the weights again, from the same model",
        )


def _make_deterministic(model: PreTrainedModel, path: str) -> None:
    """Replace the model's operations by batch-invariant kernels. Raises :class:`~headrace.base.errors.ModelError` if no
    kernel covers a part of the model."""
    from headrace.models.kernels.deterministic import make_deterministic

    try:
        make_deterministic(model)
    except ModelError as error:
        raise ModelError(
            f"model.deterministic=true, and model.path={path!r} is a {type(model).__name__}: {error.problem}",
            remedy=error.remedy,
        ) from None


def _safetensors_remedy(directory: Path) -> str:
    """Return the remedy for a directory without safetensors weights, which may contain pickled ones."""
    if any(directory.glob("*.bin")):
        return "convert it: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path) writes safetensors"
    return REMEDY
