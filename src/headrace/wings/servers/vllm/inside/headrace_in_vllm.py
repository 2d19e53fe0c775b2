"""What of Headrace runs inside vLLM: how its workers take new weights.

It is named with ``--worker-extension-cls headrace_in_vllm.Extension`` and ``--weight-transfer-config
'{"backend": "headrace"}'``, and imports nothing of Headrace, which need not be installed there. vLLM's own layerwise
reloading splits a checkpoint's tensors over its workers and packs them for its kernels.
"""

# gate: getattr - the layers are vLLM's

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_carried import Carried  # type: ignore[import-not-found]
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]

BACKEND = "headrace"
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""How the names of what a head may be tied to end."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where a version is."""

    path: str
    """A safetensors file that this worker can read."""


class SharedFile(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Takes each version from one file."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """There is nothing to open."""

    def start_weight_update(self) -> None:
        """Layers take tensors in the format of checkpoints again."""
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "moe_kernel"):
                    layer.quant_method.moe_kernel = None  # else what is loaded is not packed for processors
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load them all; ``ValueError`` names the parameters that the file has nothing for."""
        expected = dict(self.model.named_parameters())
        with safe_open(update_info.path, framework="pt") as file:
            names = list(file.keys())
            loaded = set(self.model.load_weights((name, file.get_tensor(name)) for name in names))
            if HEAD in expected and HEAD not in loaded and self.model_config.hf_config.tie_word_embeddings:
                # vLLM leaves a tied head out, and a head that is packed apart for its kernel would keep the old weights
                embedding = next(name for name in names if name.endswith(EMBEDDINGS))
                expected[HEAD].weight_loader(expected[HEAD], file.get_tensor(embedding))
                loaded.add(HEAD)
        missing = sorted(expected.keys() - loaded)
        if missing:
            raise ValueError(f"{update_info.path} holds nothing for {', '.join(missing[:5])} ({len(missing)} in all)")

    def finish_weight_update(self) -> None:
        """Pack what was loaded for the kernels."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to close."""


class Extension:
    """What a worker can do besides. Its being imported registers :class:`SharedFile`, in every worker.

    An adapter that is loaded in place through vLLM's own route is read from its files again in every step, as its
    requests go on asking for that. So the route loads it once, and from then on the workers exchange it.
    """

    def name_adapter(self, name: str) -> None:
        """The adapter that was loaded last is called ``name`` from now on."""
        self._numbers()[name] = max(self._worker().list_loras())

    def take_adapter(self, name: str, path: str) -> None:
        """Put the adapter in the directory ``path`` in the place of the one called ``name``."""
        number = self._numbers()[name]
        self._worker().add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=True))

    def carries(self, run: str) -> str | None:
        """Of the one worker of each machine that takes in what is carried there: whose run has it already
        (:meth:`headrace_carried.Carried.taken_by`)."""
        return self._carried().taken_by(run) if self._takes_in() else None

    def bring(self, order: str) -> None:
        """Begin to take a version in (:meth:`headrace_carried.Carried.bring`)."""
        if self._takes_in():
            self._carried().bring(order)

    def brought(self) -> dict[str, Any] | None:
        """What has become of that."""
        told: dict[str, Any] | None = self._carried().brought() if self._takes_in() else None
        return told

    def leave(self) -> None:
        """Nothing more will be brought."""
        self._carried().leave()

    def _takes_in(self) -> bool:
        first: bool = self._worker().local_rank == 0
        return first

    def _carried(self) -> Any:
        return self.__dict__.setdefault("carried_of_headrace", Carried(self._worker().device))

    def _numbers(self) -> dict[str, int]:
        numbers: dict[str, int] = self.__dict__.setdefault("adapters_of_headrace", {})
        return numbers

    def _worker(self) -> Any:
        """Itself: vLLM makes this a base of its worker's class."""
        return self


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedFile)
