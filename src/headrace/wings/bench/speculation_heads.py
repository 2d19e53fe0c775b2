"""Prediction heads for the models of the benchmark ``speculation``: created, trained on the model's own distributions
by plain torch, and widened with their model.

Shape legend: N tokens of a batch, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.base.types.columns import IntColumn
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, forward
from headrace.models.heads import HEADS_FILE, LAYOUTS, load_head
from headrace.models.predicting import PredictionHead
from headrace.models.settings import read_config
from headrace.models.weights import to_file_format
from headrace.wings.bench.speculation_rows import copy_weights

_DEPTH = 2
"""The number of times that the head is applied in training: to states of the model, then to its own."""


def add_head(directory: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """Add an untrained prediction head to the model in ``directory``, and return that path: a copy of its last layer,
    whose input is the mean of embedding and state, plus random numbers of the scale ``noise``, drawn from ``seed``."""
    config, files = read_config(str(directory)), load_file(directory / "model.safetensors")
    layout, generator = LAYOUTS[config.model_type], torch.Generator().manual_seed(seed)
    last, size = f"model.layers.{config.num_hidden_layers - 1}.", int(config.hidden_size)
    tensors = {name.removeprefix(last): tensor for name, tensor in files.items() if name.startswith(last)}
    tensors[layout.embedding_norm], tensors[layout.hidden_norm] = torch.ones(size), torch.ones(size)
    tensors[layout.projection] = torch.eye(size).repeat(1, 2) / 2
    tensors[layout.last_norm] = files["model.norm.weight"]
    noisy = {name: one + noise * torch.randn(one.shape, generator=generator) for name, one in tensors.items()}
    save_file({layout.start(config) + name: one for name, one in noisy.items()}, directory / HEADS_FILE)
    path = directory / "config.json"
    tree = json.loads(path.read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(tree, indent=2), encoding="utf-8")
    return directory


def train_head(
    directory: Path, batches: Iterable[Sequence[IntColumn]], on_progress: Callable[[str], None], *, lr: float = 2e-3
) -> Path:
    """Train the prediction head of the model in ``directory`` to give the model's own distributions on ``batches`` of
    texts, one step for each batch, write it there, and return that path. ``on_progress`` is called with lines of
    progress. ``lr`` is the learning rate."""
    config = ModelConfig(path=str(directory))
    model = load_model(config).requires_grad_(requires_grad=False)
    head = load_head(config, model).requires_grad_(requires_grad=True)
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    for step, texts in enumerate(batches):
        loss = _loss(model, head, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            on_progress(f"training step {step + 1} of the prediction head: loss {loss.item():.2f}")
    write_head(directory, head)
    return directory


def widen_head(small_dir: Path, directory: Path) -> Path:
    """Add the prediction head of the model in ``small_dir`` to the model in ``directory``, which is that model widened
    (:func:`~headrace.wings.bench.speculation_rows.widen_model`), and return the path of the latter."""
    add_head(directory)
    large = load_file(directory / HEADS_FILE)
    copy_weights(load_file(small_dir / HEADS_FILE), large)
    save_file(large, directory / HEADS_FILE, metadata={"format": "pt"})
    return directory


def _loss(model: torch.nn.Module, head: PredictionHead, texts: Sequence[IntColumn]) -> Tensor:
    """Return the mean cross entropy of the head's distributions to those of the model for the same tokens, over the
    texts and the depths of drafts."""
    lengths = [len(ids) for ids in texts]
    ids_N = torch.cat([torch.from_numpy(ids).long() for ids in texts])
    last_N = torch.cat([torch.arange(length) for length in lengths])
    left_N = torch.cat([length - 1 - torch.arange(length) for length in lengths])
    kept: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _m, _a, out: kept.append(out.last_hidden_state[0]))  # type: ignore[operator]
    with torch.no_grad():
        targets_NV = forward(model, ids_N, PackedPlan(lengths)).softmax(-1)
    hook.remove()
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    states_NH, losses = kept[0], []
    for depth in range(1, _DEPTH + 1):
        # at its place a token has the state of the one before, of this head or of the model
        states_NH = head(embedding(ids_N.roll(-1)), states_NH, PackedPlan(lengths))
        counted_N = (left_N > 0) & (last_N >= depth - 1)
        logs_NV = output(states_NH).log_softmax(-1)
        losses.append(-(targets_NV.roll(-1, 0) * logs_NV).sum(-1)[counted_N].mean())
        states_NH = states_NH.roll(1, 0)
    return torch.stack(losses).mean()


def write_head(directory: Path, head: PredictionHead) -> None:
    """Write ``head`` into the model's directory, with the names and shapes of checkpoints of its kind."""
    config = read_config(str(directory))
    layout = LAYOUTS[config.model_type]
    norm, layer = head.layer.get_decoder().norm, "model.layers.0."
    parts = (head.embedding_norm, head.hidden_norm, head.projection, norm)
    tensors = {name: part.weight.detach() for name, part in zip(layout.own, parts, strict=True)}
    inner = {name: one.detach() for name, one in head.layer.state_dict().items() if name.startswith(layer)}
    tensors |= {name.removeprefix(layer): one for name, one in to_file_format(head.layer, inner).items()}
    named = {layout.start(config) + name: one.clone().contiguous() for name, one in tensors.items()}
    save_file(named, directory / HEADS_FILE, metadata={"format": "pt"})
