"""What a version is for a server: which tensors a learner sends, and the files that a server loads them from.

the model itself  ──▶ one file, as such models are kept (one tensor for each expert)
adapters alone    ──▶ a folder for each, as peft keeps them, called like it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.models.load import read_config
from headrace.models.lora import add_adapters, write_adapters
from headrace.models.routing import find_routing
from headrace.models.weights import DEFAULT, kept_as, weight_tensors
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.records import RoutingDecoder

FILE = "model.safetensors"


class ServedForm:
    """Of the versions of one run: made from the outline of the model, without its numbers."""

    def __init__(self, wanted: ServeRequirements) -> None:
        lora, dtype = wanted.lora, getattr(torch, wanted.dtype)
        with torch.device("meta"):
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(read_config(wanted.path), dtype=dtype)
            if lora is not None:
                add_adapters(self._model, lora.model_copy(update={"adapter": None}), wanted.path)
        self.adapters: Mapping[str, str] = {"": DEFAULT, **{one: one for one in lora.agents}} if lora else {"": ""}
        """What a server calls the adapters of agents, and the policy's (empty), where it answers with one."""

    @property
    def folders(self) -> Sequence[str]:
        """Of a version: one for each adapter, called like it; none where it is the model itself."""
        return [name for name in self.adapters.values() if name]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors like those that are sent, by name: memory that nothing is written to, for a receiver to put its
        versions in the place of."""
        held = weight_tensors(self._model)
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in held.items()}

    def write(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Put a version into ``directory``, which is there and empty. Raises ``OSError`` and ``SafetensorError``."""
        if self.adapters[""]:
            write_adapters(self._model, tensors, directory)
            return
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        save_file(kept_as(self._model, detached), directory / FILE, metadata={"format": "pt"})

    def routes(self) -> RoutingDecoder | None:
        """Where the model sends its tokens; ``None`` for one without experts. Raises
        :class:`~headrace.base.errors.ModelError` for a mixture of experts that is not known."""
        routed = find_routing(self._model)
        return None if routed is None else RoutingDecoder(routed, self._model.config.num_hidden_layers)
