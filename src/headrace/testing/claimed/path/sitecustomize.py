"""The start-up module of a process with a claimed device (a simulated GPU). It installs the device when torch is
imported: the compiled library must be loaded before torch looks for GPUs, and the Python part after torch. It also
changes two modules of headrace after their import, because the device needs no driver and cannot run Triton kernels."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

LIBRARY = "HEADRACE_CLAIMED_DEVICE"
"""The name of the environment variable with the path of the device's library. It equals the constant of
:mod:`headrace.testing.claimed`, which cannot be imported before torch."""
TORCH, DEVICES, PAGED = "torch", "headrace.models.devices", "headrace.models.paged"


class DeviceImportHook(importlib.abc.MetaPathFinder):
    """An import hook that loads the compiled library of the claimed device before torch and the Python part after
    torch. It also makes headrace find the device without a driver, and not choose Triton kernels for it."""

    def __init__(self) -> None:
        """Create the hook for the modules that have to be changed. Each module is changed once."""
        self._pending = {TORCH, DEVICES, PAGED}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the import spec of a module that has to be changed; ``None`` for all other modules, which Python
        imports as usual."""
        if name not in self._pending:
            return None
        self._pending.remove(name)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def execute(module: Any) -> None:
            """Execute the module, with the changes before and after."""
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

        spec.loader.exec_module = execute
        return spec


if __name__ == "sitecustomize" and LIBRARY in os.environ:  # noqa: TID251 - only when Python imports it at start-up
    sys.meta_path.insert(0, DeviceImportHook())
