"""The extension of vLLM's workers that loads new weights. A worker is a process of vLLM with one device.

vLLM loads it because of the options ``--worker-extension-cls headrace_in_vllm.Extension`` and
``--weight-transfer-config '{"backend": "headrace"}'``. It imports nothing of Headrace, which need not be installed in
vLLM's environment. vLLM's own layerwise reloading splits a checkpoint's tensors over the workers and packs them for the
kernels.
"""

# gate: getattr - the layers are vLLM's

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_receiver import VersionReceiver  # type: ignore[import-not-found]
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
"""Endings of the names of embeddings whose weights an output head may share."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The settings of the transfer that vLLM passes at its start; there are none."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The order to load a version, which vLLM passes for each ``/update_weights``."""

    path: str
    """Path of a safetensors file that this worker can read."""


class SharedFile(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A weight-transfer engine of vLLM that loads each version from one file. vLLM calls its methods in every worker,
    in the order start, receive, finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Prepare the model's layers for new weights. The kernels have packed the layers' tensors, so the layers are
        changed back to the format of checkpoints."""
        if current_platform.is_cpu():
            for layer in self.model.modules():
                if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "moe_kernel"):
                    layer.quant_method.moe_kernel = None  # else vLLM does not pack the loaded weights again
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load all tensors of the file that ``update_info`` names into the model. Raises ``ValueError`` with the names
        of parameters that are missing in the file."""
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
        """Pack the loaded weights for the kernels. After that the model can compute again."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


class Extension:
    """The methods that are added to each worker of vLLM; an engine calls them over HTTP (``/collective_rpc``).
    Importing this module registers :class:`SharedFile`.

    If vLLM's own route loads an adapter in place, every later step reads its files again, since every request repeats
    the order to load it in place. So the route loads an adapter only once, and later versions are loaded by
    :meth:`replace_adapter`.
    """

    def register_adapter(self, name: str) -> None:
        """Store the number that vLLM has assigned to the last loaded adapter under ``name``."""
        self._adapter_numbers()[name] = max(self._as_worker().list_loras())

    def replace_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the directory ``path`` in place of the adapter ``name``."""
        number = self._adapter_numbers()[name]
        self._as_worker().add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=True))

    def other_source(self, run: str) -> str | None:
        """Return the address of another run that sends versions to this machine; empty if there is none, ``None`` in
        workers that do not receive (:meth:`headrace_receiver.VersionReceiver.other_source`)."""
        return self._version_receiver().other_source(run) if self._is_receiver() else None

    def start_receiving(self, order: str) -> None:
        """Start to receive a version, in the worker of this machine that receives; ``order`` is a JSON object
        (:meth:`headrace_receiver.VersionReceiver.start_receiving`)."""
        if self._is_receiver():
            self._version_receiver().start_receiving(order)

    def receive_status(self) -> dict[str, Any] | None:
        """Return the state of the latest order to receive a version; ``None`` in workers that do not receive."""
        status: dict[str, Any] | None = self._version_receiver().receive_status() if self._is_receiver() else None
        return status

    def stop_receiving(self) -> None:
        """Leave the process group and delete the received files."""
        self._version_receiver().stop_receiving()

    def _is_receiver(self) -> bool:
        """Return whether this worker receives versions. The worker with local rank 0 receives them for all workers of
        its machine."""
        is_receiver: bool = self._as_worker().local_rank == 0
        return is_receiver

    def _version_receiver(self) -> Any:
        """Return the receiver of this worker, which is made at the first call."""
        return self.__dict__.setdefault("version_receiver_of_headrace", VersionReceiver(self._as_worker().device))

    def _adapter_numbers(self) -> dict[str, int]:
        """Return vLLM's number of each registered adapter, by name."""
        numbers: dict[str, int] = self.__dict__.setdefault("adapters_of_headrace", {})
        return numbers

    def _as_worker(self) -> Any:
        """Return this object as the worker: vLLM makes this class a base of its worker's class."""
        return self


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedFile)
