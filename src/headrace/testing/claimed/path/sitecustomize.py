"""A module on the path of a process that is to have a device that only claims to be one: it waits until torch is
imported. The compiled device must be there before torch looks for one, and the rest can only follow torch."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

LIBRARY = "HEADRACE_CLAIMED_DEVICE"
"""The name of the environment variable with the path of the device's library. :mod:`headrace.testing.claimed` has it as
well, but cannot be imported before torch."""


class WithDevice(importlib.abc.MetaPathFinder):
    """An import hook that loads the claimed device around the import of torch: its compiled part before, the rest
    after."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the import spec of torch, changed so that its import also loads the device; ``None`` for all other
        modules, which Python then imports as usual."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            """Load the compiled device, then torch, and then replace the functions of ``torch.cuda``."""
            ctypes.CDLL(os.environ[LIBRARY])  # noqa: TID251 - before anything of headrace is imported
            load(module)
            from headrace.testing.claimed.device import claim

            claim()

        spec.loader.exec_module = loaded
        return spec


if __name__ == "sitecustomize" and LIBRARY in os.environ:  # noqa: TID251 - only when Python imports it at start-up
    sys.meta_path.insert(0, WithDevice())
