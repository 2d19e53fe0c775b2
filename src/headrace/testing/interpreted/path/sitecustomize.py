"""The start-up module of a vLLM server whose kernels run in Triton's interpreter. The interpreter cannot run one of
vLLM's kernels, because the counter of a ``tl.range`` is a plain number in it. So vLLM's alternative in torch is used
for this kernel."""

import importlib.abc
import importlib.util
import sys
from typing import Any

TOP_K = "vllm.v1.sample.ops.topk_topp_sampler"


class TritonImportHook(importlib.abc.MetaPathFinder):
    """An import hook that loads vLLM's module :data:`TOP_K` as if Triton were missing, so that it uses torch."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the import spec of the module ``name`` if it is :data:`TOP_K`, changed so that its ``HAS_TRITON`` is
        false after it is loaded; ``None`` for all other modules, which Python imports as usual."""
        if name != TOP_K:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def execute(module: Any) -> None:
            """Execute the module, and then set its ``HAS_TRITON`` to false."""
            load(module)
            module.HAS_TRITON = False

        spec.loader.exec_module = execute
        return spec


if __name__ == "sitecustomize":  # only when Python itself imports it at start-up
    sys.meta_path.insert(0, TritonImportHook())
