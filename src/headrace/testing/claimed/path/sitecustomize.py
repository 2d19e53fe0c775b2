"""A module on the path of a process that is to have a device that only claims to be one: it waits until torch is
imported. The compiled device must be there before torch looks for one, and the rest can only follow torch. It also
changes two modules of headrace after their import: the device needs no driver, and it cannot run kernels in Triton."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

LIBRARY = "HEADRACE_CLAIMED_DEVICE"
"""The name of the environment variable with the path of the device's library. :mod:`headrace.testing.claimed` has it as
well, but cannot be imported before torch."""
TORCH, DEVICES, PAGED = "torch", "headrace.models.devices", "headrace.models.paged"


class WithDevice(importlib.abc.MetaPathFinder):
    """An import hook that loads the claimed device around the import of torch: its compiled part before, the rest
    after. It also lets headrace find the device without a driver, and choose no kernels in Triton for it."""

    def __init__(self) -> None:
        """Wait for the modules that are changed, each once."""
        self._awaited = {TORCH, DEVICES, PAGED}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the import spec of a module that is changed after its import; ``None`` for all other modules, which
        Python then imports as usual."""
        if name not in self._awaited:
            return None
        self._awaited.remove(name)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            """Import the module, and do what belongs before it and after it."""
            if name == TORCH:
                ctypes.CDLL(os.environ[LIBRARY])  # noqa: TID251 - before anything of headrace is imported
            load(module)
            if name == TORCH:
                from headrace.testing.claimed.device import claim

                claim()
            elif name == DEVICES:
                module.DRIVERS = (sys.executable,)  # a file that exists
            else:
                module.IMPLEMENTATIONS.pop("triton", None)

        spec.loader.exec_module = loaded
        return spec


if __name__ == "sitecustomize" and LIBRARY in os.environ:  # noqa: TID251 - only when Python imports it at start-up
    sys.meta_path.insert(0, WithDevice())
