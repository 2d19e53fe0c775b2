"""The format of a version for a server: the tensors that the learner sends, and the files that the server loads.

If the model itself is trained, a version is one checkpoint file, with one tensor for each expert. If only adapters are
trained, a version is one folder per adapter in peft's format; the folder's name is the adapter's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.models.lora import add_adapters, write_adapters
from headrace.models.routing import find_routing
from headrace.models.settings import BUILDING, read_config
from headrace.models.weights import DEFAULT, to_file_format, weight_tensors
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.records import RoutingDecoder

FILE = "model.safetensors"
"""Name of the checkpoint file of a version."""


class ServedForm:
    """The format of all versions of one run, derived from the model's configuration without its weights."""

    def __init__(self, required: ServeRequirements) -> None:
        """Build the model of ``required`` on the meta device, with its adapters if adapters are trained."""
        lora, dtype = required.lora, getattr(torch, required.dtype)
        with BUILDING, torch.device("meta"):
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(read_config(required.path), dtype=dtype)
            """The model without storage, on the meta device."""
            if lora is not None:
                add_adapters(self._model, lora.model_copy(update={"adapter": None}), required.path)
        self.adapters: Mapping[str, str] = {"": DEFAULT, **{one: one for one in lora.agents}} if lora else {"": ""}
        """The server's name of the adapter of each agent, by the agent's name; the empty name is the policy. ``{"":
        ""}`` if the model itself is trained."""

    @property
    def folders(self) -> Sequence[str]:
        """Return the names of the adapters' folders in a version; empty if the model itself is trained."""
        return [name for name in self.adapters.values() if name]

    def tensors(self) -> dict[str, Tensor]:
        """Return uninitialised tensors on the CPU with the names, shapes and dtypes of the tensors that the learner
        sends. The receiver copies each version into them."""
        held = weight_tensors(self._model)
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in held.items()}

    def write(self, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Write the ``tensors`` of a version to ``directory``, as files that the server can load. The directory must
        exist and be empty. Raises ``OSError`` and ``SafetensorError``."""
        if self.adapters[""]:
            write_adapters(self._model, tensors, directory)
            return
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        save_file(to_file_format(self._model, detached), directory / FILE, metadata={"format": "pt"})

    def routes(self) -> RoutingDecoder | None:
        """Return the decoder of the experts that the server reports for each token; ``None`` for a model without
        experts. Raises :class:`~headrace.base.errors.ModelError` for an unknown mixture of experts."""
        routed = find_routing(self._model)
        return None if routed is None else RoutingDecoder(routed, self._model.config.num_hidden_layers)
